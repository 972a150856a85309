//! Division of blocks over the ranks that share a long context.

use std::num::NonZeroU64;

use ascend_attention::Violation;
use ascend_attention::spec::geometry::ContextShard;

use crate::rules;

use super::slot::{block_at, no_block_size, slot_in};

/// How blocks are divided over the ranks that share a long context: a table entry means `block_size` tokens on each
/// of `ranks` ranks, and runs of `run` tokens go to one rank after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Interleave {
    ranks: usize,
    run: usize,
}

impl Interleave {
    /// `ranks` ranks, and runs of `run` consecutive tokens on each.
    ///
    /// # Errors
    /// [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) if either is 0.
    pub fn new(ranks: usize, run: usize) -> Result<Self, Violation> {
        if ranks == 0 || run == 0 {
            return Err(Violation::new(
                &rules::RANKS_INTERLEAVE,
                format_args!("{ranks} ranks, runs of {run}"),
                "1 or more of each",
                "use 1 rank where the context is not divided",
            ));
        }
        Ok(Self { ranks, run })
    }

    /// Number of ranks.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// The number of tokens of a run: consecutive tokens on one rank.
    pub fn tokens_in_run(self) -> usize {
        self.run
    }

    /// The rank that holds a position.
    pub fn rank_of(self, position: usize) -> usize {
        // Neither divisor is 0.
        let run = position.checked_div(self.run).unwrap_or(0);
        run.checked_rem(self.ranks).unwrap_or(0)
    }

    /// Number of the first `len` tokens that `rank` holds: 0 for ranks that do not exist.
    pub fn local_len(self, len: usize, rank: usize) -> usize {
        let (ranks, run) = (self.ranks as u64, self.run as u64);
        let counts = NonZeroU64::new(ranks).zip(NonZeroU64::new(run));
        let shard = counts.and_then(|(ranks, run)| ContextShard::new(ranks, run, rank as u64));
        // No more than there are in all.
        shard.map_or(0, |shard| {
            usize::try_from(shard.local_len(len as u64)).unwrap_or(len)
        })
    }

    /// Refuses blocks that do not hold whole runs.
    pub(crate) fn check(self, block_size: usize) -> Result<(), Violation> {
        if block_size == 0 {
            return Err(no_block_size());
        }
        if !block_size.is_multiple_of(self.run) {
            return Err(Violation::new(
                &rules::RANKS_INTERLEAVE,
                format_args!("blocks of {block_size} tokens, runs of {}", self.run),
                "a block size that is a multiple of the run",
                "choose a run that divides the block size",
            ));
        }
        Ok(())
    }

    /// The slot of `position` on `rank`, or `None` where another rank holds it.
    ///
    /// # Errors
    /// [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) if a block does not hold whole runs, otherwise as
    /// [`slot`](crate::kv::slot()).
    pub fn slot(
        self,
        row: &[usize],
        position: usize,
        block_size: usize,
        rank: usize,
    ) -> Result<Option<usize>, Violation> {
        self.check(block_size)?;
        if self.rank_of(position) != rank {
            return Ok(None);
        }
        // The tokens of an entry's blocks on all ranks, and those of a round of runs.
        let (ranks, run) = (self.ranks, self.run);
        let (span, round) = (block_size.saturating_mul(ranks), run.saturating_mul(ranks));
        let divide = |a: usize, b: usize| a.checked_div(b).zip(a.checked_rem(b));
        let parts = divide(position, span).and_then(|(column, offset)| {
            let (rounds, _) = divide(offset, round)?;
            let (_, place) = divide(offset, run)?;
            let place = rounds.checked_mul(run)?.checked_add(place)?;
            Some((column, place))
        });
        // No size is 0, and both numbers are at most `position`.
        let Some((column, place)) = parts else {
            return Err(no_block_size());
        };
        slot_in(block_at(row, column, position)?, place, block_size).map(Some)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::kv::slot;
    use proptest::prelude::*;

    proptest! {
        /// Every token is on one rank, in a slot of its own, and the ranks' lengths are what their tokens count.
        #[test]
        fn ranks_divide_a_context(ranks in 1usize..6, run in 1usize..5, runs in 1usize..5, blocks in 1usize..4, cut in 0usize..1000) {
            let share = Interleave::new(ranks, run).unwrap();
            let block_size = run * runs;
            let row: Vec<usize> = (0..blocks).map(|b| b * 3 + 1).collect();
            let len = cut % (block_size * ranks * blocks + 1);
            let mut held = vec![Vec::new(); ranks];
            for position in 0..len {
                let mut holders = 0;
                for (rank, held) in held.iter_mut().enumerate() {
                    if let Some(slot) = share.slot(&row, position, block_size, rank).unwrap() {
                        holders += 1;
                        prop_assert_eq!(rank, share.rank_of(position));
                        held.push(slot);
                    }
                }
                prop_assert_eq!(holders, 1);
            }
            for (rank, slots) in held.iter().enumerate() {
                prop_assert_eq!(slots.len(), share.local_len(len, rank));
                // A rank's tokens lie in order, as in a cache of their own.
                let own: Vec<usize> = (0..slots.len()).map(|p| slot(&row, p, block_size).unwrap()).collect();
                prop_assert_eq!(slots, &own);
            }
        }

        #[test]
        fn local_lengths_add_up(ranks in 1usize..2000, run in 1usize..2000, len in any::<usize>()) {
            let share = Interleave::new(ranks, run).unwrap();
            let sum: u128 = (0..ranks).map(|rank| share.local_len(len, rank) as u128).sum();
            prop_assert_eq!(sum, len as u128);
            prop_assert_eq!(share.local_len(len, ranks), 0);
        }
    }
}
