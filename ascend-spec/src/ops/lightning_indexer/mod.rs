//! LightningIndexer: the keys that each row of sparse attention reads, chosen by a cheap score.
//!
//! The score of a key is the sum over heads of `weight * max(0, query · key)`, with one key head and without a scale.
//! A row may choose among the first keys of its sequence: all of them, or those up to its own position. Of these it
//! gets the `sparseCount` with the best scores, as positions in the sequence, and -1 where there are no more.

pub mod rules;

pub(crate) use rules::{ANY_COUNT, DIM, HEADS_950, MOST_HEADS, heads_fix};

use super::sparse_sequences::{SparseSequences, checked_by_sequences};
use crate::Cann::{V8_5, V9_1};
use crate::DType::Int32;
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::{Dims, TensorDesc};

declare_operator! {
    /// Source: aclnnLightningIndexer, parameter table.
    lightning_indexer_arguments, "LightningIndexer", #[derive(Copy)] IndexerCall<'a>;
    1 { query: tensor, Query, "query", "Queries of the indexer, `[B, S1, N1, 128]` or `[T1, N1, 128]`." }
    1 { key: tensor, Key, "key",
        "Keys of the indexer, with one head: `[B, S2, 1, 128]`, `[T2, 1, 128]` or \
         `[blocks, block size, 1, 128]`." }
    1 { weights: tensor, Weights, "weights",
        "A weight for each head of each row, `[B, S1, N1]` or `[T1, N1]`." }
    1 { actual_seq_lengths_query: tensor, ActualSeqLengthsQuery, "actualSeqLengthsQuery",
        "Query rows of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { actual_seq_lengths_key: tensor, ActualSeqLengthsKey, "actualSeqLengthsKey",
        "Keys of each sequence, `[B]`; for TND the end of each. Null is the whole of BSND." }
    1 { block_table: tensor, BlockTable, "blockTable",
        "The blocks of each sequence in a paged cache, `[B, M]`." }
    1 { layout_query: text = "BSND", LayoutQuery, "layoutQuery", "Axes of `query`: `BSND` or `TND`." }
    1 { layout_key: text = "BSND", LayoutKey, "layoutKey", "Axes of `key`: as those of `query`, or `PA_BSND`." }
    1 { sparse_count: int = 2048, SparseCount, "sparseCount", "Number of keys that a row gets." }
    1 { sparse_mode: int = 3, SparseMode, "sparseMode",
        "0: a row chooses among all keys; 3: among those up to its own position, counted from the end." }
    1 { pre_tokens: int = i64::MAX, PreTokens, "preTokens", "Reserved: the largest number." }
    1 { next_tokens: int = i64::MAX, NextTokens, "nextTokens", "Reserved: the largest number." }
    1 { return_values: flag = false, ReturnValues, "returnValues", "Whether the scores are written as well." }
    1 { sparse_indices: output, SparseIndices, "sparseIndices",
        "Positions of the chosen keys in their sequence, `[B, S1, 1, K]` or `[T1, 1, K]`; -1 after the last." }
    1 { sparse_values: output, SparseValues, "sparseValues",
        "Their scores in the dtype of `query`; -inf where there is no key. Null or \
         empty without `returnValues`." }
}

versions! {
    /// The version of LightningIndexer.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnLightningIndexer", "8.5")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_1),
    }
}

described_by! { LightningIndexer, rules::RULES }

impl CallContract for LightningIndexer {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let Some([indices, values]) = arguments.call().outputs() else {
            return;
        };
        arguments.sparse_indices = arguments.sparse_indices.or(Some(indices));
        arguments.sparse_values = arguments.sparse_values.or(Some(values));
    }

    checked_by_sequences! { IndexerCall::CONTENTS }
}

/// A call of LightningIndexer or QuantLightningIndexer that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerProblem {
    /// The sequences.
    pub sequences: SparseSequences,
    /// Number of query heads.
    pub heads: usize,
    /// Number of keys that a row gets.
    pub count: usize,
    /// Whether scores are written.
    pub values: bool,
    /// Whether the keys of a row are in the order of their scores, the best first. Ascend 950 promises no order; here
    /// they are in the order of their positions there.
    pub best_first: bool,
    /// Whether a launch may leave the call's tensors.
    pub overruns: bool,
}

impl IndexerProblem {
    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.sequences.query.total() == 0 || self.count == 0
    }
}

impl WalkedTensors<IndexerCall<'_>> for IndexerProblem {
    fn walked_shape(&self, call: &IndexerCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        match parameter {
            _ if self.is_idle() => None,
            Parameter::SparseValues if !self.values => None,
            // A release that does not look at the shape of the scores writes one for each index.
            Parameter::SparseValues => Some(call.sparse_indices?.shape),
            _ => Some(desc.shape),
        }
    }
}

impl IndexerCall<'_> {
    /// The tensors whose numbers lead to rows of others: lengths of queries and keys, and the block table.
    pub const CONTENTS: [Parameter; 3] =
        [Parameter::ActualSeqLengthsQuery, Parameter::ActualSeqLengthsKey, Parameter::BlockTable];

    /// Both outputs, as the inputs imply them; `None` without queries, or for shapes that no tensor can have. Without
    /// `returnValues` the scores are empty.
    pub fn outputs(&self) -> Option<[TensorDesc; 2]> {
        let query = self.query?;
        let indices = chosen_positions(&query, self.sparse_count)?;
        let of_values = if self.return_values { indices.shape } else { Dims::of([0]) };
        let values = TensorDesc::packed(query.dtype, of_values);
        (indices.byte_range().is_some() && values.byte_range().is_some()).then_some([indices, values])
    }
}

/// The positions that the rows of a query get.
pub(crate) fn chosen_positions(query: &TensorDesc, count: i64) -> Option<TensorDesc> {
    let axes = query.shape.rank().checked_sub(2)?;
    let mut shape = query.shape.get(..axes)?.to_vec();
    shape.extend([1, count]);
    Some(TensorDesc::packed(Int32, Dims::new(&shape)?))
}
