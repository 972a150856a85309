//! Division of blocks over the ranks that share a long context.

use std::num::NonZeroU64;

use ascend_attention::Violation;
use ascend_attention::spec::geometry::ContextShard;

use crate::rules;

use super::slot::{check_block_size, slot};

/// How blocks are divided over the ranks that share a long context: a table entry means `block_size` tokens on each
/// of `ranks` ranks, and runs of `run` tokens go to one rank after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Interleave {
    ranks: NonZeroU64,
    run: NonZeroU64,
}

impl Interleave {
    /// `ranks` ranks, and runs of `run` consecutive tokens on each.
    ///
    /// # Errors
    /// [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) if either is 0.
    pub fn new(ranks: usize, run: usize) -> Result<Self, Violation> {
        let sizes = NonZeroU64::new(ranks as u64).zip(NonZeroU64::new(run as u64));
        let Some((ranks, run)) = sizes else {
            return Err(Violation::new(
                &rules::RANKS_INTERLEAVE,
                format_args!("{ranks} ranks, runs of {run}"),
                "1 or more of each",
                "use 1 rank where the context is not divided",
            ));
        };
        Ok(Self { ranks, run })
    }

    /// Number of ranks.
    pub fn ranks(self) -> usize {
        self.ranks.get() as usize
    }

    /// The number of tokens of a run: consecutive tokens on one rank.
    pub fn tokens_in_run(self) -> usize {
        self.run.get() as usize
    }

    /// The rank that holds a position.
    pub fn rank_of(self, position: usize) -> usize {
        (position as u64 / self.run % self.ranks) as usize
    }

    /// Number of the first `len` tokens that `rank` holds: 0 for ranks that do not exist.
    pub fn local_len(self, len: usize, rank: usize) -> usize {
        let shard = ContextShard::new(self.ranks, self.run, rank as u64);
        shard.map_or(0, |shard| shard.local_len(len as u64) as usize)
    }

    /// The positions among the first `len` that `rank` holds, in order.
    pub(crate) fn positions(self, len: usize, rank: usize) -> impl Iterator<Item = usize> {
        let (ranks, run) = (self.ranks(), self.tokens_in_run());
        (0..self.local_len(len, rank)).map(move |local| (local / run * ranks + rank) * run + local % run)
    }

    /// Refuses blocks that do not hold whole runs.
    pub(crate) fn check(self, block_size: usize) -> Result<(), Violation> {
        check_block_size(block_size)?;
        if !block_size.is_multiple_of(self.tokens_in_run()) {
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
    /// [`slot`](crate::kv::slot()) for the position among the tokens of the rank.
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
        // The rank has every `ranks`-th run, one after the other, as if they were a context of their own.
        let run = self.tokens_in_run();
        let local = position / run / self.ranks() * run + position % run;
        slot(row, local, block_size).map(Some)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every token is on one rank, in a slot of its own, and the ranks' lengths are what their tokens count.
        #[test]
        fn ranks_divide_a_context(
            ranks in 1usize..6,
            run in 1usize..5,
            runs in 1usize..5,
            blocks in 1usize..4,
            cut in 0usize..1000,
        ) {
            let share = Interleave::new(ranks, run).unwrap();
            let block_size = run * runs;
            let row: Vec<usize> = (0..blocks).map(|b| b * 3 + 1).collect();
            let len = cut % (block_size * ranks * blocks + 1);
            let mut held = vec![Vec::new(); ranks];
            let mut positions = vec![Vec::new(); ranks];
            for position in 0..len {
                positions[share.rank_of(position)].push(position);
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
                prop_assert_eq!(share.positions(len, rank).collect::<Vec<_>>(), &positions[rank][..]);
                // A rank's tokens are in order, as in a cache of their own.
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
