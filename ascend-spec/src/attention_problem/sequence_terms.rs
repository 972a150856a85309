//! Masks, biases and softmax outputs of single sequences, for operators where they differ between sequences.

use super::{AttentionProblem, ByteRange, Rows, extents};
use crate::layout::{Extents, View};
use crate::{DType, MaskGeometry};

/// What differs between the scores of sequences: the visible keys of one sequence, and where its elements are in the
/// tensors that have one for each score or for each row. Rows and keys count from the sequence's first; keys are the
/// last axis of the views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTerms {
    /// Visible keys of each row, before a mask tensor.
    pub geometry: MaskGeometry,
    /// Elements of the mask tensor.
    pub mask: Option<View>,
    /// Elements of the bias tensor. The number for row and key of a bias with
    /// [`up_to_row`](super::BiasTensor::up_to_row) depends on their distance, so that the stride of rows is -1.
    pub bias: Option<View>,
    /// Distance of the first key's position from the first query's, for slopes.
    pub key_offset: i64,
    /// Bits of the drop mask: bit `k % 8`, the least significant first, of byte `k / 8`.
    pub dropped: Option<View>,
    /// The first of the [`SoftmaxOutputs::COPIES`] equal, contiguous numbers that each row has in the softmax outputs.
    pub softmax: View,
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

impl SoftmaxOutputs {
    /// Equal numbers of a row.
    pub const COPIES: usize = 8;
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
        let (offset, rows, keys) = match bias.up_to_row {
            true => (elements.offset.saturating_sub(longest as i64 - 1), 1, longest),
            false => (elements.offset, q_len, kv_len),
        };
        let keys = if q_len == 0 || kv_len == 0 { 0 } else { keys };
        let covered = extents([1, self.heads, rows, keys]);
        Some((Rows { view: View { offset, ..elements }, ..bias.rows }, covered))
    }

    /// The elements of a softmax output for `rows` rows of sequence `b`, as the rows of a tensor of one batch entry and
    /// their extents. The tensor's first element is `offset`.
    pub fn softmax_rows(&self, b: usize, rows: usize, offset: i64) -> Option<(Rows, Extents)> {
        let elements = self.terms_of(b)?.softmax;
        let view = elements.moved(offset);
        let covered = extents([1, self.heads, rows, SoftmaxOutputs::COPIES]);
        Some((Rows { view, ..Rows::none(DType::Float) }, covered))
    }
}
