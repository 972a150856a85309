//! The online softmax (Milakov and Gimelshein 2018), which the prefill and the decode kernel share.
//!
//! The softmax of a query is computed in one pass over its scores. `m` is the running maximum, `l` the running sum
//! and `O` the output of the KV tiles so far; a KV tile with scores `s` and values `V` updates them to
//!
//! ```text
//! m' = max(m, max s)
//! p  = 2^(s - m')
//! l' = l * 2^(m - m') + sum p
//! O' = O * 2^(m - m') + p V
//! ```
//!
//! and the result is `O / l`, as in FlashAttention-2 (Dao 2023). Scores are multiplied by `log2 e` beforehand,
//! together with the scale, so that the powers are of two.

use super::attention::Attention;
use super::exp2::exp2;
use super::scratch::{Scratch, take};
use super::simd::{Simd, Vector, WIDTH};
use super::tensor::element::Element;
use ascend_spec::DType;
use half::{bf16, f16};

/// The online softmax of some queries after some keys.
#[derive(Debug)]
pub(super) struct OnlineSoftmax<'s> {
    /// Running maximum of each query.
    pub(super) max: &'s mut [f32],
    /// Running sum of each query.
    pub(super) sum: &'s mut [f32],
    /// Output of each query, row by row, not yet divided by the running sum.
    pub(super) out: &'s mut [Vector],
}

impl<'s> OnlineSoftmax<'s> {
    /// The online softmax of `count` queries, with `columns` vectors of output each, before any key.
    pub(super) fn empty(scratch: &'s mut Scratch, count: usize, columns: usize) -> Self {
        let each = count.div_ceil(WIDTH);
        let mut rest = scratch.vectors(2 * each + count * columns);
        let [max, sum] = [each, each].map(|size| take(&mut rest, size).as_flattened_mut());
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        rest.fill([0.0; WIDTH]);
        OnlineSoftmax {
            max: &mut max[..count],
            sum: &mut sum[..count],
            out: rest,
        }
    }
}

/// `2^(score - max)`, for a score that is at most `max`. Both may be -inf, where no key was seen; the result is then 1.
#[inline(always)]
pub(super) fn rescale_factor(max: f32, score: f32) -> f32 {
    if score == max {
        1.0
    } else {
        (score - max).exp2()
    }
}

/// Replaces scores by their weights `2^(score - shift)`, rounded to the element type of the weights. The scores are
/// vector `at` of every `STRIDE` vectors. Returns the sum of the weights before rounding.
#[inline(always)]
pub(super) fn weights<S: Simd, const STRIDE: usize>(
    simd: S,
    attention: &Attention,
    scores: &mut [Vector],
    at: usize,
    shift: S::Register,
) -> S::Register {
    match (attention.weight_scale, attention.weight_dtype) {
        (Some(weight_scale), _) => {
            let mut sum = simd.splat(0.0);
            for scores in scores.chunks_exact_mut(STRIDE) {
                let weight = exp2(simd, simd.subtract(simd.load(&scores[at]), shift));
                sum = simd.add(sum, weight);
                simd.store(weight, &mut scores[at]);
                scores[at] = quantise_weights(&scores[at], weight_scale);
            }
            sum
        }
        (None, DType::Float16) => powers::<f16, S, STRIDE>(simd, scores, at, shift),
        (None, DType::Bf16) => powers::<bf16, S, STRIDE>(simd, scores, at, shift),
        (None, _) => powers::<f32, S, STRIDE>(simd, scores, at, shift),
    }
}

#[inline(always)]
fn powers<T: Element, S: Simd, const STRIDE: usize>(
    simd: S,
    scores: &mut [Vector],
    at: usize,
    shift: S::Register,
) -> S::Register {
    let mut sum = simd.splat(0.0);
    for scores in scores.chunks_exact_mut(STRIDE) {
        let weight = exp2(simd, simd.subtract(simd.load(&scores[at]), shift));
        sum = simd.add(sum, weight);
        simd.store(T::round(simd, weight), &mut scores[at]);
    }
    sum
}

/// Quantises weights to `INT8`: rounds `weight * scale` to the nearest integer that `INT8` holds.
#[inline(always)]
pub(super) fn quantise_weights(weight: &Vector, scale: f32) -> Vector {
    let mut integer = *weight;
    for weight in &mut integer {
        *weight = (*weight * scale)
            .round_ties_even()
            .clamp(f32::from(i8::MIN), f32::from(i8::MAX));
    }
    integer
}
