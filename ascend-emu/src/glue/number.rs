//! Numbers of any element type: exact integers, or doubles.

use crate::descriptor::Scalar;
use ascend_spec::DType;
use half::{bf16, f16};

/// The element types that operators compute with, as messages name them.
pub(super) const NAMES: &str = "FLOAT, FLOAT16, BF16, DOUBLE, INT8, UINT8, INT16, INT32, INT64, BOOL";

/// The type in which an operator computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Domain {
    /// `i64`, for integers and truth values.
    Int,
    /// `f64`.
    Real,
}

impl Domain {
    /// The domain of one element type; `None` for types that operators do not compute with.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Int8 | DType::UInt8 | DType::Int16 | DType::Int32 | DType::Int64 | DType::Bool => Some(Domain::Int),
            DType::Float | DType::Float16 | DType::Bf16 | DType::Double => Some(Domain::Real),
            _ => None,
        }
    }

    /// The common domain of two: `Real` if either is.
    pub(super) fn with(self, other: Domain) -> Domain {
        if self == Domain::Real { self } else { other }
    }
}

/// The value of a scalar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    Int(i64),
    Real(f64),
}

impl Number {
    /// The value of a scalar; `None` for types that operators do not compute with.
    pub(super) fn of_scalar(scalar: &Scalar) -> Option<Self> {
        let from = scalar.bytes().as_ptr();
        let domain = Domain::of(scalar.dtype())?;
        // SAFETY: a scalar has 16 bytes, more than any of the types has.
        Some(unsafe {
            match domain {
                Domain::Int => Number::Int(one(scalar.dtype(), from)),
                Domain::Real => Number::Real(one(scalar.dtype(), from)),
            }
        })
    }

    pub(super) fn domain(self) -> Domain {
        match self {
            Number::Int(_) => Domain::Int,
            Number::Real(_) => Domain::Real,
        }
    }

    /// The value rounded towards zero and saturated.
    pub(super) fn int(self) -> i64 {
        match self {
            Number::Int(value) => value,
            Number::Real(value) => value as i64,
        }
    }

    pub(super) fn real(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Real(value) => value,
        }
    }

    /// The value as it enters arithmetic with tensors of a type: half types and FLOAT compute in single precision.
    pub(super) fn beside(self, dtype: DType) -> Number {
        match (self, dtype) {
            (Number::Real(value), DType::Float | DType::Float16 | DType::Bf16) => Number::Real(f64::from(value as f32)),
            _ => self,
        }
    }
}

/// The nearest number of a floating-point type; for other types the number itself.
pub(super) fn rounded(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::Float => f64::from(value as f32),
        DType::Float16 => to_f16(value).to_f64(),
        DType::Bf16 => to_bf16(value).to_f64(),
        _ => value,
    }
}

/// The floating-point type in which numbers of several types are compared; `None` if all are integers. Integers are
/// compared in the other number's type; the common type of FLOAT16 and BF16 is FLOAT.
pub(super) fn common_float(dtypes: impl IntoIterator<Item = DType>) -> Option<DType> {
    let floats = dtypes.into_iter().filter(|&dtype| Domain::of(dtype) == Some(Domain::Real));
    floats.reduce(|common, dtype| match (common, dtype) {
        (common, dtype) if common == dtype => common,
        (DType::Double, _) | (_, DType::Double) => DType::Double,
        _ => DType::Float,
    })
}

/// The type of elements while operators compute with them.
pub(super) trait WideElement: Copy + Default + PartialOrd + Send + Sync + 'static {
    /// Reads elements that are `step` bytes apart.
    ///
    /// # Safety
    ///
    /// Each of the elements is valid for reading; its address needs no alignment.
    unsafe fn load(dtype: DType, from: *const u8, step: isize, to: &mut [Self]);

    /// Writes elements that are `step` bytes apart. Integers wrap around; floating numbers saturate, and NaN becomes 0.
    ///
    /// # Safety
    ///
    /// Each of the elements is valid for writing; its address needs no alignment.
    unsafe fn store(dtype: DType, to: *mut u8, step: isize, from: &[Self]);

    fn to_f64(self) -> f64;

    fn is_nan(self) -> bool;
}

/// Reads one element.
///
/// # Safety
///
/// `from` is valid for reading the element.
unsafe fn one<W: WideElement>(dtype: DType, from: *const u8) -> W {
    let mut value = [W::default()];
    // SAFETY: the caller's promise.
    unsafe { W::load(dtype, from, 0, &mut value) };
    value[0]
}

/// Reads elements of a Rust type.
///
/// # Safety
///
/// As for [`WideElement::load`].
unsafe fn gather<T: Copy, W>(from: *const u8, step: isize, to: &mut [W], widen: impl Fn(T) -> W) {
    for (i, to) in to.iter_mut().enumerate() {
        // SAFETY: the caller's promise; no slice has more than `isize::MAX` elements.
        let element = unsafe { from.offset(step * i as isize).cast::<T>().read_unaligned() };
        *to = widen(element);
    }
}

