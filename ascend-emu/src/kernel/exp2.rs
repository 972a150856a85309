//! The exponential function of the softmax, to base 2.
//!
//! Scores are multiplied by `log2 e` beforehand, together with the scale. The fractional part goes through a minimax
//! polynomial, the integer part into the exponent bits.

use super::simd::Simd;

/// The exponent whose biased form is 0; the power is then 0, too.
const SMALLEST: f32 = -127.0;

/// 1.5 * 2^23 plus the exponent bias: adding it to a small number leaves the nearest integer, biased, in the low bits.
const ROUNDING: f32 = 12_582_912.0 + 127.0;

/// Coefficients of the minimax polynomial of `(2^f - 1) / f` on `[-1/2, 1/2]`, found with the Remez algorithm. The
/// error of `2^f` is 2.6e-9 before rounding.
const POLYNOMIAL: [f32; 6] = [
    1.559_467_8e-4,
    1.340_664_3e-3,
    9.617_693e-3,
    5.550_310_4e-2,
    2.402_265_2e-1,
    6.931_472_4e-1,
];

/// Computes `2^x` for `x <= 0`, with a relative error below 2^-22 unless the result is subnormal. Returns 0 for `x`
/// up to -126.5, and NaN for NaN.
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
