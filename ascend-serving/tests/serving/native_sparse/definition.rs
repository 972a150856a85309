//! The three branches, in double precision.

use ascend_attention::{DType, bf16, f16};

use super::engine::Model;
use super::{KEY, VALUE, harness};
use crate::harness::reference::Half;

/// What two tokens of one name have in common: everything.
#[derive(Clone, Copy)]
pub enum What {
    Query,
    Key,
    Value,
}

/// Numbers of a token in a layer.
pub fn row(name: u64, layer: usize, what: What, len: usize) -> Vec<bf16> {
    let seed = (name * 8 + layer as u64) * 4 + what as u64;
    let numbers = harness::numbers(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1, len);
    numbers.into_iter().map(bf16::from_f32).collect()
}

/// The weights of keys, or of values, in a layer, of each token of a block and each key head.
pub fn weights(layer: usize, what: What, len: usize) -> Vec<bf16> {
    let numbers = harness::numbers(1_000_003 * (2 * layer as u64 + what as u64 + 1), len);
    numbers.into_iter().map(|x| bf16::from_f32(0.5 * x)).collect()
}

/// A number as a cache stores it.
fn stored<T: Half>(number: f64) -> f64 {
    match T::DTYPE {
        DType::Float16 => f16::from_f64(number).to_f64(),
        _ => bf16::from_f64(number).to_f64(),
    }
}

/// Rows of a history, of one head after the other.
struct Rows {
    heads: usize,
    dim: usize,
    numbers: Vec<f64>,
}

impl Rows {
    fn of<T: Half>(names: &[u64], layer: usize, what: What, heads: usize, dim: usize) -> Self {
        let rows = names.iter().flat_map(|name| row(*name, layer, what, heads * dim));
        Self { heads, dim, numbers: rows.map(|x| T::from_f32(x.to_f32()).to_f64()).collect() }
    }

    fn get(&self, token: usize, head: usize) -> &[f64] {
        &self.numbers[(token * self.heads + head) * self.dim..][..self.dim]
    }

    /// One row of each block of rows, rounded as it is stored.
    fn compressed<T: Half>(&self, weights: &[bf16], block: usize, stride: usize) -> Self {
        let tokens = self.numbers.len() / (self.heads * self.dim);
        let mut numbers = Vec::new();
        for first in (0..tokens).step_by(stride).filter(|first| first + block <= tokens) {
            for head in 0..self.heads {
                let mut sum = vec![0.0; self.dim];
                for token in 0..block {
                    let weight = T::from_f32(weights[token * self.heads + head].to_f32()).to_f64();
                    sum.iter_mut().zip(self.get(first + token, head)).for_each(|(x, y)| *x += weight * y);
                }
                numbers.extend(sum.into_iter().map(stored::<T>));
            }
        }
        Self { numbers, ..*self }
    }

    fn len(&self) -> usize {
        self.numbers.len() / (self.heads * self.dim)
    }
}

/// The weights of tokens for a query.
fn softmax(query: &[f64], keys: &Rows, head: usize, tokens: &[usize]) -> Vec<f64> {
    let scale = 1.0 / (KEY as f64).sqrt();
    let score = |token: &usize| {
        let products = query.iter().zip(keys.get(*token, head)).map(|(a, b)| a * b);
        (scale * products.sum::<f64>()).exp()
    };
    let weights: Vec<f64> = tokens.iter().map(score).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

fn mean(weights: &[f64], values: &Rows, head: usize, tokens: &[usize]) -> Vec<f64> {
    let mut mean = vec![0.0; VALUE];
    for (weight, token) in weights.iter().zip(tokens) {
        mean.iter_mut().zip(values.get(*token, head)).for_each(|(x, v)| *x += weight * v);
    }
    mean
}

/// The three branches of the last of `names`, each `[heads, VALUE]`, and whether the selection is beyond doubt: that no
/// block that is selected scores about as much as one that is not.
pub fn branches<T: Half>(names: &[u64], layer: usize, model: &Model) -> ([Vec<f64>; 3], bool) {
    let tokens = names.len();
    let Model { heads: [heads, kv_heads], block, stride, select, count, window, .. } = *model;
    let keys = Rows::of::<T>(names, layer, What::Key, kv_heads, KEY);
    let values = Rows::of::<T>(names, layer, What::Value, kv_heads, VALUE);
    let weights_of = |what| weights(layer, what, block * kv_heads);
    let compressed_keys = keys.compressed::<T>(&weights_of(What::Key), block, stride);
    let compressed_values = values.compressed::<T>(&weights_of(What::Value), block, stride);
    let query = Rows::of::<T>(&names[tokens - 1..], layer, What::Query, heads, KEY);
    let compressed: Vec<usize> = (0..compressed_keys.len()).collect();
    let shown: Vec<usize> = (tokens.saturating_sub(window)..tokens).collect();
    let mut out = [const { Vec::new() }; 3];
    let mut certain = true;
    for head in 0..kv_heads {
        let group = head * (heads / kv_heads)..(head + 1) * (heads / kv_heads);
        let weights: Vec<Vec<f64>> = group
            .clone()
            .map(|query_head| softmax(query.get(0, query_head), &compressed_keys, head, &compressed))
            .collect();
        let mut selected: Vec<usize> = (0..tokens).collect();
        if tokens >= select * count {
            let weight = |token: usize| weights.iter().map(|of_head| of_head.get(token).unwrap_or(&0.0)).sum::<f64>();
            let blocks = ((compressed.len() - 1) * stride + block).div_ceil(select);
            let mut scores: Vec<(f64, usize)> = (0..blocks)
                .map(|at| {
                    let last = select / stride * (at + 1);
                    let parts = (0..select / stride).flat_map(|m| (0..block / stride).map(move |n| m + n));
                    (parts.filter_map(|part| last.checked_sub(part)).map(weight).sum(), at)
                })
                .collect();
            for (score, at) in &mut scores {
                if *at == 0 || *at + 2 >= blocks {
                    *score = f64::MAX;
                }
            }
            scores.sort_by(|a, b| b.0.total_cmp(&a.0));
            if blocks > count {
                certain &= scores[count - 1].0 - scores[count].0 > 2e-3 * scores[count].0;
            }
            let chosen: Vec<usize> = scores[..count].iter().map(|(_, at)| *at).collect();
            selected.retain(|token| chosen.contains(&(token / select)));
        }
        for (query_head, weights) in group.zip(&weights) {
            let attend = |tokens: &[usize]| {
                let weights = softmax(query.get(0, query_head), &keys, head, tokens);
                mean(&weights, &values, head, tokens)
            };
            out[0].extend(mean(weights, &compressed_values, head, &compressed));
            out[1].extend(attend(&selected));
            out[2].extend(attend(&shown));
        }
    }
    (out, certain)
}
