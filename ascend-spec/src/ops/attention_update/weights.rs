//! The arithmetic of a merge.

use num_traits::Float;

/// Merges the log-sum-exps of one row and replaces each by the weight of its part.
///
/// Plain arithmetic, as the operator computes it; where it counts +inf as no keys, it is applied to the results of
/// [`visible`]. With `m` the largest, `L = m + ln sum(exp(lse_i - m))` and the weight is `exp(lse_i - L)`. A part at
/// -inf has weight 0; a row at -inf in all parts, at +inf in one, or at NaN in one, has NaN throughout.
pub fn weigh<R: Float>(lse: &mut [R]) -> R {
    let largest = lse.iter().fold(R::neg_infinity(), |most, &one| most.max(one));
    let sum = lse.iter().fold(R::zero(), |sum, &one| sum + (one - largest).exp());
    let merged = largest + sum.ln();
    for one in lse {
        *one = (*one - merged).exp();
    }
    merged
}

/// Converts a log-sum-exp of FusedInferAttentionScore for a merge: the operator marks a row without visible keys with
/// +inf, where the log of a sum over no keys is -inf.
pub fn visible<R: Float>(lse: R) -> R {
    if lse == R::infinity() { R::neg_infinity() } else { lse }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_one_softmax() {
        // ln 1, ln 3, ln 4: together ln 8.
        let mut lse = [0.0f64, 3f64.ln(), 4f64.ln()];
        assert!((weigh(&mut lse) - 8f64.ln()).abs() < 1e-15);
        for (weight, want) in lse.iter().zip([0.125, 0.375, 0.5]) {
            assert!((weight - want).abs() < 1e-15);
        }
        // Even the largest differences do not overflow.
        let mut far = [f32::MAX, f32::MIN];
        assert_eq!(weigh(&mut far), f32::MAX);
        assert_eq!(far, [1.0, 0.0]);
    }

    #[test]
    fn infinities_are_plain_arithmetic() {
        let mut one = [f32::NEG_INFINITY, 2.5];
        assert_eq!((weigh(&mut one), one), (2.5, [0.0, 1.0]));
        for row in [[f32::NEG_INFINITY, f32::NEG_INFINITY], [f32::INFINITY, 0.0], [f32::NAN, 0.0]] {
            let mut weights = row;
            assert!(weigh(&mut weights).is_nan(), "{row:?}");
            assert!(weights.iter().all(|weight| weight.is_nan()), "{row:?}");
        }
    }

    #[test]
    fn the_mark_of_a_row_without_keys_is_read_as_none() {
        assert_eq!(visible(f32::INFINITY), f32::NEG_INFINITY);
        assert_eq!(visible(f64::NEG_INFINITY), f64::NEG_INFINITY);
        assert_eq!(visible(1.5f32), 1.5);
        assert!(visible(f64::NAN).is_nan());
    }
}
