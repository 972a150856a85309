//! SparseFlashAttention: latent attention to the keys that a list names for each query row.
//!
//! A row has a list of blocks of `sparseBlockSize` keys, which [LightningIndexer](super::lightning_indexer) can
//! choose, and attends to their keys with all its heads: `softmax(scale (q · k + qr · kr)) k`. There is one key head,
//! whose 512 elements are the value too.

mod chosen;
mod latent_rules;
mod problem;
pub mod rules;

pub use chosen::{EntryFault, EntryFaultKind};
pub(crate) use latent_rules::{LatentRules, latent_rules};
pub use problem::SparseFlashProblem;
pub(crate) use problem::resolved_problem;
pub(crate) use rules::{POWERS, heads_fix, largest_divisor};

use super::sparse_sequences::checked_by_sequences;
use crate::Cann::{V8_5, V9_1, V9_2};
use crate::DType::Float;
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, TensorDesc};

declare_operator! {
    /// Source: aclnnSparseFlashAttention, parameter table.
    sparse_flash_attention_arguments, "SparseFlashAttention", #[derive(Copy)] SparseFlashCall<'a>;
    1 { query: tensor, Query, "query",
        "Queries without their rotary part, `[B, S1, N1, 512]` or `[T1, N1, 512]`." }
    1 { key: tensor, Key, "key",
        "Latent keys, which are the values too, with one head: `[B, S2, 1, 512]`, `[T2, 1, 512]` or \
         `[blocks, block size, 1, 512]`." }
    1 { value: tensor, Value, "value", "The same tensor as `key`. From 9.1 on null is `key`." }
    1 { sparse_indices: tensor, SparseIndices, "sparseIndices",
        "The blocks that each row reads, by their number in its sequence, `[B, S1, 1, K]` or `[T1, 1, K]`; -1 \
         after the last." }
    1 { block_table: tensor, BlockTable, "blockTable",
        "The blocks of each sequence in a paged cache, `[B, M]`." }
    1 { actual_seq_lengths_query: tensor, ActualSeqLengthsQuery, "actualSeqLengthsQuery",
        "Query rows of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { actual_seq_lengths_kv: tensor, ActualSeqLengthsKv, "actualSeqLengthsKv",
        "Keys of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { query_rope: tensor, QueryRope, "queryRope", "Rotary part of the queries, 64 elements each." }
    1 { key_rope: tensor, KeyRope, "keyRope", "Rotary part of the keys, 64 elements each." }
    2 { sinks: tensor, Sinks, "sinks",
        "One more logit for each head, which has no value, `[N1]`; on Ascend 950." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
    1 { sparse_block_size: int = 1, SparseBlockSize, "sparseBlockSize", "Keys of a block of `sparseIndices`." }
    1 { layout_query: text = "BSND", LayoutQuery, "layoutQuery", "Axes of `query`: `BSND` or `TND`." }
    1 { layout_kv: text = "BSND", LayoutKv, "layoutKv", "Axes of `key`: as those of `query`, or `PA_BSND`." }
    1 { sparse_mode: int = 3, SparseMode, "sparseMode",
        "0: a row may read all keys; 3: those up to its own position, counted from the end." }
    1 { pre_tokens: int = i64::MAX, PreTokens, "preTokens", "Reserved: the largest number." }
    1 { next_tokens: int = i64::MAX, NextTokens, "nextTokens", "Reserved: the largest number." }
    1 { attention_mode: int = 2, AttentionMode, "attentionMode", "2: latent attention in its absorbed form." }
    1 { return_softmax_lse: flag = false, ReturnSoftmaxLse, "returnSoftmaxLse",
        "Whether maximum and sum of each row are written as well." }
    1 { attention_out: output, AttentionOut, "attentionOut", "Attention, with the shape of `query`." }
    1 { softmax_max: output, SoftmaxMax, "softmaxMax",
        "The largest score of each row and head, `[B, 1, S1, N1]` or `[1, T1, N1]`; empty without \
         `returnSoftmaxLse`." }
    1 { softmax_sum: output, SoftmaxSum, "softmaxSum",
        "The sum of the exponentials of the scores, from which the largest is taken, in the same shape." }
}

versions! {
    /// A version of SparseFlashAttention.
    pub enum Version {
        /// The first.
        V1 = OperatorVersion::new(1, "aclnnSparseFlashAttention", "8.5")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_1),
        /// Adds sinks.
        V2 = OperatorVersion::new(2, "aclnnSparseFlashAttentionV2", "9.2")
            .exported_since(V9_2).on_a2_a3(V9_2).on_ascend950(V9_2),
    }
}

impl Version {
    /// The oldest version that can express a call.
    pub fn oldest_for(call: &SparseFlashCall<'_>) -> Version {
        match call.sinks {
            None => Version::V1,
            Some(_) => Version::V2,
        }
    }
}

described_by! { SparseFlashAttention, rules::RULES }

impl CallContract for SparseFlashAttention {
    checked_for! { target, version }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let Some([out, softmax]) = arguments.call().outputs() else {
            return;
        };
        arguments.attention_out = arguments.attention_out.or(Some(out));
        arguments.softmax_max = arguments.softmax_max.or(Some(softmax));
        arguments.softmax_sum = arguments.softmax_sum.or(Some(softmax));
    }

    checked_by_sequences! { SparseFlashCall::CONTENTS, version }
}

impl SparseFlashCall<'_> {
    /// The tensors whose numbers lead to rows of others: lengths of queries and keys, and the block table.
    pub const CONTENTS: [Parameter; 3] =
        [Parameter::ActualSeqLengthsQuery, Parameter::ActualSeqLengthsKv, Parameter::BlockTable];

    /// Attention, and the form of both softmax outputs, as the inputs imply them; `None` without queries, or for shapes
    /// that no tensor can have. Without `returnSoftmaxLse` the latter are empty.
    pub fn outputs(&self) -> Option<[TensorDesc; 2]> {
        let query = self.query?;
        let out = TensorDesc::packed(query.dtype, query.shape);
        let softmax = match self.return_softmax_lse {
            true => softmax_shape(&query)?,
            false => Dims::of([0]),
        };
        let softmax = TensorDesc::packed(Float, softmax);
        (out.byte_range().is_some() && softmax.byte_range().is_some()).then_some([out, softmax])
    }
}

/// Shape of the softmax outputs: that of the queries without their elements, with an axis for the key head before the
/// rows.
fn softmax_shape(query: &TensorDesc) -> Option<Dims> {
    match query.shape[..] {
        [rows, heads, _] => Some(Dims::of([1, rows, heads])),
        [batch, rows, heads, _] => Some(Dims::of([batch, 1, rows, heads])),
        _ => None,
    }
}
