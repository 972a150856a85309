//! Rows of 16 bits on the host, where they are quantised.

use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::rules;

use super::quantised_type::QueryType;

/// Waits for a stream and copies the numbers of a tensor of FLOAT16 or BF16; other types are refused.
pub(crate) fn host_numbers<T: Element>(stream: &Stream, tensor: &Tensor<T>) -> Result<Vec<f32>> {
    let query = QueryType::of::<T>()?;
    let bytes = tensor.download_bytes(stream)?;
    let (halves, _) = bytes.as_chunks::<2>();
    let bits = halves.iter().map(|half| u16::from_le_bytes(*half));
    Ok(bits.map(|bits| query.number(bits)).collect())
}

/// Waits for a stream and copies the first rows `[rows, N, D]` of a layer, one for each entry of `slots`. Returns
/// their numbers, and how many each row has.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for rows of another shape than the step was planned for;
/// [`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE) for a number that is not finite in a row that is written.
pub(in crate::kv) fn rows_to_quantise<T: Element>(
    stream: &Stream,
    argument: &'static str,
    rows: &Tensor<T>,
    planned: &[usize],
    slots: &[Option<usize>],
) -> Result<(Vec<f32>, usize)> {
    if rows.shape() != planned {
        return Err(Error::invalid(argument, rows.desc(), format_args!("{planned:?}, as the step was planned"))
            .fix("bring the rows that the step was planned for"));
    }
    let elements = rows.shape().iter().skip(1).product();
    let numbers = host_numbers(stream, &rows.narrow(0, 0..slots.len())?)?;
    all_finite(argument, &numbers, elements, slots)?;
    Ok((numbers, elements))
}

/// Refuses rows with a number that is not finite, except rows without a slot.
fn all_finite(argument: &str, numbers: &[f32], elements: usize, slots: &[Option<usize>]) -> Result<(), Violation> {
    let rows = numbers.chunks(elements.max(1)).zip(slots).enumerate();
    let written = rows.filter(|(_, (_, slot))| slot.is_some());
    let mut all = written.flat_map(|(row, (row_of, _))| row_of.iter().map(move |x| (row, x)));
    match all.find(|(_, number)| !number.is_finite()) {
        None => Ok(()),
        Some((row, number)) => {
            Err(rules::QUANTISED_FINITE
                .broken(format_args!("{number} in row {row} of the {argument}"), "finite numbers"))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_refused_where_they_are_written() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let check = |slots| all_finite("value", &[1.0, 2.0, 3.0, bad], 2, slots);
            let refused = check(&[None, Some(4)]).unwrap_err();
            assert_eq!(refused.rule, &rules::QUANTISED_FINITE);
            assert!(refused.given.contains("row 1 of the value"), "{refused}");
            assert_eq!(check(&[Some(4), None]), Ok(()));
        }
    }
}
