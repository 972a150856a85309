//! The model whose steps are compared, and what it computes in double precision.

use std::num::NonZeroUsize;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, Convolution, PadPolicy, PagedKvCache, StatePool, StateShape};
use ascend_serving::{Attention, AttentionShape, Backend, Backends, Causality, LayerGroup, Result, Step};

pub(super) const LINEAR: [usize; 2] = [2, 0];
pub(super) const FULL: usize = 1;
pub(super) const WINDOWED: usize = 3;
pub(super) const LAYERS: usize = 4;
pub(super) const WINDOW: usize = 20;
pub(super) const KEY_HEADS: usize = 1;
pub(super) const CONVOLUTION: Convolution = Convolution { width: 4, channels: 16, silu: true };
pub(super) const SHAPE: StateShape = StateShape {
    layers: 2,
    key_heads: KEY_HEADS,
    value_heads: 2,
    value_dim: 4,
    key_dim: 8,
    scale: 0.5,
    g: true,
    gk: false,
    drafts: 2,
    convolution: Some(CONVOLUTION),
};
/// Elements of a token's values in all heads: the first channels of what is convolved.
pub(super) const VALUES: usize = SHAPE.value_heads * SHAPE.value_dim;
pub(super) const SLOTS: usize = 12;
pub(super) const BLOCKS: usize = 200;
/// Query heads and elements of a head in layers of attention, which have one key head.
pub(super) const HEADS: usize = 2;
pub(super) const DIM: usize = 64;

pub(super) fn stream_of(cann: Cann) -> Stream {
    let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, cann)).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

pub(super) fn stream() -> Stream {
    stream_of(Cann::V9_1)
}

pub(super) fn states(stream: &Stream, drafts: usize) -> StatePool {
    StatePool::new::<bf16>(stream, SLOTS, StateShape { drafts, ..SHAPE }).unwrap()
}

pub(super) fn group(stream: &Stream, layer: usize) -> LayerGroup<bf16> {
    let causality = match layer {
        WINDOWED => Causality::Window(NonZeroUsize::new(WINDOW).unwrap()),
        _ => Causality::Causal,
    };
    let (shape, pad) = (CacheShape::new(1, 1, DIM), PadPolicy::SkipNegative);
    let cache = PagedKvCache::new(stream.device(), BLOCKS, 16, shape, pad).unwrap();
    let backends = Backends::none().with(Backend::Fused);
    LayerGroup::new([layer], causality, AttentionShape::new(HEADS, 1, DIM), cache, backends)
}

pub(super) fn model(stream: &Stream, drafts: usize) -> Attention<bf16> {
    let groups = [FULL, WINDOWED].map(|layer| group(stream, layer));
    Attention::of_hybrid(LAYERS, groups, LINEAR, states(stream, drafts)).unwrap()
}

/// A number between -1 and 1 of a token, which `bf16` holds.
pub(super) fn number(name: u64, layer: usize, which: usize) -> f64 {
    let mut mixed = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (layer * 977 + which) as u64;
    mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed >> 40) % 129) as f64 / 64.0 - 1.0
}

/// What a layer of linear attention gets of one token.
pub(super) struct Token {
    /// What is convolved to the value.
    mixed: Vec<f64>,
    query: Vec<f64>,
    key: Vec<f64>,
    beta: Vec<f64>,
    g: Vec<f64>,
}

impl Token {
    pub(super) fn new(name: u64, layer: usize) -> Self {
        let StateShape { value_heads: heads, key_dim, .. } = SHAPE;
        let of = |from: usize, count: usize| (0..count).map(|at| number(name, layer, from + at)).collect::<Vec<_>>();
        // Keys of a length of about 1, which `bf16` holds.
        let key = |from: usize| of(from, KEY_HEADS * key_dim).iter().map(|x| x / 2.0).collect();
        Self {
            mixed: of(200, CONVOLUTION.channels),
            query: key(0),
            key: key(100),
            beta: of(300, heads).iter().map(|x| 0.5 + x / 4.0).collect(),
            g: of(400, heads).iter().map(|x| -0.25 - x / 8.0).collect(),
        }
    }
}

