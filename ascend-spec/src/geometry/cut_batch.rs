//! Packed causal sequences whose rows are divided between two cards: sparse modes 7 and 8.

use super::SparseMode;
use super::lengths::Lengths;
use super::sparsity::Sparsity;
use std::ops::Range;

/// Packed causal sequences whose rows are divided between two cards: the first one has the rows in front of the cut,
/// the second one the others. At most one sequence has rows on both.
///
/// Each card computes its rows in sparse mode 7 or 8 of FlashAttentionScore's packed form, over all keys of its
/// sequences, and of the one that is cut over those that it is asked for: all of them, or in a ring the keys that are
/// on the card, and then those that another one passes on.
///
/// ```
/// use ascend_spec::{SparseMode, geometry::CutBatch};
///
/// // Sequence 1 has 4 rows of 6 keys; two rows stay on the first card and two go to the second.
/// let (q_ends, kv_ends) = ([3, 7, 12], [3, 9, 14]);
/// let cut = CutBatch::new(&q_ends, &kv_ends, 5, SparseMode::RightDownCausal).unwrap();
/// let first = cut.first(0..cut.keys()).unwrap();
/// assert_eq!((first.q_ends(), first.kv_ends()), (vec![3, 5], vec![3, 9]));
/// assert_eq!((first.mode, first.pre_tokens, first.next_tokens), (SparseMode::RightDownCausalBand, 6, -2));
/// let second = cut.second(0..cut.keys()).unwrap();
/// assert_eq!((second.q_ends(), second.kv_ends()), (vec![2, 7], vec![6, 11]));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutBatch {
    mode: SparseMode,
    /// Rows and keys of each sequence.
    sequences: Vec<(i64, i64)>,
    /// The sequence of the second card's first row.
    cut: usize,
    /// Its rows on the first card.
    before: i64,
}

/// The call of one card of a [`CutBatch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutSide {
    /// `sparseMode`: 7 or 8.
    pub mode: SparseMode,
    /// `preTokens`.
    pub pre_tokens: i64,
    /// `nextTokens`.
    pub next_tokens: i64,
    q_ends: Vec<i64>,
    kv_ends: Vec<i64>,
}

/// A sequence as a card has it.
struct Part {
    rows: i64,
    keys: i64,
    /// Row `i` sees the keys up to `i + shift`.
    shift: i64,
}

impl CutBatch {
    /// Sequences with these ends of rows and of keys, cumulative and without a leading 0, cut in front of row `row` of
    /// all. They are causal from the first row and key (`mode` is [`SparseMode::LeftUpCausal`]) or from the last ones
    /// ([`SparseMode::RightDownCausal`]).
    ///
    /// `None`, by the first of these that holds:
    /// - `mode` is another one;
    /// - the ends descend, there is none, or there are not as many of rows as of keys;
    /// - a card would be without rows: `row` is 0, or not below the last end of rows;
    /// - these modes refuse a sequence: it has rows and no keys, or in `RightDownCausal` more rows than keys.
    pub fn new(q_ends: &[usize], kv_ends: &[usize], row: usize, mode: SparseMode) -> Option<Self> {
        let right_down = match mode {
            SparseMode::RightDownCausal => true,
            SparseMode::LeftUpCausal => false,
            _ => return None,
        };
        let lengths = |ends: &[usize]| -> Option<Vec<i64>> {
            let starts = [0].iter().chain(ends);
            starts.zip(ends).map(|(start, end)| i64::try_from(end.checked_sub(*start)?).ok()).collect()
        };
        let (rows, keys) = (lengths(q_ends)?, lengths(kv_ends)?);
        i64::try_from(q_ends.last().max(kv_ends.last()).copied()?).ok()?;
        let cut = q_ends.iter().position(|end| *end > row)?;
        let start = cut.checked_sub(1).map_or(0, |before| q_ends[before]);
        let sequences: Vec<_> = rows.iter().copied().zip(keys.iter().copied()).collect();
        let taken = |&(rows, keys): &(i64, i64)| rows == 0 || keys >= if right_down { rows } else { 1 };
        let fits = rows.len() == keys.len() && row > 0 && sequences.iter().all(taken);
        fits.then_some(Self { mode, sequences, cut, before: (row - start) as i64 })
    }

