//! A decoder in the manner of Llama: RMSNorm, rotary embedding, grouped queries, a gated feed-forward part. What the
//! layers attend with is given by whoever runs the model.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::{Causality, Result};

use super::product::{View, product};

/// Sizes of a model.
#[derive(Clone, Debug)]
pub struct Config {
    pub vocabulary: usize,
    /// Numbers of a token between layers.
    pub width: usize,
    pub heads: usize,
    /// Key heads, each for `heads / kv_heads` query heads.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Numbers of a token within the feed-forward part.
    pub hidden: usize,
    /// Which keys a token sees, for each layer.
    pub layers: Vec<Causality>,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Added to the mean square by RMSNorm.
    pub epsilon: f64,
}

impl Config {
    /// Whether a row of a layer sees a key, by the layer's causality.
    pub fn sees(&self, layer: usize, row: usize, key: usize) -> bool {
        let window = self.layers[layer].window().map_or(usize::MAX, |keys| keys.get());
        key <= row && row - key < window
    }
}

/// A linear map: a row of `inputs` weights for each output.
pub struct Linear {
    pub inputs: usize,
    pub weights: Vec<f32>,
}

impl Linear {
    fn apply(&self, rows: &[f32]) -> Vec<f32> {
        let weights = View::rows_of(self.inputs, &self.weights);
        product(View::rows_of(self.inputs, rows), weights.transposed())
    }
}

/// The weights of a layer.
pub struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: Linear,
    pub key: Linear,
    pub value: Linear,
    pub output: Linear,
    pub feed_norm: Vec<f32>,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// The weights of a model. The embedding is its last map too.
pub struct Model {
    pub config: Config,
    pub embedding: Linear,
    pub layers: Vec<Layer>,
    pub norm: Vec<f32>,
}

/// What a layer attends with: `[tokens, heads, head_dim]`, keys and values with the key heads.
pub struct Attended {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
}

impl Attended {
    /// Query, key and value on the device.
    pub fn upload(&self, stream: &Stream, config: &Config) -> Result<[Tensor<bf16>; 3]> {
        let upload = |rows: &[f32], heads: usize| {
            let rows: Vec<bf16> = rows.iter().map(|x| bf16::from_f32(*x)).collect();
            let tokens = rows.len() / (heads * config.head_dim);
            stream.upload(&rows, [tokens, heads, config.head_dim])
        };
        Ok([
            upload(&self.query, config.heads)?,
            upload(&self.key, config.kv_heads)?,
            upload(&self.value, config.kv_heads)?,
        ])
    }
}

/// The output of a layer's attention on the host.
pub fn download(stream: &Stream, rows: &Tensor<bf16>) -> Result<Vec<f32>> {
    let rows = rows.download(stream)?;
    Ok(rows.iter().map(|x| x.to_f32()).collect())
}

impl Model {
    /// What the last layer gives for tokens at their positions. `attend` computes the attention of a layer.
    pub fn forward<E>(
        &self,
        tokens: &[u32],
        positions: &[usize],
        mut attend: impl FnMut(usize, Attended) -> std::result::Result<Vec<f32>, E>,
    ) -> std::result::Result<Vec<f32>, E> {
        let width = self.config.width;
        let embedding = &self.embedding.weights;
        let mut state: Vec<f32> =
            tokens.iter().flat_map(|token| &embedding[*token as usize * width..][..width]).copied().collect();
        for (at, layer) in self.layers.iter().enumerate() {
            let normed = self.norm(&state, &layer.attention_norm);
            let mut query = layer.query.apply(&normed);
            let mut key = layer.key.apply(&normed);
            self.rotate(&mut query, self.config.heads, positions);
            self.rotate(&mut key, self.config.kv_heads, positions);
            let value = layer.value.apply(&normed);
            let attention = attend(at, Attended { query, key, value })?;
            add(&mut state, &layer.output.apply(&attention));

            let normed = self.norm(&state, &layer.feed_norm);
            let mut gate = layer.gate.apply(&normed);
            for (gate, up) in gate.iter_mut().zip(layer.up.apply(&normed)) {
                *gate *= up / (1.0 + (-*gate).exp());
            }
            add(&mut state, &layer.down.apply(&gate));
        }
        Ok(state)
    }

    /// A logit for each token that could come behind this one.
    pub fn logits(&self, state: &[f32]) -> Vec<f32> {
        self.embedding.apply(&self.norm(state, &self.norm))
    }

    fn norm(&self, rows: &[f32], weights: &[f32]) -> Vec<f32> {
        let mut normed = Vec::with_capacity(rows.len());
        for row in rows.chunks_exact(weights.len()) {
            let square: f32 = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
            let factor = 1.0 / (square + self.config.epsilon as f32).sqrt();
            normed.extend(row.iter().zip(weights).map(|(x, weight)| x * factor * weight));
        }
        normed
    }

    /// Turns each pair of neighbours of a head by an angle that grows with the position, fastest in the first pair.
    fn rotate(&self, rows: &mut [f32], heads: usize, positions: &[usize]) {
        let dim = self.config.head_dim;
        let frequencies: Vec<f64> =
            (0..dim / 2).map(|pair| self.config.theta.powf(-2.0 * pair as f64 / dim as f64)).collect();
        for (row, position) in rows.chunks_exact_mut(heads * dim).zip(positions) {
            for (at, pair) in row.chunks_exact_mut(2).enumerate() {
                let angle = *position as f64 * frequencies[at % (dim / 2)];
                let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
                let (x, y) = (pair[0], pair[1]);
                pair[0] = x * cos - y * sin;
                pair[1] = x * sin + y * cos;
            }
        }
    }
}

fn add(to: &mut [f32], what: &[f32]) {
    for (to, what) in to.iter_mut().zip(what) {
        *to += what;
    }
}
