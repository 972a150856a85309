//! A small decoder in the manner of Qwen3-Next: layers of linear attention by the gated delta rule, with a causal
//! convolution in front, and one layer of full attention. The caller computes the attention of the layers.

use ascend_serving::AttentionShape;
use ascend_serving::kv::{Convolution, StateShape};

pub(crate) const VOCABULARY: usize = 48;
const WIDTH: usize = 64;
/// Whether each layer is one of linear attention.
pub(crate) const LINEAR: [bool; 5] = [true, true, true, false, true];
/// Query and key heads of a linear layer, half as many as those of its values.
pub(crate) const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
/// Elements of a head in linear layers.
const DIM: usize = 16;
pub(crate) const STATES: StateShape = StateShape {
    layers: 4,
    key_heads: KEY_HEADS,
    value_heads: VALUE_HEADS,
    value_dim: DIM,
    key_dim: DIM,
    scale: 0.25,
    g: true,
    gk: false,
    drafts: 2,
    convolution: Some(CONVOLUTION),
};
/// Query heads, key heads, and elements of a head of the full layer.
pub(crate) const FULL: [usize; 3] = [4, 2, 64];
const KEYS: usize = KEY_HEADS * DIM;
pub(crate) const VALUES: usize = VALUE_HEADS * DIM;
/// Queries, keys and values of a token in a linear layer, which the convolution mixes with those before.
pub(crate) const MIXED: usize = 2 * KEYS + VALUES;
/// The convolution, which sees four tokens.
pub(crate) const CONVOLUTION: Convolution = Convolution { width: 4, channels: MIXED, silu: true };

pub(crate) fn full_shape() -> AttentionShape {
    AttentionShape::new(FULL[0], FULL[1], FULL[2])
}

/// Numbers between -1 and 1, the same in each run.
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// A linear map with made-up weights: a row of inputs for each output.
struct Linear {
    inputs: usize,
    weights: Vec<f64>,
}

impl Linear {
    fn new(seed: u64, inputs: usize, outputs: usize) -> Self {
        let spread = (3.0 / inputs as f64).sqrt();
        let weights = numbers(seed, inputs * outputs);
        Self { inputs, weights: weights.into_iter().map(|weight| weight * spread).collect() }
    }

