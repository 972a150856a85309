//! The rules of KvQuantSparseFlashAttention.

use super::{Parameter, QuantSparseFlashCall, QuantisedRow, Version};
use crate::Cann::V9_1;
use crate::DType::{Bf16, Float8E4M3Fn, Float16, HiFloat8, Int8, Int32};
use crate::allowed::{Checked, Named, Outcome};
use crate::contract::first_lint;
use crate::ops::sparse_flash_attention::{
    POWERS, SparseFlashProblem, heads_fix, largest_divisor, latent_rules, resolved_problem,
};
use crate::ops::sparse_sequences::{SequenceTensors, SparseSequences, shaped};
use crate::rule::{lint, rules};
use crate::{DType, Target, TensorDesc, Violation};

latent_rules! {
    "quant_sparse_flash", "KvQuantSparseFlashAttention", on Ascend 950 since "9.0",
    in Scope::ALL.since(V8_5).since_on_950(V9_0);
    {
        REQUIRED = "quant_sparse_flash.required", PARAM_NULLPTR, V1,
            "KvQuantSparseFlashAttention documentation, return values",
            "query, key, value, sparseIndices and attentionOut are given",
            "pass queries, rows of keys as key and as value, indices and the output";
        DTYPE = "quant_sparse_flash.dtype", PARAM_INVALID, V1, "KvQuantSparseFlashAttention documentation, dtypes",
            "query is FLOAT16 or BF16, on Ascend 950 in 9.0 BF16, attentionOut has its dtype, key and value are INT8, "
            "on Ascend 950 both FLOAT8_E4M3FN, both HIFLOAT8 or from 9.1 on both INT8, and indices, lengths and "
            "blockTable are INT32",
            "convert the named tensor to one of the allowed dtypes";
    }
    {
        QUANTISATION = "quant_sparse_flash.quantisation", TILING_ERROR, V1,
            "KvQuantSparseFlashAttention tiling, quantisation",
            "keyQuantMode and valueQuantMode are 2, quantScaleRepoMode is 1, tileSize 128 and ropeHeadDim 64",
            "pass these numbers, and rows that are quantised so";
        SPARSE_BLOCK_SIZE = "quant_sparse_flash.sparse_block_size", TILING_ERROR, V1,
            "KvQuantSparseFlashAttention tiling, sparseBlockSize",
            "sparseBlockSize is 1, 2, 4, 8 or 16, on Ascend 950 1",
            "choose blocks of such a size, or single keys";
    }
    {
        HEAD_DIM = "quant_sparse_flash.head_dim", TILING_ERROR, V1, "KvQuantSparseFlashAttention tiling, heads",
            "queries have 576 elements, and keys one head of 656",
            "join each query with its rotary part, and pack each key with its rotary part and its scales";
        HEADS = "quant_sparse_flash.heads", TILING_ERROR, V1, "KvQuantSparseFlashAttention tiling, heads",
            "there are 1, 2, 4, 8, 16, 32, 64 or 128 query heads, or on Ascend 950 48",
            "fill query heads up to such a number with zeros, or divide them over calls";
        ENTRIES = "quant_sparse_flash.entries", TILING_ERROR, V1, "KvQuantSparseFlashAttention tiling, sparseIndices"
            in Scope::ASCEND_950,
            "with keys of HIFLOAT8 lists have 2048 entries",
            "fill shorter lists up to 2048 entries with -1; longer ones need keys of another type";
        OUT = "quant_sparse_flash.out", TILING_ERROR, V1, "KvQuantSparseFlashAttention tiling, attentionOut",
            "attentionOut has the shape of query with 512 elements",
            "give room for the attention of each row";
        SCALES_UNREAD = "quant_sparse_flash.scales_unread", Lint("the tensors are not looked at"), V1,
            "KvQuantSparseFlashAttention documentation, keyDequantScale and valueDequantScale",
            "keyDequantScale and valueDequantScale are null, since rows have their scales",
            "leave both out, and write scales into the rows";
    }
}

/// Numbers of entries in a list for keys of HIFLOAT8.
const HIFLOAT8_ENTRIES: i64 = 2048;
/// Numbers of query heads on Ascend 950.
const HEADS_950: [i64; 9] = [1, 2, 4, 8, 16, 32, 48, 64, 128];
/// Numbers of keys in a block of a list on Atlas A2 and A3.
const BLOCKS: [i64; 5] = [1, 2, 4, 8, 16];

/// The tensors that every call has.
struct Given {
    query: TensorDesc,
    key: TensorDesc,
    indices: TensorDesc,
    out: TensorDesc,
}

