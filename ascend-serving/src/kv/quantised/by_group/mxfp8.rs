//! Groups of 32 numbers as FLOAT8_E4M3FN times a shared scale, a power of two of FLOAT8_E8M0: MXFP8 of the OCP
//! Microscaling Formats.

use ascend_attention::spec::minifloat::{Float8E4M3Fn, Float8E8M0};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;

/// How many numbers share a scale.
pub(crate) const GROUP: usize = FiaCall::MXFP8_GROUP as usize;

/// The scale of a group, by its bits: 2^(bits - 127).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedScale(pub(super) u8);

impl SharedScale {
    /// The smallest scale by which the largest number of a group is at most 448, so that none of them is cut; 1 for a
    /// group of zeros. Numbers that are not finite do not count.
    pub(super) fn covering(numbers: impl IntoIterator<Item = f64>) -> Self {
        let most = numbers.into_iter().map(f64::abs);
        let most = most.filter(|number| number.is_finite()).fold(0.0, f64::max);
        if most == 0.0 {
            return Self(127);
        }
        // 448 is 1.75 * 2^8. The exponent of a double has a bias of 1023, that of a power of two one of 127.
        let bits = most.to_bits();
        let above = bits & ((1 << 52) - 1) > 3 << 50;
        let exponent = i64::try_from(bits >> 52).unwrap_or(0);
        let scale = exponent.saturating_sub(1023 + 8 - 127);
        let scale = scale.saturating_add(i64::from(above));
        Self(scale.clamp(0, 254) as u8)
    }

    fn factor(self) -> f64 {
        f64::from(Float8E8M0::from_bits(self.0).to_f32())
    }

    /// The bits of the nearest float.
    pub(super) fn store(self, number: f64) -> u8 {
        Float8E4M3Fn::from_f32((number / self.factor()) as f32).to_bits()
    }

    /// The number that a float stands for.
    pub(super) fn load(self, bits: u8) -> f64 {
        f64::from(Float8E4M3Fn::from_bits(bits).to_f32()) * self.factor()
    }
}

/// Rows as floats and shared scales, one for each 32 neighbours. Rows are a multiple of 32 long.
pub(crate) fn quantise_mxfp8(numbers: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut floats = Vec::with_capacity(numbers.len());
    let mut scales = Vec::with_capacity(numbers.len().div_ceil(GROUP));
    for group in numbers.chunks(GROUP) {
        let scale = SharedScale::covering(group.iter().copied().map(f64::from));
        floats.extend(group.iter().map(|number| scale.store(f64::from(*number))));
        scales.push(scale.0);
    }
    (floats, scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_largest_number_is_not_cut_and_fills_its_floats() {
        for (most, scale) in [
            (448.0, 127),
            (448.1, 128),
            (449.0, 128),
            (224.0, 126),
            (1.75, 119),
            (1.0, 119),
            (0.0, 127),
        ] {
            assert_eq!(
                SharedScale::covering([0.0, -most, f64::NAN]),
                SharedScale(scale),
                "{most}"
            );
        }
        assert_eq!(SharedScale::covering([f64::from(f32::MAX)]).0, 247);
        assert_eq!(SharedScale::covering([1e-40]).0, 0);
    }

    proptest! {
        /// A float is within a 16th of its number or half the smallest step, and moving it to a larger scale and back
        /// loses nothing but numbers that become too small.
        #[test]
        fn floats_move_between_scales(numbers in prop::collection::vec(-1e3f64..1e3, 1..40), exponent in -90i32..90, more in 0u8..6) {
            let numbers: Vec<f64> = numbers.iter().map(|x| x * f64::from(exponent).exp2()).collect();
            let scale = SharedScale::covering(numbers.iter().copied());
            let larger = SharedScale(scale.0 + more);
            let step = larger.factor() / 512.0;
            for number in numbers {
                let stored = scale.load(scale.store(number));
                prop_assert!((stored - number).abs() <= (number.abs() / 16.0).max(scale.factor() / 1024.0));
                let moved = larger.load(larger.store(stored));
                prop_assert!(moved == stored || (moved - stored).abs() <= step / 2.0 && moved.abs() <= 8.0 * step);
            }
        }
    }
}
