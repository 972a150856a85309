//! What a call that holds every rule merges.

use super::{Parameter, RingUpdateCall};
use crate::DType;
use crate::ops::flash_attention_score::{InputLayout, Sequence, SoftmaxOrder};
use std::ops::Range;

/// A call of RingAttentionUpdate that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingUpdateProblem {
    /// `SBH` or `TND`.
    pub layout: InputLayout,
    /// Number of sequences.
    pub batch: usize,
    /// Rows of a sequence, or of all where they are packed.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Type of the attention; maxima and sums are `FLOAT`.
    pub dtype: DType,
    /// Order of maxima and sums.
    pub softmax_order: SoftmaxOrder,
}

impl RingUpdateProblem {
    /// The rows of each sequence, in order. `ends` are the contents of `actualSeqQlen`; with a batch axis they are
    /// ignored.
    pub fn sequences<'a>(&self, ends: &'a [i64]) -> impl Iterator<Item = Sequence> + use<'a> {
        let (packed, rows) = (self.layout.is_packed(), self.rows);
        (0..self.batch).map(move |index| {
            let end = |index: usize| {
                let end = ends.get(index).copied().unwrap_or(0);
                usize::try_from(end).unwrap_or(0).min(rows)
            };
            let (first, len) = match packed {
                true => (end(index), end(index + 1).saturating_sub(end(index))),
                false => (0, rows),
            };
            Sequence {
                index,
                q_first: first,
                q_len: len,
                ..Sequence::default()
            }
        })
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base address,
    /// by the strides of its description.
    pub fn touches(&self, call: &RingUpdateCall<'_>, visit: &mut dyn FnMut(Parameter, Range<u64>)) {
        let packed = self.layout.is_packed();
        let (rows, heads, dim) = (self.rows, self.heads, self.head_dim);
        for (argument, desc) in call.each_tensor() {
            use Parameter::{ActualSeqQlen, AttnOut, CurAttnOut, PrevAttnOut};
            let touched = match (argument.parameter, packed) {
                (ActualSeqQlen, false) => continue,
                (ActualSeqQlen, true) => desc.walked([self.batch.saturating_add(1)]),
                (PrevAttnOut | CurAttnOut | AttnOut, true) => desc.walked([rows, heads, dim]),
                (PrevAttnOut | CurAttnOut | AttnOut, false) => {
                    desc.walked([rows, self.batch, heads.saturating_mul(dim)])
                }
                (_, true) => desc.walked([rows, heads, SoftmaxOrder::COPIES]),
                (_, false) => desc.walked([self.batch, heads, rows, SoftmaxOrder::COPIES]),
            };
            visit(argument.parameter, touched);
        }
    }

    /// Index of the first element of a row of a head among the elements of the attention. Exact where the tensor fits
    /// in memory; saturates elsewhere.
    pub fn attention_element(&self, of: &Sequence, head: usize, row: usize) -> usize {
        let row = match self.layout.is_packed() {
            true => of.q_first.saturating_add(row),
            false => row.saturating_mul(self.batch).saturating_add(of.index),
        };
        let row = row.saturating_mul(self.heads).saturating_add(head);
        row.saturating_mul(self.head_dim)
    }
}