pub(super) fn upload(stream: &Stream, numbers: impl Iterator<Item = f64>, shape: &[usize]) -> Tensor<bf16> {
    stream.upload(&numbers.map(bf16::from_f64).collect::<Vec<_>>(), shape).unwrap()
}

/// The weights of a layer's convolution, `[width, channels]`.
pub(super) fn weights(layer: usize) -> Vec<f64> {
    (0..CONVOLUTION.width * CONVOLUTION.channels).map(|at| number(77, layer, 600 + at)).collect()
}

/// The values of a request's tokens: convolved, with SiLU.
pub(super) fn values(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    let weights = weights(layer);
    let mixed: Vec<_> = names.iter().map(|name| Token::new(*name, layer).mixed).collect();
    let value = |token: usize, channel: usize| {
        let taps = (0..CONVOLUTION.width).filter_map(|back| Some((back, mixed.get(token.checked_sub(back)?)?)));
        let weight = |back: usize| weights[(CONVOLUTION.width - 1 - back) * CONVOLUTION.channels + channel];
        let sum: f64 = taps.map(|(back, row)| weight(back) * row[channel]).sum();
        sum / (1.0 + (-sum).exp())
    };
    (0..names.len()).map(|token| (0..VALUES).map(|channel| value(token, channel)).collect()).collect()
}

pub(super) fn weight(stream: &Stream, layer: usize) -> Tensor<bf16> {
    upload(stream, weights(layer).into_iter(), &[CONVOLUTION.width, CONVOLUTION.channels])
}

/// The rows of tokens in a layer of linear attention, and `pad` more of them.
pub(super) struct Rows {
    pub(super) query: Tensor<bf16>,
    pub(super) key: Tensor<bf16>,
    /// What is convolved to the values.
    pub(super) mixed: Tensor<bf16>,
    pub(super) beta: Tensor<bf16>,
    pub(super) g: Tensor<f32>,
}

impl Rows {
    pub(super) fn new(stream: &Stream, names: &[u64], pad: usize, layer: usize) -> Self {
        let StateShape { value_heads: heads, key_dim, .. } = SHAPE;
        let mut tokens: Vec<Token> = names.iter().map(|name| Token::new(*name, layer)).collect();
        tokens.extend((0..pad).map(|_| Token::new(u64::MAX, layer)));
        let count = tokens.len();
        let all = |of: fn(&Token) -> &Vec<f64>| tokens.iter().flat_map(|token| of(token).clone()).collect::<Vec<_>>();
        let halves = |of, shape: &[usize]| upload(stream, all(of).into_iter(), shape);
        let decays: Vec<f32> = all(|token| &token.g).into_iter().map(|g| g as f32).collect();
        Self {
            query: halves(|token| &token.query, &[count, KEY_HEADS, key_dim]),
            key: halves(|token| &token.key, &[count, KEY_HEADS, key_dim]),
            mixed: halves(|token| &token.mixed, &[count, CONVOLUTION.channels]),
            beta: halves(|token| &token.beta, &[count, heads]),
            g: stream.upload(&decays, [count, heads]).unwrap(),
        }
    }

    /// Queues the convolution of the tokens, which gives their values.
    pub(super) fn convolved(&self, step: &mut Step<'_, bf16>, stream: &Stream, layer: usize) -> Result<Tensor<bf16>> {
        self.convolved_by(&weight(stream, layer), step, stream, layer)
    }

    fn convolved_by(
        &self,
        weight: &Tensor<bf16>,
        step: &mut Step<'_, bf16>,
        stream: &Stream,
        layer: usize,
    ) -> Result<Tensor<bf16>> {
        let values = step.convolve(layer, (&self.mixed, weight))?;
        let values = values.narrow(0, 0..self.mixed.shape()[0])?.narrow(1, 0..VALUES)?.contiguous(stream)?;
        Ok(values.reshape([self.mixed.shape()[0], SHAPE.value_heads, SHAPE.value_dim])?)
    }

    pub(super) fn tensors<'a>(&'a self, value: &'a Tensor<bf16>) -> DeltaTensors<'a, bf16> {
        DeltaTensors::new((&self.query, &self.key, value), &self.beta).g(&self.g)
    }
}

