//! What numbers a tensor holds: for finding the layer that overflows.

use half::{bf16, f16};

use crate::error::Result;
use crate::memory::Element;
use crate::runtime::Stream;

use super::Tensor;

/// The range of some numbers, and the first element that is NaN, infinite or too large.
///
/// NaN is no number: it counts apart and takes no part in the range.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RangeReport {
    /// The least number; none if there is no number.
    pub min: Option<f64>,
    /// The greatest number.
    pub max: Option<f64>,
    /// How many are NaN.
    pub nan: usize,
    /// How many are infinite.
    pub inf: usize,
    /// How many finite ones are beyond the limit, on either side.
    pub over: usize,
    /// Place of the first that is NaN, infinite or beyond the limit.
    pub first: Option<usize>,
}

impl RangeReport {
    /// The range of elements; those farther than `limit` from 0 are too large.
    pub fn of(elements: &[f64], limit: f64) -> Self {
        Self::over(elements.iter().copied(), limit)
    }

    /// As [`RangeReport::of`], but for elements of any type that is a [`Number`].
    pub fn of_elements<T: Number>(elements: &[T], limit: f64) -> Self {
        Self::over(elements.iter().map(|element| element.to_f64()), limit)
    }

    fn over(elements: impl ExactSizeIterator<Item = f64>, limit: f64) -> Self {
        let mut report = Self { min: None, max: None, nan: 0, inf: 0, over: 0, first: None };
        for (place, x) in elements.enumerate() {
            let kind = if x.is_nan() {
                Some(&mut report.nan)
            } else if x.is_infinite() {
                Some(&mut report.inf)
            } else if x.abs() > limit {
                Some(&mut report.over)
            } else {
                None
            };
            if let Some(kind) = kind {
                *kind = kind.saturating_add(1);
                report.first.get_or_insert(place);
            }
            if !x.is_nan() {
                report.min = Some(report.min.map_or(x, |min| min.min(x)));
                report.max = Some(report.max.map_or(x, |max| max.max(x)));
            }
        }
        report
    }

    /// Whether every element is a number within the limit.
    pub fn is_clean(&self) -> bool {
        self.first.is_none()
    }
}

/// An element that is a number.
pub trait Number: Element {
    /// Returns the number as `f64`.
    fn to_f64(self) -> f64;

    /// Returns the nearest number of this type.
    fn from_f32(number: f32) -> Self;
}

macro_rules! numbers {
    ($($number:ty: $to:expr, $from:expr;)*) => {$(
        impl Number for $number {
            fn to_f64(self) -> f64 {
                $to(self)
            }

            fn from_f32(number: f32) -> Self {
                $from(number)
            }
        }
    )*};
}

numbers! {
    f16: f16::to_f64, f16::from_f32;
    bf16: bf16::to_f64, bf16::from_f32;
    f32: f64::from, f32::from;
}

impl<T: Number> Tensor<T> {
    /// Waits for a stream and reports the range of the elements, in row-major order. Copies them to the host: for
    /// finding an error, not for each step.
    ///
    /// # Errors
    /// As for [`Tensor::download`].
    pub fn range_report(&self, stream: &Stream, limit: f64) -> Result<RangeReport> {
        Ok(RangeReport::of_elements(&self.download(stream)?, limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_counted_and_the_first_is_found() {
        let numbers = [1.0, -7.0, f64::NAN, 5.0, f64::NEG_INFINITY, 2e4, -2e4];
        let report = RangeReport::of(&numbers, 1e4);
        assert_eq!((report.nan, report.inf, report.over), (1, 1, 2));
        assert_eq!(report.first, Some(2));
        assert_eq!(report.min, Some(f64::NEG_INFINITY));
        assert_eq!(report.max, Some(2e4));
        assert!(!report.is_clean());
    }

    #[test]
    fn nothing_but_nan_has_no_range() {
        let report = RangeReport::of(&[f64::NAN; 3], 1.0);
        assert_eq!((report.min, report.max, report.nan), (None, None, 3));
        let none = RangeReport::of(&[], 1.0);
        assert!(none.is_clean() && none.min.is_none());
        assert!(RangeReport::of(&[1.0, -1.0], 1.0).is_clean());
    }
}
