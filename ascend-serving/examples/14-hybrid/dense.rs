//! The model over a whole sequence at once, in double precision: what the engine's steps must equal.

use std::convert::Infallible;

use crate::model::{Attend, CONVOLUTION, Delta, FULL, KEY_HEADS, MIXED, STATES, VALUES, dot, silu};

/// A sequence whose tokens are all new.
pub(crate) struct Whole;

impl Attend for Whole {
    type Error = Infallible;

    fn convolve(&mut self, _: usize, mixed: Vec<f64>, weights: &[f64]) -> Result<Vec<f64>, Infallible> {
        let mut rows = vec![0.0; (CONVOLUTION.width - 1) * MIXED];
        rows.extend(mixed);
        let convolved = |window: &[f64]| {
            let products = window.iter().zip(weights).map(|(x, weight)| x * weight).collect::<Vec<_>>();
            (0..MIXED).map(|at| silu(products.iter().skip(at).step_by(MIXED).sum())).collect::<Vec<_>>()
        };
        Ok(rows.windows(CONVOLUTION.width * MIXED).step_by(MIXED).flat_map(convolved).collect())
    }

    fn linear(&mut self, _: usize, inputs: Delta) -> Result<Vec<f64>, Infallible> {
        let (heads, dim, keys) = (STATES.value_heads, STATES.value_dim, STATES.key_dim);
        let mut states = vec![0.0; heads * dim * keys];
        let mut out = Vec::new();
        for token in 0..inputs.g.len() / heads {
            for head in 0..heads {
                let place = (token * KEY_HEADS + head / (heads / KEY_HEADS)) * keys;
                let (query, key) = (&inputs.query[place..][..keys], &inputs.key[place..][..keys]);
                let at = token * heads + head;
                let decay = inputs.g[at].exp();
                for row in 0..dim {
                    let state = &mut states[(head * dim + row) * keys..][..keys];
                    state.iter_mut().for_each(|s| *s *= decay);
                    let value = inputs.value[token * VALUES + head * dim + row];
                    let correction = inputs.beta[at] * (value - dot(state, key));
                    state.iter_mut().zip(key).for_each(|(s, k)| *s += correction * k);
                    out.push(STATES.scale * dot(state, query));
                }
            }
        }
        Ok(out)
    }

    fn full(&mut self, _: usize, [query, key, value]: [Vec<f64>; 3]) -> Result<Vec<f64>, Infallible> {
        let [heads, kv_heads, dim] = FULL;
        let mut out = Vec::new();
        for (at, query) in query.chunks(dim).enumerate() {
            let (token, head) = (at / heads, at % heads / (heads / kv_heads));
            let row = |rows: &'_ [f64], token: usize| rows[(token * kv_heads + head) * dim..][..dim].to_vec();
            let scores = (0..=token).map(|seen| dot(query, &row(&key, seen)) / (dim as f64).sqrt());
            let weights: Vec<f64> = scores.map(f64::exp).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = vec![0.0; dim];
            for (seen, weight) in weights.iter().enumerate() {
                sum.iter_mut().zip(row(&value, seen)).for_each(|(sum, x)| *sum += weight / total * x);
            }
            out.extend(sum);
        }
        Ok(out)
    }
}
