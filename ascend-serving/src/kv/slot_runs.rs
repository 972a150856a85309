//! What copies move: runs of contiguous rows or slots, in a cache whose tokens are contiguous rows.

use std::ops::Range;

use ascend_attention::{Element, Tensor};

use crate::error::{Error, Result};

/// Contiguous rows or slots that are copied to contiguous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) len: usize,
}

impl SlotRun {
    /// The range that is copied from.
    pub(super) fn sources(self) -> Range<usize> {
        self.from..self.from + self.len
    }

    /// The range that is copied to.
    pub(super) fn places(self) -> Range<usize> {
        self.to..self.to + self.len
    }

    /// Appends a run: it extends the last one if it continues that and `joins` returns true.
    pub(super) fn push(runs: &mut Vec<Self>, next: Self, joins: impl FnOnce(&Self) -> bool) {
        match runs.last_mut() {
            Some(last)
                if last.from + last.len == next.from
                    && last.to + last.len == next.to
                    && joins(last) =>
            {
                last.len += next.len;
            }
            _ => runs.push(next),
        }
    }
}

/// A cache as contiguous rows `[tokens, N * D]`, and these two sizes.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a cache of another block size, or one in which a token has
/// several pieces: NZ, or BnNBsD of several heads.
pub(super) fn token_rows<T: Element>(
    cache: &Tensor<T>,
    block_size: usize,
) -> Result<(Tensor<T>, [usize; 2])> {
    let sizes = match *cache.shape() {
        [blocks, size, hidden] | [blocks, 1, size, hidden] if size == block_size => {
            blocks.checked_mul(size).map(|tokens| [tokens, hidden])
        }
        _ => None,
    };
    match sizes {
        Some(sizes) => Ok((cache.reshape(sizes)?, sizes)),
        None => Err(Error::invalid(
            "cache",
            cache.desc(),
            format_args!(
                "[blocks, {block_size}, N * D], or [blocks, 1, {block_size}, D], whose tokens are contiguous"
            ),
        )
        .fix("choose BnBsH, or BnNBsD of one head")),
    }
}
