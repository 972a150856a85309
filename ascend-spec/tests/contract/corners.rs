//! Calls at the corners of the contract, with the answer that the check list gives: accepted, or refused by a rule.

use crate::paged::paged;
use ascend_spec::ops::fused_infer_attention_score::{CheckedCall, FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

pub(crate) fn of(dtype: DType, shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

pub(crate) fn half(shape: &[i64]) -> TensorDesc {
    of(DType::Float16, shape)
}

pub(crate) fn bf16(shape: &[i64]) -> TensorDesc {
    of(DType::Bf16, shape)
}

pub(crate) fn int8(shape: &[i64]) -> TensorDesc {
    of(DType::Int8, shape)
}

fn causal() -> Option<TensorDesc> {
    Some(of(DType::Bool, &[2048, 2048]))
}

pub(crate) fn with<'a>(call: &FiaCall<'a>, change: impl FnOnce(&mut FiaCall<'a>)) -> FiaCall<'a> {
    let mut call = call.clone();
    change(&mut call);
    call
}

/// The rule that refuses a call; what is accepted and not computed counts as accepted.
fn verdict(call: &FiaCall<'_>, version: Version, soc: Soc) -> &'static str {
    match call.check(version, Target::snapshot(soc)) {
        Err(violation) if violation.is_unsupported() => "unsupported",
        Err(violation) => violation.rule.id,
        Ok(_) => "accepted",
    }
}

/// Calls by the answer that is due, with what they are about.
pub(crate) fn answers(calls: &[(&str, &str, FiaCall<'_>)]) {
    for (id, about, call) in calls {
        assert_eq!(verdict(call, Version::V4, Soc::AtlasA2), *id, "{about}: {call:?}");
    }
}

/// An accepted call and what it resolves to.
pub(crate) fn checked<'a>(call: &'a FiaCall<'a>) -> CheckedCall<'a> {
    call.check(Version::V4, Target::snapshot(Soc::AtlasA2)).unwrap()
}

#[test]
fn axes_behind_the_fourth_of_a_dense_output_are_not_looked_at() {
    // B10, B11.
    let key = [half(&[2, 4, 64, 32])];
    let call = |layout, out: &[i64]| FiaCall {
        query: Some(half(&[2, 4, 16, 32])),
        key: &key,
        value: &key,
        num_heads: 4,
        attention_out: Some(half(out)),
        ..FiaCall::new(layout)
    };
    answers(&[
        ("accepted", "BNSD", call("BNSD", &[2, 4, 16, 32, 1])),
        ("accepted", "BNSD_BSND", call("BNSD_BSND", &[2, 16, 4, 32, 1])),
        ("attention_out.shape", "an axis before", call("BNSD_BSND", &[1, 2, 16, 4, 32])),
        ("attention_out.shape", "an axis less", call("BNSD_BSND", &[2, 16, 128])),
    ]);
}

#[test]
fn the_sparse_mode_has_32_bits() {
    let key = [half(&[2, 4, 64, 32])];
    let call = |rows, sparse_mode| FiaCall {
        query: Some(half(&[2, 4, rows, 32])),
        attention_out: Some(half(&[2, 4, rows, 32])),
        key: &key,
        value: &key,
        num_heads: 4,
        sparse_mode,
        ..FiaCall::new("BNSD")
    };
    for rows in [1, 16] {
        let wide = call(rows, 1 << 32);
        answers(&[("accepted", "0 below", wide.clone())]);
        let linted = checked(&wide).lint(&[]).unwrap_err();
        assert_eq!(linted.rule.id, "sparse_mode.wide");
    }
    answers(&[
        ("atten_mask.required", "3 below", call(16, (7 << 32) + 3)),
        ("sparse_mode.known", "9 below", call(16, (1 << 32) + 9)),
        ("sparse_mode.known", "-1", call(16, -1)),
    ]);
}

#[test]
fn an_empty_length_array_pads_nothing() {
    // F7, J10.
    let key = [half(&[2, 64, 4, 32])];
    let call = FiaCall {
        query: Some(half(&[2, 1, 4, 32])),
        attention_out: Some(half(&[2, 1, 4, 32])),
        key: &key,
        value: &key,
        num_heads: 4,
        kv_padding_size: Some(of(DType::Int64, &[1])),
        key_shared_prefix: Some(half(&[1, 16, 4, 32])),
        value_shared_prefix: Some(half(&[1, 16, 4, 32])),
        ..FiaCall::new("BSND")
    };
    let lengths = |lengths| with(&call, |c| c.actual_seq_lengths_kv = lengths);
    answers(&[
        ("accepted", "null", lengths(None)),
        ("accepted", "empty", lengths(Some(&[]))),
        ("padding_size.decode", "given", lengths(Some(&[9]))),
    ]);
    let alone = |lengths| FiaCall {
        key_shared_prefix: None,
        value_shared_prefix: None,
        actual_seq_lengths_kv: lengths,
        ..call.clone()
    };
    for (lengths, padded) in [(None, false), (Some(&[][..]), false), (Some(&[9][..]), true)] {
        let call = alone(lengths);
        assert_eq!(checked(&call).problem.key_padding.is_some(), padded);
    }
}

#[test]
fn calls_without_keys_hold_their_rules() {
    let none = |dtype| [of(dtype, &[1, 4, 0, 64])];
    let (halves, bytes) = (none(DType::Float16), none(DType::Int8));
    let call = FiaCall {
        query: Some(half(&[1, 4, 32, 64])),
        attention_out: Some(half(&[1, 4, 32, 64])),
        key: &halves,
        value: &halves,
        num_heads: 4,
        ..FiaCall::new("BNSD")
    };
    let wide = [half(&[1, 4, 0, 1024])];
    let at_most = [half(&[1, 4, 0, 512])];
    let empty = [half(&[1, 4, 0, 64]), half(&[1, 4, 0, 64])];
    let mixed = [half(&[1, 4, 0, 64]), half(&[1, 4, 5, 64])];
    let swapped = [half(&[1, 4, 5, 64]), half(&[1, 4, 0, 64])];
    let dim = |dim, keys| FiaCall {
        query: Some(half(&[1, 4, 32, dim])),
        attention_out: Some(half(&[1, 4, 32, dim])),
        key: keys,
        value: keys,
        ..call.clone()
    };
    let list = |keys, values| FiaCall {
        query: Some(half(&[2, 4, 32, 64])),
        attention_out: Some(half(&[2, 4, 32, 64])),
        key: keys,
        value: values,
        ..call.clone()
    };
    answers(&[
        ("accepted", "no keys", call.clone()),
        (
            "quant.int8_query_empty",
            "an INT8 query",
            FiaCall { query: Some(int8(&[1, 4, 32, 64])), key: &bytes, value: &bytes, ..call.clone() },
        ),
        // B16 is a check at the entry.
        ("head_dim.max", "dimension 1024", dim(1024, &wide)),
        ("accepted", "dimension 512", dim(512, &at_most)),
        // C5.
        ("accepted", "empty lists", list(&empty, &empty)),
        ("key.list_batch", "the first empty", list(&mixed, &mixed)),
        ("key.list_batch", "the second empty", list(&swapped, &swapped)),
        ("key.list_batch", "values mixed", list(&empty, &mixed)),
    ]);
}

#[test]
fn int32_is_int4_for_key_and_value_together_from_the_second_version_on() {
    // A5.
    let words = [of(DType::Int32, &[2, 4, 32, 8])];
    let nibbles = [of(DType::Int4, &[2, 4, 32, 64])];
    let call = |rows, key, value| FiaCall {
        query: Some(half(&[2, 4, rows, 64])),
        attention_out: Some(half(&[2, 4, rows, 64])),
        key,
        value,
        num_heads: 4,
        antiquant_scale: Some(half(&[2])),
        ..FiaCall::new("BNSD")
    };
    for rows in [1, 32] {
        answers(&[
            ("accepted", "INT32", call(rows, &words, &words)),
            ("accepted", "INT4", call(rows, &nibbles, &nibbles)),
            ("value.dtype_of_key", "INT32 key", call(rows, &words, &nibbles)),
            ("value.dtype_of_key", "INT32 value", call(rows, &nibbles, &words)),
        ]);
        let words = call(rows, &words, &words);
        assert_eq!(Version::oldest_for(&words), Version::V2);
        for (version, id) in [(Version::V1, "key.dtype_of_query"), (Version::V2, "accepted")] {
            assert_eq!(verdict(&words, version, Soc::AtlasA2), id);
        }
        let nibbles = call(rows, &nibbles, &nibbles);
        assert_eq!(verdict(&nibbles, Version::V1, Soc::AtlasA2), "accepted");
    }
    let (words, nibbles) = ([of(DType::Int32, &[20, 32, 32])], [of(DType::Int4, &[20, 32, 256])]);
    let paged = FiaCall {
        block_size: 32,
        antiquant_scale: Some(half(&[2, 256])),
        ..paged("BSH", &words, &[2, 1, 512], (4, 2))
    };
    answers(&[
        ("accepted", "INT32", paged.clone()),
        ("value.dtype_of_key", "INT32 key", with(&paged, |c| c.value = &nibbles)),
    ]);
}

#[test]
fn lists_of_int32_are_addressed_by_int4() {
    let words = [of(DType::Int32, &[1, 4, 32, 8]), of(DType::Int32, &[1, 4, 30, 8])];
    for rows in [1, 32] {
        let call = FiaCall {
            query: Some(half(&[2, 4, rows, 64])),
            attention_out: Some(half(&[2, 4, rows, 64])),
            key: &words,
            value: &words,
            num_heads: 4,
            antiquant_scale: Some(half(&[2])),
            ..FiaCall::new("BNSD")
        };
        let problem = checked(&call).problem;
        for (b, keys) in [(0, 32), (1, 30)] {
            let at = problem.key_value(b);
            for rows in [at.key, at.value] {
                assert_eq!(rows.dtype, DType::Int4);
                assert_eq!((rows.view.head, rows.view.row), (keys * 64, 64));
            }
        }
    }
}

#[test]
fn a_shared_prefix_is_packed_int4_as_its_keys_are() {
    let words = [of(DType::Int32, &[2, 4, 32, 8])];
    let call = |rows, dtype, dim| FiaCall {
        query: Some(half(&[2, 4, rows, 64])),
        attention_out: Some(half(&[2, 4, rows, 64])),
        key: &words,
        value: &words,
        num_heads: 4,
        antiquant_scale: Some(half(&[2])),
        key_shared_prefix: Some(of(dtype, &[1, 4, 16, dim])),
        value_shared_prefix: Some(of(dtype, &[1, 4, 16, dim])),
        ..FiaCall::new("BNSD")
    };
    for rows in [1, 32] {
        let (nibbles, packed) = (call(rows, DType::Int4, 64), call(rows, DType::Int32, 8));
        assert_eq!(checked(&nibbles).problem.prefix, checked(&packed).problem.prefix);
        answers(&[
            ("accepted", "INT4", nibbles),
            ("accepted", "INT32", packed),
            ("shared_prefix.shape", "eight times as many", call(rows, DType::Int32, 64)),
        ]);
    }
    let unpacked = [of(DType::Int4, &[2, 4, 32, 64])];
    let of_nibbles = |rows| FiaCall { key: &unpacked, value: &unpacked, ..call(rows, DType::Int32, 64) };
    answers(&[("shared_prefix.dtype", "looked at", of_nibbles(1)), ("unsupported", "not looked at", of_nibbles(32))]);
}

#[test]
fn the_bias_of_packed_heads_covers_the_longest_sequence() {
    // E5.1: batch 1, every head, the longest query, the longest key.
    let rows = [bf16(&[4, 12, 64])];
    let cache = [bf16(&[4, 128, 256])];
    let call = FiaCall {
        query: Some(bf16(&[4, 5, 64])),
        attention_out: Some(bf16(&[5, 4, 64])),
        key: &rows,
        value: &rows,
        num_heads: 4,
        num_key_value_heads: 4,
        actual_seq_lengths: Some(&[2, 5]),
        actual_seq_lengths_kv: Some(&[8, 12]),
        ..FiaCall::new("NTD_TND")
    };
    let paged = FiaCall {
        key: &cache,
        value: &cache,
        block_table: Some(of(DType::Int32, &[2, 2])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[8, 130]),
        ..call.clone()
    };
    let bias = |call: &FiaCall<'_>, shape: &[i64]| {
        call.check(Version::V4, Target::snapshot(Soc::AtlasA2)).unwrap();
        let call = with(call, |c| c.pse_shift = Some(bf16(shape)));
        verdict(&call, Version::V4, Soc::AtlasA2)
    };
    for (id, call, shape) in [
        ("accepted", &call, &[1, 4, 3, 8][..]),
        ("accepted", &call, &[1, 4, 5, 12]),
        ("pse_shift.shape", &call, &[2, 4, 3, 8]),
        ("pse_shift.shape", &call, &[1, 3, 3, 8]),
        ("pse_shift.shape", &call, &[1, 4, 2, 8]),
        ("pse_shift.shape", &call, &[1, 4, 3, 7]),
        ("pse_shift.shape", &call, &[4, 3, 8]),
        ("accepted", &paged, &[1, 4, 3, 256]),
        ("pse_shift.shape", &paged, &[1, 4, 3, 255]),
        ("pse_shift.shape", &paged, &[1, 4, 2, 256]),
    ] {
        assert_eq!(bias(call, shape), id, "{shape:?}");
    }
}

#[test]
fn a_sliding_window_without_paging_has_no_negative_block_size() {
    // G1.4.
    let key = [bf16(&[1, 600, 1, 512])];
    let call = FiaCall {
        query: Some(bf16(&[1, 2, 128, 512])),
        query_rope: Some(bf16(&[1, 2, 128, 64])),
        attention_out: Some(bf16(&[1, 2, 128, 512])),
        key: &key,
        value: &key,
        key_rope: Some(bf16(&[1, 600, 1, 64])),
        num_heads: 128,
        num_key_value_heads: 1,
        sparse_mode: 4,
        atten_mask: causal(),
        pre_tokens: 64,
        next_tokens: 0,
        ..FiaCall::new("BSND")
    };
    let block_size = |size| with(&call, |c| c.block_size = size);
    answers(&[
        ("accepted", "none", block_size(0)),
        ("accepted", "ignored", block_size(128)),
        ("mla.block_size", "negative", block_size(-1)),
    ]);
}

#[test]
fn ascend_950_types_are_unsupported_rather_than_wrong() {
    for (query, key, newer) in [
        (DType::HiFloat8, DType::HiFloat8, "unsupported"),
        (DType::Float8E4M3Fn, DType::Float8E4M3Fn, "unsupported"),
        (DType::Bf16, DType::Float4E2M1, "unsupported"),
        (DType::Double, DType::Double, "dtype.registered"),
    ] {
        let keys = [of(key, &[1, 4, 32, 64])];
        let call = FiaCall {
            query: Some(of(query, &[1, 4, 32, 64])),
            attention_out: Some(half(&[1, 4, 32, 64])),
            key: &keys,
            value: &keys,
            num_heads: 4,
            ..FiaCall::new("BNSD")
        };
        assert_eq!(verdict(&call, Version::V5, Soc::Ascend950), newer);
        assert_eq!(verdict(&call, Version::V4, Soc::AtlasA2), "dtype.registered");
    }
}

#[test]
fn batches_of_any_size_are_judged_by_the_lengths_that_are_given() {
    let batch = 1_000_000_000_000;
    let key = [half(&[batch, 1, 16, 64])];
    let call = FiaCall {
        query: Some(half(&[batch, 1, 16, 64])),
        attention_out: Some(int8(&[batch, 1, 16, 64])),
        key: &key,
        value: &key,
        num_heads: 1,
        actual_seq_lengths: Some(&[16]),
        actual_seq_lengths_kv: Some(&[16]),
        quant_scale2: Some(of(DType::Float, &[1])),
        quant_offset2: Some(of(DType::Float, &[1])),
        ..FiaCall::new("BNSD")
    };
    let checked = call.check(Version::V3, Target::new(Soc::AtlasA2, Cann::V9_0)).unwrap();
    assert_eq!(checked.problem.batch, 1_000_000_000_000);
    checked.each_lint(&mut |_| {});
    checked.problem.touches(&mut |_, _| {});
    // From 9.1 on the operator bounds the batch.
    let newer = Target::new(Soc::AtlasA2, Cann::V9_1);
    assert!(call.check(Version::V3, newer).is_err());
}
