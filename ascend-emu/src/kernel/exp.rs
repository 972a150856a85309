//! The exponential of the softmax.

use super::simd::{Simd, Vector};

/// Below this the result is 0 instead of a number under 1.7e-38.
const SMALLEST: f32 = -87.0;

/// 1.5 * 2^23: added to a small number it leaves the nearest integer in the low bits.
const ROUNDING: f32 = 12_582_912.0;

/// ln 2 in two parts; the first has so few bits that an exponent times it is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// Minimax polynomial of `(e^r - 1 - r) / r^2` on `[-ln 2 / 2, ln 2 / 2]` (Cephes, `expf`).
const POLYNOMIAL: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_6e-1,
    0.5,
];

/// e^x for x <= 0, with a relative error under 2^-22; 0 for x below -87; NaN for NaN.
///
/// `e^x = 2^n e^r` with `n` the integer nearest to `x / ln 2`, `2^n` put together from its bits.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: &Vector) -> Vector {
    let mut y = *x;
    for y in &mut y {
        *y = exp_one(simd, *y);
    }
    y
}

/// `exp(scores - shift)`, which is also added to `sum`.
#[inline(always)]
pub(super) fn exponentiate<S: Simd>(
    simd: S,
    scores: &Vector,
    shift: &Vector,
    sum: &mut Vector,
) -> Vector {
    let mut weights = *scores;
    for (weight, shift) in weights.iter_mut().zip(shift) {
        *weight -= shift;
    }
    weights = exp(simd, &weights);
    for (sum, weight) in sum.iter_mut().zip(&weights) {
        *sum += weight;
    }
    weights
}

/// [`exp`] of one number.
#[inline(always)]
pub(super) fn exp_one<S: Simd>(simd: S, x: f32) -> f32 {
    // Comparisons with NaN fail, so that NaN passes through both selections.
    let bounded = if x < SMALLEST { SMALLEST } else { x };
    let shifted = simd.mul_add_one(bounded, std::f32::consts::LOG2_E, ROUNDING);
    let n = shifted - ROUNDING;
    let r = simd.mul_add_one(n, -LN_2_HIGH, bounded);
    let r = simd.mul_add_one(n, -LN_2_LOW, r);
    let mut p = POLYNOMIAL[0];
    p = simd.mul_add_one(p, r, POLYNOMIAL[1]);
    p = simd.mul_add_one(p, r, POLYNOMIAL[2]);
    p = simd.mul_add_one(p, r, POLYNOMIAL[3]);
    p = simd.mul_add_one(p, r, POLYNOMIAL[4]);
    p = simd.mul_add_one(p, r, POLYNOMIAL[5]);
    p = simd.mul_add_one(p, r * r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < SMALLEST { 0.0 } else { p * power }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::{Kernel, Level, WIDTH};

    #[derive(Clone, Copy)]
    struct Exp(Vector);

    impl Kernel for Exp {
        type Output = Vector;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vector {
            exp(simd, &self.0)
        }
    }

    #[test]
    fn error_is_below_the_stated_bound() {
        // Evenly over the range, and densely near 0.
        let xs: Vec<f32> = (0..2_000_000)
            .map(|i| SMALLEST * (i as f32 / 2e6))
            .chain((0..160_000).map(|i| -((i as f32 - 120_000.0) / 10_000.0).exp()))
            .filter(|x| *x >= SMALLEST)
            .collect();
        for level in [Level::PORTABLE, Level::detect()] {
            for xs in xs.as_chunks::<WIDTH>().0 {
                for (x, got) in xs.iter().zip(level.run(Exp(*xs))) {
                    let want = f64::from(*x).exp();
                    let error = (f64::from(got) / want - 1.0).abs();
                    assert!(error < 2f64.powi(-22), "{error:e} at {x} under {level:?}");
                }
            }
        }
    }

    #[test]
    fn ends_are_exact() {
        for level in [Level::PORTABLE, Level::detect()] {
            let mut xs = [0.0; WIDTH];
            xs[..6].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -0.0, -88.0, f32::MIN, -1e-45]);
            let got = level.run(Exp(xs));
            assert_eq!(got[0], 0.0);
            assert!(got[1].is_nan());
            assert_eq!(got[2..6], [1.0, 0.0, 0.0, 1.0]);
            assert_eq!(got[6], 1.0);
        }
    }
}
