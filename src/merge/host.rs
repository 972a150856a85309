//! Merging in host memory.

use ascend_spec::ops::attention_update::{visible, weigh};
use num_traits::Float;

use crate::error::{Error, Result};

use super::LseNat;

/// Attention over a part of the keys, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostPart<'a, R> {
    /// The rows, one after the other, all of one length.
    pub attention: &'a [R],
    /// The log-sum-exp of each row, in the same order.
    pub softmax_lse: LseNat<&'a [R]>,
}

/// Attention over all parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Merged<R> {
    /// The rows.
    pub attention: Vec<R>,
    /// The log-sum-exp of each row; -inf for a row without keys.
    pub softmax_lse: LseNat<Vec<R>>,
}

impl<R> Merged<R> {
    /// The result as a part of a further merge.
    pub fn as_part(&self) -> HostPart<'_, R> {
        HostPart { attention: &self.attention, softmax_lse: LseNat(&self.softmax_lse.0) }
    }
}

/// Merges parts in host memory, in their precision: `f32` or `f64`. The [module](super) describes what becomes of rows
/// without keys and of NaN.
///
/// ```
/// use ascend_attention::merge::{HostPart, LseNat, merge_on_host};
///
/// // One row of two elements. The second part weighs three times as much.
/// let one = HostPart { attention: &[1.0, 0.0], softmax_lse: LseNat(&[0.0][..]) };
/// let two = HostPart { attention: &[5.0, 4.0], softmax_lse: LseNat(&[3f64.ln()][..]) };
/// let both = merge_on_host(&[one, two])?;
/// assert!((both.attention[0] - 4.0).abs() < 1e-12 && (both.attention[1] - 3.0).abs() < 1e-12);
/// assert!((both.softmax_lse.0[0] - 4f64.ln()).abs() < 1e-12);
/// # Ok::<(), ascend_attention::Error>(())
/// ```
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) without parts, for parts of different sizes, or for rows of
/// different lengths.
pub fn merge_on_host<R: Float>(parts: &[HostPart<'_, R>]) -> Result<Merged<R>> {
    let (rows, dim) = sizes(parts)?;
    let no_keys = R::neg_infinity();
    let mut merged = Merged { attention: vec![R::zero(); rows * dim], softmax_lse: LseNat(vec![no_keys; rows]) };
    let mut weights = vec![no_keys; parts.len()];
    for (row, lse_out) in merged.softmax_lse.0.iter_mut().enumerate() {
        for (weight, part) in weights.iter_mut().zip(parts) {
            *weight = visible(part.softmax_lse.0.get(row).copied().unwrap_or(no_keys));
        }
        let out = merged.attention.iter_mut().skip(row * dim).take(dim);
        if weights.iter().any(|lse| lse.is_nan()) {
            *lse_out = R::nan();
            out.for_each(|out| *out = R::nan());
            continue;
        }
        if weights.iter().all(|&lse| lse == no_keys) {
            continue;
        }
        // A part without keys is left out, whatever it holds.
        let mut sum = vec![R::zero(); dim];
        let present: Vec<bool> = weights.iter().map(|&lse| lse != no_keys).collect();
        *lse_out = weigh(&mut weights);
        for ((&weight, part), _) in (weights.iter().zip(parts).zip(&present)).filter(|(_, here)| **here) {
            let elements = part.attention.iter().skip(row * dim);
            for (sum, &element) in sum.iter_mut().zip(elements) {
                *sum = *sum + weight * element;
            }
        }
        out.zip(sum).for_each(|(out, sum)| *out = sum);
    }
    Ok(merged)
}

/// Returns the number of rows, and of elements in a row.
fn sizes<R>(parts: &[HostPart<'_, R>]) -> Result<(usize, usize)> {
    let Some(first) = parts.first() else {
        return Err(
            Error::invalid("parts", "none", "at least one").fix("leave the merge out where nothing was computed")
        );
    };
    let (elements, rows) = (first.attention.len(), first.softmax_lse.0.len());
    let dim = match elements.checked_rem(rows) {
        Some(0) => elements / rows,
        None if elements == 0 => 0,
        _ => {
            return Err(Error::invalid(
                "attention",
                format_args!("{elements} elements for {rows} log-sum-exps"),
                "a whole number of elements for each log-sum-exp",
            )
            .fix("bring the rows and the log-sum-exps of one call"));
        }
    };
    for part in parts {
        if (part.attention.len(), part.softmax_lse.0.len()) != (elements, rows) {
            return Err(Error::invalid(
                "parts",
                format_args!("{} elements and {} log-sum-exps", part.attention.len(), part.softmax_lse.0.len()),
                format_args!("{elements} and {rows}, as the first part"),
            )
            .fix("merge parts of the same queries"));
        }
    }
    Ok((rows, dim))
}
