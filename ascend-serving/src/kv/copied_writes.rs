//! New keys and values into a paged cache by copies, for products that ScatterPaKvCache does not run on.

use ascend_attention::{Element, Stream, Tensor};

use crate::error::{Error, Result};

use super::slot_runs::SlotRun;
use super::whole_tokens::whole_tokens;

/// Where the new rows of a step go, as copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopiedWrites {
    block_size: usize,
    /// From rows to slots.
    runs: Vec<SlotRun>,
}

impl CopiedWrites {
    /// The rows go to these slots of a cache with blocks of `block_size` tokens, in order; those that have none are left out.
    pub(crate) fn new(slots: impl IntoIterator<Item = Option<usize>>, block_size: usize) -> Self {
        let mut runs = Vec::new();
        for (from, slot) in slots.into_iter().enumerate() {
            let Some(to) = slot else { continue };
            SlotRun::push(&mut runs, SlotRun { from, to, len: 1 }, |_| true);
        }
        Self { block_size, runs }
    }

    /// The copies of rows `[tokens, N, D]` into a cache, once everything about them is known to be right: a call that is
    /// refused leaves the cache as it was.
    ///
    /// # Errors
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for rows that are no tokens of the cache or not contiguous,
    /// for a cache without these slots, or one whose tokens do not lie whole.
    pub(crate) fn checked<T: Element>(
        &self,
        argument: &'static str,
        rows: &Tensor<T>,
        cache: &Tensor<T>,
    ) -> Result<CheckedWrites<'_, T>> {
        let places = whole_tokens(cache, self.block_size)?;
        let (count, hidden) = match *places.shape() {
            [count, hidden] => (count, hidden),
            _ => (0, 0),
        };
        let tokens = match *rows.shape() {
            [tokens, heads, dim] if heads.checked_mul(dim) == Some(hidden) => tokens,
            _ => {
                return Err(Error::invalid(
                    argument,
                    rows.desc(),
                    format_args!("[tokens, N, D] of {hidden} elements a token, as the cache has"),
                ));
            }
        };
        if !rows.desc().is_contiguous() {
            return Err(Error::invalid(
                argument,
                rows.desc(),
                "a contiguous tensor: copy it into one of its own",
            ));
        }
        let ends = self.runs.iter().map(|run| run.places().end);
        let end = ends.max().unwrap_or(0);
        if end > count {
            return Err(Error::invalid(
                "cache",
                format_args!("{count} slots"),
                format_args!("{end} or more: the cache that the write was planned for"),
            ));
        }
        Ok(CheckedWrites {
            runs: &self.runs,
            rows: rows.reshape([tokens, hidden])?,
            places,
        })
    }
}

/// Copies that can be queued.
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
        /// Each row goes where it should, by as few copies as there can be.
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
