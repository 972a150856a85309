//! Conversion of masks to other forms, and from the elements of a tensor.

use ascend_spec::DType;
use half::{bf16, f16};

use crate::error::{Error, Result};

use super::form::MaskForm;
use super::host::HostMask;

/// The weakest number that hides in an additive mask that is in use anywhere: -10000 as bf16 rounds it.
const HIDES: f32 = -9984.0;

impl HostMask {
    /// Converts the mask to another form: what is hidden stays hidden, with the value of the new form.
    ///
    /// # Errors
    /// As for [`HostMask::of`].
    pub fn convert(&self, form: MaskForm) -> Result<Self> {
        let (batch, rows, keys) = self.axes();
        let elements = self.bytes().chunks_exact(self.form().size());
        let hidden = elements.map(|element| element.iter().any(|&byte| byte != 0));
        Self::from_flags(form, batch, (rows, keys), hidden)
    }

    /// The mask that the elements of a tensor `[Sq, Skv]` or `[B, Sq, Skv]` make up.
    ///
    /// In the one-byte types everything but 0 hides, as the operators take it. In float types 0 shows, and -9984
    /// (which is -10000 in bf16) and below hide, `-inf` among them; or 0 shows and 1 hides. The mask has the value that
    /// (which is -10000 in bf16) and below hide, `-inf` among them; or 0 shows and 1 hides. The mask takes the value
    /// that hides in the tensor, the lowest if there are several.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another type or shape, another number of bytes, and for
    /// elements that are no mask: NaN, and numbers between, which are a bias. Rows that see nothing are refused as
    /// in [`HostMask::of`].
    pub fn from_elements(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Self> {
        let (batch, rows, keys) = match *shape {
            [rows, keys] => (None, rows, keys),
            [batch, rows, keys] => (Some(batch), rows, keys),
            _ => {
                let given = format_args!("{shape:?}").to_string();
                return Err(Error::invalid("shape", given, "[Sq, Skv] or [B, Sq, Skv]")
                    .fix("reshape the mask, or broadcast it over the batch"));
            }
        };
        let ones = MaskForm::ones(dtype)?;
        let wanted = shape.iter().try_fold(ones.size(), |bytes, &axis| bytes.checked_mul(axis));
        if wanted != Some(bytes.len()) {
            return Err(Error::invalid("bytes", bytes.len(), format_args!("those of {shape:?} elements of {dtype}"))
                .fix("bring the bytes of all elements, contiguous"));
        }
        let values = || bytes.chunks_exact(ones.size()).map(|element| value(dtype, element));
        let (mut lowest, mut highest) = (0f32, 0f32);
        for (at, value) in values().enumerate() {
            let known = value == 0.0 || value == 1.0 || value <= HIDES;
            (lowest, highest) = (lowest.min(value), highest.max(value));
            if !known || (lowest < 0.0 && highest > 0.0) {
                return Err(Error::invalid(
                    "elements",
                    format_args!("{value} at {at}"),
                    "0 and 1, or 0 and numbers of at most -9984 (-10000 in bf16): what lies between is a position \
                     bias, not a mask",
                )
                .fix("give a bias as `PseShift`, and a mask by one of the allowed pairs of numbers"));
            }
        }
        let form = match lowest {
            0.0 => ones,
            f32::NEG_INFINITY => MaskForm::infinite(dtype)?,
            lowest => MaskForm::additive(dtype, lowest)?,
        };
        Self::from_flags(form, batch, (rows, keys), values().map(|value| value != 0.0))
    }
}

/// An element of a mask as a number; in the one-byte types everything but 0 is 1.
fn value(dtype: DType, element: &[u8]) -> f32 {
    match (dtype, element) {
        (DType::Float16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (DType::Float, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (_, element) => f32::from(u8::from(element != [0])),
    }
}
