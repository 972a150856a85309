//! A decoder in the manner of Llama: RMSNorm, rotary embedding, grouped queries, a gated feed-forward part. What the
//! layers attend with is given by whoever runs the model.

use ascend_serving::Causality;

use crate::product::{View, product};

/// Sizes of a model.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) vocabulary: usize,
    /// Numbers of a token between layers.
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// Key heads, each for `heads / kv_heads` query heads.
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Numbers of a token within the feed-forward part.
    pub(crate) hidden: usize,
    /// Which keys a token sees, for each layer.
    pub(crate) layers: Vec<Causality>,
    /// Base of the rotary frequencies.
    pub(crate) theta: f64,
    /// Added to the mean square by RMSNorm.
    pub(crate) epsilon: f64,
}

/// A linear map: a row of `inputs` weights for each output.
pub(crate) struct Linear {
    pub(crate) inputs: usize,
    pub(crate) weights: Vec<f32>,
}

impl Linear {
    fn apply(&self, rows: &[f32]) -> Vec<f32> {
        let weights = View::rows_of(self.inputs, &self.weights);
        product(View::rows_of(self.inputs, rows), weights.transposed())
    }
}

/// The weights of a layer.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: Linear,
    pub(crate) key: Linear,
    pub(crate) value: Linear,
    pub(crate) output: Linear,
    pub(crate) feed_norm: Vec<f32>,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

/// The weights of a model. The embedding is its last map too.
pub(crate) struct Model {
    pub(crate) config: Config,
    pub(crate) embedding: Linear,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
}

/// What a layer attends with: `[tokens, heads, head_dim]`, keys and values with the key heads.
pub(crate) struct Attended {
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

impl Model {
    /// What the last layer gives for tokens at their positions. `attend` computes the attention of a layer.
    pub(crate) fn forward<E>(
        &self,
        tokens: &[u32],
        positions: &[usize],
        mut attend: impl FnMut(usize, Attended) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<f32>, E> {
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
    pub(crate) fn logits(&self, state: &[f32]) -> Vec<f32> {
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
