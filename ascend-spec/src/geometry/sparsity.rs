//! A whole call: the geometry of each of its sequences.

use super::MaskGeometry;
use super::sparse_mode::TOKENS_UNBOUNDED;
use crate::SparseMode;

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

impl Lengths<'_> {
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
}

/// The arguments of a call that determine which keys its rows see, for every mode of every operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sparsity<'a> {
    /// `sparseMode`.
    pub mode: SparseMode,
    /// Whether there is a mask tensor.
    pub has_tensor: bool,
    /// `preTokens`.
    pub pre_tokens: i64,
    /// `nextTokens`.
    pub next_tokens: i64,
    /// `prefix` of modes 5 and 6: how many keys every row of a sequence sees. A sequence without an entry has none.
    pub prefix: &'a [i64],
    /// Rows and keys.
    pub lengths: Lengths<'a>,
}

impl<'a> Sparsity<'a> {
    /// A mode with the tensor it takes, without a bound on the tokens and without a prefix.
    pub fn new(mode: SparseMode, lengths: Lengths<'a>) -> Self {
        Sparsity {
            mode,
            has_tensor: mode != SparseMode::DefaultMask,
            pre_tokens: TOKENS_UNBOUNDED,
            next_tokens: TOKENS_UNBOUNDED,
            prefix: &[],
            lengths,
        }
    }

    /// What the rows of sequence `b` see. Searches for the cut sequence each time: [`Sparsity::geometries`] does it
    /// once for all.
    pub fn geometry(&self, b: usize) -> MaskGeometry {
        self.geometry_with(b, self.cut_sequence())
    }

