//! A whole call: the geometry of each of its sequences.

use super::sparse_mode::TOKENS_UNBOUNDED;
use super::{Lengths, MaskGeometry};
use crate::SparseMode;

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
            let _ = (geometry.visible(), geometry.row(0));
        }
    }
}