    /// Keys of the sequence that the second card's first row belongs to.
    pub fn keys(&self) -> usize {
        self.sequences[self.cut].1 as usize
    }

    /// How many rows of this sequence the first card has; 0 where no sequence is cut.
    pub fn rows_before(&self) -> usize {
        self.before as usize
    }

    /// The rows of the first card, over these keys of the sequence that is cut: `0..0` where it has no row of it.
    ///
    /// `None`, by the first of these that holds:
    /// - the sequence does not have the keys, or they are none although the card has rows of it, or some although it
    ///   has no row of it;
    /// - the first of its rows here sees none of them: give those in front of it, in a ring the next ones;
    /// - neither mode says what its rows see beside the other sequences: make a `CutBatch` of this sequence alone, and
    ///   compute the others in another call.
    pub fn first(&self, keys: Range<usize>) -> Option<CutSide> {
        let mut parts: Vec<Part> = self.sequences[..self.cut].iter().map(|of| self.whole(*of)).collect();
        match self.before {
            0 if keys.is_empty() => {}
            0 => return None,
            rows => parts.push(self.part(0..rows, keys)?),
        }
        self.side(&parts)
    }

    /// The rows of the second card, over these keys of the sequence that is cut.
    ///
    /// `None` as for [`CutBatch::first`]. Keys in front of the cut alone are a call without other sequences: that of a
    /// `CutBatch` of this sequence.
    pub fn second(&self, keys: Range<usize>) -> Option<CutSide> {
        let [(rows, _), behind @ ..] = &self.sequences[self.cut..] else { return None };
        let mut parts = vec![self.part(self.before..*rows, keys)?];
        parts.extend(behind.iter().map(|of| self.whole(*of)));
        self.side(&parts)
    }

    fn whole(&self, (rows, keys): (i64, i64)) -> Part {
        let shift = if self.mode == SparseMode::RightDownCausal { keys - rows } else { 0 };
        Part { rows, keys, shift }
    }

    /// Some rows and keys of the sequence that is cut.
    fn part(&self, rows: Range<i64>, keys: Range<usize>) -> Option<Part> {
        let Part { keys: all, shift, .. } = self.whole(self.sequences[self.cut]);
        let (start, end) = (i64::try_from(keys.start).ok()?, i64::try_from(keys.end).ok()?);
        let part = Part { rows: rows.end - rows.start, keys: end - start, shift: shift + rows.start - start };
        (start < end && end <= all).then_some(part)
    }

    /// The call of these sequences: in the mode that makes a band of one of them and is right for the others.
    fn side(&self, parts: &[Part]) -> Option<CutSide> {
        let ends = |count: fn(&Part) -> i64| -> Vec<i64> {
            let sum = |end: &mut i64, part: &Part| {
                *end += count(part);
                Some(*end)
            };
            parts.iter().scan(0, sum).collect()
        };
        let (q_ends, kv_ends) = (ends(|part| part.rows), ends(|part| part.keys));
        let modes = [SparseMode::RightDownCausalBand, SparseMode::BandLeftUpCausal];
        let right_down = self.mode == SparseMode::RightDownCausal;
        let found = modes.into_iter().filter(|mode| right_down || *mode == modes[1]).find_map(|mode| {
            let band = Sparsity::new(mode, Lengths::Packed { q_ends: &q_ends, kv_ends: &kv_ends }).cut_sequence()?;
            let shift = |part: &Part| if mode == modes[0] { part.keys - part.rows } else { 0 };
            let as_mode = |(at, part): (usize, &Part)| at == band || part.rows == 0 || part.shift == shift(part);
            let Part { rows, keys, shift } = parts[band];
            // Of mode 7 the band ends with the last key at most.
            let next = shift - (keys - rows);
            let taken = shift >= 0 && (mode == modes[1] || next <= 0);
            (taken && parts.iter().enumerate().all(as_mode)).then_some((mode, keys, next))
        });
        let (mode, pre_tokens, next_tokens) = found?;
        Some(CutSide { mode, pre_tokens, next_tokens, q_ends, kv_ends })
    }
}

