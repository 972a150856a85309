//! Lengths of the sequences: of one length with a batch axis, or the running sums of packed ones.

use crate::{Lengths, SparseMode, Sparsity};

/// Ends of packed sequences, cumulative, without a leading 0; both arrays have the same number of entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedLengths<'a> {
    /// `actualSeqQLen`.
    pub q_ends: &'a [i64],
    /// `actualSeqKvLen`.
    pub kv_ends: &'a [i64],
}

/// The rows and keys of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Index of the sequence.
    pub index: usize,
    /// First row on the query's row axis; 0 where there is a batch axis.
    pub q_first: usize,
    /// Query rows.
    pub q_len: usize,
    /// First row on the row axis of key and value; 0 where there is a batch axis.
    pub kv_first: usize,
    /// Keys.
    pub kv_len: usize,
    /// Scores of one head in all earlier sequences: the sum of their rows times keys.
    pub scores_before: u64,
}

impl<'a> PackedLengths<'a> {
    /// Number of sequences.
    pub fn batch(self) -> usize {
        self.q_ends.len()
    }

    /// Whether both arrays end with 0.
    pub(crate) fn end_with_zero(self) -> bool {
        self.q_ends.last() == Some(&0) && self.kv_ends.last() == Some(&0)
    }

    /// The ends in the form that the geometry of the masks takes; it computes the lengths as their differences.
    fn lengths(self) -> Lengths<'a> {
        Lengths::Packed { q_ends: self.q_ends, kv_ends: self.kv_ends }
    }

    /// The sequence that modes 7 and 8 treat as a band.
    pub(super) fn cut_sequence(self, mode: SparseMode) -> Option<usize> {
        Sparsity::new(mode, self.lengths()).cut_sequence()
    }

    /// Query rows and keys of each sequence.
    pub fn each(self) -> impl DoubleEndedIterator<Item = (i64, i64)> + 'a {
        let size = |length: u64| i64::try_from(length).unwrap_or(i64::MAX);
        (0..self.batch()).map(move |b| {
            let (rows, keys) = self.lengths().of(b);
            (size(rows), size(keys))
        })
    }

    /// Query rows and keys of all sequences.
    pub(super) fn sums(self) -> (i64, i64) {
        self.each().fold((0i64, 0i64), |(rows, keys), (q, kv)| (rows.saturating_add(q), keys.saturating_add(kv)))
    }

    /// Query rows of the longest query, and keys of the longest key.
    pub(super) fn longest(self) -> (i64, i64) {
        self.each().fold((0, 0), |(rows, keys), (q, kv)| (rows.max(q), keys.max(kv)))
    }

    /// Number of sequences with query rows, and number of those with keys.
    pub(super) fn filled(self) -> (i64, i64) {
        self.each().fold((0, 0), |(rows, keys), (q, kv)| (rows + i64::from(q > 0), keys + i64::from(kv > 0)))
    }

    /// The rows and keys of each sequence, in order.
    pub fn sequences(self) -> impl Iterator<Item = Sequence> + 'a {
        let size = |length: i64| usize::try_from(length).unwrap_or(usize::MAX);
        let mut next = Sequence::default();
        self.each().map(move |(q_len, kv_len)| {
            let this = Sequence { q_len: size(q_len), kv_len: size(kv_len), ..next };
            let scores = (this.q_len as u64).saturating_mul(this.kv_len as u64);
            next = Sequence {
                index: this.index + 1,
                q_first: this.q_first.saturating_add(this.q_len),
                kv_first: this.kv_first.saturating_add(this.kv_len),
                scores_before: this.scores_before.saturating_add(scores),
                ..this
            };
            this
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_differences_and_never_negative() {
        let lengths = PackedLengths { q_ends: &[3, 3, 8, 0, 0], kv_ends: &[2, 6, 6, 0, 0] };
        let each: Vec<_> = lengths.each().collect();
        assert_eq!(each, [(3, 2), (0, 4), (5, 0), (0, 0), (0, 0)]);
        assert_eq!(lengths.sums(), (8, 6));
        assert_eq!(lengths.longest(), (5, 4));
        assert_eq!(lengths.filled(), (2, 2));
        let firsts: Vec<_> = lengths
            .sequences()
            .map(|sequence| (sequence.index, sequence.q_first, sequence.kv_first, sequence.scores_before))
            .collect();
        let want = [(0, 0, 0, 0), (1, 3, 2, 6), (2, 3, 6, 6), (3, 8, 6, 6), (4, 8, 6, 6)];
        assert_eq!(firsts, want);
    }

    #[test]
    fn extreme_ends_do_not_overflow() {
        let lengths =
            PackedLengths { q_ends: &[i64::MAX, i64::MIN, i64::MAX, i64::MAX], kv_ends: &[i64::MIN, i64::MAX] };
        assert_eq!(lengths.sums(), (i64::MAX, i64::MAX));
        assert_eq!(lengths.sequences().count(), 4);
    }
}