    fn apply(&self, rows: &[f64]) -> Vec<f64> {
        let outputs = |row: &[f64]| self.weights.chunks(self.inputs).map(|weights| dot(row, weights)).collect();
        rows.chunks(self.inputs).flat_map::<Vec<f64>, _>(outputs).collect()
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Scales each row of `dim` numbers to the length `length`.
fn normalised(rows: &[f64], dim: usize, length: f64) -> Vec<f64> {
    let row = |row: &[f64]| {
        let factor = length / (dot(row, row) + 1e-6).sqrt();
        row.iter().map(|x| x * factor).collect::<Vec<_>>()
    };
    rows.chunks(dim).flat_map(row).collect()
}

/// What a layer of linear attention attends with, a row for each token.
#[derive(Default)]
pub(crate) struct Delta {
    pub(crate) query: Vec<f64>,
    pub(crate) key: Vec<f64>,
    pub(crate) value: Vec<f64>,
    pub(crate) beta: Vec<f64>,
    pub(crate) g: Vec<f64>,
}

/// A layer: the map of its inputs, the maps of gates in a linear layer, and the map of what attention returns.
struct Layer {
    inputs: Linear,
    gates: Linear,
    /// Weights of the convolution, `[width, MIXED]`.
    convolution: Vec<f64>,
    output: Linear,
}

pub(crate) struct Model {
    embedding: Linear,
    layers: Vec<Layer>,
}

/// What a model needs from its caller, layer by layer, as the model numbers them.
pub(crate) trait Attend {
    type Error;

    /// The convolution of the mixed rows of new tokens by these weights, with SiLU; a request begins behind rows of
    /// zeros.
    fn convolve(&mut self, layer: usize, mixed: Vec<f64>, weights: &[f64]) -> Result<Vec<f64>, Self::Error>;

    /// Linear attention, `[tokens, heads, value_dim]`.
    fn linear(&mut self, layer: usize, inputs: Delta) -> Result<Vec<f64>, Self::Error>;

    /// Full attention over queries, keys and values.
    fn full(&mut self, layer: usize, inputs: [Vec<f64>; 3]) -> Result<Vec<f64>, Self::Error>;
}

impl Model {
    pub(crate) fn new() -> Self {
        let layer = |(at, linear): (usize, &bool)| {
            let [heads, kv_heads, dim] = FULL;
            let (inputs, attended) = match linear {
                true => (MIXED, VALUES),
                false => ((heads + 2 * kv_heads) * dim, heads * dim),
            };
            let seed = 100 * (at as u64 + 1);
            Layer {
                inputs: Linear::new(seed, WIDTH, inputs),
                gates: Linear::new(seed + 1, WIDTH, 2 * STATES.value_heads + VALUES),
                convolution: numbers(seed + 2, CONVOLUTION.width * MIXED),
                output: Linear::new(seed + 3, attended, WIDTH),
            }
        };
        let layers = LINEAR.iter().enumerate().map(layer).collect();
        Self { embedding: Linear::new(1, WIDTH, VOCABULARY), layers }
    }

    /// The weights of a layer's convolution, `[width, MIXED]`.
    pub(crate) fn convolution(&self, layer: usize) -> &[f64] {
        &self.layers[layer].convolution
    }

    /// The logits of what could come behind each token.
    pub(crate) fn forward<A: Attend>(&self, tokens: &[usize], attend: &mut A) -> Result<Vec<f64>, A::Error> {
        let row = |token: &usize| &self.embedding.weights[token * WIDTH..][..WIDTH];
        let mut rows: Vec<f64> = tokens.iter().flat_map(row).map(|x| x * 4.0).collect();
        for (at, (layer, linear)) in self.layers.iter().zip(LINEAR).enumerate() {
            let normed = normalised(&rows, WIDTH, (WIDTH as f64).sqrt());
            let inputs = layer.inputs.apply(&normed);
            let attended = if linear {
                let gates = layer.gates.apply(&normed);
                let mixed = attend.convolve(at, inputs, &layer.convolution)?;
                gated(&attend.linear(at, delta(&mixed, &gates))?, &gates)
            } else {
                let [heads, kv_heads, dim] = FULL;
                let [mut query, mut key, mut value] = [const { Vec::new() }; 3];
                for row in inputs.chunks((heads + 2 * kv_heads) * dim) {
                    let (own, others) = row.split_at(heads * dim);
                    query.extend(own);
                    key.extend(&others[..kv_heads * dim]);
                    value.extend(&others[kv_heads * dim..]);
                }
                attend.full(at, [query, key, value])?
            };
            rows.iter_mut().zip(layer.output.apply(&attended)).for_each(|(row, more)| *row += more);
        }
        Ok(self.embedding.apply(&normalised(&rows, WIDTH, (WIDTH as f64).sqrt())))
    }
}

/// Normalised queries and keys, and the gates of the delta rule.
fn delta(mixed: &[f64], gates: &[f64]) -> Delta {
    let heads = STATES.value_heads;
    let mut delta = Delta::default();
    for (mixed, gates) in mixed.chunks(MIXED).zip(gates.chunks(2 * heads + VALUES)) {
        delta.query.extend(normalised(&mixed[..KEYS], STATES.key_dim, 1.0));
        delta.key.extend(normalised(&mixed[KEYS..2 * KEYS], STATES.key_dim, 1.0));
        delta.value.extend(&mixed[2 * KEYS..]);
        delta.beta.extend(gates[..heads].iter().map(|b| 1.0 / (1.0 + (-b).exp())));
        // The decay of a head: exp(-softplus(a) / 4).
        delta.g.extend(gates[heads..2 * heads].iter().map(|a| -(1.0 + a.exp()).ln() / 4.0));
    }
    delta
}

/// What linear attention returns, normalised in each head and gated.
fn gated(attended: &[f64], gates: &[f64]) -> Vec<f64> {
    let dim = STATES.value_dim;
    let mut rows = normalised(attended, dim, (dim as f64).sqrt());
    for (row, gates) in rows.chunks_mut(VALUES).zip(gates.chunks(2 * STATES.value_heads + VALUES)) {
        row.iter_mut().zip(&gates[2 * STATES.value_heads..]).for_each(|(x, z)| *x *= silu(*z));
    }
    rows
}