impl CutSide {
    /// Ends of the rows of each sequence, cumulative: `actualSeqQLen`.
    pub fn q_ends(&self) -> Vec<usize> {
        self.q_ends.iter().map(|end| *end as usize).collect()
    }

    /// Ends of the keys of each sequence, cumulative: `actualSeqKvLen`.
    pub fn kv_ends(&self) -> Vec<usize> {
        self.kv_ends.iter().map(|end| *end as usize).collect()
    }

    /// Which keys the rows see.
    pub fn sparsity(&self) -> Sparsity<'_> {
        let lengths = Lengths::Packed { q_ends: &self.q_ends, kv_ends: &self.kv_ends };
        let Self { pre_tokens, next_tokens, .. } = *self;
        Sparsity { pre_tokens, next_tokens, ..Sparsity::new(self.mode, lengths) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rows of each sequence of a call as text.
    fn drawn(call: &Sparsity<'_>) -> Vec<Vec<String>> {
        let all: Vec<_> = call.geometries().collect();
        let each = (0..call.lengths.batch()).map(|b| call.geometry(b));
        assert!(each.eq(all.iter().copied()));
        let row =
            |of: &crate::MaskGeometry, i| (0..of.kv_len()).map(|j| if of.sees(i, j) { '#' } else { '.' }).collect();
        all.iter().map(|of| (0..of.q_len()).map(|i| row(of, i)).collect()).collect()
    }

    fn whole(q_ends: &[usize], kv_ends: &[usize], mode: SparseMode) -> Vec<Vec<String>> {
        let [q_ends, kv_ends] = [q_ends, kv_ends].map(|ends| ends.iter().map(|end| *end as i64).collect::<Vec<_>>());
        drawn(&Sparsity::new(mode, Lengths::Packed { q_ends: &q_ends, kv_ends: &kv_ends }))
    }

    /// What the sequences see on the two cards together, of which the second begins with the rest of the cut one.
    fn merged(first: &CutSide, second: &CutSide, cut: &CutBatch) -> Vec<Vec<String>> {
        let (mut all, second) = (drawn(&first.sparsity()), drawn(&second.sparsity()));
        match cut.before {
            0 => all.extend(second),
            _ => {
                all[cut.cut].extend_from_slice(&second[0]);
                all.extend_from_slice(&second[1..]);
            }
        }
        all
    }

    #[test]
    fn the_calls_are_those_of_the_documents() {
        let (q_ends, kv_ends) = ([3, 7, 12, 16], [3, 9, 14, 18]);
        let cut = CutBatch::new(&q_ends, &kv_ends, 5, SparseMode::RightDownCausal).unwrap();
        let (first, second) = (cut.first(0..6).unwrap(), cut.second(0..6).unwrap());
        assert_eq!((first.mode.acl(), first.pre_tokens, first.next_tokens), (7, 6, -2));
        assert_eq!((second.mode.acl(), second.pre_tokens, second.next_tokens), (7, 4, 0));
        assert_eq!((second.q_ends(), second.kv_ends()), (vec![2, 7, 11], vec![6, 11, 15]));
        assert_eq!(drawn(&first.sparsity())[1], ["###...", "####.."]);
        assert_eq!(drawn(&second.sparsity())[0], ["#####.", "######"]);
        assert_eq!(merged(&first, &second, &cut), whole(&q_ends, &kv_ends, SparseMode::RightDownCausal));

        // Sequence 1 has 5 rows of 4 keys; two rows stay on the first card and three go to the second.
        let (q_ends, kv_ends) = ([3, 8, 13, 17], [3, 7, 12, 16]);
        let cut = CutBatch::new(&q_ends, &kv_ends, 5, SparseMode::LeftUpCausal).unwrap();
        let (first, second) = (cut.first(0..4).unwrap(), cut.second(0..4).unwrap());
        assert_eq!((first.mode.acl(), first.pre_tokens, first.next_tokens), (8, 3, 0));
        assert_eq!((second.mode.acl(), second.pre_tokens, second.next_tokens), (8, 4, 1));
        assert_eq!(drawn(&first.sparsity())[1], ["#...", "##.."]);
        assert_eq!(drawn(&second.sparsity())[0], ["###.", "####", "####"]);
        assert_eq!(merged(&first, &second, &cut), whole(&q_ends, &kv_ends, SparseMode::LeftUpCausal));
    }

    #[test]
    fn cuts_that_no_call_has_are_none() {
        let cut = |q: &[usize], kv: &[usize], row| CutBatch::new(q, kv, row, SparseMode::RightDownCausal);
        for (q, kv, row) in [
            (&[3, 8][..], &[3, 8][..], 0),
            (&[3, 8], &[3, 8], 8),
            (&[3, 8], &[8], 5),
            (&[8, 3], &[8, 9], 5),
            (&[3, 8], &[3, 7], 5),
            (&[3, 8], &[0, 8], 5),
            (&[], &[], 1),
            (&[3, usize::MAX], &[3, usize::MAX], 5),
        ] {
            assert_eq!(cut(q, kv, row), None, "{q:?} {kv:?} {row}");
        }
        assert_eq!(CutBatch::new(&[3, 8], &[3, 8], 5, SparseMode::Band), None);
        let cut = cut(&[3, 8], &[3, 9], 5).unwrap();
        // Keys that are not there or that the first row here does not see, and keys of a sequence without rows here.
        for keys in [0..0, 0..7, 3..9, usize::MAX..usize::MAX] {
            assert_eq!(cut.first(keys.clone()), None, "{keys:?}");
        }
        let none = CutBatch::new(&[3, 8], &[3, 9], 3, SparseMode::RightDownCausal).unwrap();
        assert!(none.first(0..0).is_some() && none.first(0..1).is_none());
        // The keys in front are no call beside another sequence that has more keys than rows.
        let beside = CutBatch::new(&[8, 12], &[8, 13], 5, SparseMode::RightDownCausal).unwrap();
        assert!(beside.second(0..4).is_none() && beside.second(4..8).is_some());
    }

    proptest! {
        /// Any sequences cut in front of any row, in both modes: the two cards see what the whole call sees, with all
        /// keys in one call, and the rest of the cut sequence also by its keys in two calls.
        #[test]
        fn two_cards_see_what_one_sees(
            sequences in prop::collection::vec((0usize..6, 0usize..4), 1..5), row in 1usize..20, keys in 0usize..9,
            right_down: bool,
        ) {
            let mode = if right_down { SparseMode::RightDownCausal } else { SparseMode::LeftUpCausal };
            let (mut q_ends, mut kv_ends) = (vec![], vec![]);
            for (rows, more) in sequences {
                let keys = if right_down { rows + more } else { more + 1 };
                q_ends.push(q_ends.last().unwrap_or(&0) + rows);
                kv_ends.push(kv_ends.last().unwrap_or(&0) + keys);
            }
            let Some(cut) = CutBatch::new(&q_ends, &kv_ends, row, mode) else {
                prop_assert!(row >= *q_ends.last().unwrap());
                return Ok(());
            };
            let of_first = if cut.before == 0 { 0..0 } else { 0..cut.keys() };
            let (first, second) = (cut.first(of_first).unwrap(), cut.second(0..cut.keys()).unwrap());
            let all = whole(&q_ends, &kv_ends, mode);
            prop_assert_eq!(merged(&first, &second, &cut), all.clone());

            let (rows, all_keys) = cut.sequences[cut.cut];
            let at = keys.min(all_keys as usize);
            let (rows, before) = (rows as usize, cut.before as usize);
            prop_assume!(before > 0);
            let alone = CutBatch::new(&[rows], &[all_keys as usize], before, mode).unwrap();
            let parts = [0..at, at..all_keys as usize].map(|keys| (keys.clone(), alone.second(keys)));
            let seen = |range: Range<usize>| all[cut.cut][before..].iter().map(move |row| row[range.clone()].to_owned());
            for (keys, side) in parts {
                let first_row_sees_none = seen(keys.clone()).next().is_some_and(|row| !row.contains('#'));
                match side {
                    Some(side) => prop_assert_eq!(&drawn(&side.sparsity())[0], &seen(keys).collect::<Vec<_>>()),
                    None => prop_assert!(first_row_sees_none, "{:?} of {:?}", keys, cut),
                }
            }
        }
    }
}