/// The numbers of a token in a layer of attention: its query, key or value.
pub(super) fn attention_row(name: u64, layer: usize, which: usize) -> impl Iterator<Item = f64> {
    let heads = if which == 0 { HEADS } else { 1 };
    (0..heads * DIM).map(move |at| number(name, layer, 1000 * (1 + which) + at))
}

/// Queues a layer of a step for the tokens of these names, with weights of its own.
pub(super) fn forward(
    step: &mut Step<'_, bf16>,
    stream: &Stream,
    names: &[u64],
    pad: usize,
    layer: usize,
) -> Result<Tensor<bf16>> {
    forward_by(&weight(stream, layer), step, stream, (names, pad), layer)
}

/// Queues a layer of a step for the tokens of these names, with these weights of its convolution, and with padding.
pub(super) fn forward_by(
    weight: &Tensor<bf16>,
    step: &mut Step<'_, bf16>,
    stream: &Stream,
    (names, pad): (&[u64], usize),
    layer: usize,
) -> Result<Tensor<bf16>> {
    if LINEAR.contains(&layer) {
        let rows = Rows::new(stream, names, pad, layer);
        let values = rows.convolved_by(weight, step, stream, layer)?;
        return step.forward(layer, rows.tensors(&values)).cloned();
    }
    let padded = names.iter().copied().chain(std::iter::repeat_n(u64::MAX, pad));
    let [query, key, value] = [0, 1, 2].map(|which| {
        let rows = padded.clone().flat_map(|name| attention_row(name, layer, which));
        upload(stream, rows, &[names.len() + pad, if which == 0 { HEADS } else { 1 }, DIM])
    });
    step.forward(layer, (&query, &key, &value)).cloned()
}

/// The outputs of the tokens of a request in a layer, one after the other, in double precision.
pub(super) fn reference(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    match LINEAR.contains(&layer) {
        true => recurrence(names, layer),
        false => attended(names, layer, if layer == WINDOWED { WINDOW } else { usize::MAX }),
    }
}

pub(super) fn recurrence(names: &[u64], layer: usize) -> Vec<Vec<f64>> {
    let StateShape { value_heads: heads, value_dim, key_dim, scale, .. } = SHAPE;
    let mut state = vec![0.0; heads * value_dim * key_dim];
    let mut outputs = Vec::new();
    for (name, values) in names.iter().zip(values(names, layer)) {
        let token = Token::new(*name, layer);
        let mut output = Vec::new();
        for head in 0..heads {
            let decay = token.g[head].exp();
            for (row, value) in values[head * value_dim..][..value_dim].iter().enumerate() {
                let state = &mut state[(head * value_dim + row) * key_dim..][..key_dim];
                let remembered: f64 = state.iter().zip(&token.key).map(|(s, k)| s * decay * k).sum();
                let correction = token.beta[head] * (value - remembered);
                for (s, k) in state.iter_mut().zip(&token.key) {
                    *s = *s * decay + correction * k;
                }
                output.push(state.iter().zip(&token.query).map(|(s, q)| s * q * scale).sum());
            }
        }
        outputs.push(output);
    }
    outputs
}

pub(super) fn attended(names: &[u64], layer: usize, window: usize) -> Vec<Vec<f64>> {
    let rows = |which| names.iter().map(|name| attention_row(*name, layer, which).collect()).collect::<Vec<Vec<f64>>>();
    let [queries, keys, values] = [0, 1, 2].map(rows);
    let token = |(token, query): (usize, &Vec<f64>)| {
        let first = (token + 1).saturating_sub(window);
        let head = |query: &[f64]| {
            let weight = |key: &Vec<f64>| {
                let score: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                (score / (DIM as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = keys[first..=token].iter().map(weight).collect();
            let sum: f64 = weights.iter().sum();
            let element = |at: usize| {
                let products = weights.iter().zip(&values[first..=token]).map(|(weight, value)| weight * value[at]);
                products.sum::<f64>() / sum
            };
            (0..DIM).map(element).collect::<Vec<f64>>()
        };
        query.chunks(DIM).flat_map(head).collect()
    };
    queries.iter().enumerate().map(token).collect()
}
