//! Lengths of the sequences: of one length with a batch axis, or the running sums of packed ones.

use crate::View;

/// How the sequences of a call are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths<'a> {
    /// Every sequence has the same number of rows and of keys.
    Dense {
        /// Number of sequences.
        batch: usize,
        /// Query rows of each.
        q_len: u64,
        /// Keys of each.
        kv_len: u64,
    },
    /// Sequences one after another: the ends of their rows and of their keys, cumulative, without a leading 0.
    Packed {
        /// `actualSeqQLen`.
        q_ends: &'a [i64],
        /// `actualSeqKvLen`.
        kv_ends: &'a [i64],
    },
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

impl Sequence {
    /// The scores of this sequence in `heads` heads, in a tensor that has `[N, Sq, Skv]` of each sequence one after
    /// the other.
    pub fn scores(&self, heads: usize) -> View {
        let product = |left: u64, right: usize| left.saturating_mul(right as u64);
        let [offset, head, row] =
            [product(self.scores_before, heads), product(self.q_len as u64, self.kv_len), self.kv_len as u64]
                .map(|elements| i64::try_from(elements).unwrap_or(i64::MAX));
        View { offset, batch: 0, head, row, dim: 1 }
    }
}

impl<'a> Lengths<'a> {
    /// Number of sequences.
    pub fn batch(&self) -> usize {
        match self {
            Lengths::Dense { batch, .. } => *batch,
            Lengths::Packed { q_ends, .. } => q_ends.len(),
        }
    }

    /// Rows and keys of sequence `b`; 0 where the ends do not ascend, or there is no such sequence.
    pub fn of(&self, b: usize) -> (u64, u64) {
        let between = |ends: &[i64]| {
            let end = ends.get(b).copied().unwrap_or(0);
            let start = b.checked_sub(1).and_then(|before| ends.get(before));
            let start = start.copied().unwrap_or(0).max(0);
            u64::try_from(end.saturating_sub(start)).unwrap_or(0)
        };
        match *self {
            Lengths::Dense { batch, q_len, kv_len } if b < batch => (q_len, kv_len),
            Lengths::Dense { .. } => (0, 0),
            Lengths::Packed { q_ends, kv_ends } => (between(q_ends), between(kv_ends)),
        }
    }

    /// Query rows and keys of each sequence.
    pub fn each(self) -> impl DoubleEndedIterator<Item = (i64, i64)> + 'a {
        let size = |length: u64| i64::try_from(length).unwrap_or(i64::MAX);
        (0..self.batch()).map(move |b| {
            let (rows, keys) = self.of(b);
            (size(rows), size(keys))
        })
    }

    /// The rows and keys of each sequence, in order.
    pub fn sequences(self) -> impl Iterator<Item = Sequence> + 'a {
        let size = |length: i64| usize::try_from(length).unwrap_or(usize::MAX);
        let is_packed = matches!(self, Lengths::Packed { .. });
        let mut next = Sequence::default();
        self.each().map(move |(q_len, kv_len)| {
            let this = Sequence { q_len: size(q_len), kv_len: size(kv_len), ..next };
            let scores = (this.q_len as u64).saturating_mul(this.kv_len as u64);
            next.index += 1;
            next.scores_before = next.scores_before.saturating_add(scores);
            if is_packed {
                next.q_first = next.q_first.saturating_add(this.q_len);
                next.kv_first = next.kv_first.saturating_add(this.kv_len);
            }
            this
        })
    }

    /// Scores of one head in all sequences.
    pub(crate) fn scores(self) -> i128 {
        let times = |q: i64, kv: i64| i128::from(q) * i128::from(kv);
        match self {
            // There may be any number of sequences with equal lengths.
            Lengths::Dense { batch, q_len, kv_len } => {
                i128::from(q_len).saturating_mul(i128::from(kv_len)).saturating_mul(batch as i128)
            }
            Lengths::Packed { .. } => self.each().fold(0i128, |all, (q, kv)| all.saturating_add(times(q, kv))),
        }
    }

    /// Query rows and keys of all sequences, by a walk through them: for packed ones.
    pub(crate) fn sums(self) -> (i64, i64) {
        self.each().fold((0i64, 0i64), |(rows, keys), (q, kv)| (rows.saturating_add(q), keys.saturating_add(kv)))
    }

    /// Query rows of the longest query, and keys of the longest key, by a walk through all sequences: for packed ones.
    pub(crate) fn longest(self) -> (i64, i64) {
        self.each().fold((0, 0), |(rows, keys), (q, kv)| (rows.max(q), keys.max(kv)))
    }

    /// Number of sequences with query rows, and number of those with keys, by a walk through them: for packed ones.
    pub(crate) fn filled(self) -> (i64, i64) {
        self.each().fold((0, 0), |(rows, keys), (q, kv)| (rows + i64::from(q > 0), keys + i64::from(kv > 0)))
    }

    /// Whether the ends of both rows and keys end with 0.
    pub(crate) fn end_with_zero(self) -> bool {
        match self {
            Lengths::Dense { .. } => false,
            Lengths::Packed { q_ends, kv_ends } => q_ends.last() == Some(&0) && kv_ends.last() == Some(&0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_differences_and_never_negative() {
        let lengths = Lengths::Packed { q_ends: &[3, 3, 8, 0, 0], kv_ends: &[2, 6, 6, 0, 0] };
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
            Lengths::Packed { q_ends: &[i64::MAX, i64::MIN, i64::MAX, i64::MAX], kv_ends: &[i64::MIN, i64::MAX] };
        assert_eq!(lengths.sums(), (i64::MAX, i64::MAX));
        assert_eq!(lengths.sequences().count(), 4);
    }
}
