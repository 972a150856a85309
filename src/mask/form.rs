//! Element types of masks, and the value that hides.

use std::fmt;

use ascend_spec::{DType, Soc};
use half::{bf16, f16};

use crate::error::{Error, Result};

/// Element type of a mask, and the value that hides a key; 0 shows it.
///
/// [`BOOL`](Self::BOOL), [`INT8`](Self::INT8), [`UINT8`](Self::UINT8) and the floats of [`ones`](Self::ones) hide by 1:
/// those of a byte are for the operators of this crate, floats for latent attention. The others are of FLOAT16, BF16 or
/// FLOAT, for masks that are added to the scores:
///
/// | form | hides by | for |
/// |---|---|---|
/// | [`infinite`](Self::infinite) | `-inf` | rows that see a key |
/// | [`lowest`](Self::lowest) | -65504, -3.39e38, -3.40e38 | also rows that see nothing |
/// | [`additive`](Self::additive) | any negative number, such as -10000 | operators that document such a number |
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MaskForm {
    dtype: DType,
    /// Bits of the element that hides.
    hidden: u32,
}

impl MaskForm {
    /// BOOL, true hides.
    pub const BOOL: Self = Self::byte(DType::Bool);
    /// INT8, 1 hides.
    pub const INT8: Self = Self::byte(DType::Int8);
    /// UINT8, 1 hides.
    pub const UINT8: Self = Self::byte(DType::UInt8);

    /// The form of the masks that this crate makes: BOOL on Ascend 950, where some quantised keys take no other, and
    /// on the Atlas inference series, which takes no other at all; INT8 elsewhere.
    pub(crate) fn made_for(soc: Option<Soc>) -> Self {
        match soc {
            Some(Soc::Ascend950 | Soc::AtlasInference) => Self::BOOL,
            _ => Self::INT8,
        }
    }

    const fn byte(dtype: DType) -> Self {
        Self { dtype, hidden: 1 }
    }

    /// 1 hides, in the one-byte types or in a float type.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another type.
    pub fn ones(dtype: DType) -> Result<Self> {
        match dtype {
            DType::Bool | DType::Int8 | DType::UInt8 => Ok(Self::byte(dtype)),
            _ => Self::float(dtype, 1.0, "BOOL, INT8, UINT8, FLOAT16, BF16, FLOAT"),
        }
    }

    /// `-inf` hides. A mask with a row that sees nothing is refused in this form.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a type that is no float.
    pub fn infinite(dtype: DType) -> Result<Self> {
        Self::float(dtype, f32::NEG_INFINITY, FLOATS)
    }

    /// The most negative finite number of the type hides.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a type that is no float.
    pub fn lowest(dtype: DType) -> Result<Self> {
        let lowest = match dtype {
            DType::Float16 => f16::MIN.to_f32(),
            DType::Bf16 => bf16::MIN.to_f32(),
            _ => f32::MIN,
        };
        Self::float(dtype, lowest, FLOATS)
    }

    /// A negative number hides, rounded to the type.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a type that is no float, or a number that is not
    /// negative and finite in it, as -1e6 is not in f16.
    pub fn additive(dtype: DType, value: f32) -> Result<Self> {
        let form = Self::float(dtype, value, FLOATS)?;
        let rounded = form.hidden_value();
        if rounded < 0.0 && rounded.is_finite() {
            return Ok(form);
        }
        Err(Error::invalid(
            "value",
            format_args!("{value}, which is {rounded} in {dtype}"),
            "a negative number that is finite in the type; `MaskForm::lowest` has the most negative one",
        )
        .fix("use `MaskForm::lowest`"))
    }

    fn float(dtype: DType, value: f32, allowed: &str) -> Result<Self> {
        let hidden = match dtype {
            DType::Float16 => u32::from(f16::from_f32(value).to_bits()),
            DType::Bf16 => u32::from(bf16::from_f32(value).to_bits()),
            DType::Float => value.to_bits(),
            _ => {
                return Err(Error::invalid("dtype", dtype, allowed).fix("make the mask in one of the allowed types"));
            }
        };
        Ok(Self { dtype, hidden })
    }

    /// Element type.
    pub const fn dtype(self) -> DType {
        self.dtype
    }

    /// The value that hides.
    pub fn hidden_value(self) -> f32 {
        match self.dtype {
            DType::Float16 => f16::from_bits(self.hidden as u16).to_f32(),
            DType::Bf16 => bf16::from_bits(self.hidden as u16).to_f32(),
            DType::Float => f32::from_bits(self.hidden),
            _ => 1.0,
        }
    }

    /// Whether the value that hides is `-inf`.
    pub fn is_infinite(self) -> bool {
        self.hidden_value() == f32::NEG_INFINITY
    }

    /// Bytes of an element.
    pub(super) fn size(self) -> usize {
        self.dtype.size().unwrap_or(1)
    }

    /// The bytes in memory of the element that hides, followed by zeros.
    pub(super) const fn hidden_bytes(self) -> [u8; 4] {
        self.hidden.to_le_bytes()
    }
}

const FLOATS: &str = "FLOAT16, BF16, FLOAT";

impl fmt::Display for MaskForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {} to hide", self.dtype, self.hidden_value())
    }
}

impl fmt::Debug for MaskForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MaskForm({self})")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn values_are_those_that_the_table_states() {
        let values = |dtype| {
            let infinite = MaskForm::infinite(dtype).unwrap().hidden_value();
            assert_eq!(infinite, f32::NEG_INFINITY);
            assert_eq!(MaskForm::ones(dtype).unwrap().hidden_value(), 1.0);
            MaskForm::lowest(dtype).unwrap().hidden_value()
        };
        assert_eq!(values(DType::Float16), -65504.0);
        assert_eq!(values(DType::Bf16), bf16::MIN.to_f32());
        assert_eq!(values(DType::Float), f32::MIN);
        let form = MaskForm::additive(DType::Float16, -10000.0).unwrap();
        assert_eq!(form.hidden_value(), -10000.0);
    }

    #[test]
    fn values_that_would_become_infinite_are_refused() {
        for value in [f32::MIN, -1e6, f32::NAN, 0.0, 1.0, f32::NEG_INFINITY] {
            let refused = MaskForm::additive(DType::Float16, value).unwrap_err();
            assert!(refused.to_string().contains("MaskForm::lowest"), "{refused}");
        }
        assert!(MaskForm::additive(DType::Bf16, -1e6).is_ok());
        assert!(MaskForm::infinite(DType::Int8).is_err());
        assert!(MaskForm::ones(DType::Int64).is_err());
    }
}
