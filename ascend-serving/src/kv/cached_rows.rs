//! Cached tokens that are copied to contiguous rows.

use std::ops::Range;

use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};

use super::cache_shape::LayerCache;
use super::slot::slot;
use super::slot_runs::{SlotRun, token_rows};

/// Tokens of a paged cache that are to be copied to contiguous rows, for operators that take no block table.
///
/// [`LayerCache::gather`] copies on the stream: one copy for each run of contiguous slots, at most one for each
/// block, beginning at any token, in any release. From CANN 8.5 on [`ascend_attention::gather`] does it in one call,
/// beginning at a block.
///
/// ```
/// use ascend_serving::kv::CachedRows;
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// // Tokens 2 to 9 of a sequence in the blocks 5, 6 and 1 of four tokens: 5 and 6 follow each other.
/// let mut rows = CachedRows::new(4);
/// rows.push(&[5, 6, 1], 2..10)?;
/// assert_eq!((rows.len(), rows.copies()), (8, 2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRows {
    block_size: usize,
    /// Runs of slots and the rows that they are copied to.
    runs: Vec<SlotRun>,
    rows: usize,
}

impl CachedRows {
    /// An empty list, for a cache with blocks of `block_size` tokens.
    pub fn new(block_size: usize) -> Self {
        Self { block_size, runs: Vec::new(), rows: 0 }
    }

    /// Adds the tokens at these positions of a sequence with this row of the block table, after those added before.
    ///
    /// # Errors
    /// As for [`slot`]; nothing is added then.
    pub fn push(&mut self, row: &[usize], positions: Range<usize>) -> Result<(), Violation> {
        let mut runs = Vec::new();
        let (mut position, mut to) = (positions.start, self.rows);
        while position < positions.end {
            let from = slot(row, position, self.block_size)?;
            let left = self.block_size - position % self.block_size;
            let len = left.min(positions.end - position);
            runs.push(SlotRun { from, to, len });
            position += len;
            to += len;
        }
        for run in runs {
            SlotRun::push(&mut self.runs, run, |_| true);
        }
        self.rows = to;
        Ok(())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Number of copies for each tensor that [`gather`](LayerCache::gather) queues.
    pub fn copies(&self) -> usize {
        self.runs.len()
    }
}

impl<T: Element> LayerCache<T> {
    /// Refuses a cache in which a token's row is not contiguous.
    pub(crate) fn check_contiguous(&self, block_size: usize) -> Result<()> {
        token_rows(&self.key, block_size)?;
        token_rows(&self.value, block_size)?;
        Ok(())
    }

    /// Queues copies of cached tokens to `key` and `value`, `[tokens, N * D]` each, from a cache in which a token's
    /// row is contiguous: BnBsH, or a single head in BnNBsD. Of strided blocks each is a copy of its
    /// own. Returns at once.
    ///
    /// # Errors
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// another cache, one of another block size or without these slots, for a target of another shape, or memory
    /// that is shared with the cache or the other target; [`Acl`](ascend_attention::Error::Acl).
    pub fn gather(&self, stream: &Stream, rows: &CachedRows, key: &Tensor<T>, value: &Tensor<T>) -> Result<()> {
        if key.overlaps(value) {
            return Err(Error::shared("value", "memory that is shared with `key`", "a tensor of its own")
                .fix("give keys and values a tensor each"));
        }
        for (cache, target) in [(&self.key, key), (&self.value, value)] {
            let (tokens, step, _) = token_rows(cache, rows.block_size)?;
            if target.shape().first() != Some(&rows.len()) {
                return Err(Error::invalid(
                    "target",
                    target.desc(),
                    format_args!("a row for each of the {} tokens", rows.len()),
                )
                .fix("make the target with as many rows as are read"));
            }
            let runs = rows.runs.iter();
            for run in runs.flat_map(|run| run.spread(rows.block_size, step)) {
                let source = tokens.narrow(0, run.sources())?;
                let place = target.narrow(0, run.places())?;
                place.copy_from(stream, &source)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::rules;
    use proptest::prelude::*;

    #[test]
    fn what_cannot_be_added_leaves_the_rest() {
        let mut rows = CachedRows::new(4);
        rows.push(&[2, 7], 1..3).unwrap();
        let before = rows.clone();
        // The first token continues the run; the last one has no block.
        let error = rows.push(&[2], 3..5).unwrap_err();
        assert_eq!((error.rule, &rows), (&rules::TABLE_ROW, &before));
        let error = CachedRows::new(0).push(&[2], 0..1).unwrap_err();
        assert_eq!(error.rule, &rules::POOL_SIZE);
        rows.push(&[], 9..9).unwrap();
        assert_eq!(rows, before);
    }

    proptest! {
        /// Every token is the one in its slot, in order, and runs are as long as they can be.
        #[test]
        fn runs_are_slots(
            block_size in 1usize..6,
            table in prop::collection::vec(0usize..9, 1..6),
            cuts in prop::collection::vec((0usize..30, 0usize..30), 1..4),
        ) {
            let mut rows = CachedRows::new(block_size);
            let mut want = Vec::new();
            for (from, to) in cuts {
                let len = table.len() * block_size;
                let range = from.min(len)..to.min(len);
                rows.push(&table, range.clone()).unwrap();
                for position in range {
                    want.push(slot(&table, position, block_size).unwrap());
                }
            }
            let got: Vec<usize> = rows.runs.iter().flat_map(|run| run.sources()).collect();
            let places: Vec<usize> = rows.runs.iter().flat_map(|run| run.places()).collect();
            prop_assert_eq!(places, (0..want.len()).collect::<Vec<_>>());
            prop_assert_eq!(rows.len(), want.len());
            let breaks = want.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
            prop_assert_eq!(rows.copies(), if want.is_empty() { 0 } else { breaks + 1 });
            prop_assert_eq!(got, want);
        }
    }
}
