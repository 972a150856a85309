//! Attention in double precision, by loops over its formula.

use half::f16;

/// Sizes of dense attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) rows: usize,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
}

/// Numbers of `[batch, heads, rows, dim]` that f16 holds exactly, from -1 to 1.
pub(crate) fn numbers(seed: usize, count: usize) -> Vec<f16> {
    let one = |i: usize| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) % 129;
    (0..count).map(|i| f16::from_f32(one(i) as f32 / 64.0 - 1.0)).collect()
}

/// `softmax(Q K^T * scale) V` over the keys that a row of a sequence sees: `sees(sequence, row, key)`. All are
/// `[batch, heads, rows, dim]`.
pub(crate) fn attend(
    of: Sizes,
    [query, key, value]: [&[f16]; 3],
    scale: f64,
    sees: &dyn Fn(usize, usize, usize) -> bool,
) -> Vec<f64> {
    let mut out = Vec::new();
    for (b, n, i) in
        (0..of.batch * of.heads * of.rows).map(|at| (at / of.rows / of.heads, at / of.rows % of.heads, at % of.rows))
    {
        let kv = b * of.kv_heads + n / (of.heads / of.kv_heads);
        let row = |from: &[f16], row: usize, dim: usize| -> Vec<f64> {
            let row = &from[row * dim..][..dim];
            row.iter().map(|number| number.to_f64()).collect()
        };
        let q = row(query, (b * of.heads + n) * of.rows + i, of.dim);
        let seen: Vec<usize> = (0..of.keys).filter(|&j| sees(b, i, j)).collect();
        let score = |&j: &usize| -> f64 {
            let k = row(key, kv * of.keys + j, of.dim);
            q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scale
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut result = vec![0.0; of.value_dim];
        for (j, weight) in seen.iter().zip(&weights) {
            let v = row(value, kv * of.keys + j, of.value_dim);
            for (result, v) in result.iter_mut().zip(v) {
                *result += weight / sum * v;
            }
        }
        out.extend(result);
    }
    out
}

/// Bytes of numbers.
pub(crate) fn bytes(numbers: &[f16]) -> Vec<u8> {
    numbers.iter().flat_map(|of| of.to_le_bytes()).collect()
}
