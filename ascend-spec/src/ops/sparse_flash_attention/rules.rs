//! The rules of SparseFlashAttention.

use super::latent_rules::latent_rules;
use super::problem::{DIM, ROPE_DIM, resolved_problem};
use super::{Parameter, SparseFlashCall, SparseFlashProblem, Version, softmax_shape};
use crate::Cann::{V9_0, V9_1};
use crate::DType::{Bf16, Float, Float16, Int32};
use crate::allowed::{Checked, Named, Outcome};
use crate::contract::first_lint;
use crate::ops::sparse_sequences::{SequenceTensors, SparseSequences, TokenLayout, shaped};
use crate::rule::{lint, require, rules};
use crate::{Rule, Target, TensorDesc, Violation};

latent_rules! {
    "sparse_flash", "SparseFlashAttention", on Ascend 950 since "9.1", in Scope::ALL.since(V8_5).since_on_950(V9_1);
    {
        REQUIRED = "sparse_flash.required", PARAM_NULLPTR, V1, "SparseFlashAttention documentation, return values",
            "query, key, sparseIndices, attentionOut and before 9.1 value are given, in 8.5 softmaxMax and softmaxSum "
            "whatever returnSoftmaxLse says, and later both of them or neither",
            "pass queries, keys as key and as value, indices and all outputs";
        SOFTMAX = "sparse_flash.softmax", API_ERROR, V1, "SparseFlashAttention API, softmaxMax and softmaxSum"
            in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "softmaxMax and softmaxSum are given with returnSoftmaxLse",
            "pass tensors for maxima and sums, or leave returnSoftmaxLse out";
        NO_SOFTMAX = "sparse_flash.no_softmax", NullptrCrash("the library uses placeholders that it has destroyed"), V1,
            "SparseFlashAttention API, softmaxMax and softmaxSum" in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "softmaxMax and softmaxSum are not both null",
            "pass two tensors of shape [0] without returnSoftmaxLse";
        NO_SOFTMAX_V2 = "sparse_flash.no_softmax_v2", API_ERROR, V2,
            "SparseFlashAttentionV2 API, softmaxMax and softmaxSum" in Scope::ALL.since(V9_2).since_on_950(V9_2),
            "softmaxMax and softmaxSum are not both null",
            "pass two tensors of shape [0] without returnSoftmaxLse";
        SINKS = "sparse_flash.sinks", RUNTIME_ERROR, V2, "SparseFlashAttentionV2 API, sinks"
            in Scope::A2_A3.since(V9_2),
            "sinks are null except on Ascend 950",
            "attend without sinks, or on Ascend 950";
        DTYPE = "sparse_flash.dtype", PARAM_INVALID, V1, "SparseFlashAttention documentation, dtypes",
            "query is FLOAT16 or BF16, key, value, queryRope, keyRope and attentionOut have its dtype, indices, "
            "lengths and blockTable are INT32, and sinks, softmaxMax and softmaxSum FLOAT",
            "convert the named tensor to one of the allowed dtypes";
    }
    {
        ROPE = "sparse_flash.rope", TILING_ERROR, V1, "SparseFlashAttention tiling, queryRope and keyRope",
            "queryRope and keyRope are given",
            "pass the rotary parts of queries and keys as tensors of their own";
        SPARSE_BLOCK_SIZE = "sparse_flash.sparse_block_size", TILING_ERROR, V1,
            "SparseFlashAttention tiling, sparseBlockSize",
            "sparseBlockSize is a power of two up to 128, on Ascend 950 1",
            "choose blocks of such a size, or single keys";
        SOFTMAX_PAGED = "sparse_flash.softmax_paged", TILING_ERROR, V1, "SparseFlashAttention tiling, returnSoftmaxLse",
            "maxima and sums are not returned for keys in a paged cache",
            "leave returnSoftmaxLse out, or gather the keys";
        SINKS_PAGED = "sparse_flash.sinks_paged", TILING_ERROR, V2, "SparseFlashAttentionV2 tiling, sinks"
            in Scope::ASCEND_950.since_on_950(V9_2),
            "sinks go with keys that are not in a paged cache",
            "gather the keys, or attend without sinks";
    }
    {
        HEAD_DIM = "sparse_flash.head_dim", TILING_ERROR, V1, "SparseFlashAttention tiling, heads",
            "queries and keys have 512 elements, and keys one head",
            "fill shorter rows up to 512 elements with zeros; no operator attends to chosen keys with longer rows or "
            "several key heads";
        HEADS = "sparse_flash.heads", TILING_ERROR, V1, "SparseFlashAttention tiling, heads",
            "there are 1 to 128 query heads, on Atlas A2 and A3 a power of two",
            "fill query heads up to such a number with zeros, or divide them over calls";
        QUERY_ROPE = "sparse_flash.query_rope", TILING_ERROR, V1, "SparseFlashAttention tiling, queryRope",
            "queryRope has the shape of query with 64 elements",
            "give the rotary part of each query";
        KEY_ROWS = "sparse_flash.key_rows", TILING_ERROR, V1, "SparseFlashAttention tiling, value and keyRope",
            "value and keyRope have the shape of key, the latter with 64 elements",
            "pass key as value, and the rotary part of each key";
        OUT = "sparse_flash.out", TILING_ERROR, V1, "SparseFlashAttention tiling, attentionOut",
            "attentionOut has the shape of query",
            "give room for the attention of each row";
        SINKS_SHAPE = "sparse_flash.sinks_shape", TILING_ERROR, V2, "SparseFlashAttentionV2 tiling, sinks"
            in Scope::ASCEND_950.since_on_950(V9_2),
            "sinks are [N1]",
            "give a number for each query head";
        SOFTMAX_SHAPE = "sparse_flash.softmax_shape", TILING_ERROR, V1,
            "SparseFlashAttention tiling, softmaxMax and softmaxSum" in Scope::ALL.since(V9_0).since_on_950(V9_1),
            "with returnSoftmaxLse softmaxMax and softmaxSum are [B, 1, S1, N1] or [1, T1, N1]",
            "give room for the maximum and the sum of each row and head";
        SOFTMAX_ROOM = "sparse_flash.softmax_room",
            Overrun("a number is written for each row and head, whatever room there is"), V1,
            "SparseFlashAttention tiling, softmaxMax and softmaxSum" in Scope::A2_A3.since(V8_5).until(V8_5),
            "with returnSoftmaxLse softmaxMax and softmaxSum are [B, 1, S1, N1] or [1, T1, N1] in 8.5 too, which "
            "does not look at them",
            "give room for the maximum and the sum of each row and head";
        PAGED_DIM = "sparse_flash.paged_dim", Overrun("512 elements of each key are read"), V1,
            "SparseFlashAttention tiling, key",
            "keys in a paged cache have 512 elements too, which the operator does not compare",
            "pass the cache of latent keys";
    }
}

