//! The types in which the numbers of a quantised cache are stored, and those of the queries over them.

use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::{AnyTensor, DType, Element, Stream, bf16, f16};

use crate::error::{Error, Result};

/// The type in which keys and values of a quantised cache are stored: numbers of one byte, which stand for themselves
/// times a scale.
///
/// | type | products | scales | largest error |
/// |---|---|---|---|
/// | INT8 | Atlas A2, A3, Ascend 950 | of channels, of tokens | half a step, of one size |
/// | FLOAT8_E4M3FN | Ascend 950, CANN 9.1 | of channels, of tokens | a 16th of each number, over 15 powers of two |
/// | HIFLOAT8 | Ascend 950, CANN 9.1 | of channels | a 16th from 1/8 to 16, more of others, over 38 powers of two |
///
/// Where most of a channel's numbers are far smaller than its largest, floats keep them and integers lose them; where
/// they are spread evenly, integers are closer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantisedType {
    /// INT8. Larger numbers are cut to -128 to 127.
    #[default]
    Int8,
    /// FLOAT8_E4M3FN. A number larger than 464 times its channel's scale becomes NaN, one from 448 on is cut to that.
    Float8E4M3Fn,
    /// HIFLOAT8. A number from 40960 times its channel's scale on becomes an infinity, one from 32768 on is cut
    /// to that.
    HiFloat8,
}

/// The largest number of each type.
const LARGEST_INT8: f32 = 127.0;
const LARGEST_E4M3FN: f32 = 448.0;
const LARGEST_HIFLOAT8: f32 = 32768.0;

impl QuantisedType {
    /// CANN's type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Int8 => DType::Int8,
            Self::Float8E4M3Fn => DType::Float8E4M3Fn,
            Self::HiFloat8 => DType::HiFloat8,
        }
    }

    /// What the largest number of a calibration becomes. Small floats lose nothing, so there is room for numbers
    /// larger than the calibration's where the device does not cut them.
    pub(in crate::kv) const fn calibrated(self) -> f32 {
        match self {
            Self::Int8 => LARGEST_INT8,
            // A quarter of the largest.
            Self::Float8E4M3Fn => LARGEST_E4M3FN / 4.0,
            // The largest number that has three mantissa bits.
            Self::HiFloat8 => 15.0,
        }
    }

    /// What the largest number of a token becomes, where each has its own scale; `None` where tokens have none.
    pub(in crate::kv) const fn largest_of_token(self) -> Option<f32> {
        match self {
            Self::Int8 => Some(LARGEST_INT8),
            Self::Float8E4M3Fn => Some(LARGEST_E4M3FN),
            Self::HiFloat8 => None,
        }
    }

    /// The bits of the nearest number; of two, those of the even one (HIFLOAT8: the larger). Numbers that are too
    /// large are cut.
    pub(in crate::kv) fn bits(self, number: f32) -> i8 {
        match self {
            Self::Int8 => number.round_ties_even() as i8,
            Self::Float8E4M3Fn => {
                let stored = Float8E4M3Fn::from_f32(number.clamp(-LARGEST_E4M3FN, LARGEST_E4M3FN));
                i8::from_ne_bytes([stored.to_bits()])
            }
            Self::HiFloat8 => {
                let stored = HiFloat8::from_f32(number.clamp(-LARGEST_HIFLOAT8, LARGEST_HIFLOAT8));
                i8::from_ne_bytes([stored.to_bits()])
            }
        }
    }
}

/// The type of queries over quantised keys, of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kv) enum QueryType {
    Float16,
    Bf16,
}

impl QueryType {
    /// The variant of an element type; other types are refused.
    pub(in crate::kv) fn of<T: Element>() -> Result<Self> {
        match T::DTYPE {
            DType::Float16 => Ok(Self::Float16),
            DType::Bf16 => Ok(Self::Bf16),
            other => Err(Error::invalid("T", other, "FLOAT16 or BF16: the type of queries over quantised keys")
                .fix("compute queries in 16 bits")),
        }
    }

    /// The number with these bits.
    pub(in crate::kv) fn number(self, bits: u16) -> f32 {
        match self {
            Self::Float16 => f16::from_bits(bits).to_f32(),
            Self::Bf16 => bf16::from_bits(bits).to_f32(),
        }
    }

    /// The nearest number of the type.
    pub(in crate::kv) fn rounded(self, number: f32) -> f32 {
        match self {
            Self::Float16 => f16::from_f32(number).to_f32(),
            Self::Bf16 => bf16::from_f32(number).to_f32(),
        }
    }

    /// Uploads numbers as those of the type.
    pub(in crate::kv) fn upload(self, stream: &Stream, numbers: &[f32], shape: &[usize]) -> Result<AnyTensor> {
        let numbers = numbers.iter().copied();
        Ok(match self {
            Self::Float16 => {
                let numbers: Vec<f16> = numbers.map(f16::from_f32).collect();
                stream.upload(&numbers, shape)?.into()
            }
            Self::Bf16 => {
                let numbers: Vec<bf16> = numbers.map(bf16::from_f32).collect();
                stream.upload(&numbers, shape)?.into()
            }
        })
    }
}
