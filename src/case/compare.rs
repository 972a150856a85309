//! Comparison of an output with the expected one.

use super::Tolerance;

/// The element that is furthest from what was expected.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Deviation {
    /// Index of the element in the row-major output.
    pub index: usize,
    /// The computed value.
    pub got: f32,
    /// The expected value.
    pub want: f32,
    /// `|got - want|`; infinite if only one of them is finite, or `got` is NaN.
    pub error: f64,
    /// The largest `error` that the case allows.
    pub tolerance: f64,
}

/// How an output compares with the expected one.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Comparison {
    /// Name of the output.
    pub output: &'static str,
    /// Elements compared.
    pub compared: usize,
    /// Elements that the case does not specify.
    pub unspecified: usize,
    /// Elements outside their tolerance.
    pub outside: usize,
    /// The error as a whole: `sqrt(sum (got - want)^2 / sum want^2)` over the elements compared; infinite if an element
    /// that is expected to be finite is not.
    pub rms: f64,
    /// The largest `rms` that the case allows, if it names one.
    pub rms_tolerance: Option<f64>,
    /// The element with the largest error: among those outside their tolerance if there are any, among all otherwise.
    pub worst: Option<Deviation>,
}

impl Comparison {
    /// Compares element by element; `got` and `want` have the same length.
    pub(super) fn new(
        output: &'static str,
        got: &[f32],
        want: &[f32],
        tolerance: Tolerance,
        rms_tolerance: Option<f64>,
    ) -> Self {
        let (mut errors, mut wants) = (0.0, 0.0);
        let mut comparison =
            Self { output, compared: 0, unspecified: 0, outside: 0, rms: 0.0, rms_tolerance, worst: None };
        for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
            if want.is_nan() {
                comparison.unspecified += 1;
                continue;
            }
            comparison.compared += 1;
            let deviation =
                Deviation { index, got, want, error: distance(got, want), tolerance: tolerance.at(f64::from(want)) };
            if want.is_finite() {
                errors += deviation.error * deviation.error;
                wants += f64::from(want) * f64::from(want);
            }
            comparison.outside += usize::from(deviation.is_outside());
            if comparison.worst.is_none_or(|worst| deviation.is_worse_than(&worst)) {
                comparison.worst = Some(deviation);
            }
        }
        if errors > 0.0 {
            comparison.rms = (errors / wants).sqrt();
        }
        comparison
    }

    /// Whether every element that the case specifies is within its tolerance, and so is the output as a whole.
    pub fn passed(&self) -> bool {
        self.outside == 0 && self.rms_tolerance.is_none_or(|most| self.rms <= most)
    }
}

impl Deviation {
    /// Whether the error is larger than the tolerance.
    pub fn is_outside(&self) -> bool {
        // An infinite `want` has an infinite tolerance, which must not let a finite `got` pass.
        self.error > self.tolerance || self.error == f64::INFINITY
    }

    fn is_worse_than(&self, other: &Self) -> bool {
        (self.is_outside(), self.error) > (other.is_outside(), other.error)
    }
}

fn distance(got: f32, want: f32) -> f64 {
    if got == want {
        0.0
    } else if got.is_finite() && want.is_finite() {
        (f64::from(got) - f64::from(want)).abs()
    } else {
        f64::INFINITY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance = Tolerance { atol: 0.25, rtol: 0.5 };

    fn compare(got: &[f32], want: &[f32]) -> Comparison {
        Comparison::new("attention_out", got, want, TOLERANCE, None)
    }

    #[test]
    fn an_error_that_no_element_shows_alone_fails_as_a_whole() {
        let (got, want) = ([1.1, -0.9, f32::NAN], [1.0, -1.0, f32::NAN]);
        let compared = |most| Comparison::new("attention_out", &got, &want, TOLERANCE, most);
        assert!((compared(None).rms - 0.1).abs() < 1e-6 && compared(None).passed());
        assert!(compared(Some(0.11)).passed() && !compared(Some(0.09)).passed());
        let zeros = Comparison::new("attention_out", &[0.1], &[0.0], TOLERANCE, Some(1.0));
        assert!(!zeros.passed());
        let wrong = Comparison::new("attention_out", &[f32::NAN], &[1.0], TOLERANCE, Some(1.0));
        assert_eq!(wrong.rms, f64::INFINITY);
    }

    #[test]
    fn the_tolerance_grows_with_the_expected_value_and_includes_its_edge() {
        assert!(compare(&[2.25, 0.25, -2.25], &[1.5, 0.0, -4.0]).outside == 0);
        assert!(!compare(&[0.26], &[0.0]).passed());
        assert!(!compare(&[3.26], &[2.0]).passed());
    }

    #[test]
    fn what_is_not_specified_is_not_compared() {
        let comparison = compare(&[f32::NAN, 1.0, 2.0], &[f32::NAN, 1.0, f32::NAN]);
        assert_eq!((comparison.compared, comparison.unspecified), (1, 2));
        assert!(comparison.passed());
        assert_eq!(compare(&[f32::NAN], &[f32::NAN]).compared, 0);
    }

    #[test]
    fn nothing_but_the_same_infinity_passes_for_an_infinity() {
        let infinity = f32::INFINITY;
        assert!(compare(&[infinity], &[infinity]).passed());
        for got in [0.0, -infinity, f32::NAN, f32::MAX] {
            assert!(!compare(&[got], &[infinity]).passed(), "{got}");
        }
        for got in [infinity, -infinity, f32::NAN] {
            assert!(!compare(&[got], &[1.0]).passed(), "{got}");
        }
    }

    #[test]
    fn the_worst_element_is_one_that_fails_if_any_does() {
        let comparison = compare(&[104.0, 0.5, 0.0], &[100.0, 0.0, 0.0]);
        let worst = comparison.worst.unwrap();
        assert_eq!((worst.index, worst.error, comparison.outside), (1, 0.5, 1));
        let comparison = compare(&[104.0, 0.1], &[100.0, 0.0]);
        let worst = comparison.worst.unwrap();
        assert_eq!((worst.index, worst.error, worst.tolerance), (0, 4.0, 50.25));
    }
}