/// Writes elements of a Rust type.
///
/// # Safety
///
/// As for [`WideElement::store`].
unsafe fn scatter<T, W: Copy>(to: *mut u8, step: isize, from: &[W], narrow: impl Fn(W) -> T) {
    for (i, &from) in from.iter().enumerate() {
        // SAFETY: the caller's promise; no slice has more than `isize::MAX` elements.
        unsafe {
            to.offset(step * i as isize).cast::<T>().write_unaligned(narrow(from));
        }
    }
}

/// Implements [`WideElement`]: the conversions from each type but BOOL, and back.
macro_rules! wide {
    ($wide:ty, $half:expr, $bhalf:expr, $is_nan:expr) => {
        impl WideElement for $wide {
            unsafe fn load(dtype: DType, from: *const u8, step: isize, to: &mut [Self]) {
                // SAFETY: the caller's promise.
                unsafe {
                    match dtype {
                        DType::Float => gather(from, step, to, |v: f32| v as $wide),
                        DType::Double => gather(from, step, to, |v: f64| v as $wide),
                        DType::Float16 => gather(from, step, to, |v: f16| v.to_f32() as $wide),
                        DType::Bf16 => gather(from, step, to, |v: bf16| v.to_f32() as $wide),
                        DType::Int8 => gather(from, step, to, |v: i8| v as $wide),
                        DType::UInt8 => gather(from, step, to, |v: u8| v as $wide),
                        DType::Int16 => gather(from, step, to, |v: i16| v as $wide),
                        DType::Int32 => gather(from, step, to, |v: i32| v as $wide),
                        DType::Int64 => gather(from, step, to, |v: i64| v as $wide),
                        // A byte that is neither 0 nor 1 counts as true.
                        DType::Bool => gather(from, step, to, |v: u8| u8::from(v != 0) as $wide),
                        // Operators do not compute with views of another type.
                        _ => {}
                    }
                }
            }

            unsafe fn store(dtype: DType, to: *mut u8, step: isize, from: &[Self]) {
                // SAFETY: the caller's promise.
                unsafe {
                    match dtype {
                        DType::Float => scatter(to, step, from, |v: $wide| v as f32),
                        DType::Double => scatter(to, step, from, |v: $wide| v as f64),
                        DType::Float16 => scatter(to, step, from, $half),
                        DType::Bf16 => scatter(to, step, from, $bhalf),
                        DType::Int8 => scatter(to, step, from, |v: $wide| v as i8),
                        DType::UInt8 => scatter(to, step, from, |v: $wide| v as u8),
                        DType::Int16 => scatter(to, step, from, |v: $wide| v as i16),
                        DType::Int32 => scatter(to, step, from, |v: $wide| v as i32),
                        DType::Int64 => scatter(to, step, from, |v: $wide| v as i64),
                        DType::Bool => scatter(to, step, from, |v: $wide| u8::from(v != <$wide>::default())),
                        _ => {}
                    }
                }
            }

            fn to_f64(self) -> f64 {
                self as f64
            }

            fn is_nan(self) -> bool {
                ($is_nan)(self)
            }
        }
    };
}

wide!(i64, |v| to_f16(v as f64), |v| to_bf16(v as f64), |_| false);
wide!(f64, to_f16, to_bf16, f64::is_nan);

/// The nearest FLOAT16.
fn to_f16(value: f64) -> f16 {
    f16::from_f32(rounded_to_odd(value))
}

/// The nearest BF16.
fn to_bf16(value: f64) -> bf16 {
    bf16::from_f32(rounded_to_odd(value))
}

/// Rounds to odd: the number itself if it is a FLOAT, otherwise that one of its two FLOAT neighbours whose last bit
/// is 1. Rounding the result to a type with at least two bits less gives the same as rounding the number at once
/// (Boldo and Melquiond, "When double rounding is odd").
fn rounded_to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() {
        return near;
    }
    let beyond = f64::from(near).abs() > value.abs();
    f32::from_bits((near.to_bits() - u32::from(beyond)) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_just_above_a_tie_are_rounded_up() {
        for (power, above) in [(-8, -22), (-8, -40), (-8, -52)] {
            let value = 1.0 + 2f64.powi(power) + 2f64.powi(above);
            assert_eq!(to_bf16(value).to_f64(), 1.0 + 2f64.powi(-7), "{value:e}");
            assert_eq!(to_bf16(-value).to_f64(), -1.0 - 2f64.powi(-7), "{value:e}");
        }
        let value = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(to_f16(value).to_f64(), 1.0 + 2f64.powi(-10));
        // The ties themselves go to the even one.
        assert_eq!(to_bf16(1.0 + 2f64.powi(-8)).to_f64(), 1.0);
        assert_eq!(to_f16(1.0 + 2f64.powi(-11)).to_f64(), 1.0);
    }

    #[test]
    fn ends_of_the_range_stay_such() {
        assert_eq!(to_f16(65519.999), f16::MAX);
        assert_eq!(to_f16(65520.0), f16::INFINITY);
        assert_eq!(to_bf16(f64::MAX), bf16::INFINITY);
        assert_eq!(to_bf16(f64::NEG_INFINITY), bf16::NEG_INFINITY);
        assert_eq!(to_f16(1e-30).to_f64(), 0.0);
        assert!(to_f16(f64::NAN).is_nan() && to_bf16(f64::NAN).is_nan());
    }
}
