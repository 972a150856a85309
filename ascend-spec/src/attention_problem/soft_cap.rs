//! The cap of the scores by a hyperbolic tangent.

/// A cap of the scores before bias, mask and softmax (Gemma 2, Grok), which no operator of CANN has: the emulation and
/// the reference kernel compute it, and NPUs do not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftCap(f64);

impl SoftCap {
    /// What [`new`](Self::new) takes.
    pub const ALLOWED: &str = "a number of at least 1.2e-38, finite in 32 bits";

    /// A cap of at least 1.2e-38, the smallest normal number of 32 bits, that is finite in 32 bits, and so has a finite
    /// inverse there; `None` for another number.
    pub fn new(cap: f64) -> Option<Self> {
        let held = cap as f32;
        (held.is_normal() && held > 0.0).then_some(Self(cap))
    }

    /// The number.
    pub fn get(self) -> f64 {
        self.0
    }

    /// The score that takes the place of a scaled score: `cap * tanh(score / cap)`, below the cap and above its
    /// negative, and close to a score that is small beside the cap.
    pub fn of(self, score: f64) -> f64 {
        self.0 * (score / self.0).tanh()
    }
}

#[cfg(test)]
mod tests {
    use super::SoftCap;

    #[test]
    fn scores_stay_below_the_cap_and_small_ones_as_they_are() {
        let cap = SoftCap::new(50.0).unwrap();
        assert_eq!(cap.of(0.0), 0.0);
        assert_eq!((cap.of(1e9), cap.of(f64::NEG_INFINITY)), (50.0, -50.0));
        assert!((cap.of(50.0) - 50.0 * 1f64.tanh()).abs() < 1e-12);
        assert!(cap.of(f64::NAN).is_nan());
        // The first term that the cap takes away is s^3 / (3 cap^2).
        for score in [0.5f64, 1.0, 2.0, 5.0] {
            let change = score - cap.of(score);
            let expected = score.powi(3) / (3.0 * 50.0 * 50.0);
            assert!((change / expected - 1.0).abs() < 0.01, "{score}");
        }
    }

    #[test]
    fn a_cap_is_a_number_above_0() {
        for cap in [0.0, -0.0, -50.0, f64::NAN, f64::INFINITY, 1e39, 1e-39, 1e-300] {
            assert_eq!(SoftCap::new(cap), None, "{cap}");
        }
        assert_eq!(SoftCap::new(30.0).map(SoftCap::get), Some(30.0));
    }
}
