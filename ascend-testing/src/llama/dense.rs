//! The model by its definition: one sequence at a time, all its tokens at once, in double precision, without a cache
//! and without the operator. With what it checks it shares the weights, the sizes and the matrix product.

use super::model::{Config, Linear, Model};
use super::product::{View, product};

/// The logits at some positions of a sequence, `vocabulary` each. `sees` is whether a row of a layer sees a key.
pub fn logits(
    model: &Model,
    tokens: &[u32],
    positions: &[usize],
    sees: impl Fn(usize, usize, usize) -> bool,
) -> Vec<Vec<f64>> {
    let config = &model.config;
    let width = config.width;
    let mut state = Vec::with_capacity(tokens.len() * width);
    for token in tokens {
        let row = &model.embedding.weights[*token as usize * width..][..width];
        state.extend(row.iter().map(|x| f64::from(*x)));
    }
    for (at, layer) in model.layers.iter().enumerate() {
        let input = rms_norm(&state, &layer.attention_norm, config.epsilon);
        let query = rotary(map(&layer.query, &input), config.heads, config);
        let key = rotary(map(&layer.key, &input), config.kv_heads, config);
        let value = map(&layer.value, &input);
        let attention = attention(config, [&query, &key, &value], |row, key| sees(at, row, key));
        accumulate(&mut state, &map(&layer.output, &attention));

        let input = rms_norm(&state, &layer.feed_norm, config.epsilon);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gate = map(&layer.gate, &input).into_iter().map(silu);
        let product = gate.zip(map(&layer.up, &input)).map(|(gate, up)| gate * up);
        accumulate(&mut state, &map(&layer.down, &product.collect::<Vec<_>>()));
    }
    let chosen: Vec<f64> = positions.iter().flat_map(|position| &state[position * width..][..width]).copied().collect();
    let logits = map(&model.embedding, &rms_norm(&chosen, &model.norm, config.epsilon));
    logits.chunks_exact(config.vocabulary).map(<[f64]>::to_vec).collect()
}

fn map(linear: &Linear, input: &[f64]) -> Vec<f64> {
    let weights: Vec<f64> = linear.weights.iter().map(|x| f64::from(*x)).collect();
    let weights = View::rows_of(linear.inputs, &weights);
    product(View::rows_of(linear.inputs, input), weights.transposed())
}

/// `softmax(Q K^T / sqrt(d)) V` for each head, over the keys that a row sees.
fn attention(config: &Config, [query, key, value]: [&[f64]; 3], sees: impl Fn(usize, usize) -> bool) -> Vec<f64> {
    let dim = config.head_dim;
    let (query_width, key_width) = (config.heads * dim, config.kv_heads * dim);
    let tokens = query.len() / query_width;
    let mut out = vec![0.0; query.len()];
    for head in 0..config.heads {
        let own = head * dim..(head + 1) * dim;
        let shared = head * config.kv_heads / config.heads;
        let shared = shared * dim..(shared + 1) * dim;
        let query = View::rows_of(query_width, query).columns(own.clone());
        let key = View::rows_of(key_width, key).columns(shared.clone());
        let value = View::rows_of(key_width, value).columns(shared);
        let mut weights = product(query, key.transposed());
        for (row, weights) in weights.chunks_exact_mut(tokens).enumerate() {
            softmax(weights, (dim as f64).sqrt(), |key| sees(row, key));
        }
        let rows = product(View::rows_of(tokens, &weights), value);
        for (out, row) in out.chunks_exact_mut(query_width).zip(rows.chunks_exact(dim)) {
            out[own.clone()].copy_from_slice(row);
        }
    }
    out
}

/// Weights of the keys that are seen, 0 for the others.
fn softmax(scores: &mut [f64], divisor: f64, sees: impl Fn(usize) -> bool) {
    for (key, score) in scores.iter_mut().enumerate() {
        if !sees(key) {
            *score = f64::NEG_INFINITY;
        }
    }
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for score in &mut *scores {
        *score = ((*score - most) / divisor).exp();
        sum += *score;
    }
    for weight in scores {
        *weight /= sum;
    }
}

fn rms_norm(rows: &[f64], weights: &[f32], epsilon: f64) -> Vec<f64> {
    let normed = rows.chunks_exact(weights.len()).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let root = (mean + epsilon).sqrt();
        row.iter().zip(weights).map(move |(x, weight)| x / root * f64::from(*weight))
    });
    normed.collect()
}

/// Numbers `2 i` and `2 i + 1` of each head, as a complex number, times `e^(j position theta^(-2 i / d))`.
fn rotary(mut rows: Vec<f64>, heads: usize, config: &Config) -> Vec<f64> {
    let dim = config.head_dim;
    for (position, row) in rows.chunks_exact_mut(heads * dim).enumerate() {
        for head in row.chunks_exact_mut(dim) {
            for i in 0..dim / 2 {
                let exponent = -((2 * i) as f64) / dim as f64;
                let (sin, cos) = (position as f64 * config.theta.powf(exponent)).sin_cos();
                let (re, im) = (head[2 * i], head[2 * i + 1]);
                head[2 * i] = re * cos - im * sin;
                head[2 * i + 1] = re * sin + im * cos;
            }
        }
    }
    rows
}

fn accumulate(state: &mut [f64], change: &[f64]) {
    for (state, change) in state.iter_mut().zip(change) {
        *state += change;
    }
}
