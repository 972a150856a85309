//! Writes of new keys and values to a paged cache by copies, for products that do not have ScatterPaKvCache.

use ascend_attention::{Element, Stream, Tensor};

use crate::error::{Error, Result};

use super::slot_runs::{SlotRun, token_rows};

/// The copies of a step's new rows to their slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopiedWrites {
    block_size: usize,
    /// Runs of rows and the slots that they are copied to.
    runs: Vec<SlotRun>,
}

impl CopiedWrites {
    /// Copies of rows to these slots, in order, of a cache with blocks of `block_size` tokens; rows without a slot
    /// are left out.
    pub(crate) fn new(slots: impl IntoIterator<Item = Option<usize>>, block_size: usize) -> Self {
        let mut runs = Vec::new();
        for (from, slot) in slots.into_iter().enumerate() {
            let Some(to) = slot else { continue };
            SlotRun::push(&mut runs, SlotRun { from, to, len: 1 }, |_| true);
        }
        Self { block_size, runs }
    }

    /// Checks all copies of rows `[tokens, N, D]` to a cache before one is queued: a write that is refused leaves the
    /// cache unchanged.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for rows of other sizes than the cache's tokens
    /// or not contiguous, for a cache without these slots, or one in which a token's row is not contiguous.
    pub(crate) fn checked<T: Element>(
        &self,
        argument: &'static str,
        rows: &Tensor<T>,
        cache: &Tensor<T>,
    ) -> Result<CheckedWrites<'_, T>> {
        let (places, _, [count, hidden]) = token_rows(cache, self.block_size)?;
        let tokens = match *rows.shape() {
            [tokens, heads, dim] if heads.checked_mul(dim) == Some(hidden) => tokens,
            _ => {
                return Err(Error::invalid(
                    argument,
                    rows.desc(),
                    format_args!("[tokens, N, D] of {hidden} elements a token, as the cache has"),
                )
                .fix("bring the heads of the cache, in packed rows"));
            }
        };
        if !rows.desc().is_contiguous() {
            return Err(Error::invalid(argument, rows.desc(), "a contiguous tensor: copy it into one of its own")
                .fix("copy it with `contiguous`"));
        }
        let ends = self.runs.iter().map(|run| run.places().end);
        if let Some(end) = ends.max().filter(|end| *end > count) {
            return Err(Error::invalid(
                "cache",
                format_args!("{count} slots"),
                format_args!("{end} or more: the cache that the write was planned for"),
            )
            .fix("plan the write with this cache"));
        }
        Ok(CheckedWrites { runs: &self.runs, rows: rows.reshape([tokens, hidden])?, places })
    }
}

/// Copies that are checked and can be queued.
pub(crate) struct CheckedWrites<'a, T: Element> {
    runs: &'a [SlotRun],
    /// The new rows, `[tokens, N * D]`.
    rows: Tensor<T>,
    /// The cache, `[tokens, N * D]`.
    places: Tensor<T>,
}

impl<T: Element> CheckedWrites<'_, T> {
    /// Queues the copies.
    pub(crate) fn queue(&self, stream: &Stream) -> Result<()> {
        for run in self.runs {
            let rows = self.rows.narrow(0, run.sources())?;
            let places = self.places.narrow(0, run.places())?;
            places.copy_from(stream, &rows)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each row goes to its slot, by as few copies as possible.
        #[test]
        fn runs_are_slots(slots in prop::collection::vec(prop::option::weighted(0.8, 0usize..6), 0..20)) {
            let writes = CopiedWrites::new(slots.iter().copied(), 4);
            let mut got = vec![None; slots.len()];
            for run in &writes.runs {
                for (row, slot) in run.sources().zip(run.places()) {
                    got[row] = Some(slot);
                }
            }
            prop_assert_eq!(&got, &slots);
            let follow = slots.windows(2).filter(|pair| match **pair {
                [Some(one), Some(next)] => one + 1 == next,
                _ => false,
            });
            prop_assert_eq!(writes.runs.len(), slots.iter().flatten().count() - follow.count());
        }
    }
}
