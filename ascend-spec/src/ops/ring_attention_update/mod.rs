//! RingAttentionUpdate: merges two outputs of FlashAttentionScore, each over a part of the keys, into the output over
//! both parts.
//!
//! Each part has the maximum and the sum of each row beside its attention, in the orders in which FlashAttentionScore
//! writes them ([`SoftmaxOrder`]).

mod merge;
pub mod rules;

pub use merge::{Merged, Part, admits, admits_keyless, merge};

use crate::Cann::{V8_1, V9_0};
use crate::attention_problem::SoftmaxOutputs;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::ops::flash_attention_score::{InputLayout, Sequence, SoftmaxOrder};
use crate::{DType, Dims, TensorDesc};
use std::ops::Range;

declare_operator! {
    /// Source: aclnnRingAttentionUpdate V1 and V2, parameter tables.
    ring_attention_update_arguments, "RingAttentionUpdate", #[derive(Copy)] RingUpdateCall<'a>;
    1 { prev_attn_out: tensor, PrevAttnOut, "prevAttnOut",
        "Attention over the first keys, `[S, B, H]` or packed `[T, N, D]`." }
    1 { prev_softmax_max: tensor, PrevSoftmaxMax, "prevSoftmaxMax",
        "Its maxima, `[B, N, S, 8]` or `[T, N, 8]`." }
    1 { prev_softmax_sum: tensor, PrevSoftmaxSum, "prevSoftmaxSum", "Its sums, as the maxima." }
    1 { cur_attn_out: tensor, CurAttnOut, "curAttnOut", "Attention over the other keys." }
    1 { cur_softmax_max: tensor, CurSoftmaxMax, "curSoftmaxMax", "Its maxima." }
    1 { cur_softmax_sum: tensor, CurSoftmaxSum, "curSoftmaxSum", "Its sums." }
    1 { actual_seq_qlen: tensor, ActualSeqQlen, "actualSeqQlen",
        "Ends of packed sequences behind a leading 0, in device memory." }
    1 { input_layout: optional_text, InputLayout, "inputLayout", "`SBH` or `TND`." }
    2 { input_softmax_layout: optional_text, InputSoftmaxLayout, "inputSoftmaxLayout",
        "Order of packed softmax tensors: `TND` as they read, otherwise a block `[N, Sq, 8]` for each \
         sequence." }
    1 { attn_out: output, AttnOut, "attnOut", "Merged attention." }
    1 { softmax_max: output, SoftmaxMax, "softmaxMax", "Merged maxima." }
    1 { softmax_sum: output, SoftmaxSum, "softmaxSum", "Merged sums." }
}

described_by! { RingAttentionUpdate, rules::RULES }

impl CallContract for RingAttentionUpdate {
    checked_for! { target, version }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let packed = |desc: TensorDesc, dtype| TensorDesc::packed(dtype, desc.shape);
        let attn = arguments.prev_attn_out.map(|desc| packed(desc, desc.dtype));
        let softmax = arguments.prev_softmax_max.map(|desc| packed(desc, DType::Float));
        arguments.attn_out = arguments.attn_out.or(attn);
        arguments.softmax_max = arguments.softmax_max.or(softmax);
        arguments.softmax_sum = arguments.softmax_sum.or(softmax);
    }

    contents_checked_for! { target, version, |_, problem, integers| {
        problem.admits_lengths(&integers(Parameter::ActualSeqQlen))
    } }
}

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
    /// Whether there is nothing to compute: never, since a call without elements breaks a rule.
    pub fn is_idle(&self) -> bool {
        false
    }

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
            Sequence { index, q_first: first, q_len: len, ..Sequence::default() }
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
                (_, true) => desc.walked([rows, heads, SoftmaxOutputs::COPIES]),
                (_, false) => desc.walked([self.batch, heads, rows, SoftmaxOutputs::COPIES]),
            };
            visit(argument.parameter, touched);
        }
    }

    /// Index of the first element of a row of a head among the elements of the attention. Exact where the tensor fits
    /// in memory; saturates elsewhere.
    pub fn attention_element(&self, sequence: &Sequence, head: usize, row: usize) -> usize {
        let row = match self.layout.is_packed() {
            true => sequence.q_first.saturating_add(row),
            false => row.saturating_mul(self.batch).saturating_add(sequence.index),
        };
        let row = row.saturating_mul(self.heads).saturating_add(head);
        row.saturating_mul(self.head_dim)
    }
}

versions! {
    /// A version of RingAttentionUpdate.
    pub enum Version {
        /// The first.
        V1 = OperatorVersion::new(1, "aclnnRingAttentionUpdate", "8.1").on_a2_a3(V8_1).on_ascend950(V9_0),
        /// Adds the order of packed softmax tensors.
        V2 = OperatorVersion::new(2, "aclnnRingAttentionUpdateV2", "after 8.1").on_a2_a3(V8_1).on_ascend950(V9_0),
    }
}

impl Version {
    /// The oldest version that can express a call.
    pub fn oldest_for(call: &RingUpdateCall<'_>) -> Version {
        match call.input_softmax_layout {
            None | Some("") => Version::V1,
            Some(_) => Version::V2,
        }
    }
}