    /// What the rows of each sequence see, in order.
    pub fn geometries(&self) -> impl Iterator<Item = MaskGeometry> + '_ {
        let cut = self.cut_sequence();
        (0..self.lengths.batch()).map(move |b| self.geometry_with(b, cut))
    }

    fn geometry_with(&self, b: usize, cut: Option<usize>) -> MaskGeometry {
        let (q_len, kv_len) = self.lengths.of(b);
        let geometry_of = |mode| {
            let (pre, next) = (self.pre_tokens, self.next_tokens);
            MaskGeometry::new(mode, self.has_tensor, q_len, kv_len, pre, next)
        };
        let cut = cut == Some(b);
        match self.mode {
            SparseMode::Prefix | SparseMode::PrefixCompress => {
                let prefix = self.prefix.get(b).copied().unwrap_or(0);
                MaskGeometry::prefix(q_len, kv_len, u64::try_from(prefix).unwrap_or(0))
            }
            mode => geometry_of(mode.of_sequence(cut)),
        }
    }

    /// The sequence that modes 7 and 8 treat as a band: the last, or the first, that has rows, with or without keys.
    pub fn cut_sequence(&self) -> Option<usize> {
        let has_rows = |&b: &usize| self.lengths.of(b).0 > 0;
        let batch = self.lengths.batch();
        // Of sequences with equal lengths only one is examined: there may be any number of them.
        let looked_at = match self.lengths {
            Lengths::Dense { .. } => batch.min(1),
            Lengths::Packed { .. } => batch,
        };
        match self.mode {
            SparseMode::RightDownCausalBand => {
                let mut from_last = (batch - looked_at..batch).rev();
                from_last.find(has_rows)
            }
            SparseMode::BandLeftUpCausal => (0..looked_at).find(has_rows),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed<'a>(q_ends: &'a [i64], kv_ends: &'a [i64]) -> Lengths<'a> {
        Lengths::Packed { q_ends, kv_ends }
    }

    /// Rows of a geometry as text.
    fn rows(geometry: MaskGeometry) -> Vec<String> {
        let cell = |i, j| if geometry.sees(i, j) { '#' } else { '.' };
        (0..geometry.q_len()).map(|i| (0..geometry.kv_len()).map(|j| cell(i, j)).collect()).collect()
    }

    /// All rows of a call, sequence by sequence.
    fn all(call: &Sparsity<'_>) -> Vec<Vec<String>> {
        let all: Vec<_> = call.geometries().collect();
        let each = (0..call.lengths.batch()).map(|b| call.geometry(b));
        assert!(each.eq(all.iter().copied()));
        all.into_iter().map(rows).collect()
    }

    #[test]
    fn a_right_down_call_cut_between_two_cards_sees_what_the_whole_call_sees() {
        // Sequence 1 has 4 rows of 6 keys; two rows stay on the first card and two go to the second.
        let whole = Sparsity::new(SparseMode::RightDownCausal, packed(&[3, 7, 12, 16], &[3, 9, 14, 18]));
        let first = Sparsity {
            pre_tokens: 6,
            next_tokens: -2,
            ..Sparsity::new(SparseMode::RightDownCausalBand, packed(&[3, 5], &[3, 9]))
        };
        let second = Sparsity {
            next_tokens: 0,
            ..Sparsity::new(SparseMode::RightDownCausalBand, packed(&[2, 7, 11], &[6, 11, 15]))
        };
        assert_eq!(first.cut_sequence(), Some(1));
        assert_eq!(second.cut_sequence(), Some(2));
        assert_eq!(rows(first.geometry(1)), ["###...", "####.."]);
        assert_eq!(rows(second.geometry(0)), ["#####.", "######"]);
        let (first, second) = (all(&first), all(&second));
        let mut merged = vec![first[0].clone(), [&first[1][..], &second[0][..]].concat()];
        merged.extend_from_slice(&second[1..]);
        assert_eq!(merged, all(&whole));
    }

    #[test]
    fn a_left_up_call_cut_between_two_cards_sees_what_the_whole_call_sees() {
        // Sequence 1 has 5 rows of 4 keys; two rows stay on the first card and three go to the second.
        let whole = Sparsity::new(SparseMode::LeftUpCausal, packed(&[3, 8, 13, 17], &[3, 7, 12, 16]));
        let first =
            Sparsity { next_tokens: 0, ..Sparsity::new(SparseMode::BandLeftUpCausal, packed(&[3, 5], &[3, 7])) };
        let second = Sparsity {
            pre_tokens: 4,
            next_tokens: 1,
            ..Sparsity::new(SparseMode::BandLeftUpCausal, packed(&[3, 8, 12], &[4, 9, 13]))
        };
        assert_eq!(first.cut_sequence(), Some(0));
        assert_eq!(rows(first.geometry(1)), ["#...", "##.."]);
        assert_eq!(rows(second.geometry(0)), ["###.", "####", "####"]);
        let (first, second) = (all(&first), all(&second));
        let mut merged = vec![first[0].clone(), [&first[1][..], &second[0][..]].concat()];
        merged.extend_from_slice(&second[1..]);
        assert_eq!(merged, all(&whole));
    }

    #[test]
    fn the_cut_sequence_is_one_with_rows() {
        let lengths = packed(&[0, 2, 5, 5], &[4, 6, 9, 9]);
        let cut = |mode| Sparsity::new(mode, lengths).cut_sequence();
        assert_eq!(cut(SparseMode::RightDownCausalBand), Some(2));
        assert_eq!(cut(SparseMode::BandLeftUpCausal), Some(1));
        assert_eq!(cut(SparseMode::Band), None);
        let without_keys = packed(&[2, 5], &[0, 4]);
        let first = Sparsity::new(SparseMode::BandLeftUpCausal, without_keys);
        assert_eq!(first.cut_sequence(), Some(0));
        assert_eq!(rows(first.geometry(1)), ["#...", "##..", "###."]);
        let none = Sparsity::new(SparseMode::BandLeftUpCausal, packed(&[], &[]));
        assert_eq!(none.cut_sequence(), None);
        assert_eq!(none.geometry(0).q_len(), 0);
    }

    proptest! {
        /// Any sequence cut at any row, in both modes, on its two devices.
        #[test]
        fn a_sequence_cut_anywhere_sees_what_it_saw(
            sq in 2i64..12, skv in 1i64..12, cut in 1i64..11, others in proptest::array::uniform2((1i64..6, 0i64..6)),
        ) {
            let cut = cut.min(sq - 1);
            let [(qa, ea), (qb, eb)] = others;
            // Mode 7 wants at least as many keys as rows.
            let skv7 = skv.max(sq);
            let right = MaskGeometry::new(SparseMode::RightDownCausal, true, sq as u64, skv7 as u64, 0, 0);
            let (q_ends, kv_ends) = ([qa, qa + cut], [qa + ea, qa + ea + skv7]);
            let first = Sparsity {
                pre_tokens: skv7,
                next_tokens: cut - sq,
                ..Sparsity::new(SparseMode::RightDownCausalBand, packed(&q_ends, &kv_ends))
            };
            // On the second card the rest of the sequence comes first and is an ordinary one.
            let rest = MaskGeometry::new(SparseMode::RightDownCausal, true, (sq - cut) as u64, skv7 as u64, 0, 0);
            prop_assert_eq!([rows(first.geometry(1)), rows(rest)].concat(), rows(right));
            let own = MaskGeometry::new(SparseMode::RightDownCausal, true, qa as u64, (qa + ea) as u64, 0, 0);
            prop_assert_eq!(first.geometry(0), own);

            let left = MaskGeometry::new(SparseMode::LeftUpCausal, true, sq as u64, skv as u64, 0, 0);
            let begin = MaskGeometry::new(SparseMode::LeftUpCausal, true, cut as u64, skv as u64, 0, 0);
            let (q_ends, kv_ends) = ([sq - cut, sq - cut + qb], [skv, skv + qb + eb]);
            let second = Sparsity {
                pre_tokens: skv.max(sq),
                next_tokens: sq - skv,
                ..Sparsity::new(SparseMode::BandLeftUpCausal, packed(&q_ends, &kv_ends))
            };
            prop_assert_eq!([rows(begin), rows(second.geometry(0))].concat(), rows(left));
            let own = MaskGeometry::new(SparseMode::LeftUpCausal, true, qb as u64, (qb + eb) as u64, 0, 0);
            prop_assert_eq!(second.geometry(1), own);
        }

        #[test]
        fn lengths_that_make_no_sense_are_safe(
            q in proptest::collection::vec(any::<i64>(), 0..4), kv in proptest::collection::vec(any::<i64>(), 0..4),
            prefix in proptest::collection::vec(any::<i64>(), 0..4),
            mode in proptest::sample::select(SparseMode::ALL.to_vec()),
            pre: i64, next: i64, b in 0usize..6,
        ) {
            let call = Sparsity {
                mode, has_tensor: true, pre_tokens: pre, next_tokens: next, prefix: &prefix, lengths: packed(&q, &kv),
            };
            let geometry = call.geometry(b);
            let _ = (geometry.visible(), geometry.row(0), geometry.has_fully_masked_row());
        }
    }
}