impl QuantSparseFlashCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of lengths,
    /// table, indices and rows are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<SparseFlashProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let query = REQUIRED.requires(self.query, "query")?;
        let key = REQUIRED.requires(self.key, "key")?;
        REQUIRED.requires(self.value, "value")?;
        let indices = REQUIRED.requires(self.sparse_indices, "sparseIndices")?;
        let out = REQUIRED.requires(self.attention_out, "attentionOut")?;
        let given = Given { query, key, indices, out };
        self.dtypes(&given, target)?;
        FORMAT.formats(self)?;
        let resolved = |sequences| {
            let tensors = [&given.query, &given.indices];
            resolved_problem(sequences, tensors, self.sparse_block_size, self.scale)
        };
        // A call whose output is empty ends before the tiling looks at it.
        if given.out.is_empty() {
            return Ok(resolved(SparseSequences::none()));
        }
        let layouts = SEQUENCES.layouts([self.layout_query, self.layout_kv])?;
        self.judge_values(target)?;
        let sequences = SEQUENCES.resolve(
            &SequenceTensors {
                query: &given.query,
                key: &given.key,
                lengths: [self.actual_seq_lengths_query, self.actual_seq_lengths_kv],
                names: ["actualSeqLengthsQuery", "actualSeqLengthsKv"],
                block_table: self.block_table,
                sparse_block_size: Some(self.sparse_block_size),
            },
            layouts,
            self.sparse_mode == 3,
        )?;
        given.shapes(target)?;
        Ok(resolved(sequences))
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, _: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Some(key), Some(value), Some(indices)) = (self.key, self.value, self.sparse_indices) else {
            return Ok(());
        };
        if self.attention_out.is_none_or(|out| out.is_empty()) {
            return Ok(());
        }
        first_lint(allowed, |report| {
            LATENT.value([&value, &key], report);
            for (name, desc) in
                [("keyDequantScale", self.key_dequant_scale), ("valueDequantScale", self.value_dequant_scale)]
            {
                lint!(report, desc.is_none(), SCALES_UNREAD, name, "null");
            }
            LATENT.scale_and_lists(self.scale, &indices, report);
        })
    }

    /// Refuses a number of query heads that no call on `target` has.
    ///
    /// # Errors
    /// [`Violation`] by [`HEADS`].
    pub fn check_heads(target: Target, heads: i64) -> Result<(), Violation> {
        let verdict = match target.is_950() {
            true => HEADS.takes(heads, HEADS_950),
            false => HEADS.takes(heads, POWERS),
        };
        verdict.fix(|| heads_fix(&HEADS, heads))
    }

    /// The largest `sparseBlockSize` on `target` for a paged cache whose blocks have `block_size` keys: the fewest
    /// entries name all keys of a row then.
    pub fn largest_sparse_block_size(target: Target, block_size: usize) -> usize {
        match target.is_950() {
            true => 1,
            false => largest_divisor(&BLOCKS, block_size),
        }
    }

    fn dtypes(&self, given: &Given, target: Target) -> Checked {
        let own = given.query.dtype;
        let (of_query, of_rows): (&[DType], &[DType]) = match target.is_950() {
            true if target.cann < V9_1 => (&[Bf16], &[Float8E4M3Fn, HiFloat8]),
            true => (&[Float16, Bf16], &[Int8, Float8E4M3Fn, HiFloat8]),
            false => (&[Float16, Bf16], &[Int8]),
        };
        DTYPE.takes(Named("query", own), of_query)?;
        DTYPE.takes(Named("key", given.key.dtype), of_rows)?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::Value => given.key.dtype,
                Parameter::AttentionOut => own,
                Parameter::SparseIndices
                | Parameter::BlockTable
                | Parameter::ActualSeqLengthsQuery
                | Parameter::ActualSeqLengthsKv => Int32,
                _ => return None,
            })
        })
    }

    fn judge_values(&self, target: Target) -> Checked {
        SEQUENCES.visibility(self.sparse_mode, [self.pre_tokens, self.next_tokens])?;
        ATTENTION_MODE.takes(self.attention_mode, 2)?;
        for (name, given, allowed) in [
            ("keyQuantMode", self.key_quant_mode, 2),
            ("valueQuantMode", self.value_quant_mode, 2),
            ("quantScaleRepoMode", self.quant_scale_repo_mode, 1),
            ("tileSize", self.tile_size, QuantisedRow::TILE as i64),
            ("ropeHeadDim", self.rope_head_dim, SparseFlashProblem::ROPE_DIM as i64),
        ] {
            QUANTISATION.takes(Named(name, given), allowed)?;
        }
        // On Ascend 950, 9.0 asks for neither this nor 2048 entries of HIFLOAT8, and its kernel is not documented for
        // other numbers.
        match target.is_950() {
            true => SPARSE_BLOCK_SIZE.takes(self.sparse_block_size, 1),
            false => SPARSE_BLOCK_SIZE.takes(self.sparse_block_size, BLOCKS),
        }
    }
}

impl Given {
    /// Checks shapes, whose ranks are those of the layouts.
    fn shapes(&self, target: Target) -> Checked {
        let (rows, head) = self.query.shape.split_at(self.query.shape.rank() - 2);
        let (_, key_head) = self.key.shape.split_at(self.key.shape.rank() - 2);
        HEAD_DIM.takes(Named("query", head[1]), QuantisedRow::DIM as i64)?;
        HEAD_DIM.takes(Named("key heads", key_head[0]), 1)?;
        HEAD_DIM.takes(Named("key", key_head[1]), QuantisedRow::BYTES as i64)?;
        QuantSparseFlashCall::check_heads(target, head[0])?;
        let entries = self.indices.shape.last().copied().unwrap_or(0);
        shaped(&INDICES, "sparseIndices", &self.indices, rows, &[1, entries])?;
        if self.key.dtype == HiFloat8 {
            ENTRIES.takes_on(target, entries, HIFLOAT8_ENTRIES)?;
        }
        let out = [head[0], SparseFlashProblem::DIM as i64];
        shaped(&OUT, "attentionOut", &self.out, rows, &out)
    }
}
