//! NsaCompressAttentionInfer: attention to compressed tokens in a paged cache, whose weights choose blocks of original
//! tokens.
//!
//! A row attends to the compressed tokens of its sequence. The weights of those in a block of `l'` original
//! tokens, or beside it, are the block's score, summed over the query heads of a key head. A row gets the blocks with
//! the highest scores; the first block and the last two are always among them.
//! [NsaSelectedAttentionInfer](super::nsa_selected_attention_infer) attends to their tokens.

pub mod rules;

use super::native_sparse::{Compression, NsaAttention};
use super::sparse_sequences::{SparseSequence, checked_contents};
use crate::Cann::V8_5;
use crate::DType::Int32;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};
use std::ops::Range;

declare_operator! {
    /// Source: aclnnNsaCompressAttentionInfer, parameter table.
    nsa_compress_attention_infer_arguments, "NsaCompressAttentionInfer", #[derive(Copy)] NsaCompressAttentionCall<'a>;
    1 { query: tensor, Query, "query", "Queries, `[T, N1, D]` or `[B, S, N1, D]`." }
    1 { key: tensor, Key, "key", "Cache of compressed keys, `[blocks, page, N2 * D]`." }
    1 { value: tensor, Value, "value", "Cache of compressed values, `[blocks, page, N2 * Dv]`." }
    1 { attention_mask: tensor, AttentionMask, "attentionMask", "Not looked at here: null." }
    1 { block_table: tensor, BlockTable, "blockTable", "The blocks of each sequence in the cache, `[B, M]`." }
    1 { actual_q_seq_len: ints, ActualQSeqLen, "actualQSeqLen",
        "Query rows of each sequence, also in TND; null is one row, or all of BSND." }
    1 { actual_cmp_kv_seq_len: ints, ActualCmpKvSeqLen, "actualCmpKvSeqLen",
        "Compressed tokens of each sequence." }
    1 { actual_sel_kv_seq_len: ints, ActualSelKvSeqLen, "actualSelKvSeqLen",
        "Original tokens of each sequence: rows do not see compressed tokens that reach behind their \
         position." }
    1 { top_k_mask: tensor, TopKMask, "topKMask", "Reserved: null." }
    1 { num_heads: int = 1, NumHeads, "numHeads", "Heads of `query`, N1." }
    1 { num_key_value_heads: int = 1, NumKeyValueHeads, "numKeyValueHeads", "Heads of the cache, N2." }
    1 { select_block_size: int = 64, SelectBlockSize, "selectBlockSize", "Tokens of a selected block, l'." }
    1 { select_block_count: int = 16, SelectBlockCount, "selectBlockCount",
        "Blocks that are selected for each row and key head." }
    1 { compress_block_size: int = 32, CompressBlockSize, "compressBlockSize",
        "Tokens of which one compressed token is made, l." }
    1 { compress_block_stride: int = 16, CompressBlockStride, "compressBlockStride",
        "Tokens from the first of a compressed token to that of the next, d." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
    1 { layout: text = "TND", Layout, "layout", "Axes of `query`: `TND` or `BSND`." }
    1 { page_block_size: int = 128, PageBlockSize, "pageBlockSize", "Tokens of a block of the cache." }
    1 { sparse_mode: int = 0, SparseMode, "sparseMode", "0: no mask is given." }
    1 { output: output, Output, "output", "Attention, in the shape of `query` with the elements of a value." }
    1 { top_k_output: output, TopKOutput, "topKOutput",
        "The selected blocks of each row and key head, `[T, N2, selectBlockCount]` or \
         `[B, S, N2, selectBlockCount]`." }
}

versions! {
    /// The version of NsaCompressAttentionInfer.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnNsaCompressAttentionInfer", "8.5").exported_since(V8_5).on_a2_a3(V8_5),
    }
}

described_by! { NsaCompressAttentionInfer, rules::RULES }

impl CallContract for NsaCompressAttentionInfer {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let Some([output, selected]) = arguments.call().outputs() else {
            return;
        };
        arguments.output = arguments.output.or(Some(output));
        arguments.top_k_output = arguments.top_k_output.or(Some(selected));
    }

    contents_checked_for! { target, |call, problem, integers| {
        let numbers = call.numbers(&problem, integers(Parameter::BlockTable));
        checked_contents(&problem.attention.sequences, &numbers, &rules::CONTENTS)
    } }
}

/// A call of NsaCompressAttentionInfer that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NsaCompressAttentionProblem {
    /// Queries, and the cache of compressed tokens.
    pub attention: NsaAttention,
    /// The blocks of original tokens that compressed tokens are made of.
    pub compression: Compression,
    /// Tokens of a selected block.
    pub select: usize,
}

