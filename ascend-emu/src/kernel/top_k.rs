//! The best of many scores: the keys that a row of an indexer chooses, the blocks that native sparse attention selects.
//!
//! Quickselect with a linear bound (introselect, Musser 1997) finds the best, and only these are sorted. Of equal
//! scores the one that comes first is the better one, so that the best of the best of ranges are the best of all.

use std::cmp::Reverse;

/// A key and its score, as a number that is the larger the better the key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate(u64);

impl Candidate {
    pub(super) fn new(score: f32, position: usize) -> Self {
        // Both zeros are one score.
        let bits = (score + 0.0).to_bits();
        let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        Candidate(u64::from(ascending) << 32 | u64::from(!(position as u32)))
    }

    pub(super) fn position(self) -> u32 {
        !(self.0 as u32)
    }

    pub(super) fn score(self) -> f32 {
        let ascending = (self.0 >> 32) as u32;
        f32::from_bits(match ascending >> 31 {
            1 => ascending & !(1 << 31),
            _ => !ascending,
        })
    }
}

/// Keeps the `count` best of all candidates, in any order.
pub(super) fn keep_best(all: &mut Vec<Candidate>, count: usize) {
    if count < all.len() {
        all.select_nth_unstable_by_key(count, |&candidate| Reverse(candidate));
        all.truncate(count);
    }
}

/// The `count` best of all candidates: the best first, or in the order of their positions.
pub(super) fn best(mut all: Vec<Candidate>, count: usize, best_first: bool) -> Vec<Candidate> {
    keep_best(&mut all, count);
    match best_first {
        true => all.sort_unstable_by_key(|&candidate| Reverse(candidate)),
        false => all.sort_unstable_by_key(|candidate| candidate.position()),
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_are_in_the_order_of_keys_and_numbers_survive() {
        let scores = [0.0, -0.0, 3.5, f32::NEG_INFINITY, 3.5, -2.0];
        let all: Vec<_> = (0..).zip(scores).map(|(at, score)| Candidate::new(score, at)).collect();
        let positions = |chosen: Vec<Candidate>| -> Vec<_> { chosen.into_iter().map(Candidate::position).collect() };
        for (candidate, score) in all.iter().zip(scores) {
            assert_eq!(candidate.score(), score);
        }
        assert_eq!(positions(best(all.clone(), 9, true)), [2, 4, 0, 1, 5, 3]);
        assert_eq!(positions(best(all.clone(), 3, true)), [2, 4, 0]);
        assert_eq!(positions(best(all.clone(), 3, false)), [0, 2, 4]);
        assert!(best(all, 0, true).is_empty());
    }
}
