//! Page attention.

use super::{Report, lint};
use crate::allowed::{Named, Outcome, Shown};
use crate::ops::fused_infer_attention_score::rules::unified::lists;
use crate::ops::fused_infer_attention_score::{Cache, CheckedCall, Checker, Parameter, Version};
use crate::rule::rules;
use crate::{Cann, DType, TensorDesc};
use std::{iter, slice};

rules! {
    in Scope::ALL;
    BLOCK_SIZE = "block_size.ignored",
        Lint("only an attribute is ignored"), V1, "FusedInferAttentionScore documentation, blockSize",
        "blockSize is given with a block table only",
        "pass the block table, or blockSize 0";
    TABLE = "block_table.unchecked", Overrun("a row of INT32 is read for each sequence"), V1, "check J8",
        "in the decode path, in the split-fuse path and for the unified checker until 9.0 blockTable is INT32 [B, M]",
        "pass one row of INT32 block ids for each sequence";
    BLOCKS = "cache.blocks_unchecked",
        Lint("the blocks that the table names are checked one by one"), V1, "checks E3.3, J8",
        "outside of the prefill path the cache has as many blocks as its longest sequence needs",
        "pass the whole cache, or shorter lengths";
    SHAPE = "cache.shape_unchecked",
        Overrun("blocks are read by blockSize, numKeyValueHeads and the query's head dimension"), V1, "checks E3.4, F6",
        "in the decode and the split-fuse path a BnBsH cache is [blocks, blockSize, numKeyValueHeads * head \
         dimension], a BnNBsD cache [blocks, numKeyValueHeads, blockSize, head dimension]",
        "shape the cache by blockSize, numKeyValueHeads and the query's head dimension";
    VALUE = "cache.value_unchecked", Overrun("the value cache is read by the key cache's shape"), V1, "check J9",
        "in the decode and the split-fuse path the value cache has the key cache's shape",
        "give the value cache the key cache's shape";
    HIDDEN = "cache.hidden_size_unchecked",
        Overrun("the step from row to row does not fit in its 16 bits"), V1, "checks E3.4, F6",
        "in the decode path the last axis of a BnBsH cache is at most 65535",
        "use a BnNBsD cache with BNSD queries";
    COPIED = "cache.copied", Lint("the copy has the elements of the cache"), V1,
        "entry points, strided tensors" in Scope::A2_A3.since(V9_1),
        "V1 to V4 read a paged cache in place: from 9.2 on with blocks apart in the split-fuse path and, for V4, in \
         the absorbed form, otherwise contiguous",
        "give keys and values a contiguous cache each: the operator copies every other one whole in each call, used \
         blocks or not";
}

/// What becomes of a tensor of a paged cache that is not contiguous.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StridedCache {
    /// The operator reads it in place.
    Read,
    /// Each call copies it whole.
    Copied,
}

/// Whether a parameter's tensors are the cache of a call with a block table.
pub(super) fn is_cached(parameter: Parameter) -> bool {
    use Parameter::{Key, KeyRope, Value};
    matches!(parameter, Key | Value | KeyRope)
}

/// What becomes of a call's tensor that is not contiguous, if it is of a paged cache; `None` for other tensors, and
/// where no source says it.
pub(super) fn strided_cache(p: &CheckedCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<StridedCache> {
    p.cache?;
    let axes = p.axes_in_place.filter(|_| is_cached(parameter))?;
    Some(match lists::is_read_in_place(desc, axes) {
        true => StridedCache::Read,
        false => StridedCache::Copied,
    })
}

/// Reports the tensors of a paged cache that the call copies first, with their bytes.
pub(super) fn copied(p: &CheckedCall<'_>, report: Report<'_>) {
    let mut copies = p.call.each_tensor().filter(|(argument, desc)| {
        let becomes = || strided_cache(p, argument.parameter, desc);
        !desc.is_contiguous() && becomes() == Some(StridedCache::Copied)
    });
    let Some(first) = copies.next() else {
        return;
    };
    let (mut bytes, mut tensors) = (0, String::new());
    for (argument, desc) in iter::once(first).chain(copies) {
        let packed = TensorDesc::packed(desc.dtype, desc.shape);
        bytes += packed.byte_range().map_or(0, |range| range.end);
        let name = argument.parameter.acl_name();
        tensors += &format!(", {name} {desc}");
    }
    lint!(
        report,
        false,
        COPIED,
        format_args!("{bytes} bytes copied by each call{tensors}"),
        match p.axes_in_place {
            Some(1..) => "no bytes: strides as of row-major blocks, which may lie apart",
            _ => "no bytes: row-major strides",
        },
    );
}

/// Whether a tensor may be a paged cache whose table was forgotten. Serving engines pass their block size with every
/// call, also where the keys are in no cache.
fn is_block_shaped(key: &TensorDesc, block_size: i64) -> bool {
    let rows = match &key.shape[..] {
        [_, rows, _] => slice::from_ref(rows),
        [_, rest @ .., _] if rest.len() == 2 => rest,
        _ => &[],
    };
    block_size != 0 && rows.contains(&block_size)
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    let (Some(pages), Some(cache), Some(table)) = (&p.problem.pages, p.cache, &call.block_table) else {
        lint!(
            report,
            !call.key.iter().any(|key| is_block_shaped(key, call.block_size)),
            BLOCK_SIZE,
            format_args!("{} for keys of that many rows", call.block_size),
            "0 without a block table",
        );
        return;
    };
    if p.checker == Checker::Prefill {
        return;
    }
    let unified = p.checker == Checker::Unified;
    // The unified checker checks the table from 9.1 on.
    let looked_at = unified && (p.target.is_950() || p.target.cann >= Cann::V9_1);
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    lint!(
        report,
        looked_at
            || table.dtype == DType::Int32 && matches!(table.shape[..], [rows, _] if rows == size(p.problem.batch)),
        TABLE,
        table,
        format_args!("INT32 [{}, M]", p.problem.batch),
    );
    let longest = usize::try_from(p.longest_key()).unwrap_or(0);
    let needed = longest.div_ceil(pages.block_size.max(1));
    lint!(
        report,
        needed <= pages.blocks,
        BLOCKS,
        format_args!("{} blocks", pages.blocks),
        format_args!("{needed} or more"),
    );
    let ([key, ..], [value, ..]) = (call.key, call.value) else {
        return;
    };
    if unified {
        return;
    }
    VALUE.takes(Named(format_args!("key {}, value", key.shape), value.shape), key.shape).report(report);
    let (blocks, bs) = (size(pages.blocks), size(pages.block_size));
    let (heads, dim) = (size(p.problem.kv_heads), size(p.problem.head_dim));
    if let Some(shape) = cache.shape(key.dtype, blocks, bs, heads, dim) {
        SHAPE
            .takes(Shown(format_args!("{}, read by a table of {bs} tokens a block", key.shape), key.shape), shape)
            .report(report);
    }
    let hidden = key.shape.last().copied().unwrap_or(0);
    lint!(report, cache != Cache::BnBsH || hidden <= 65_535, HIDDEN, hidden, "65535 or less",);
}
