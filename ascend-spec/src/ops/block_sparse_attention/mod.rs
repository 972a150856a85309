//! BlockSparseAttention: attention in which a mask names the blocks of keys that each block of query rows sees.
//!
//! The mask has a byte for each query head, each block of X rows and each block of Y keys. A row sees all keys of the
//! blocks that the mask names for its block, and so causality is that of whole blocks.

mod problem;
mod row_block;
pub mod rules;

pub use problem::{BlockSparseProblem, BlockSparseSequence};
pub use row_block::{BlockFault, BlockFaultKind, RowBlock};

use crate::Cann::{V9_0, V9_1};
use crate::DType::Float;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, Target, TensorDesc, Violation};

/// The window that calls have: none.
const UNBOUNDED: i64 = i32::MAX as i64;

declare_operator! {
    /// Source: aclnnBlockSparseAttention, parameter table.
    block_sparse_attention_arguments, "BlockSparseAttention", #[derive(Copy)] BlockSparseCall<'a>;
    1 { query: tensor, Query, "query",
        "Queries, `[T1, N1, D]`, `[B, N1, S1, D]` or `[B, S1, N1, D]`, in the order of `qInputLayout`." }
    1 { key: tensor, Key, "key", "Keys, with `numKeyValueHeads` heads, in the same order." }
    1 { value: tensor, Value, "value", "Values, with the shape of `key`." }
    1 { block_sparse_mask: tensor, BlockSparseMask, "blockSparseMask",
        "For each sequence, query head, block of rows and block of keys 1 where the rows see the keys, 0 where \
         they do not: `[B, N1, row blocks, key blocks]`." }
    1 { atten_mask: tensor, AttenMask, "attenMask", "Reserved: null." }
    1 { block_shape: ints, BlockShape, "blockShape",
        "Rows and keys of a block, X and Y. From 9.2 on null is 128 and 128." }
    1 { actual_seq_lengths: ints, ActualSeqLengths, "actualSeqLengths",
        "Query rows of each sequence, also in TND. Null is the whole of BNSD and BSND." }
    1 { actual_seq_lengths_kv: ints, ActualSeqLengthsKv, "actualSeqLengthsKv",
        "Keys of each sequence, also in TND. Null is the whole of BNSD and BSND." }
    1 { block_table: tensor, BlockTable, "blockTable", "Reserved: null." }
    1 { q_input_layout: text = "TND", QInputLayout, "qInputLayout",
        "Axes of `query`: `TND`, `BNSD` or, on Ascend 950, `BSND`." }
    1 { kv_input_layout: text = "TND", KvInputLayout, "kvInputLayout",
        "Axes of `key` and `value`: as those of `query`." }
    1 { num_key_value_heads: int = 0, NumKeyValueHeads, "numKeyValueHeads", "Heads of `key` and `value`, N2." }
    1 { mask_type: int = 0, MaskType, "maskType", "Reserved: 0." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores, as a FLOAT." }
    1 { inner_precise: int = 0, InnerPrecise, "innerPrecise",
        "0: softmax in FLOAT; 1: in FLOAT16, for such queries; 4, on Ascend 950: in the type of the queries." }
    1 { block_size: int = 0, BlockSize, "blockSize", "Reserved: 0." }
    1 { pre_tokens: int = i32::MAX as i64, PreTokens, "preTokens", "Reserved: 2147483647." }
    1 { next_tokens: int = i32::MAX as i64, NextTokens, "nextTokens", "Reserved: 2147483647." }
    1 { softmax_lse_flag: int = 0, SoftmaxLseFlag, "softmaxLseFlag",
        "1: the log-sum-exp of each row is written as well; 0: it is not." }
    1 { attention_out: output, AttentionOut, "attentionOut", "Attention, with the shape of `query`." }
    1 { softmax_lse: output, SoftmaxLse, "softmaxLse",
        "The log-sum-exp of each row and head, with the shape of `query` but for a last axis of 1." }
}

versions! {
    /// The version of BlockSparseAttention.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnBlockSparseAttention", "9.0")
            .exported_since(V9_0).on_a2_a3(V9_0).on_ascend950(V9_1),
    }
}

described_by! { BlockSparseAttention, rules::RULES }

impl CallContract for BlockSparseAttention {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let Some((out, lse)) = arguments.call().outputs() else {
            return;
        };
        arguments.attention_out = arguments.attention_out.or(Some(out));
        arguments.softmax_lse = arguments.softmax_lse.or(lse);
    }

    contents_checked_for! { target, |call, problem, integers| {
        let mask = integers(Parameter::BlockSparseMask);
        let mask: Vec<u8> = mask.iter().map(|&byte| byte as u8).collect();
        // A call that is only described has no bytes.
        match mask.len() < problem.mask_bytes() {
            true => Ok(()),
            false => problem.checked_mask(&call, Some(&mask)),
        }
    } }

    fn lint_contents(
        arguments: &Self::Arguments,
        _: Version,
        target: Target,
        bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
        report: &mut dyn FnMut(Violation),
    ) {
        let call = arguments.call();
        if let Ok(problem) = call.check(target)
            && let Some(mask) = bytes(Parameter::BlockSparseMask.name())
            && mask.len() >= problem.mask_bytes()
            && let Err(empty) = problem.lint_mask(&call, &mask)
        {
            report(empty);
        }
    }
}

impl BlockSparseCall<'_> {
    /// Attention, and the log-sum-exp where it is asked for, as the inputs imply them; `None` without queries, or for
    /// shapes that no tensor can have.
    pub fn outputs(&self) -> Option<(TensorDesc, Option<TensorDesc>)> {
        let query = self.query?;
        let out = TensorDesc::packed(query.dtype, query.shape);
        out.byte_range()?;
        let lse = lse_shape(&query).map(|shape| TensorDesc::packed(Float, shape));
        Some((out, lse.filter(|_| self.softmax_lse_flag == 1)))
    }
}

/// Shape of the log-sum-exp of these queries: `None` for queries without axes.
fn lse_shape(query: &TensorDesc) -> Option<Dims> {
    let last = query.shape.rank().checked_sub(1)?;
    Some(query.shape.with(last, 1))
}
