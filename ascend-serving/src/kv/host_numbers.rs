//! Numbers of 16 bits on the host, where they are quantised.

use ascend_attention::{DType, Element, Stream, Tensor, bf16, f16};

use crate::error::Result;
use crate::refusal::{Refused, Rule, refused};

use super::quantised_scales::wrong_type;

/// Waits for a stream and copies the numbers of a tensor of FLOAT16 or BF16; other types are refused.
pub(crate) fn host_numbers<T: Element>(stream: &Stream, tensor: &Tensor<T>) -> Result<Vec<f32>> {
    let bytes = tensor.download_bytes(stream)?;
    let (halves, _) = bytes.as_chunks::<2>();
    let bits = halves.iter().map(|half| u16::from_le_bytes(*half));
    match T::DTYPE {
        DType::Bf16 => Ok(bits.map(|bits| bf16::from_bits(bits).to_f32()).collect()),
        DType::Float16 => Ok(bits.map(|bits| f16::from_bits(bits).to_f32()).collect()),
        other => Err(wrong_type(other)),
    }
}

/// Refuses rows of so many elements with a number that is not finite.
pub(super) fn all_finite(argument: &str, numbers: &[f32], elements: usize) -> Result<(), Refused> {
    let rows = numbers.chunks(elements.max(1)).enumerate();
    let mut all = rows.flat_map(|(row, numbers)| numbers.iter().map(move |number| (row, number)));
    match all.find(|(_, number)| !number.is_finite()) {
        None => Ok(()),
        Some((row, number)) => Err(refused(
            Rule::QuantisedFinite,
            format_args!("{number} in row {row} of the {argument}"),
            "finite numbers",
            "find the layer that overflows by `Tensor::range_report`",
        )),
    }
}