/// Numbers of query heads on Atlas A2 and A3, and of keys in a block there.
pub(crate) const POWERS: [i64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// The largest of ascending numbers of keys that divides a block of a paged cache, or 1.
pub(crate) fn largest_divisor(numbers: &[i64], block_size: usize) -> usize {
    let divides = |number: &usize| block_size.is_multiple_of(*number);
    numbers.iter().rev().map(|number| *number as usize).find(divides).unwrap_or(1)
}

/// Largest number of query heads.
const MOST_HEADS: i64 = 128;

/// What mends a number of query heads that `rule` refuses: no zeros make too many of them fewer.
pub(crate) fn heads_fix(rule: &Rule, heads: i64) -> &'static str {
    match heads > MOST_HEADS {
        true => "divide the query heads over calls",
        false => rule.fix,
    }
}

/// The tensors that every call has.
struct Given {
    query: TensorDesc,
    key: TensorDesc,
    /// `key` where there is none.
    value: TensorDesc,
    indices: TensorDesc,
    out: TensorDesc,
}

impl SparseFlashCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of lengths,
    /// table and indices are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, version: Version, target: Target) -> Result<SparseFlashProblem, Violation> {
        require!(
            version.runs_on(target),
            PRODUCT,
            format_args!("{} on {target}", version.symbol()),
            match version {
                Version::V1 => "Atlas A2 and A3 with 8.5 or newer, Ascend 950 with 9.1 or newer",
                Version::V2 if self.sinks.is_some() => "Ascend 950 with 9.2 or newer",
                Version::V2 => "Atlas A2, A3 and Ascend 950 with 9.2 or newer",
            },
            match version {
                Version::V1 => PRODUCT.fix,
                Version::V2 if self.sinks.is_some() => {
                    "run on Ascend 950 with CANN 9.2 or newer, or attend without sinks"
                }
                Version::V2 => "run with CANN 9.2 or newer, or call aclnnSparseFlashAttention",
            },
        );
        let given = self.required(version, target)?;
        if !target.is_950() {
            SINKS.leaves_out(self, &[Parameter::Sinks])?;
        }
        self.dtypes(&given.query)?;
        FORMAT.formats(self)?;
        let empty = |desc: Option<TensorDesc>| desc.is_none_or(|desc| desc.is_empty());
        // A call whose outputs are all empty ends before the tiling looks at it.
        if given.out.is_empty() && empty(self.softmax_max) && empty(self.softmax_sum) {
            return Ok(self.problem(SparseSequences::none(), &given));
        }
        let [layout_query, layout_kv] = SEQUENCES.layouts([self.layout_query, self.layout_kv])?;
        self.judge_values(layout_kv, target)?;
        let sequences = SEQUENCES.resolve(
            &SequenceTensors {
                query: &given.query,
                key: &given.key,
                lengths: [self.actual_seq_lengths_query, self.actual_seq_lengths_kv],
                names: ["actualSeqLengthsQuery", "actualSeqLengthsKv"],
                block_table: self.block_table,
                sparse_block_size: Some(self.sparse_block_size),
            },
            [layout_query, layout_kv],
            self.sparse_mode == 3,
        )?;
        self.shapes(&given, layout_kv, target)?;
        Ok(self.problem(sequences, &given))
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Some(query), Some(key), Some(indices)) = (self.query, self.key, self.sparse_indices) else {
            return Ok(());
        };
        if self.attention_out.is_none_or(|out| out.is_empty()) {
            return Ok(());
        }
        first_lint(allowed, |report| {
            if let Some(value) = self.value.filter(|_| key.shape.last() == Some(&DIM)) {
                LATENT.value([&value, &key], report);
            }
            PAGED_DIM.takes(key.shape.last().copied().unwrap_or(0), DIM).report(report);
            let room = softmax_shape(&query).filter(|_| self.return_softmax_lse);
            for (name, desc) in self.softmax() {
                if let (Some(room), Some(desc)) = (&room, desc) {
                    let fits = desc.shape[..] == room[..] || !SOFTMAX_ROOM.scope.holds(target);
                    lint!(report, fits, SOFTMAX_ROOM, format_args!("{name} {}", desc.shape), room);
                }
            }
            LATENT.scale_and_lists(self.scale, &indices, report);
        })
    }

    /// The largest `sparseBlockSize` on `target` for a paged cache whose blocks have `block_size` keys: the fewest
    /// entries name all keys of a row then.
    pub fn largest_sparse_block_size(target: Target, block_size: usize) -> usize {
        match target.is_950() {
            true => 1,
            false => largest_divisor(&POWERS, block_size),
        }
    }

    /// Refuses a number of query heads that no call on `target` has.
    ///
    /// # Errors
    /// [`Violation`] by [`HEADS`].
    pub fn check_heads(target: Target, heads: i64) -> Result<(), Violation> {
        let verdict = match target.is_950() {
            true => HEADS.takes(heads, 1..=MOST_HEADS),
            false => HEADS.takes(heads, POWERS),
        };
        verdict.fix(|| heads_fix(&HEADS, heads))
    }

    fn softmax(&self) -> [(&'static str, Option<TensorDesc>); 2] {
        [("softmaxMax", self.softmax_max), ("softmaxSum", self.softmax_sum)]
    }

    fn required(&self, version: Version, target: Target) -> Result<Given, Violation> {
        // The function of 8.5 asks for every tensor, used or not.
        let asks_for_all = target.cann < V9_0;
        let query = REQUIRED.requires(self.query, "query")?;
        let key = REQUIRED.requires(self.key, "key")?;
        if target.cann < V9_1 {
            REQUIRED.requires(self.value, "value")?;
        }
        let indices = REQUIRED.requires(self.sparse_indices, "sparseIndices")?;
        let out = REQUIRED.requires(self.attention_out, "attentionOut")?;
        let missing = self.softmax().map(|(_, desc)| desc.is_none());
        let given = asks_for_all || self.return_softmax_lse || missing != [true; 2];
        let (neither, allowed) = ("neither", "two tensors, which may be empty");
        require!(given || version != Version::V1, NO_SOFTMAX, neither, allowed);
        require!(given || version == Version::V1, NO_SOFTMAX_V2, neither, allowed);
        for (name, desc) in self.softmax() {
            match self.return_softmax_lse && !asks_for_all {
                true => SOFTMAX.requires(desc, name)?,
                false => REQUIRED.requires(desc, name)?,
            };
        }
        Ok(Given { query, key, value: self.value.unwrap_or(key), indices, out })
    }

    fn problem(&self, sequences: SparseSequences, given: &Given) -> SparseFlashProblem {
        let room = softmax_shape(&given.query).filter(|_| self.return_softmax_lse);
        let short =
            |desc: Option<TensorDesc>| (desc.zip(room.as_ref())).is_some_and(|(desc, room)| desc.shape[..] != room[..]);
        let tensors = [&given.query, &given.indices];
        SparseFlashProblem {
            softmax: self.return_softmax_lse,
            overruns: given.key.shape.last() != Some(&DIM) || short(self.softmax_max) || short(self.softmax_sum),
            ..resolved_problem(sequences, tensors, self.sparse_block_size, self.scale)
        }
    }

    fn dtypes(&self, query: &TensorDesc) -> Checked {
        DTYPE.takes(Named("query", query.dtype), [Float16, Bf16])?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::SparseIndices
                | Parameter::BlockTable
                | Parameter::ActualSeqLengthsQuery
                | Parameter::ActualSeqLengthsKv => Int32,
                Parameter::Sinks | Parameter::SoftmaxMax | Parameter::SoftmaxSum => Float,
                _ => query.dtype,
            })
        })
    }

    fn judge_values(&self, layout_kv: TokenLayout, target: Target) -> Checked {
        ROPE.requires(self.query_rope, "queryRope")?;
        ROPE.requires(self.key_rope, "keyRope")?;
        SEQUENCES.visibility(self.sparse_mode, [self.pre_tokens, self.next_tokens])?;
        ATTENTION_MODE.takes(self.attention_mode, 2)?;
        match target.is_950() {
            true => SPARSE_BLOCK_SIZE.takes(self.sparse_block_size, 1)?,
            false => SPARSE_BLOCK_SIZE.takes(self.sparse_block_size, POWERS)?,
        }
        let paged = layout_kv == TokenLayout::PaBsnd;
        SINKS_PAGED.forbids([("sinks with PA_BSND", self.sinks.is_some() && paged)])?;
        SOFTMAX_PAGED.forbids([("returnSoftmaxLse with PA_BSND", self.return_softmax_lse && paged)])
    }

    fn shapes(&self, given: &Given, layout_kv: TokenLayout, target: Target) -> Checked {
        let Given { query, key, value, indices, out } = given;
        // The ranks are those of the layouts.
        let (rows, head) = query.shape.split_at(query.shape.rank() - 2);
        let (key_rows, key_head) = key.shape.split_at(key.shape.rank() - 2);
        HEAD_DIM.takes(Named("query", head[1]), DIM)?;
        HEAD_DIM.takes(Named("key heads", key_head[0]), 1)?;
        if layout_kv != TokenLayout::PaBsnd {
            HEAD_DIM.takes(Named("key", key_head[1]), DIM)?;
        }
        Self::check_heads(target, head[0])?;
        shaped(&KEY_ROWS, "value", value, key_rows, &[1, if self.value.is_some() { DIM } else { key_head[1] }])?;
        if let (Some(query_rope), Some(key_rope)) = (&self.query_rope, &self.key_rope) {
            shaped(&QUERY_ROPE, "queryRope", query_rope, rows, &[head[0], ROPE_DIM])?;
            shaped(&KEY_ROWS, "keyRope", key_rope, key_rows, &[1, ROPE_DIM])?;
        }
        let entries = indices.shape.last().copied().unwrap_or(0);
        shaped(&INDICES, "sparseIndices", indices, rows, &[1, entries])?;
        shaped(&OUT, "attentionOut", out, &query.shape, &[])?;
        if let Some(sinks) = &self.sinks {
            shaped(&SINKS_SHAPE, "sinks", sinks, &head[..1], &[])?;
        }
        if let Some(shape) = softmax_shape(query).filter(|_| self.return_softmax_lse && target.cann >= V9_0) {
            for (name, desc) in self.softmax() {
                if let Some(desc) = desc {
                    shaped(&SOFTMAX_SHAPE, name, &desc, &shape, &[])?;
                }
            }
        }
        Ok(())
    }
}
