//! Left padding of query and key.

use super::Facts;
use crate::allowed::Named;
use crate::ops::fused_infer_attention_score::{Checker, Parameter, Version};
use crate::rule::{require, rules};
use crate::{DType, Dims, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    SHAPE = "padding_size.shape", TILING_ERROR, V1, "check C7" in Scope::ALL,
        "in the prefill path queryPaddingSize and kvPaddingSize have one axis of one element",
        "pass one INT64: the padding is the same for every sequence";
    LENGTHS = "padding_size.lengths", TILING_ERROR, V1, "check C7" in Scope::ALL,
        "in the prefill path queryPaddingSize needs actualSeqLengths, kvPaddingSize needs actualSeqLengthsKv",
        "pass the matching length array";
    ALONE = "padding_size.alone", TILING_ERROR, V1, "checks C6, C7",
        "left padding goes with no tensor list, paging, packed layout or shared prefix in the prefill path",
        "pad on the right and give the lengths";
    DECODE = "padding_size.decode", TILING_ERROR, V1, "checks F7, F12, J10",
        "in the decode path kvPaddingSize goes with neither INT4 keys nor rotary parts, nor with a shared prefix and \
         key lengths",
        "pad on the right and give the lengths";
}

/// Whether a call pads its query or its keys on the left.
pub(crate) fn given(f: &Facts<'_>) -> bool {
    f.call.query_padding_size.is_some() || f.call.kv_padding_size.is_some()
}

pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    // NTD_TND ignores the padding of its query.
    if !given(f) || (f.layout == crate::Layout::NtdTnd && call.kv_padding_size.is_none()) {
        return Ok(());
    }
    ALONE.forbids([("a tensor list", f.kv_list), ("blockTable", f.paged()), ("a packed layout", f.packed())])?;
    ALONE.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    let sizes: [(&Option<TensorDesc>, _, _); 2] = [
        (&call.query_padding_size, "queryPaddingSize", call.actual_seq_lengths),
        (&call.kv_padding_size, "kvPaddingSize", call.actual_seq_lengths_kv),
    ];
    for (size, name, lengths) in sizes {
        let Some(size) = size else { continue };
        SHAPE.takes(Named(name, size.shape), Dims::of([1]))?;
        require!(lengths.is_some(), LENGTHS, format_args!("{name} without lengths"), "the lengths of the sequences",);
    }
    Ok(())
}

/// Whether the decode path sees key lengths: an empty array counts as none.
fn has_key_lengths(f: &Facts<'_>) -> bool {
    let lengths = f.call.actual_seq_lengths_kv;
    lengths.is_some_and(|lengths| !lengths.is_empty())
}

/// Checks the decode path, which ignores padding where it does not refuse it.
pub(crate) fn decode(f: &Facts<'_>) -> Result<(), Violation> {
    if f.call.kv_padding_size.is_none() {
        return Ok(());
    }
    DECODE.forbids([
        ("a shared prefix with lengths", f.call.key_shared_prefix.is_some() && has_key_lengths(f)),
        ("INT4 keys", f.kv_dtype() == DType::Int4),
        ("rotary parts", f.rope()),
    ])
}

/// Whether the unified checker checks the padding of the keys.
pub(crate) fn checked_by_unified(f: &Facts<'_>) -> bool {
    let counts = |size| !f.one_row || key_counts(f, size);
    f.call.kv_padding_size.as_ref().is_some_and(counts)
}

/// Whether the padding of a single row's keys is used rather than ignored.
fn key_counts(f: &Facts<'_>, size: &TensorDesc) -> bool {
    f.call.actual_seq_lengths_kv.is_some() && !f.kv_list && !size.is_empty() && !f.paged()
}

/// Whether the padding of the keys takes effect.
pub(crate) fn in_force(f: &Facts<'_>) -> bool {
    if f.checker == Checker::Unified && f.prefill() {
        return checked_by_unified(f) && !f.packed();
    }
    let ignored = f.paged() || f.kv_list || !has_key_lengths(f);
    f.call.kv_padding_size.is_some() && !f.packed() && (f.prefill() || !ignored)
}
