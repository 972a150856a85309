//! The rules of BlockSparseAttention.

use super::{BlockSparseCall, BlockSparseProblem, Parameter, UNBOUNDED, Version, lse_shape};
use crate::Cann::{V9_1, V9_2};
use crate::DType::{Bf16, Float, Float16, Int8};
use crate::allowed::{Axis, Checked, MultiplesOf, Named, Noted, Outcome, Rank, Shapes};
use crate::attention_problem::lint_scale;
use crate::contract::first_lint;
use crate::rule::rules;
use crate::{Axes, Dims, Extents, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL.since(V9_0).since_on_950(V9_1);
    PRODUCT = "block_sparse.product", FIND_KERNEL_ERROR, V1,
        "BlockSparseAttention documentation, products" in Scope::ALL,
        "the product has the operator in the release",
        "run on Atlas A2 or Atlas A3 with CANN 9.0 or newer, or on Ascend 950 with CANN 9.1 or newer";
    REQUIRED = "block_sparse.required", PARAM_NULLPTR, V1, "BlockSparseAttention documentation, return values",
        "query, key, value, attentionOut and before 9.2 blockShape are given",
        "pass queries, keys, values, the sizes of blocks and the output";
    DTYPE = "block_sparse.dtype", PARAM_INVALID, V1, "BlockSparseAttention documentation, dtypes",
        "query is FLOAT16 or BF16, key, value and attentionOut have its dtype, blockSparseMask is INT8, and softmaxLse "
        "FLOAT",
        "convert the named tensor to one of the allowed dtypes";
    format of "block_sparse", PARAM_INVALID, "BlockSparseAttention documentation, parameters";
    LAYOUT = "block_sparse.layout", PARAM_INVALID, V1, "BlockSparseAttention API, layouts",
        "qInputLayout is TND, BNSD or from 9.1 on BSND, and kvInputLayout the same",
        "spell the layouts as CANN does, and order keys and values as queries";
    BLOCK_SHAPE = "block_sparse.block_shape", PARAM_INVALID, V1, "BlockSparseAttention API, blockShape",
        "blockShape has two sizes above 0",
        "give the rows and the keys of a block";
    INNER_PRECISE = "block_sparse.inner_precise", PARAM_INVALID, V1, "BlockSparseAttention API, innerPrecise",
        "innerPrecise is 0, 1 or from 9.1 on 4",
        "pass 0 on Atlas A2 and A3, 4 on Ascend 950";
    MASK_RANK = "block_sparse.mask_rank", PARAM_INVALID, V1, "BlockSparseAttention API, blockSparseMask",
        "blockSparseMask has four axes",
        "describe the mask as [sequences, query heads, blocks of rows, blocks of keys]";
    RANK = "block_sparse.rank", INNER_NULLPTR, V1, "BlockSparseAttention shape inference, ranks",
        "query, key and value have the axes of their layout",
        "describe the tensor with the axes of its layout";
    KV_HEADS = "block_sparse.kv_heads", INNER_NULLPTR, V1, "BlockSparseAttention shape inference, numKeyValueHeads",
        "key and value have numKeyValueHeads heads",
        "pass the number of heads that key and value have";
    VALUE_DIM = "block_sparse.value_dim", INNER_NULLPTR, V1, "BlockSparseAttention shape inference, value",
        "keys and values have the same head dimension",
        "give keys and values of one head dimension";
    VALUE_BATCH = "block_sparse.value_batch", INNER_NULLPTR, V1, "BlockSparseAttention shape inference, value"
        in Scope::ALL.since(V9_1).since_on_950(V9_1),
        "key and value have the same number of sequences",
        "make both from the same batch";
    OUT = "block_sparse.out", INNER_NULLPTR, V1, "BlockSparseAttention API, attentionOut",
        "attentionOut has the shape of query",
        "give room for the attention of each row";
    LSE = "block_sparse.softmax_lse", INNER_NULLPTR, V1, "BlockSparseAttention API, softmaxLse",
        "with softmaxLseFlag 1 softmaxLse is given, in the shape of query but for a last axis of 1",
        "give room for a number of each row and head, or set softmaxLseFlag to 0";
    LAYOUT_BSND = "block_sparse.layout_bsnd", TILING_ERROR, V1, "BlockSparseAttention tiling, layouts"
        in Scope::A2_A3.since(V9_1),
        "the layout is BSND on Ascend 950 alone",
        "order the axes as TND or BNSD";
    PRECISION = "block_sparse.precision", TILING_ERROR, V1, "BlockSparseAttention tiling, innerPrecise",
        "innerPrecise is 4 on Ascend 950, and 0, or 1 with FLOAT16 queries, on Atlas A2 and A3",
        "pass 4 on Ascend 950, 0 elsewhere";
    RESERVED = "block_sparse.reserved", TILING_ERROR, V1, "BlockSparseAttention tiling, reserved arguments",
        "attenMask and blockTable are null, and blockSize is 0",
        "leave the argument out: blocks are the only mask, and keys are not paged";
    TOKENS = "block_sparse.tokens", TILING_ERROR, V1, "BlockSparseAttention tiling, preTokens and nextTokens",
        "preTokens and nextTokens are the largest INT32",
        "pass 2147483647 for both";
    LSE_FLAG = "block_sparse.softmax_lse_flag", TILING_ERROR, V1, "BlockSparseAttention tiling, softmaxLseFlag",
        "softmaxLseFlag is 0 or 1",
        "pass 1 for the log-sum-exp, 0 without it";
    BLOCK_KEYS = "block_sparse.block_keys", TILING_ERROR, V1, "BlockSparseAttention tiling, blockShape",
        "blockShape has two sizes, and that of keys is a multiple of 128, on Ascend 950 from 9.2 on of 16",
        "give the rows and the keys of a block, and choose blocks of such a size";
    HEAD_DIM = "block_sparse.head_dim", TILING_ERROR, V1, "BlockSparseAttention tiling, head dimension",
        "queries and keys have both 64 or both 128 elements",
        "fill heads up with zeros to such a size; larger ones need other attention";
    HEADS = "block_sparse.heads", TILING_ERROR, V1, "BlockSparseAttention tiling, numKeyValueHeads",
        "there are key heads, and from 9.2 on the query heads are a multiple of them",
        "give each key head the same number of query heads";
    BATCH = "block_sparse.batch", TILING_ERROR, V1, "BlockSparseAttention tiling, batch",
        "query, key and value have the same number of sequences",
        "make all from the same batch";
    LENGTHS = "block_sparse.lengths", TILING_ERROR, V1, "BlockSparseAttention tiling, actualSeqLengths",
        "both lengths or, but for TND, neither are given, each with a number for each sequence",
        "give the query rows and the keys of each sequence";
    LENGTH_SUM = "block_sparse.length_sum", TILING_ERROR, V1, "BlockSparseAttention tiling, actualSeqLengths",
        "in TND the lengths add up to the rows of query and of key",
        "give the rows of each sequence, not where it ends, and tensors without rows behind the last";
    LENGTH_MOST = "block_sparse.length_most", TILING_ERROR, V1, "BlockSparseAttention tiling, actualSeqLengths"
        in Scope::ALL.since(V9_2).since_on_950(V9_2),
        "no length is larger than the rows of its axis",
        "give lengths that the tensors have room for";
    MASK = "block_sparse.mask", TILING_ERROR, V1, "BlockSparseAttention tiling, blockSparseMask",
        "blockSparseMask is given and has each sequence and query head, and from 9.2 on the blocks of the longest "
        "sequence, in TND, or of all rows and keys",
        "make the mask for the blocks of this call";
    WORK = "block_sparse.work", TILING_ERROR, V1, "BlockSparseAttention tiling, tasks"
        in Scope::A2_A3.since(V9_0),
        "on Atlas A2 and A3 some sequence has query rows, and there are at least as many query heads as key heads",
        "leave the call out where there is nothing to compute, and give it no more key heads than query heads";
    VALUE_ROWS = "block_sparse.value_rows", Overrun("as many values are read as there are keys"), V1,
        "BlockSparseAttention kernel, value",
        "value has the rows of key, which the operator does not compare",
        "give a value for each key";
    LENGTH_RANGE = "block_sparse.length_range", Overrun("rows of other memory are read or written"), V1,
        "BlockSparseAttention documentation, actualSeqLengths",
        "lengths are at least 0 and, before 9.2 too, at most the rows of their axis",
        "give lengths that the tensors have room for";
    HEADS_UNCHECKED = "block_sparse.heads_unchecked", Overrun("keys behind the last head are read"), V1,
        "BlockSparseAttention documentation, numKeyValueHeads"
        in Scope::ALL.since(V9_0).until(V9_1).since_on_950(V9_1).until_on_950(V9_1),
        "the query heads are a multiple of the key heads before 9.2 too, which does not compare them",
        "give each key head the same number of query heads";
    MASK_UNCHECKED = "block_sparse.mask_unchecked", Overrun("the mask is read by the blocks of the call"), V1,
        "BlockSparseAttention documentation, blockSparseMask"
        in Scope::ALL.since(V9_0).until(V9_1).since_on_950(V9_1).until_on_950(V9_1),
        "blockSparseMask has the blocks of rows and keys of the call before 9.2 too, which does not compare them",
        "make the mask for the blocks of this call";
    MASK_TYPE = "block_sparse.mask_type", Lint("other masks are not known, and 3 has no kernel"), V1,
        "BlockSparseAttention tiling, maskType",
        "maskType is 0, which the operator does not check",
        "pass 0";
    scale of "block_sparse", "BlockSparseAttention", "scores", "usually one over the root of the head dimension",
        "the head dimension", "the head dimension: with 0 all keys of the blocks weigh alike";
    ROWS_WITHOUT_KEYS = "block_sparse.rows_without_keys", Lint("such rows of the outputs keep what was there"), V1,
        "BlockSparseAttention kernel, blockSparseMask",
        "blockSparseMask names a block of keys for each block of rows",
        "name a block for these rows, or leave the rows out";
    CONTENTS = "block_sparse.contents", Overrun("keys of the next sequence or of other memory are read"), V1,
        "BlockSparseAttention kernel, blockSparseMask",
        "blockSparseMask names no block past the keys of its sequence",
        "set the bytes past each sequence's last block to 0";
}

