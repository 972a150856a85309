//! QuantLightningIndexer: LightningIndexer with queries and keys of one byte an element.
//!
//! The score of a key is the sum over heads of `weight * max(0, sq sk (query · key))`, with scales of at
//! least 0, `sq` for each head of a row and `sk` for each key; the kernel multiplies by both after the maximum. What a
//! row chooses among and gets is as for [LightningIndexer](super::lightning_indexer); scores are not written.

pub mod rules;

use super::lightning_indexer::{IndexerProblem, chosen_positions};
use super::sparse_sequences::checked_by_sequences;
use crate::Cann::{V8_5, V9_0};
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};

declare_operator! {
    /// Source: aclnnQuantLightningIndexer, parameter table.
    quant_lightning_indexer_arguments, "QuantLightningIndexer", #[derive(Copy)] QuantIndexerCall<'a>;
    1 { query: tensor, Query, "query", "Queries of the indexer, `[B, S1, N1, 128]` or `[T1, N1, 128]`." }
    1 { key: tensor, Key, "key",
        "Keys of the indexer, with one head: `[B, S2, 1, 128]`, `[T2, 1, 128]` or \
         `[blocks, block size, 1, 128]`." }
    1 { weights: tensor, Weights, "weights",
        "A weight for each head of each row, `[B, S1, N1]` or `[T1, N1]`." }
    1 { query_dequant_scale: tensor, QueryDequantScale, "queryDequantScale",
        "A scale of at least 0 for each head of each row, in the shape of `weights`." }
    1 { key_dequant_scale: tensor, KeyDequantScale, "keyDequantScale",
        "A scale of at least 0 for each key, in the shape of `key` without its last axis." }
    1 { actual_seq_lengths_query: tensor, ActualSeqLengthsQuery, "actualSeqLengthsQuery",
        "Query rows of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { actual_seq_lengths_key: tensor, ActualSeqLengthsKey, "actualSeqLengthsKey",
        "Keys of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { block_table: tensor, BlockTable, "blockTable",
        "The blocks of each sequence in a paged cache, `[B, M]`." }
    1 { query_quant_mode: int = 0, QueryQuantMode, "queryQuantMode", "0: a scale for each head of each row." }
    1 { key_quant_mode: int = 0, KeyQuantMode, "keyQuantMode", "0: a scale for each key." }
    1 { layout_query: text = "BSND", LayoutQuery, "layoutQuery", "Axes of `query`: `BSND` or `TND`." }
    1 { layout_key: text = "BSND", LayoutKey, "layoutKey", "Axes of `key`: as those of `query`, or `PA_BSND`." }
    1 { sparse_count: int = 2048, SparseCount, "sparseCount", "Number of keys that a row gets." }
    1 { sparse_mode: int = 3, SparseMode, "sparseMode",
        "0: a row chooses among all keys; 3: among those up to its own position, counted from the end." }
    1 { pre_tokens: int = i64::MAX, PreTokens, "preTokens", "Reserved: the largest number." }
    1 { next_tokens: int = i64::MAX, NextTokens, "nextTokens", "Reserved: the largest number." }
    1 { sparse_indices: output, SparseIndices, "sparseIndices",
        "Positions of the chosen keys in their sequence, `[B, S1, 1, K]` or `[T1, 1, K]`; -1 after the last." }
}

versions! {
    /// The version of QuantLightningIndexer.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnQuantLightningIndexer", "8.5")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_0),
    }
}

described_by! { QuantLightningIndexer, rules::RULES }

impl CallContract for QuantLightningIndexer {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let indices = arguments.call().output();
        arguments.sparse_indices = arguments.sparse_indices.or(indices);
    }

    checked_by_sequences! { QuantIndexerCall::CONTENTS }
}

impl QuantIndexerCall<'_> {
    /// The tensors whose numbers lead to rows of others: lengths of queries and keys, and the block table.
    pub const CONTENTS: [Parameter; 3] =
        [Parameter::ActualSeqLengthsQuery, Parameter::ActualSeqLengthsKey, Parameter::BlockTable];

    /// The positions, as the inputs imply them; `None` without queries, or for shapes that no tensor can have.
    pub fn output(&self) -> Option<TensorDesc> {
        let indices = chosen_positions(&self.query?, self.sparse_count)?;
        indices.byte_range().is_some().then_some(indices)
    }
}

impl WalkedTensors<QuantIndexerCall<'_>> for IndexerProblem {
    fn walked_shape(&self, _: &QuantIndexerCall<'_>, _: Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle()).then_some(desc.shape)
    }
}
