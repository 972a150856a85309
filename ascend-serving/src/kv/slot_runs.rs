//! What copies move: runs of contiguous rows or slots, in a cache whose tokens are contiguous rows.

use std::iter;
use std::ops::Range;

use ascend_attention::{Element, Tensor};

use crate::error::{Error, Result};

use super::slot::spread_slot;

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

    /// The run where blocks to copy from have a stride of `step` blocks: one run for each block, or where they follow
    /// each other the run itself.
    pub(super) fn spread(self, block_size: usize, step: usize) -> impl Iterator<Item = SlotRun> {
        let mut done = 0;
        iter::from_fn(move || {
            let (from, left) = (self.from + done, self.len - done);
            let len = match step {
                1 => left,
                _ => left.min(block_size - from % block_size),
            };
            let to = self.to + done;
            done += len;
            let from = spread_slot(from, block_size, step);
            (len > 0).then_some(SlotRun { from, to, len })
        })
    }

    /// Appends a run: it extends the last one if it continues that and `joins` returns true.
    pub(super) fn push(runs: &mut Vec<Self>, next: Self, joins: impl FnOnce(&Self) -> bool) {
        match runs.last_mut() {
            Some(last) if last.from + last.len == next.from && last.to + last.len == next.to && joins(last) => {
                last.len += next.len;
            }
            _ => runs.push(next),
        }
    }
}

/// A cache as contiguous memory, which has what is between its blocks as blocks of its own, and the stride of the
/// cache's blocks in these: 1 where the cache is contiguous.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for blocks that are not contiguous, or not a whole number of blocks
/// apart.
pub(super) fn spread_blocks<T: Element>(cache: &Tensor<T>) -> Result<(Tensor<T>, usize)> {
    if cache.is_contiguous() {
        return Ok((cache.clone(), 1));
    }
    let apart = || -> Option<(usize, Vec<usize>)> {
        let (&blocks, block) = cache.shape().split_first()?;
        let elements = block.iter().product::<usize>();
        let stride = usize::try_from(*cache.strides().first()?).ok()?;
        let step = stride.checked_div(elements)?;
        let whole = stride == step * elements && step > 0 && cache.desc().is_contiguous_from(1);
        let all = blocks.checked_sub(1)? * step + 1;
        whole.then(|| (step, [&[all], block].concat()))
    };
    match apart() {
        Some((step, shape)) => Ok((cache.span()?.reshape(shape)?, step)),
        None => Err(Error::invalid(
            "cache",
            format_args!("{} strides {:?}", cache.desc(), cache.strides()),
            "contiguous blocks, a whole number of blocks apart",
        )
        .fix("keep each block contiguous, or make the cache by `PagedKvCache`")),
    }
}

/// A cache as contiguous rows `[tokens, N * D]` of its [blocks in memory](spread_blocks), the stride of the
/// cache's blocks in these, and the sizes of the rows.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a cache of another block size, or one in which a token has
/// several pieces: NZ, or BnNBsD of several heads.
pub(super) fn token_rows<T: Element>(cache: &Tensor<T>, block_size: usize) -> Result<(Tensor<T>, usize, [usize; 2])> {
    let (cache, step) = &spread_blocks(cache)?;
    let sizes = match *cache.shape() {
        [blocks, size, hidden] | [blocks, 1, size, hidden] if size == block_size => {
            blocks.checked_mul(size).map(|tokens| [tokens, hidden])
        }
        _ => None,
    };
    match sizes {
        Some(sizes) => Ok((cache.reshape(sizes)?, *step, sizes)),
        None => Err(Error::invalid(
            "cache",
            cache.desc(),
            format_args!("[blocks, {block_size}, N * D], or [blocks, 1, {block_size}, D], whose tokens are contiguous"),
        )
        .fix("choose BnBsH, or BnNBsD of one head")),
    }
}
