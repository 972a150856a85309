//! The rules of QuantLightningIndexer.

use super::{Parameter, QuantIndexerCall, Version};
use crate::Cann::V9_1;
use crate::DType::{Bf16, Float, Float8E4M3Fn, Float16, HiFloat8, Int8, Int32};
use crate::allowed::{Checked, Named, Outcome};
use crate::contract::first_lint;
use crate::ops::lightning_indexer::{ANY_COUNT, DIM, HEADS_950, IndexerProblem, MOST_HEADS, heads_fix};
use crate::ops::sparse_sequences::{SequenceTensors, SparseSequences, TokenLayout, sequence_rules, shaped};
use crate::rule::{require, rules};
use crate::{DType, Soc, Target, TensorDesc, Violation};

sequence_rules! {
    "quant_indexer", "QuantLightningIndexer", layout of keys "layoutKey", on Ascend 950 since "9.0",
    columns "", multiples "", rows without keys "such rows choose none",
    in Scope::ALL.since(V8_5).since_on_950(V9_0);
    {
        QUERY = "quant_indexer.query", API_ERROR, V1, "QuantLightningIndexer API, query"
            in Scope::ALL.since(V9_1).since_on_950(V9_1),
            "query is given",
            "pass the queries";
        UNCHECKED_NULL = "quant_indexer.unchecked_null", NullptrCrash("the library reads through the pointer"), V1,
            "QuantLightningIndexer API, key and keyDequantScale" in Scope::ALL.since(V9_1).since_on_950(V9_1),
            "key and keyDequantScale are given",
            "pass the keys and their scales";
        REQUIRED = "quant_indexer.required", PARAM_NULLPTR, V1,
            "QuantLightningIndexer documentation, return values",
            "query, key, weights, queryDequantScale, keyDequantScale and sparseIndices are given",
            "pass queries, keys, weights, the scales of both and the output";
        DTYPE = "quant_indexer.dtype", PARAM_INVALID, V1, "QuantLightningIndexer documentation, dtypes",
            "query and key are on Atlas A2 and A3 INT8 with weights and scales of FLOAT16, on Ascend 950 FLOAT8_E4M3FN "
            "or HIFLOAT8 with weights of BF16 and scales of FLOAT, from 9.1 on also INT8 or FLOAT8_E4M3FN with weights "
            "and scales of FLOAT16, and lengths, blockTable and sparseIndices are INT32",
            "convert the named tensor to one of the allowed dtypes";
    }
    {
        COUNT = "quant_indexer.count", TILING_ERROR, V1, "QuantLightningIndexer tiling, sparseCount",
            "sparseCount is 1 to 2048, for HIFLOAT8 2048",
            "choose 1 to 2048 keys, with HIFLOAT8 just 2048";
        QUANT_MODES = "quant_indexer.quant_modes", TILING_ERROR, V1, "QuantLightningIndexer tiling, quantisation",
            "queryQuantMode and keyQuantMode are 0",
            "pass 0, and a scale for each head of each row and for each key";
    }
    {
        HEAD_DIM = "quant_indexer.head_dim", TILING_ERROR, V1, "QuantLightningIndexer tiling, heads",
            "heads have 128 dimensions, and keys one head",
            "fill heads of fewer dimensions up to 128 with zeros; longer ones, and keys of several heads, have no "
            "operator: choose their keys on the host";
        HEADS = "quant_indexer.heads", TILING_ERROR, V1, "QuantLightningIndexer tiling, heads",
            "there are 64 query heads, from 9.1 on 1 to 64, on Ascend 950 24 or 64, from 9.1 on 8, 16, 24, 32 or 64",
            "fill queries, weights and scales up to such a number of heads with zeros, which count nothing; no call "
            "has more than 64";
        WEIGHTS = "quant_indexer.weights", TILING_ERROR, V1, "QuantLightningIndexer tiling, weights",
            "weights and queryDequantScale have the shape of query without its last axis",
            "give a weight and a scale for each head of each row";
        KEY_SCALE = "quant_indexer.key_scale", TILING_ERROR, V1, "QuantLightningIndexer tiling, keyDequantScale",
            "keyDequantScale has the shape of key without its last axis",
            "give a scale for each key";
        CONTIGUOUS = "quant_indexer.contiguous", TILING_ERROR, V1, "QuantLightningIndexer tiling, strides"
            in Scope::ASCEND_950.since_on_950(V9_1),
            "on Ascend 950 key and keyDequantScale are contiguous, or in a paged cache each of their blocks is",
            "copy keys and scales to contiguous tensors";
        INDICES = "quant_indexer.indices", TILING_ERROR, V1, "QuantLightningIndexer tiling, sparseIndices",
            "sparseIndices is [B, S1, 1, sparseCount] or [T1, 1, sparseCount]",
            "give room for the keys of each row";
        NONE_CHOSEN = "quant_indexer.none_chosen", Lint("nothing is written"), V1,
            "QuantLightningIndexer tiling, sparseIndices",
            "there is at least one row, and each chooses at least one key",
            "leave the call out where nothing is chosen";
    }
}

/// Number of query heads before 9.1.
const HEADS_BEFORE: i64 = 64;
/// Numbers of query heads on Ascend 950 before 9.1.
const HEADS_950_BEFORE: [i64; 2] = [24, 64];

/// The tensors that every call has.
struct Given {
    query: TensorDesc,
    key: TensorDesc,
    weights: TensorDesc,
    query_scale: TensorDesc,
    key_scale: TensorDesc,
    indices: TensorDesc,
}

