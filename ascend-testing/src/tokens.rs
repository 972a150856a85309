//! Tokens with names: a token's query, key and value are random numbers made from its name, and their attention in
//! double precision, by its definition.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::AttentionShape;

use crate::harness::reference::Half;

/// Elements of a head.
pub const DIM: usize = 64;

/// The query (0), key (1) or value (2) of a token in a layer. Two tokens of one name are the same token.
pub fn row(name: u64, layer: usize, what: u64, heads: usize) -> Vec<bf16> {
    let seed = name * 8 + layer as u64 * 3 + what;
    let numbers = crate::harness::numbers(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1, heads * DIM);
    numbers.into_iter().map(bf16::from_f32).collect()
}

/// Rows of tokens, `[tokens, heads, DIM]`.
pub fn packed<T: Half>(stream: &Stream, names: &[u64], layer: usize, what: u64, heads: usize) -> Tensor<T> {
    stream.upload(&T::all_of(&rows(names, layer, what, heads)), [names.len(), heads, DIM]).unwrap()
}

fn rows(names: &[u64], layer: usize, what: u64, heads: usize) -> Vec<f32> {
    names.iter().flat_map(|name| row(*name, layer, what, heads)).map(bf16::to_f32).collect()
}

/// A row of dense attention by its definition: the query of the last of `names`, over the keys at the places that
/// `sees` says.
pub fn dense(names: &[u64], layer: usize, shape: AttentionShape, sees: impl Fn(usize) -> bool) -> Vec<f64> {
    attended(names, layer, shape, &sees, &|_, numbers, _| numbers, &[])
}

/// Dense attention with one more logit for each head, a sink, which has no value.
pub fn dense_with_sinks(
    names: &[u64],
    layer: usize,
    shape: AttentionShape,
    sees: impl Fn(usize) -> bool,
    sinks: &[f64],
) -> Vec<f64> {
    attended(names, layer, shape, &sees, &|_, numbers, _| numbers, sinks)
}

/// Dense attention over keys (1) and values (2) that a cache returns changed: by the place of a token, its numbers and
/// which they are.
pub fn dense_over(
    names: &[u64],
    layer: usize,
    shape: AttentionShape,
    sees: impl Fn(usize) -> bool,
    cached: impl Fn(usize, Vec<f64>, u64) -> Vec<f64>,
) -> Vec<f64> {
    attended(names, layer, shape, &sees, &cached, &[])
}

/// No generic function, so that it is compiled here, with optimisation.
fn attended(
    names: &[u64],
    layer: usize,
    shape: AttentionShape,
    sees: &dyn Fn(usize) -> bool,
    cached: &dyn Fn(usize, Vec<f64>, u64) -> Vec<f64>,
    sinks: &[f64],
) -> Vec<f64> {
    let exact = |row: Vec<bf16>| row.into_iter().map(|x| x.to_f64()).collect::<Vec<_>>();
    let query = exact(row(*names.last().unwrap(), layer, 0, shape.heads));
    let seen: Vec<usize> = (0..names.len()).filter(|place| sees(*place)).collect();
    let all = |what| -> Vec<Vec<f64>> {
        let numbers = |place: &usize| exact(row(names[*place], layer, what, shape.kv_heads));
        seen.iter().map(|place| cached(*place, numbers(place), what)).collect()
    };
    let (keys, values) = (all(1), all(2));
    let mut out = Vec::new();
    for head in 0..shape.heads {
        let at = head / (shape.heads / shape.kv_heads) * DIM;
        let query = &query[head * DIM..(head + 1) * DIM];
        let dot = |key: &Vec<f64>| -> f64 {
            let key = &key[at..at + DIM];
            key.iter().zip(query).map(|(a, b)| a * b).sum()
        };
        let capped = |score: f64| shape.emulated_only_soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
        let scores: Vec<f64> = keys.iter().map(|key| capped(shape.scale * dot(key))).collect();
        let logits = || scores.iter().chain(sinks.get(head));
        let max = logits().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits().map(|s| (s - max).exp()).sum();
        let mut row = vec![0.0; DIM];
        for (score, value) in scores.iter().zip(&values) {
            let weight = (score - max).exp() / sum;
            for (x, v) in row.iter_mut().zip(&value[at..at + DIM]) {
                *x += weight * v;
            }
        }
        out.extend(row);
    }
    out
}
