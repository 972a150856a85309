//! The oracle: attention by its definition, one score after the other, in double precision.
//!
//! Slow, and obviously right. It shares nothing with the fast kernels but the contract (what a [`Problem`] says about
//! lengths, strides and visible keys), and measures them in tests and benchmarks. Weights are not rounded to the
//! element type: what that costs belongs to the tolerance of the comparison.

use ascend_spec::fia::{MaskUse, Problem, Work};
use ascend_spec::{DType, View};

/// The bytes of each tensor of a call, from its base address.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Element type of query, key and value: [`Problem::dtype`], or `FLOAT` to measure kernels in single precision.
    pub dtype: DType,
    /// `query`.
    pub query: &'a [u8],
    /// Each tensor of the `key` list.
    pub key: &'a [&'a [u8]],
    /// Each tensor of the `value` list.
    pub value: &'a [&'a [u8]],
    /// `attenMask`; empty if there is none.
    pub atten_mask: &'a [u8],
}

/// What the call computes. Rows past a sequence's length, and rows without a key to see, have log-sum-exp +inf.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// `[batch][head][row][element]`, whatever the layout.
    pub attention: Vec<f64>,
    /// `[batch][head][row]`, natural logarithm.
    pub lse: Vec<f64>,
}

/// Computes `problem` over `inputs`. Elements that the given bytes do not hold are NaN.
pub fn attention(problem: &Problem<'_>, inputs: &Inputs<'_>) -> Outputs {
    let mut outputs = Outputs {
        attention: Vec::new(),
        lse: Vec::new(),
    };
    if problem.work == Work::Nothing {
        return outputs;
    }
    for b in 0..problem.batch {
        for head in 0..problem.heads {
            for row in 0..problem.query_rows {
                let (values, lse) = one_row(problem, inputs, b, head, row);
                outputs.attention.extend(values);
                outputs.lse.push(lse);
            }
        }
    }
    outputs
}

/// Output and log-sum-exp of one row.
fn one_row(
    problem: &Problem<'_>,
    inputs: &Inputs<'_>,
    b: usize,
    head: usize,
    row: usize,
) -> (Vec<f64>, f64) {
    let nothing = (vec![0.0; problem.value_dim], f64::INFINITY);
    if problem.work == Work::Fill {
        return nothing;
    }
    let Some(at) = problem.key_value(b) else {
        return nothing;
    };
    let (Some(key), Some(value)) = (
        inputs.key.get(at.list_index),
        inputs.value.get(at.list_index),
    ) else {
        return nothing;
    };
    let kv_head = head / (problem.heads / problem.kv_heads);
    let dtype = inputs.dtype;

    let geometry = problem.geometry(b);
    let in_sight: Vec<usize> = (0..problem.kv_len(b))
        .filter(|&j| geometry.sees(row as u64, j as u64))
        .collect();
    let hidden = |j: usize| match problem.mask {
        MaskUse::None | MaskUse::Compressed => false,
        MaskUse::Full(mask) => {
            let element = mask.at(b, row) + j as i64 * mask.key;
            usize::try_from(element)
                .ok()
                .and_then(|at| inputs.atten_mask.get(at))
                != Some(&0)
        }
    };
    let visible: Vec<usize> = in_sight.iter().copied().filter(|&j| !hidden(j)).collect();
    if in_sight.is_empty() {
        return nothing;
    }
    let value_of = |j: usize, d: usize| element(value, dtype, &at.value, (at.batch, kv_head, j), d);
    if visible.is_empty() {
        if problem.corrects_blind_rows() {
            return nothing;
        }
        let mean =
            |d| in_sight.iter().map(|&j| value_of(j, d)).sum::<f64>() / in_sight.len() as f64;
        return ((0..problem.value_dim).map(mean).collect(), f64::INFINITY);
    }

    let scores: Vec<f64> = visible
        .iter()
        .map(|&j| {
            let dot: f64 = (0..problem.head_dim)
                .map(|d| {
                    element(inputs.query, dtype, &problem.query, (b, head, row), d)
                        * element(key, dtype, &at.key, (at.batch, kv_head, j), d)
                })
                .sum();
            dot * problem.scale()
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let output = |d| {
        let weighted: f64 = visible
            .iter()
            .zip(&weights)
            .map(|(&j, w)| w * value_of(j, d))
            .sum();
        weighted / sum
    };
    ((0..problem.value_dim).map(output).collect(), max + sum.ln())
}

/// Element `d` of a row.
fn element(
    bytes: &[u8],
    dtype: DType,
    view: &View,
    (batch, head, row): (usize, usize, usize),
    d: usize,
) -> f64 {
    let index = view.at(batch, head, row) + d as i64 * view.dim;
    let element = |size: usize| {
        let start = usize::try_from(index).ok()?.checked_mul(size)?;
        bytes.get(start..start.checked_add(size)?)
    };
    let value = match dtype {
        DType::Float16 => {
            element(2).and_then(|e| Some(half(u16::from_le_bytes(e.try_into().ok()?))))
        }
        DType::Bf16 => element(2).and_then(|e| Some(brain(u16::from_le_bytes(e.try_into().ok()?)))),
        DType::Float => {
            element(4).and_then(|e| Some(f64::from(f32::from_le_bytes(e.try_into().ok()?))))
        }
        _ => None,
    };
    value.unwrap_or(f64::NAN)
}

/// IEEE half precision by its definition.
fn half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits >> 10) & 0x1f);
    let mantissa = f64::from(bits & 0x3ff);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    };
    sign * magnitude
}

/// Brain floating point: the upper half of a single.
fn brain(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_agrees_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let same = |ours: f64, theirs: f64| ours == theirs || ours.is_nan() && theirs.is_nan();
            assert!(same(half(bits), half::f16::from_bits(bits).to_f64()));
            assert!(same(brain(bits), half::bf16::from_bits(bits).to_f64()));
        }
    }
}
