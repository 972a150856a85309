//! KvQuantSparseFlashAttention: SparseFlashAttention whose keys have one byte an element.
//!
//! A key is a [`QuantisedRow`]: quantised elements, which are the value too, a rotary part in the dtype of the queries,
//! and a scale for each tile of elements. Lists and sequences are those of
//! [SparseFlashAttention](super::sparse_flash_attention); maxima and sums are not written.

pub mod rules;

use super::sparse_flash_attention::SparseFlashProblem;
use super::sparse_sequences::checked_by_sequences;
use crate::Cann::{V8_5, V9_0};
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};
use std::ops::Range;

declare_operator! {
    /// Source: aclnnKvQuantSparseFlashAttention, parameter table.
    kv_quant_sparse_flash_attention_arguments, "KvQuantSparseFlashAttention", #[derive(Copy)] QuantSparseFlashCall<'a>;
    1 { query: tensor, Query, "query",
        "Queries, 512 elements and then 64 rotary ones, `[B, S1, N1, 576]` or `[T1, N1, 576]`." }
    1 { key: tensor, Key, "key",
        "Rows of 656 bytes, which are keys and values, with one head: `[B, S2, 1, 656]`, `[T2, 1, 656]` or \
         `[blocks, block size, 1, 656]`." }
    1 { value: tensor, Value, "value", "The same tensor as `key`." }
    1 { sparse_indices: tensor, SparseIndices, "sparseIndices",
        "The blocks that each row reads, by their number in its sequence, `[B, S1, 1, K]` or `[T1, 1, K]`; -1 \
         after the last." }
    1 { key_dequant_scale: tensor, KeyDequantScale, "keyDequantScale",
        "Reserved: null. Rows have their scales." }
    1 { value_dequant_scale: tensor, ValueDequantScale, "valueDequantScale",
        "Reserved: null. Rows have their scales." }
    1 { block_table: tensor, BlockTable, "blockTable",
        "The blocks of each sequence in a paged cache, `[B, M]`." }
    1 { actual_seq_lengths_query: tensor, ActualSeqLengthsQuery, "actualSeqLengthsQuery",
        "Query rows of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { actual_seq_lengths_kv: tensor, ActualSeqLengthsKv, "actualSeqLengthsKv",
        "Keys of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
    1 { key_quant_mode: int = 2, KeyQuantMode, "keyQuantMode", "2: a scale for each tile of a row." }
    1 { value_quant_mode: int = 2, ValueQuantMode, "valueQuantMode", "2: a scale for each tile of a row." }
    1 { sparse_block_size: int = 1, SparseBlockSize, "sparseBlockSize", "Keys of a block of `sparseIndices`." }
    1 { layout_query: text = "BSND", LayoutQuery, "layoutQuery", "Axes of `query`: `BSND` or `TND`." }
    1 { layout_kv: text = "BSND", LayoutKv, "layoutKv", "Axes of `key`: as those of `query`, or `PA_BSND`." }
    1 { sparse_mode: int = 3, SparseMode, "sparseMode",
        "0: a row may read all keys; 3: those up to its own position, counted from the end." }
    1 { pre_tokens: int = i64::MAX, PreTokens, "preTokens", "Reserved: the largest number." }
    1 { next_tokens: int = i64::MAX, NextTokens, "nextTokens", "Reserved: the largest number." }
    1 { attention_mode: int = 2, AttentionMode, "attentionMode", "2: latent attention in its absorbed form." }
    1 { quant_scale_repo_mode: int = 1, QuantScaleRepoMode, "quantScaleRepoMode",
        "1: scales are in the rows of `key`." }
    1 { tile_size: int = 128, TileSize, "tileSize", "Elements of a row with one scale: 128." }
    1 { rope_head_dim: int = 64, RopeHeadDim, "ropeHeadDim", "Elements of a rotary part: 64." }
    1 { attention_out: output, AttentionOut, "attentionOut",
        "Attention, `[B, S1, N1, 512]` or `[T1, N1, 512]` in the dtype of `query`." }
}

versions! {
    /// The version of KvQuantSparseFlashAttention.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnKvQuantSparseFlashAttention", "8.5")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_0),
    }
}

described_by! { KvQuantSparseFlashAttention, rules::RULES }

impl CallContract for KvQuantSparseFlashAttention {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let out = arguments.call().output();
        arguments.attention_out = arguments.attention_out.or(out);
    }

    checked_by_sequences! { QuantSparseFlashCall::CONTENTS }
}

/// A row of `key`: quantised elements, then a rotary part in the dtype of the queries, then scales of FLOAT, both in
/// the machine's byte order.
///
/// Element `d` is its quantised value times scale `d / 128`, rounded to the dtype of the queries.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedRow;

impl QuantisedRow {
    /// Bytes of a row, which is as many elements of one byte.
    pub const BYTES: usize = 656;
    /// Elements with one scale.
    pub const TILE: usize = 128;
    /// Where the rotary part is.
    pub const ROPE: Range<usize> = 512..640;
    /// Where the scales are.
    pub const SCALES: Range<usize> = 640..656;
    /// Elements that a row stands for: those of a key and of its rotary part.
    pub const DIM: usize = SparseFlashProblem::DIM + SparseFlashProblem::ROPE_DIM;
}

impl QuantSparseFlashCall<'_> {
    /// The tensors whose numbers lead to rows of others: lengths of queries and keys, and the block table.
    pub const CONTENTS: [Parameter; 3] =
        [Parameter::ActualSeqLengthsQuery, Parameter::ActualSeqLengthsKv, Parameter::BlockTable];

    /// Attention, as the inputs imply it; `None` without queries, or for shapes that no tensor can have.
    pub fn output(&self) -> Option<TensorDesc> {
        let query = self.query?;
        let axis = query.shape.rank().checked_sub(1)?;
        let shape = query.shape.with(axis, SparseFlashProblem::DIM as i64);
        let out = TensorDesc::packed(query.dtype, shape);
        out.byte_range().is_some().then_some(out)
    }
}

impl WalkedTensors<QuantSparseFlashCall<'_>> for SparseFlashProblem {
    fn walked_shape(&self, _: &QuantSparseFlashCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        match parameter {
            _ if self.is_idle() => None,
            // The values are elements of the keys.
            Parameter::Value | Parameter::KeyDequantScale | Parameter::ValueDequantScale => None,
            _ => Some(desc.shape),
        }
    }
}
