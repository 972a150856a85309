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
//! together with the scale, so that the powers are of two, which [`exp2`] computes.

use super::attention::Attention;
use super::scratch::{Scratch, take};
use super::simd::{Simd, Vector, WIDTH};
use super::tensor::Element;
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
        OnlineSoftmax { max: &mut max[..count], sum: &mut sum[..count], out: rest }
    }
}

/// `2^(score - max)`, for a score that is at most `max`. Both may be -inf, where no key was seen; the result is then 1.
#[inline(always)]
pub(super) fn rescale_factor(max: f32, score: f32) -> f32 {
    if score == max { 1.0 } else { (score - max).exp2() }
}

/// Replaces scores by their weights `2^(score - shift)`, rounded to the element type of the weights. The scores are
/// vector `index` of every `STRIDE` vectors. Returns the sum of the weights before rounding.
#[inline(always)]
pub(super) fn weights<S: Simd, const STRIDE: usize>(
    simd: S,
    attention: &Attention,
    scores: &mut [Vector],
    index: usize,
    shift: S::Register,
) -> S::Register {
    match (attention.weight_scale, attention.weight_dtype) {
        (Some(weight_scale), _) => {
            let mut sum = simd.splat(0.0);
            for scores in scores.chunks_exact_mut(STRIDE) {
                let weight = exp2(simd, simd.subtract(simd.load(&scores[index]), shift));
                sum = simd.add(sum, weight);
                simd.store(weight, &mut scores[index]);
                scores[index] = quantise_weights(&scores[index], weight_scale);
            }
            sum
        }
        (None, DType::Float16) => powers::<f16, S, STRIDE>(simd, scores, index, shift),
        (None, DType::Bf16) => powers::<bf16, S, STRIDE>(simd, scores, index, shift),
        (None, _) => powers::<f32, S, STRIDE>(simd, scores, index, shift),
    }
}

#[inline(always)]
fn powers<T: Element, S: Simd, const STRIDE: usize>(
    simd: S,
    scores: &mut [Vector],
    index: usize,
    shift: S::Register,
) -> S::Register {
    let mut sum = simd.splat(0.0);
    for scores in scores.chunks_exact_mut(STRIDE) {
        let weight = exp2(simd, simd.subtract(simd.load(&scores[index]), shift));
        sum = simd.add(sum, weight);
        simd.store(T::round(simd, weight), &mut scores[index]);
    }
    sum
}

/// Quantises weights to `INT8`: rounds `weight * scale` to the nearest integer that `INT8` holds.
#[inline(always)]
pub(super) fn quantise_weights(weight: &Vector, scale: f32) -> Vector {
    let mut integer = *weight;
    for weight in &mut integer {
        *weight = (*weight * scale).round_ties_even().clamp(f32::from(i8::MIN), f32::from(i8::MAX));
    }
    integer
}

/// The exponent whose biased form is 0; the power is then 0, too.
const SMALLEST: f32 = -127.0;

/// 1.5 * 2^23 plus the exponent bias: adding it to a small number leaves the nearest integer, biased, in the low bits.
const ROUNDING: f32 = 12_582_912.0 + 127.0;

/// Coefficients of the minimax polynomial of `(2^f - 1) / f` on `[-1/2, 1/2]`, found with the Remez algorithm. The
/// error of `2^f` is 2.6e-9 before rounding.
const POLYNOMIAL: [f32; 6] =
    [1.559_467_8e-4, 1.340_664_3e-3, 9.617_693e-3, 5.550_310_4e-2, 2.402_265_2e-1, 6.931_472_4e-1];

/// Computes `2^x` for `x <= 0`: the fractional part by a minimax polynomial, the integer part in the exponent bits. The
/// relative error is below 2^-22 unless the result is subnormal. Returns 0 for `x` up to -126.5, and NaN for NaN.
#[inline(always)]
pub(super) fn exp2<S: Simd>(simd: S, x: S::Register) -> S::Register {
    // NaN passes through.
    let bounded = simd.larger(simd.splat(SMALLEST), x);
    let rounding = simd.splat(ROUNDING);
    let shifted = simd.add(bounded, rounding);
    let fraction = simd.subtract(bounded, simd.subtract(shifted, rounding));
    let mut power = simd.splat(POLYNOMIAL[0]);
    for coefficient in &POLYNOMIAL[1..] {
        power = simd.mul_add(power, fraction, simd.splat(*coefficient));
    }
    power = simd.mul_add(power, fraction, simd.splat(1.0));
    simd.multiply(power, simd.powers_of_two(shifted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::{Kernel, Level, Vector, WIDTH};

    #[derive(Clone, Copy)]
    struct Exp(Vector);

    impl Kernel for Exp {
        type Output = Vector;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vector {
            let mut power = [0.0; WIDTH];
            simd.store(exp2(simd, simd.load(&self.0)), &mut power);
            power
        }
    }

    #[test]
    fn error_is_below_the_stated_bound() {
        // Evenly over the range, and densely near 0.
        let xs: Vec<f32> = (0..2_000_000)
            .map(|i| -126.0 * (i as f32 / 2e6))
            .chain((0..160_000).map(|i| -((i as f32 - 120_000.0) / 10_000.0).exp()))
            .filter(|x| *x >= -126.0)
            .collect();
        for level in Level::all() {
            for xs in xs.as_chunks::<WIDTH>().0 {
                for (x, got) in xs.iter().zip(level.run(Exp(*xs))) {
                    let want = f64::from(*x).exp2();
                    let error = (f64::from(got) / want - 1.0).abs();
                    assert!(error < 2f64.powi(-22), "{error:e} at {x} under {level:?}");
                }
            }
        }
    }

    #[test]
    fn ends_are_exact() {
        for level in Level::all() {
            let mut xs = [0.0; WIDTH];
            xs[..6].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -0.0, -126.5, f32::MIN, -1e-45]);
            let got = level.run(Exp(xs));
            assert_eq!(got[0], 0.0);
            assert!(got[1].is_nan());
            assert_eq!(got[2..6], [1.0, 0.0, 0.0, 1.0]);
            assert_eq!(got[6], 1.0);
        }
    }
}