impl NsaCompressAttentionProblem {
    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.attention.is_idle()
    }

    /// Number of compressed tokens, from the first on, that a row of a sequence sees. `original` is the sequence's
    /// number of original tokens, where the call says it: the row then sees those that end at its position or before.
    pub fn visible(&self, sequence: &SparseSequence, row: usize, original: Option<i64>) -> usize {
        let behind = sequence.queries.saturating_sub(row + 1);
        match original {
            Some(original) if sequence.queries > 1 => {
                let before = usize::try_from(original).unwrap_or(0).saturating_sub(behind);
                sequence.keys.min(self.compression.count(before))
            }
            _ => sequence.keys,
        }
    }

    /// Number of blocks of original tokens that a sequence of this number of compressed tokens has.
    pub fn blocks(&self, compressed: usize) -> usize {
        self.compression.blocks(self.select, compressed)
    }

    /// The compressed tokens whose weights are summed for a block: `(l' / d) (block + 1) - m - n` for each `m` below
    /// `l' / d` and each `n` below `l / d` (Yuan and others 2025). A token comes as often as it counts.
    pub fn parts(&self, block: usize) -> impl Iterator<Item = usize> + use<> {
        let stride = self.compression.stride.max(1);
        let (outer, inner) = (self.select / stride, self.compression.block / stride);
        let last = outer.saturating_mul(block.saturating_add(1));
        (0..outer).flat_map(move |m| (0..inner).filter_map(move |n| last.checked_sub(m + n)))
    }

    /// The blocks that are always selected, of `blocks` of them: the first and the last two.
    pub fn forced(blocks: usize) -> [Range<usize>; 2] {
        let last = blocks.saturating_sub(2).max(1).min(blocks);
        [0..blocks.min(1), last..blocks]
    }
}

impl WalkedTensors<NsaCompressAttentionCall<'_>> for NsaCompressAttentionProblem {
    fn walked_shape(&self, _: &NsaCompressAttentionCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        match parameter {
            _ if self.is_idle() => None,
            Parameter::AttentionMask | Parameter::TopKMask => None,
            _ => Some(desc.shape),
        }
    }
}

impl NsaCompressAttentionCall<'_> {
    /// What the sequences of the call, whose problem this is, read.
    pub fn numbers(&self, problem: &NsaCompressAttentionProblem, table: Vec<i64>) -> [Vec<i64>; 3] {
        let keys = self.actual_cmp_kv_seq_len.unwrap_or_default();
        problem.attention.numbers(self.query_lengths(), keys, table)
    }

    /// The query rows of each sequence; an array without numbers, which PyTorch's extension passes, is none.
    fn query_lengths(&self) -> Option<&[i64]> {
        self.actual_q_seq_len.filter(|lengths| !lengths.is_empty())
    }

    /// Attention and selected blocks, as the inputs imply them; `None` for shapes that no tensor can have.
    pub fn outputs(&self) -> Option<[TensorDesc; 2]> {
        let (query, value) = (self.query?, self.value?);
        let axes = query.shape.rank().checked_sub(2)?;
        let dim = value.shape.last()?.checked_div(self.num_key_value_heads)?;
        let output = TensorDesc::packed(query.dtype, query.shape.with(axes + 1, dim));
        let selected = [query.shape.get(..axes)?, &[self.num_key_value_heads, self.select_block_count]].concat();
        let selected = TensorDesc::packed(Int32, Dims::new(&selected)?);
        (output.byte_range().is_some() && selected.byte_range().is_some()).then_some([output, selected])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_block_and_the_last_two_are_forced_once() {
        let forced =
            |blocks| NsaCompressAttentionProblem::forced(blocks).map(|range| range.collect::<Vec<_>>()).concat();
        assert_eq!(forced(0), []);
        assert_eq!(forced(1), [0]);
        assert_eq!(forced(2), [0, 1]);
        assert_eq!(forced(3), [0, 1, 2]);
        assert_eq!(forced(9), [0, 7, 8]);
    }

    #[test]
    fn a_block_is_scored_by_the_tokens_that_reach_into_it() {
        let problem = NsaCompressAttentionProblem {
            attention: NsaAttention::IDLE,
            compression: Compression { block: 32, stride: 16 },
            select: 64,
        };
        let sorted = |block| {
            let mut parts: Vec<_> = problem.parts(block).collect();
            parts.sort_unstable();
            parts
        };
        assert_eq!(sorted(0), [0, 1, 1, 2, 2, 3, 3, 4]);
        assert_eq!(sorted(1), [4, 5, 5, 6, 6, 7, 7, 8]);
        assert_eq!((problem.blocks(1), problem.blocks(4), problem.blocks(3)), (1, 2, 1));
    }
}
