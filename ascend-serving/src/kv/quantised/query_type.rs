//! The types of queries over quantised keys.

use ascend_attention::{AnyTensor, DType, Element, Stream, bf16, f16};

use crate::error::{Error, Result};

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
            other => Err(Error::invalid(
                "T",
                other,
                "FLOAT16 or BF16: the type of queries over quantised keys",
            )
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
    pub(in crate::kv) fn upload(
        self,
        stream: &Stream,
        numbers: &[f32],
        shape: &[usize],
    ) -> Result<AnyTensor> {
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
