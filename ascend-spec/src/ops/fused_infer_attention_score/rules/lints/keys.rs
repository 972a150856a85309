//! Keys, values and rotary parts that are not checked, and limits that only the documents know.

use super::{Report, lint};
use crate::allowed::{Named, Outcome};
use crate::ops::fused_infer_attention_score::{CheckedCall, Checker, Route, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    LIST_IGNORED = "key.list_ignored", Lint("the tensors are not looked at"), V1, "check J16",
        "every tensor of the key and value lists is used",
        "pass the tensors that are used only";
    LIST_DTYPE = "key.list_dtype",
        Overrun("a tensor of smaller elements is read as one of the first tensor's"), V1, "check D3",
        "in the prefill path the tensors of a list have one dtype",
        "convert every tensor of the lists to one dtype: the operator looks at the first alone";
    SINGLE_LENGTH = "key.list_single_length",
        Overrun("keys behind the end of a shorter tensor are read"), V1, "check E1.2",
        "in the prefill path one key length for a whole list fits in each of its tensors",
        "pass a key length for each sequence: the operator holds a single one against the longest tensor";
    LIST_MAX = "key.list_max",
        Overrun("CANN does not say what holds the addresses of more"),
        V1, "FusedInferAttentionScore documentation, limits; check I2",
        "a list of keys has at most 256 tensors",
        "split the batch over several calls";
    VALUE_SHAPE = "value.shape_unchecked", Overrun("the value is read by the key's rows"), V1, "check J17",
        "the value has the key's batch size and rows",
        "give the value its key's shape: the operator reads it by the key's rows";
    ROWS_MAX = "query.rows_max", Overrun("CANN does not say where offsets of more rows lead"), V1, "check D15",
        "a sequence has at most 20971520 query rows and as many keys",
        "split long sequences: the operator only warns";
    HEADS_MAX = "num_heads.max_decode",
        Overrun("CANN does not say what the buffers hold for more"),
        V1, "FusedInferAttentionScore documentation, limits; check D1",
        "numHeads is at most 256 in the decode path",
        "split the heads over several calls";
    UNALIGNED = "query.batch_unaligned",
        Overrun("CANN does not say where rows of more sequences are copied to"),
        V1, "FusedInferAttentionScore documentation, limits",
        "with a head dimension that is no multiple of 16 the batch size is at most 128",
        "pad the head dimension with zeros, or split the batch over several calls";
    ROPE_DTYPE = "rope.dtype_unchecked",
        Overrun("a rotary part of smaller elements is read as one of the query's"), V3, "check J29",
        "in the prefill path queryRope and keyRope have the query's dtype",
        "convert the rotary parts to the query's dtype";
    ROPE_CACHE = "rope.cache_unchecked",
        Overrun("the cache of keyRope is read by the blocks of the key"), V3, "check J29",
        "in the prefill path the cache of keyRope has as many blocks as that of the key, and tokens in each",
        "shape the cache of keyRope as that of the key";
}

/// Lints of a call without keys: its output is filled, whatever the values are.
pub(super) fn filled(p: &CheckedCall<'_>, report: Report<'_>) {
    if let ([key, ..], [value, ..]) = (p.call.key, p.call.value) {
        lint!(
            report,
            key.is_empty() == value.is_empty(),
            VALUE_SHAPE,
            format_args!("key {}, value {}", key.shape, value.shape),
            "both empty, or neither",
        );
    }
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    let most = CheckedCall::MOST_ROWS;
    let used = if p.problem.list.is_some() { p.problem.batch } else { 1 };
    lint!(
        report,
        call.key.len() <= used && call.value.len() <= used,
        LIST_IGNORED,
        format_args!("{} keys, {} values", call.key.len(), call.value.len()),
        used,
    );
    if p.problem.list.is_some() {
        let first = call.key.first().map(|key| key.dtype);
        let other = call.key.iter().chain(call.value).find(|desc| Some(desc.dtype) != first);
        if let Some(other) = other {
            lint!(report, false, LIST_DTYPE, other, "the first key's dtype");
        }
        if let (Route::Prefill, Some(&[len])) = (p.route, call.actual_seq_lengths_kv) {
            let shortest = p.problem.distinct_sequences().map(|b| p.problem.key_axis_of(b)).min().unwrap_or(0);
            lint!(
                report,
                usize::try_from(len).is_ok_and(|len| len <= shortest),
                SINGLE_LENGTH,
                len,
                format_args!("0 to {shortest}, or a length for each of {}", p.problem.batch),
            );
        }
        LIST_MAX.takes(p.problem.batch, ..=256).report(report);
    } else if let ([key, ..], [value, ..]) = (call.key, call.value)
        && p.problem.pages.is_none()
        && !p.problem.packed
        && p.checker != Checker::Unified
    {
        VALUE_SHAPE.takes(Named(format_args!("key {}, value", key.shape), value.shape), key.shape).report(report);
    }
    lint!(
        report,
        p.problem.packed || (p.problem.query_rows <= most && (p.problem.pages.is_some() || p.problem.key_rows <= most)),
        ROWS_MAX,
        format_args!("{} rows, {} keys", p.problem.query_rows, p.problem.key_rows),
        format_args!("1 to {most}"),
    );
    if p.checker == Checker::Decode {
        HEADS_MAX.takes(p.problem.heads, ..=256).report(report);
        lint!(
            report,
            p.problem.head_dim.is_multiple_of(16) || p.problem.batch <= 128,
            UNALIGNED,
            format_args!("batch {}, head dimension {}", p.problem.batch, p.problem.head_dim),
            "1 to 128",
        );
    }
}

pub(super) fn rope(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    if p.route != Route::Prefill {
        return;
    }
    for (rope, name) in [(&call.query_rope, "queryRope"), (&call.key_rope, "keyRope")] {
        let Some(rope) = rope else { continue };
        lint!(
            report,
            // A quantised query has BF16 rotary parts, which a rule checks.
            rope.dtype == p.problem.query.dtype || p.problem.query_quantisation.is_some(),
            ROPE_DTYPE,
            format_args!("{name} {}", rope.dtype),
            p.problem.query.dtype,
        );
    }
    let (Some(pages), Some(cache), Some(rope)) = (&p.problem.pages, p.cache, &call.key_rope) else {
        return;
    };
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    let extents = cache.extents(rope, size(p.problem.kv_heads));
    let grid = extents.map(|extents| (extents.batch, extents.rows));
    lint!(
        report,
        grid == Some((size(pages.blocks), size(pages.block_size))),
        ROPE_CACHE,
        rope.shape,
        format_args!("{} blocks of {}", pages.blocks, pages.block_size),
    );
}