/// The layouts by their names.
const LAYOUTS: [(&str, Axes); 3] = [("TND", Axes::Tnd), ("BNSD", Axes::Bnsd), ("BSND", Axes::Bsnd)];
/// Rows and keys of a block where the call does not say.
const BLOCK: [i64; 2] = [128, 128];

/// The tensors that every call has.
struct Given {
    query: TensorDesc,
    key: TensorDesc,
    value: TensorDesc,
    out: TensorDesc,
    axes: Axes,
    block: [i64; 2],
}

/// Sizes of queries and keys, and the lengths of their sequences.
struct Sides {
    query: Extents,
    key: Extents,
    batch: i64,
}

impl BlockSparseCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of the mask are
    /// not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<BlockSparseProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let given = self.judge_entry(target)?;
        let [query, key] = self.infer(&given, target)?;
        let lse = self.softmax_lse.filter(|_| self.softmax_lse_flag == 1);
        // A call whose outputs are all empty ends before the tiling looks at it.
        if given.out.is_empty() && lse.is_none_or(|lse| lse.is_empty()) {
            return Ok(BlockSparseProblem::IDLE);
        }
        self.judge_values(&given, target)?;
        let sides = self.judge_sequences(&given, [query, key], target)?;
        self.judge_mask(&given, &sides, target)?;
        Ok(self.problem(&given, &sides))
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Ok(problem), Some(key), Some(value)) = (self.check(target), self.key, self.value) else {
            return Ok(());
        };
        if problem.is_idle() {
            return Ok(());
        }
        first_lint(allowed, |report| {
            VALUE_ROWS.takes(Named("value", value.shape), key.shape).report(report);
            for (name, lengths, rows) in self.lengths([problem.query_rows, problem.key_rows]) {
                let rows = i64::try_from(rows).unwrap_or(i64::MAX);
                for &length in lengths.unwrap_or_default() {
                    LENGTH_RANGE.takes(Named(name, length), 0..=rows).report(report);
                }
            }
            let [heads, kv_heads] = [problem.heads, problem.kv_heads];
            HEADS_UNCHECKED.takes_on(target, Named("query heads", heads), MultiplesOf(kv_heads.max(1))).report(report);
            if let Some(mask) = self.block_sparse_mask {
                let [rows, keys] = problem.mask_blocks.map(|blocks| Axis::Of(blocks as i64));
                let axes: &[&[Axis]] = &[&[Axis::Any, Axis::Any, rows, keys]];
                MASK_UNCHECKED.takes_on(target, mask.shape, Shapes(axes)).report(report);
            }
            MASK_TYPE.takes(self.mask_type, 0).report(report);
            lint_scale(self.scale, [problem.dim, 0], [&SCALE, &SCALE_ZERO, &SCALE_INVERSE], report);
        })
    }

    /// The lengths of queries and of keys, each with its name and what else belongs to its side.
    fn lengths<T>(&self, sides: [T; 2]) -> [(&'static str, Option<&[i64]>, T); 2] {
        let [query, key] = sides;
        [("actualSeqLengths", self.actual_seq_lengths, query), ("actualSeqLengthsKv", self.actual_seq_lengths_kv, key)]
    }

    /// What the entry point looks at.
    fn judge_entry(&self, target: Target) -> Result<Given, Violation> {
        let query = REQUIRED.requires(self.query, "query")?;
        let key = REQUIRED.requires(self.key, "key")?;
        let value = REQUIRED.requires(self.value, "value")?;
        if target.cann < V9_2 {
            REQUIRED.requires(self.block_shape, "blockShape")?;
        }
        let out = REQUIRED.requires(self.attention_out, "attentionOut")?;
        self.judge_dtypes(&query)?;
        FORMAT.formats(self)?;
        let is_first = target.cann < V9_1;
        let known = if is_first { &LAYOUTS[..2] } else { &LAYOUTS };
        let names = [self.q_input_layout, self.kv_input_layout];
        let found = known.iter().find(|(name, _)| names == [*name, *name]);
        let Some(&(_, axes)) = found else {
            let given = format_args!("{:?} with keys in {:?}", names[0], names[1]);
            let known = known.iter().map(|(name, _)| *name).collect::<Vec<_>>();
            return Err(LAYOUT.broken(given, format_args!("{} for both", known.join(" or "))));
        };
        let block = match self.block_shape {
            None => BLOCK,
            Some(&[rows, keys]) => [rows, keys],
            // The tiling of these releases refuses further sizes.
            Some(&[rows, keys, ..]) if target.cann < V9_2 => [rows, keys],
            Some(sizes) => return Err(BLOCK_SHAPE.broken(format_args!("{sizes:?}"), "two sizes")),
        };
        for (name, size) in ["rows", "keys"].into_iter().zip(block) {
            BLOCK_SHAPE.takes(Named(name, size), 1..)?;
        }
        match is_first {
            true => INNER_PRECISE.takes(self.inner_precise, [0, 1])?,
            false => INNER_PRECISE.takes(self.inner_precise, [0, 1, 4])?,
        }
        if let Some(mask) = self.block_sparse_mask {
            MASK_RANK.takes(mask.shape, Rank(4))?;
        }
        Ok(Given { query, key, value, out, axes, block })
    }

    fn judge_dtypes(&self, query: &TensorDesc) -> Checked {
        DTYPE.takes(Named("query", query.dtype), [Float16, Bf16])?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                // The tiling refuses these of any type.
                Parameter::AttenMask | Parameter::BlockTable => return None,
                Parameter::BlockSparseMask => Int8,
                Parameter::SoftmaxLse => Float,
                _ => query.dtype,
            })
        })
    }

    /// What the inference of shapes and the comparison of outputs look at. Returns the sizes of queries and of keys.
    fn infer(&self, given: &Given, target: Target) -> Result<[Extents; 2], Violation> {
        let Given { query, key, value, out, axes, .. } = given;
        let extents = |name, desc: &TensorDesc| {
            let extents = axes.extents(&desc.shape, self.num_key_value_heads);
            let (shape, rank) = (desc.shape, axes.rank());
            extents.ok_or_else(|| {
                RANK.broken(format_args!("{name} {shape}"), format_args!("{rank} axes for {}", self.q_input_layout))
            })
        };
        let query_size = extents("query", query)?;
        let (key, value) = (extents("key", key)?, extents("value", value)?);
        for (name, heads) in [("key", key.heads), ("value", value.heads)] {
            let given = Noted(heads, format_args!("heads of {name}"));
            KV_HEADS.takes(given, self.num_key_value_heads)?;
        }
        VALUE_DIM.takes(Named("value", value.dim), key.dim)?;
        VALUE_BATCH.takes_on(target, Named("value", value.batch), key.batch)?;
        BATCH.takes(Named("value", value.batch), key.batch)?;
        OUT.takes(Named("attentionOut", out.shape), query.shape)?;
        if self.softmax_lse_flag == 1 {
            let lse = LSE.requires(self.softmax_lse, "softmaxLse")?;
            LSE.takes(lse.shape, lse_shape(query).unwrap_or(query.shape))?;
        }
        Ok([query_size, key])
    }

    fn judge_values(&self, given: &Given, target: Target) -> Checked {
        LAYOUT_BSND.takes_on(target, self.q_input_layout, ["TND", "BNSD"])?;
        match (target.is_950(), given.query.dtype) {
            (true, _) => PRECISION.takes(self.inner_precise, 4)?,
            (false, Float16) => PRECISION.takes(self.inner_precise, [0, 1])?,
            (false, _) => PRECISION.takes(self.inner_precise, 0)?,
        }
        RESERVED.leaves_out(self, &[Parameter::AttenMask, Parameter::BlockTable, Parameter::BlockSize])?;
        TOKENS.takes(Named("preTokens", self.pre_tokens), UNBOUNDED)?;
        TOKENS.takes(Named("nextTokens", self.next_tokens), UNBOUNDED)?;
        LSE_FLAG.takes(self.softmax_lse_flag, [0, 1])?;
        let sizes = self.block_shape.map_or(2, <[i64]>::len);
        BLOCK_KEYS.takes(Noted(sizes, "sizes"), 2)?;
        let step = match target.is_950() && target.cann >= V9_2 {
            true => 16,
            false => 128,
        };
        BLOCK_KEYS.takes(Noted(given.block[1], "keys"), MultiplesOf(step))
    }

    fn judge_sequences(&self, given: &Given, [query, key]: [Extents; 2], target: Target) -> Result<Sides, Violation> {
        HEAD_DIM.takes(Named("query", query.dim), [64, 128])?;
        HEAD_DIM.takes(Named("key", key.dim), query.dim)?;
        HEADS.takes(Named("numKeyValueHeads", key.heads), 1..)?;
        if target.cann >= V9_2 {
            HEADS.takes(Named("query heads", query.heads), MultiplesOf(key.heads))?;
        }
        BATCH.takes(Named("key", key.batch), query.batch)?;
        let packed = given.axes.is_packed();
        let sides = self.lengths([query.rows, key.rows]);
        let [(_, of_query, _), (_, of_key, _)] = sides;
        if packed || of_query.is_some() != of_key.is_some() {
            for (name, lengths, _) in sides {
                LENGTHS.requires(lengths, name)?;
            }
        }
        let counted = of_query.filter(|_| packed).map(<[i64]>::len);
        let batch = counted.map_or(query.batch, |count| i64::try_from(count).unwrap_or(i64::MAX));
        for (name, lengths, rows) in sides {
            let Some(lengths) = lengths else {
                continue;
            };
            let count = i64::try_from(lengths.len()).unwrap_or(i64::MAX);
            LENGTHS.takes(Named(format_args!("elements of {name}:"), count), batch)?;
            let sum = lengths.iter().map(|&length| i128::from(length)).sum();
            match packed {
                true => LENGTH_SUM.takes(Named(name, sum), i128::from(rows))?,
                false => {
                    for &length in lengths {
                        LENGTH_MOST.takes_on(target, Named(name, length), ..=rows)?;
                    }
                }
            }
        }
        if WORK.scope.holds(target) {
            let longest = of_query.map_or(query.rows, longest);
            WORK.takes(Named("query rows of the longest sequence:", longest), 1..)?;
            WORK.takes(Named("query heads:", query.heads), key.heads..)?;
        }
        Ok(Sides { query, key, batch })
    }

    /// Blocks of rows and of keys for which the mask has bytes.
    fn blocks(&self, given: &Given, sides: &Sides) -> [i64; 2] {
        let rows = self.lengths([sides.query.rows, sides.key.rows]);
        let rows = rows.map(|(_, lengths, rows)| match lengths {
            Some(lengths) if given.axes.is_packed() => longest(lengths).max(0),
            _ => rows,
        });
        [0, 1].map(|side| {
            let (rows, size) = (rows[side], given.block[side]);
            rows / size + i64::from(rows % size > 0)
        })
    }

    fn judge_mask(&self, given: &Given, sides: &Sides, target: Target) -> Checked {
        let mask = MASK.requires(self.block_sparse_mask, "blockSparseMask")?;
        let blocks = self.blocks(given, sides).map(|blocks| match target.cann < V9_2 {
            true => Axis::Any,
            false => Axis::Of(blocks),
        });
        let heads = [Axis::Of(sides.batch), Axis::Of(sides.query.heads)];
        let axes: &[&[Axis]] = &[&[heads[0], heads[1], blocks[0], blocks[1]]];
        MASK.takes(mask.shape, Shapes(axes))
    }

    fn problem(&self, given: &Given, sides: &Sides) -> BlockSparseProblem {
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        let (query, key) = (&sides.query, &sides.key);
        let blocks = self.blocks(given, sides);
        let mask = Dims::of([sides.batch, query.heads, blocks[0], blocks[1]]);
        BlockSparseProblem {
            axes: given.axes,
            batch: count(sides.batch),
            query_rows: count(query.rows),
            key_rows: count(key.rows),
            heads: count(query.heads),
            kv_heads: count(key.heads),
            dim: count(query.dim),
            block: given.block.map(count),
            mask_blocks: blocks.map(count),
            scale: self.scale as f32,
            lse: self.softmax_lse_flag == 1,
            overruns: given.value.shape != given.key.shape
                || self.block_sparse_mask.is_some_and(|given| given.shape != mask),
        }
    }
}

/// The largest of the lengths of a call's sequences.
fn longest(lengths: &[i64]) -> i64 {
    lengths.iter().copied().max().unwrap_or(0)
}
