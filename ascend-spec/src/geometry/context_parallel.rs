//! Context parallelism in decoding: the keys of a sequence are distributed over ranks, and each rank masks its own.

use super::visibility::run;
use super::{Tile, Visibility};
use std::num::NonZeroU64;
use std::ops::Range;

/// How the keys of every sequence are distributed: runs of `interleave` keys go to the ranks in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextShard {
    ranks: NonZeroU64,
    interleave: NonZeroU64,
    rank: u64,
}

impl ContextShard {
    /// The share of `rank`, one of `ranks`; `None` for a rank that is not one of them.
    pub fn new(ranks: NonZeroU64, interleave: NonZeroU64, rank: u64) -> Option<Self> {
        (rank < ranks.get()).then_some(ContextShard { ranks, interleave, rank })
    }

    /// How many of the first `len` keys the rank has. The ranks' shares sum up to `len`.
    pub fn local_len(&self, len: u64) -> u64 {
        let (ranks, run) = (self.ranks.get(), self.interleave.get());
        let whole = len / run / ranks * run;
        let rest = len - whole * ranks;
        whole + rest.saturating_sub(self.rank.saturating_mul(run)).min(run)
    }

    /// The number of the rank's keys that rows at all positions below `end` see, summed over the rows: a key at
    /// position `p` is seen by `end - p` rows.
    fn seen_below(&self, end: u64) -> u128 {
        let wide = u128::from;
        let (end, run, rank) = (wide(end), wide(self.interleave.get()), wide(self.rank));
        let round = run * wide(self.ranks.get());
        // The sum of `end - position` over `count` positions from `first` on, `step` apart.
        let behind = |first: u128, count: u128, step: u128| {
            count * end.saturating_sub(first) - step * (count * count.saturating_sub(1) / 2)
        };
        let (rounds, rest) = (end / round, end % round);
        // Each of the whole rounds counts from its own run's first key; keys within a run are one apart.
        let whole = match rounds {
            0 => 0,
            _ => run * behind(rank * run, rounds, round) - rounds * (run * (run - 1) / 2),
        };
        let part = rest.saturating_sub(rank * run).min(run);
        whole + behind(rounds * round + rank * run, part, 1)
    }

    /// What `q_len` query rows after `history` keys see of the rank's keys.
    pub const fn rows(self, history: u64, q_len: u64) -> RankRows {
        RankRows { shard: self, history, q_len }
    }
}

/// Rows of a decoding step (several with speculation) on one rank: row `i` is at position `history + i` and sees the
/// rank's keys up to there. A row for which the rank has no key sees nothing: its output is 0 and its log-sum-exp
/// -inf, so a merge gives it no weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankRows {
    shard: ContextShard,
    history: u64,
    q_len: u64,
}

impl RankRows {
    fn seen(&self, i: u64) -> u64 {
        let place = self.history.saturating_add(i);
        self.shard.local_len(place.saturating_add(1))
    }
}

impl Visibility for RankRows {
    fn q_len(&self) -> u64 {
        self.q_len
    }

    /// Number of the rank's keys, those of the rows among them.
    fn kv_len(&self) -> u64 {
        self.shard.local_len(self.history.saturating_add(self.q_len))
    }

    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
        if i < self.q_len {
            run(0, self.seen(i), self.kv_len(), visit);
        }
    }

    /// In constant time.
    fn visible(&self) -> u128 {
        let end = self.history.saturating_add(self.q_len);
        // Rows whose position exceeds the number type see what the last row with a position sees.
        let counted = end - self.history;
        let all = self.shard.seen_below(end) - self.shard.seen_below(self.history);
        all + u128::from(self.q_len - counted) * u128::from(self.kv_len())
    }

    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        let rows = rows.start..rows.end.min(self.q_len);
        let keys = keys.start..keys.end.min(self.kv_len());
        if rows.is_empty() || keys.is_empty() || self.seen(rows.end - 1) <= keys.start {
            Tile::None
        } else if self.seen(rows.start) >= keys.end {
            Tile::All
        } else {
            Tile::Mixed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tile_by_rows;
    use super::*;
    use proptest::prelude::*;

    fn shard(ranks: u64, interleave: u64, rank: u64) -> ContextShard {
        let nonzero = |n| NonZeroU64::new(n).unwrap();
        ContextShard::new(nonzero(ranks), nonzero(interleave), rank).unwrap()
    }

    proptest! {
        #[test]
        fn every_rank_sees_its_keys_up_to_the_row(
            ranks in 1u64..5, interleave in 1u64..5, history in 0u64..20, q_len in 0u64..5,
            rows in (0u64..6, 0u64..6), keys in (0u64..20, 0u64..20),
        ) {
            let mut total = 0;
            for rank in 0..ranks {
                let own = shard(ranks, interleave, rank);
                // Positions of the rank's keys in the sequence.
                let places: Vec<u64> = (0..history + q_len).filter(|p| p / interleave % ranks == rank).collect();
                let mask = own.rows(history, q_len);
                prop_assert_eq!(mask.kv_len(), places.len() as u64);
                total += mask.kv_len();
                for i in 0..q_len + 1 {
                    for (k, &place) in places.iter().enumerate() {
                        prop_assert_eq!(mask.sees(i, k as u64), i < q_len && place <= history + i);
                    }
                    prop_assert!(!mask.sees(i, places.len() as u64));
                }
                let mut visible = 0;
                (0..q_len).for_each(|i| mask.each_run(i, &mut |run| visible += u128::from(run.end - run.start)));
                prop_assert_eq!(mask.visible(), visible);
                let (rows, keys) = (rows.0..rows.1, keys.0..keys.1);
                prop_assert_eq!(mask.tile(rows.clone(), keys.clone()), tile_by_rows(&mask, rows, keys));
            }
            prop_assert_eq!(total, history + q_len);
        }

        #[test]
        fn any_numbers_are_safe(
            ranks in 1u64.., interleave in 1u64.., rank: u64, history: u64, q: u64, i: u64, j: u64,
        ) {
            let own = shard(ranks, interleave, rank % ranks);
            let mask = own.rows(history, q);
            let _ = (mask.kv_len(), mask.sees(i, j), mask.tile(0..i, 0..j), mask.visible());
        }
    }

    #[test]
    fn a_rank_must_be_one_of_the_ranks() {
        let one = NonZeroU64::MIN;
        assert_eq!(ContextShard::new(one, one, 1), None);
    }
}