impl QuantIndexerCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of lengths,
    /// table and scales are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<IndexerProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let given = self.required(target)?;
        self.dtypes(&given, target)?;
        FORMAT.formats(self)?;
        let resolved = |sequences, heads: i64| IndexerProblem {
            sequences,
            heads: usize::try_from(heads).unwrap_or(0),
            count: usize::try_from(self.sparse_count).unwrap_or(0),
            values: false,
            best_first: target.soc != Soc::Ascend950,
            overruns: false,
        };
        // A call whose output is empty ends before the tiling looks at it.
        if given.indices.is_empty() {
            return Ok(resolved(SparseSequences::none(), 0));
        }
        let layouts = SEQUENCES.layouts([self.layout_query, self.layout_key])?;
        // 9.0 takes other numbers for HIFLOAT8 too, for which its kernel is not documented.
        match given.query.dtype {
            HiFloat8 => COUNT.takes(self.sparse_count, ANY_COUNT)?,
            _ => COUNT.takes(self.sparse_count, 1..=ANY_COUNT)?,
        }
        SEQUENCES.visibility(self.sparse_mode, [self.pre_tokens, self.next_tokens])?;
        QUANT_MODES.takes(Named("queryQuantMode", self.query_quant_mode), 0)?;
        QUANT_MODES.takes(Named("keyQuantMode", self.key_quant_mode), 0)?;
        let sequences = SEQUENCES.resolve(
            &SequenceTensors {
                query: &given.query,
                key: &given.key,
                lengths: [self.actual_seq_lengths_query, self.actual_seq_lengths_key],
                names: ["actualSeqLengthsQuery", "actualSeqLengthsKey"],
                block_table: self.block_table,
                sparse_block_size: None,
            },
            layouts,
            self.sparse_mode == 3,
        )?;
        let heads = given.shapes(self.sparse_count, layouts[1], target)?;
        Ok(resolved(sequences, heads))
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, _: Target, allowed: &[&str]) -> Result<(), Violation> {
        first_lint(allowed, |report| {
            if let Some(indices) = self.sparse_indices.filter(TensorDesc::is_empty) {
                report(NONE_CHOSEN.broken(indices.shape, "rows and keys"));
            }
        })
    }

    fn required(&self, target: Target) -> Result<Given, Violation> {
        let (of_query, of_key) = match target.cann < V9_1 {
            true => (&REQUIRED, &REQUIRED),
            false => (&QUERY, &UNCHECKED_NULL),
        };
        Ok(Given {
            query: of_query.requires(self.query, "query")?,
            key: of_key.requires(self.key, "key")?,
            weights: REQUIRED.requires(self.weights, "weights")?,
            query_scale: REQUIRED.requires(self.query_dequant_scale, "queryDequantScale")?,
            key_scale: of_key.requires(self.key_dequant_scale, "keyDequantScale")?,
            indices: REQUIRED.requires(self.sparse_indices, "sparseIndices")?,
        })
    }

    fn dtypes(&self, given: &Given, target: Target) -> Checked {
        let own = given.query.dtype;
        let first_950 = target.is_950() && target.cann < V9_1;
        let of_query: &[DType] = match target.is_950() {
            true if first_950 => &[Float8E4M3Fn, HiFloat8],
            true => &[Int8, Float8E4M3Fn, HiFloat8],
            false => &[Int8],
        };
        DTYPE.takes(Named("query", own), of_query)?;
        let of_weights: &[DType] = match own {
            Int8 => &[Float16],
            Float8E4M3Fn if !first_950 => &[Float16, Bf16],
            _ => &[Bf16],
        };
        DTYPE.takes(Named("weights", given.weights.dtype), of_weights)?;
        let of_scales = match given.weights.dtype {
            Bf16 => Float,
            _ => Float16,
        };
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::Query | Parameter::Weights => return None,
                Parameter::Key => own,
                Parameter::QueryDequantScale | Parameter::KeyDequantScale => of_scales,
                _ => Int32,
            })
        })
    }
}

impl Given {
    /// Checks shapes, whose ranks are those of the layouts. Returns the number of query heads.
    fn shapes(&self, count: i64, layout_key: TokenLayout, target: Target) -> Result<i64, Violation> {
        let (rows, head) = self.query.shape.split_at(self.query.shape.rank() - 2);
        let (key_rows, key_head) = self.key.shape.split_at(self.key.shape.rank() - 2);
        HEAD_DIM.takes(Named("query", head[1]), DIM)?;
        HEAD_DIM.takes(Named("key", key_head[1]), DIM)?;
        HEAD_DIM.takes(Named("key heads", key_head[0]), 1)?;
        let heads = match (target.is_950(), target.cann < V9_1) {
            (true, true) => HEADS.takes(head[0], HEADS_950_BEFORE),
            (true, false) => HEADS.takes(head[0], HEADS_950),
            (false, true) => HEADS.takes(head[0], HEADS_BEFORE),
            (false, false) => HEADS.takes(head[0], 1..=MOST_HEADS),
        };
        heads.fix(|| heads_fix(&HEADS, head[0]))?;
        for (name, desc) in [("weights", &self.weights), ("queryDequantScale", &self.query_scale)] {
            shaped(&WEIGHTS, name, desc, rows, &head[..1])?;
        }
        shaped(&KEY_SCALE, "keyDequantScale", &self.key_scale, key_rows, &[1])?;
        // Strides between the blocks of a cache are passed to the kernel.
        let first = usize::from(layout_key == TokenLayout::PaBsnd);
        for (name, desc) in [("key", &self.key), ("keyDequantScale", &self.key_scale)] {
            let lies = desc.is_contiguous_from(first) || !CONTIGUOUS.scope.holds(target);
            require!(lies, CONTIGUOUS, format_args!("{name} {desc}"), "contiguous elements");
        }
        shaped(&INDICES, "sparseIndices", &self.indices, rows, &[1, count])?;
        Ok(head[0])
    }
}
