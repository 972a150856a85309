//! Where the number of a row is in `softmaxMax` and `softmaxSum`.

use super::Sequence;
use crate::View;
use crate::attention_problem::SoftmaxOutputs;

/// The order of `softmaxMax` and `softmaxSum` in memory. Each row has [`SoftmaxOutputs::COPIES`] equal, contiguous
/// numbers.
///
/// Source: FlashAttentionScore, softmaxMaxOut and softmaxOutLayout; the order of packed rows is that of the
/// operator's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SoftmaxOrder {
    /// `[B, N, S, 8]`.
    Batches,
    /// For each packed sequence a block `[N, Sq, 8]`, one after the other. The shape is `[T, N, 8]` all the same.
    SequenceBlocks,
    /// `[T, N, 8]`, in the order of the query's rows (`same_as_input`).
    SameAsInput,
}

impl SoftmaxOrder {
    /// The axes, in words.
    pub const fn name(self) -> &'static str {
        match self {
            SoftmaxOrder::Batches => "[B, N, S, 8]",
            SoftmaxOrder::SequenceBlocks => "a block [N, Sq, 8] for each sequence",
            SoftmaxOrder::SameAsInput => "[T, N, 8]",
        }
    }

    /// This order if reading another order of the same size would give wrong numbers: with several heads of packed
    /// rows.
    pub fn matters(self, packed: bool, heads: usize) -> Option<Self> {
        (packed && heads > 1).then_some(self)
    }

    /// The first numbers of the rows of a sequence with `heads` heads. Exact where the tensor fits in memory; saturates
    /// elsewhere.
    pub fn rows(self, sequence: &Sequence, heads: usize) -> View {
        let [heads, q_len] = [heads, sequence.q_len].map(|size| size as i64);
        let first = match self {
            SoftmaxOrder::Batches => (sequence.index as i64).saturating_mul(q_len),
            SoftmaxOrder::SequenceBlocks | SoftmaxOrder::SameAsInput => sequence.q_first as i64,
        };
        let (head, row) = match self {
            SoftmaxOrder::Batches | SoftmaxOrder::SequenceBlocks => (q_len, 1),
            SoftmaxOrder::SameAsInput => (1, heads),
        };
        let [offset, head, row] = [first.saturating_mul(heads), head, row]
            .map(|numbers| numbers.saturating_mul(SoftmaxOutputs::COPIES as i64));
        View { offset, batch: 0, head, row, dim: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lengths;

    #[test]
    fn each_order_has_a_place_for_each_row() {
        let lengths = Lengths::Packed { q_ends: &[2, 2, 5], kv_ends: &[1, 2, 3] };
        let heads = 2;
        let places = |order: SoftmaxOrder| -> Vec<i64> {
            let of_sequence = |sequence: Sequence| {
                (0..heads).flat_map(move |n| {
                    (0..sequence.q_len).map(move |row| order.rows(&sequence, heads).at(0, n, row) / 8)
                })
            };
            lengths.sequences().flat_map(of_sequence).collect()
        };
        assert_eq!(places(SoftmaxOrder::SequenceBlocks), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(places(SoftmaxOrder::SameAsInput), [0, 2, 1, 3, 4, 6, 8, 5, 7, 9]);
        let second = Sequence { index: 1, q_len: 3, ..Sequence::default() };
        assert_eq!(SoftmaxOrder::Batches.rows(&second, 2).at(0, 1, 2), (6 + 3 + 2) * 8);
    }
}
