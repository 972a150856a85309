//! Masks, biases and softmax outputs of single sequences, for operators where they differ between sequences.

use super::{AttentionProblem, ByteRange, MaskRows, Rows, extents};
use crate::layout::{Extents, View};
use crate::{DType, MaskGeometry};

/// What differs between the scores of sequences: the visible keys of one sequence, and where its elements are in the
/// tensors that have one for each score or for each row. Rows and keys count from the sequence's first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTerms {
    /// Visible keys of each row, before a mask tensor.
    pub geometry: MaskGeometry,
    /// Elements of the mask tensor.
    pub mask: Option<MaskRows>,
    /// Elements of the bias tensor.
    pub bias: Option<BiasRows>,
    /// Distance of the first key's position from the first query's, for slopes.
    pub key_offset: i64,
    /// Bits of the drop mask.
    pub dropped: Option<DropRows>,
    /// Elements of the softmax outputs.
    pub softmax: SoftmaxRows,
}

/// Where the elements of one sequence are in a bias tensor. Elements of neighbouring keys are contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BiasRows {
    /// Element for head 0, row 0 and key 0.
    pub first: i64,
    /// Elements from one head to the next.
    pub head: i64,
    /// Elements from one row to the next.
    pub row: i64,
    /// Whether row `i` has elements for keys 0 to `i` only; `row` is then -1.
    pub up_to_row: bool,
}

impl BiasRows {
    /// Offset of the element for row `i` and key `j`, in elements; `None` if the tensor has none.
    pub fn element(&self, head: usize, i: usize, j: usize) -> Option<i64> {
        let step = |count: usize, stride: i64| (count as i64).saturating_mul(stride);
        let steps = [step(head, self.head), step(i, self.row), j as i64];
        let element = steps.into_iter().fold(self.first, i64::saturating_add);
        (!self.up_to_row || j <= i).then_some(element)
    }
}

/// Where the bits of one sequence are in a drop mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropRows {
    /// Bit for head 0, row 0 and key 0.
    pub first: u64,
    /// Bits from one head to the next.
    pub head: u64,
    /// Bits from one row to the next.
    pub row: u64,
}

impl DropRows {
    /// The bit for row `i` and key `j`: bit `k % 8`, the least significant first, of byte `k / 8`.
    pub fn bit(&self, head: usize, i: usize, j: usize) -> u64 {
        let step = |count: usize, stride: u64| (count as u64).saturating_mul(stride);
        let steps = [step(head, self.head), step(i, self.row), j as u64];
        steps.into_iter().fold(self.first, u64::saturating_add)
    }
}

/// Where the numbers of one sequence are in the softmax outputs: [`SoftmaxRows::COPIES`] equal ones for each row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftmaxRows {
    /// First element of head 0 and row 0.
    pub first: i64,
    /// Elements from one head to the next.
    pub head: i64,
    /// Elements from one row to the next.
    pub row: i64,
}

impl SoftmaxRows {
    /// Equal numbers of a row.
    pub const COPIES: usize = 8;
}

/// Dropout: weights whose bit is 0 are dropped, and the others are divided by the share of weights that are kept.
/// Maximum and sum are taken over all weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The bytes of the drop mask that are read, from its base address.
    pub bytes: ByteRange,
    /// Share of the weights that are kept; above 0.
    pub keep_prob: f64,
}

/// The softmax outputs: maximum and sum of each row, in tensors of `FLOAT` with the same layout.
///
/// Maximum and sum of a row without visible keys are the lowest and the highest finite number if such rows are zeros,
/// and otherwise the lowest finite number and the number of keys. With a sink they are the sink and 1. Rows of a
/// sequence without keys have 0 and 0, and are zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftmaxOutputs {
    /// The first element, from the base address of the maxima.
    pub max_offset: i64,
    /// The first element, from the base address of the sums.
    pub sum_offset: i64,
    /// The order of the axes in memory, in words, where reading another order of the same size would give wrong
    /// numbers.
    pub order: Option<&'static str>,
}

impl AttentionProblem<'_> {
    /// The terms of sequence `b`, if the problem has them for each sequence.
    pub fn terms_of(&self, b: usize) -> Option<&SequenceTerms> {
        self.terms.get(b)
    }

    /// The elements of the bias tensor for the rows and keys of sequence `b`, as the rows of a tensor of one batch
    /// entry and their extents, where [`SequenceTerms`] locate them. If row `i` has elements for keys 0 to `i` only,
    /// this is one row, the last one, whose last element is that of distance 0.
    pub fn bias_rows(&self, b: usize) -> Option<(Rows, Extents)> {
        let (bias, elements) = (self.bias?, self.terms_of(b)?.bias?);
        let [.., longest] = bias.sizes;
        let (q_len, kv_len) = (self.q_len(b), self.kv_len(b));
        let (first, rows, keys) = match elements.up_to_row {
            true => (elements.first.saturating_sub(longest as i64 - 1), 1, longest),
            false => (elements.first, q_len, kv_len),
        };
        let view = View { offset: first, batch: 0, head: elements.head, row: elements.row, dim: 1 };
        let keys = if q_len == 0 || kv_len == 0 { 0 } else { keys };
        let covered = extents([1, self.heads, rows, keys]);
        Some((Rows { view, ..bias.rows }, covered))
    }

    /// The elements of a softmax output for `rows` rows of sequence `b`, as the rows of a tensor of one batch entry and
    /// their extents. The tensor's first element is `offset`.
    pub fn softmax_rows(&self, b: usize, rows: usize, offset: i64) -> Option<(Rows, Extents)> {
        let elements = self.terms_of(b)?.softmax;
        let view = View {
            offset: offset.saturating_add(elements.first),
            batch: 0,
            head: elements.head,
            row: elements.row,
            dim: 1,
        };
        let covered = extents([1, self.heads, rows, SoftmaxRows::COPIES]);
        let dtype = DType::Float;
        Some((Rows { view, lanes: 0, dtype }, covered))
    }
}
