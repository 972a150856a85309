//! Every rule has a call that breaks it, and it alone is named.

use crate::recorded;
use ascend_spec::fia::{FiaCall, Version, rules};
use ascend_spec::{DType, Format, Level, Refusal, Soc, TensorDesc};
use std::collections::BTreeSet;

fn half(shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(DType::Float16, shape).unwrap()
}

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(DType::Bool, shape)
}

/// The rule that refuses `call`.
fn refused(call: &FiaCall<'_>) -> &'static str {
    refused_on(call, Version::V1, Soc::AtlasA2)
}

fn refused_on(call: &FiaCall<'_>, version: Version, soc: Soc) -> &'static str {
    match call.check(version, soc) {
        Err(Refusal::Violation(violation)) => {
            for text in [&violation.given, &violation.allowed, &violation.fix] {
                assert!(!text.is_empty(), "{violation:?}");
            }
            assert!(violation.to_string().starts_with(violation.rule.id));
            violation.rule.id
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn every_rule_is_broken_by_some_call() {
    let key = [half(&[2, 4, 64, 32])];
    let keys = |desc: TensorDesc| [desc];
    let prefill = FiaCall {
        query: Some(half(&[2, 8, 16, 32])),
        key: &key,
        value: &key,
        num_heads: 8,
        num_key_value_heads: 4,
        attention_out: Some(half(&[2, 8, 16, 32])),
        ..FiaCall::new("BNSD")
    };
    let decode = FiaCall {
        query: Some(half(&[2, 8, 1, 32])),
        attention_out: Some(half(&[2, 8, 1, 32])),
        ..prefill.clone()
    };
    let elements = [half(&[1, 4, 64, 32]), half(&[1, 4, 60, 32])];
    let list = FiaCall {
        key: &elements,
        value: &elements,
        ..prefill.clone()
    };
    for good in [&prefill, &decode, &list] {
        good.check(Version::V1, Soc::AtlasA2).unwrap();
    }

    let mut seen = BTreeSet::new();
    let mut expect = |id: &'static str, call: FiaCall<'_>| {
        assert_eq!(refused(&call), id);
        seen.insert(id);
    };

    expect(
        "call.required",
        FiaCall {
            query: None,
            ..prefill.clone()
        },
    );
    expect(
        "call.required",
        FiaCall {
            key: &[],
            ..prefill.clone()
        },
    );
    expect(
        "call.required",
        FiaCall {
            value: &[],
            ..prefill.clone()
        },
    );
    expect(
        "call.required",
        FiaCall {
            attention_out: None,
            ..prefill.clone()
        },
    );
    let float = TensorDesc {
        dtype: DType::Float,
        ..half(&[2, 8, 16, 32])
    };
    expect(
        "dtype.registered",
        FiaCall {
            query: Some(float),
            ..prefill.clone()
        },
    );
    expect(
        "dtype.registered",
        FiaCall {
            atten_mask: Some(float),
            ..prefill.clone()
        },
    );
    let nz = TensorDesc {
        format: Format::FractalNz,
        ..half(&[2, 8, 16, 32])
    };
    expect(
        "format.plain",
        FiaCall {
            query: Some(nz),
            ..prefill.clone()
        },
    );
    expect(
        "shape.countable",
        FiaCall {
            query: Some(half(&[2, -8, 16, 32])),
            ..prefill.clone()
        },
    );
    expect(
        "input_layout.known",
        FiaCall {
            input_layout: "NHWC",
            ..prefill.clone()
        },
    );
    expect(
        "query.rank",
        FiaCall {
            query: Some(half(&[2, 8, 16])),
            ..prefill.clone()
        },
    );
    expect(
        "query.hidden_size",
        FiaCall {
            query: Some(half(&[2, 16, 250])),
            input_layout: "BSH",
            ..prefill.clone()
        },
    );
    expect(
        "num_heads.positive",
        FiaCall {
            num_heads: 0,
            ..prefill.clone()
        },
    );
    expect(
        "input_layout.bnsd_bsnd_rows",
        FiaCall {
            input_layout: "BNSD_BSND",
            ..decode.clone()
        },
    );
    expect(
        "query.empty_output",
        FiaCall {
            query: Some(half(&[0, 16, 8, 32])),
            input_layout: "BSND",
            ..prefill.clone()
        },
    );
    expect(
        "query.empty_decode",
        FiaCall {
            query: Some(half(&[0, 8, 1, 32])),
            attention_out: Some(half(&[0, 8, 1, 32])),
            ..decode.clone()
        },
    );
    expect(
        "num_heads.query",
        FiaCall {
            num_heads: 4,
            ..prefill.clone()
        },
    );
    let many = [half(&[2, 257, 64, 32])];
    expect(
        "num_heads.max",
        FiaCall {
            query: Some(half(&[2, 257, 16, 32])),
            attention_out: Some(half(&[2, 257, 16, 32])),
            key: &many,
            value: &many,
            num_heads: 257,
            num_key_value_heads: 0,
            ..prefill.clone()
        },
    );
    expect(
        "num_key_value_heads.range",
        FiaCall {
            num_key_value_heads: 9,
            ..prefill.clone()
        },
    );
    expect(
        "num_key_value_heads.range",
        FiaCall {
            num_key_value_heads: -1,
            ..decode.clone()
        },
    );
    expect(
        "num_key_value_heads.divides",
        FiaCall {
            num_key_value_heads: 3,
            ..prefill.clone()
        },
    );
    let one = [half(&[2, 1, 64, 32])];
    expect(
        "num_key_value_heads.group",
        FiaCall {
            query: Some(half(&[2, 65, 16, 32])),
            attention_out: Some(half(&[2, 65, 16, 32])),
            key: &one,
            value: &one,
            num_heads: 65,
            num_key_value_heads: 1,
            ..prefill.clone()
        },
    );
    expect(
        "num_key_value_heads.key",
        FiaCall {
            num_key_value_heads: 2,
            ..prefill.clone()
        },
    );
    let wide = keys(half(&[2, 4, 64, 528]));
    expect(
        "head_dim.max",
        FiaCall {
            query: Some(half(&[2, 8, 16, 528])),
            attention_out: Some(half(&[2, 8, 16, 528])),
            key: &wide,
            value: &wide,
            ..prefill.clone()
        },
    );
    expect(
        "head_dim.equal",
        FiaCall {
            key: &keys(half(&[2, 4, 64, 48])),
            ..prefill.clone()
        },
    );
    let odd = keys(half(&[2, 4, 64, 40]));
    expect(
        "head_dim.aligned",
        FiaCall {
            query: Some(half(&[2, 8, 16, 40])),
            attention_out: Some(half(&[2, 8, 16, 40])),
            key: &odd,
            value: &odd,
            ..prefill.clone()
        },
    );
    let bf16 = [TensorDesc {
        dtype: DType::Bf16,
        ..key[0]
    }];
    expect(
        "key.dtype_of_query",
        FiaCall {
            key: &bf16,
            value: &bf16,
            ..prefill.clone()
        },
    );
    expect(
        "key.rank",
        FiaCall {
            key: &keys(half(&[2, 64, 128])),
            ..prefill.clone()
        },
    );
    expect(
        "key.batch",
        FiaCall {
            key: &elements[..1],
            value: &elements[..1],
            ..prefill.clone()
        },
    );
    let huge = keys(half(&[65_537, 4, 64, 32]));
    expect(
        "query.batch_max",
        FiaCall {
            query: Some(half(&[65_537, 8, 1, 32])),
            attention_out: Some(half(&[65_537, 8, 1, 32])),
            key: &huge,
            value: &huge,
            ..decode.clone()
        },
    );
    expect(
        "value.shape_of_key",
        FiaCall {
            value: &keys(half(&[2, 4, 63, 32])),
            ..decode.clone()
        },
    );
    expect(
        "key.list_length",
        FiaCall {
            key: &elements[..1],
            value: &elements[..1],
            ..decode.clone()
        },
    );
    let batched = [half(&[1, 4, 64, 32]), half(&[2, 4, 64, 32])];
    expect(
        "key.list_batch",
        FiaCall {
            key: &batched,
            value: &batched,
            ..list.clone()
        },
    );
    let mixed = [half(&[1, 4, 64, 32]), half(&[1, 4, 64, 16])];
    expect(
        "key.list_shape",
        FiaCall {
            key: &mixed,
            value: &mixed,
            ..list.clone()
        },
    );
    expect(
        "value.shape_of_key",
        FiaCall {
            value: &[elements[1], elements[0]],
            ..list.clone()
        },
    );
    expect(
        "actual_seq_lengths.range",
        FiaCall {
            actual_seq_lengths: Some(&[16, 17]),
            ..prefill.clone()
        },
    );
    expect(
        "actual_seq_lengths_kv.range",
        FiaCall {
            actual_seq_lengths_kv: Some(&[-1]),
            ..prefill.clone()
        },
    );
    expect(
        "actual_seq_lengths_kv.range",
        FiaCall {
            actual_seq_lengths_kv: Some(&[60, 61]),
            ..list.clone()
        },
    );
    let three = keys(half(&[3, 4, 64, 32]));
    let three_rows = |rows| FiaCall {
        query: Some(half(&[3, 8, rows, 32])),
        attention_out: Some(half(&[3, 8, rows, 32])),
        key: &three,
        value: &three,
        ..prefill.clone()
    };
    expect(
        "actual_seq_lengths.count",
        FiaCall {
            actual_seq_lengths: Some(&[4, 4]),
            ..three_rows(16)
        },
    );
    expect(
        "actual_seq_lengths_kv.count",
        FiaCall {
            actual_seq_lengths_kv: Some(&[4, 4]),
            ..three_rows(1)
        },
    );
    expect(
        "sparse_mode.known",
        FiaCall {
            sparse_mode: 5,
            ..prefill.clone()
        },
    );
    expect(
        "atten_mask.required",
        FiaCall {
            sparse_mode: 3,
            ..prefill.clone()
        },
    );
    expect(
        "atten_mask.compressed_shape",
        FiaCall {
            sparse_mode: 4,
            atten_mask: mask(&[16, 64]),
            ..prefill.clone()
        },
    );
    expect(
        "atten_mask.compressed_shape_decode",
        FiaCall {
            sparse_mode: 3,
            atten_mask: mask(&[1, 2048, 2048]),
            ..decode.clone()
        },
    );
    expect(
        "atten_mask.full_shape",
        FiaCall {
            sparse_mode: 1,
            atten_mask: mask(&[16, 63]),
            ..prefill.clone()
        },
    );
    expect(
        "atten_mask.full_shape_decode",
        FiaCall {
            atten_mask: mask(&[1, 64]),
            ..decode.clone()
        },
    );
    let banded = |pre_tokens, next_tokens| FiaCall {
        sparse_mode: 4,
        atten_mask: mask(&[2048, 2048]),
        pre_tokens,
        next_tokens,
        ..prefill.clone()
    };
    expect("tokens.both_negative", banded(-1, -1));
    expect("tokens.empty_band", banded(3, -4));
    expect("next_tokens.reach", banded(100, -64));
    expect("pre_tokens.reach", banded(-16, 100));
    let out = TensorDesc {
        dtype: DType::Bf16,
        ..half(&[2, 8, 16, 32])
    };
    expect(
        "attention_out.dtype",
        FiaCall {
            attention_out: Some(out),
            ..prefill.clone()
        },
    );
    expect(
        "attention_out.shape",
        FiaCall {
            attention_out: Some(half(&[2, 8, 16, 16])),
            ..prefill.clone()
        },
    );
    let asked = FiaCall {
        softmax_lse_flag: true,
        ..prefill.clone()
    };
    expect("softmax_lse.required", asked.clone());
    let lse = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape);
    expect(
        "softmax_lse.shape",
        FiaCall {
            softmax_lse: lse(DType::Float, &[2, 8, 16]),
            ..asked.clone()
        },
    );
    expect(
        "softmax_lse.dtype",
        FiaCall {
            softmax_lse: lse(DType::Float16, &[2, 8, 16, 1]),
            ..asked.clone()
        },
    );
    expect(
        "inner_precise.known",
        FiaCall {
            inner_precise: 4,
            ..prefill.clone()
        },
    );
    expect(
        "inner_precise.known",
        FiaCall {
            inner_precise: 2,
            ..decode.clone()
        },
    );
    expect(
        "antiquant_mode.unused",
        FiaCall {
            antiquant_mode: 1,
            ..prefill.clone()
        },
    );
    let int4 = |shape: &[i64]| TensorDesc::contiguous(DType::Int4, shape).unwrap();
    let nibbles = [int4(&[2, 4, 64, 32])];
    expect(
        "antiquant.head_dim",
        FiaCall {
            key: &nibbles,
            value: &nibbles,
            antiquant_scale: Some(half(&[2])),
            ..prefill.clone()
        },
    );
    let cache = [half(&[3, 128, 128])];
    let paged = FiaCall {
        key: &cache,
        value: &cache,
        block_table: TensorDesc::contiguous(DType::Int32, &[2, 2]),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[200, 200]),
        ..prefill.clone()
    };
    expect("cache.blocks", paged.clone());
    let wide = [half(&[4, 128, 65_536])];
    expect(
        "cache.hidden_size",
        FiaCall {
            query: Some(half(&[2, 128, 16, 512])),
            attention_out: Some(half(&[2, 128, 16, 512])),
            num_heads: 128,
            num_key_value_heads: 128,
            key: &wide,
            value: &wide,
            ..paged.clone()
        },
    );
    expect(
        "cache.rank",
        FiaCall {
            key: &[half(&[4, 128])],
            ..paged.clone()
        },
    );
    let heads_first = [half(&[4, 4, 128, 32])];
    expect(
        "cache.layout",
        FiaCall {
            query: Some(half(&[2, 16, 8, 32])),
            attention_out: Some(half(&[2, 16, 8, 32])),
            input_layout: "BSND",
            key: &heads_first,
            value: &heads_first,
            ..paged.clone()
        },
    );
    let bytes = [TensorDesc::contiguous(DType::Int8, &[4, 128, 32]).unwrap()];
    expect(
        "inner_precise.int8_cache",
        FiaCall {
            query: Some(half(&[3, 8, 512])),
            attention_out: Some(half(&[8, 3, 512])),
            input_layout: "TND_NTD",
            key: &bytes,
            value: &bytes,
            inner_precise: 2,
            actual_seq_lengths: Some(&[1, 3]),
            query_rope: Some(half(&[3, 8, 64])),
            key_rope: Some(half(&[4, 128, 64])),
            ..paged.clone()
        },
    );
    let bf16 = |shape: &[i64]| TensorDesc::contiguous(DType::Bf16, shape).unwrap();
    let rows = [bf16(&[9, 4, 64])];
    let packed = FiaCall {
        query: Some(bf16(&[5, 4, 64])),
        attention_out: Some(bf16(&[5, 4, 64])),
        key: &rows,
        value: &rows,
        input_layout: "TND",
        num_heads: 4,
        actual_seq_lengths: Some(&[2, 5]),
        actual_seq_lengths_kv: Some(&[4, 9]),
        ..FiaCall::new("TND")
    };
    packed.check(Version::V4, Soc::AtlasA2).unwrap();
    let sink = TensorDesc::contiguous(DType::Float, &[4]);
    expect(
        "learnable_sink.dtype",
        FiaCall {
            learnable_sink: sink,
            ..packed.clone()
        },
    );
    let banded = FiaCall {
        sparse_mode: 4,
        atten_mask: mask(&[2048, 2048]),
        ..packed.clone()
    };
    expect(
        "packed.band",
        FiaCall {
            pre_tokens: -3,
            ..banded.clone()
        },
    );
    let (wide, narrow) = ([bf16(&[9, 4, 192])], [bf16(&[9, 4, 192])]);
    expect(
        "packed.band_head_dim",
        FiaCall {
            query: Some(bf16(&[5, 4, 192])),
            attention_out: Some(bf16(&[5, 4, 192])),
            key: &wide,
            value: &narrow,
            ..banded.clone()
        },
    );
    expect(
        "packed.value_rows",
        FiaCall {
            value: &[bf16(&[8, 4, 64])],
            ..packed.clone()
        },
    );
    let int8 = |shape: &[i64]| TensorDesc::contiguous(DType::Int8, shape).unwrap();
    let quantised = [int8(&[2, 4, 64, 32])];
    expect(
        "quant.int8_query_decode",
        FiaCall {
            query: Some(int8(&[2, 8, 1, 32])),
            attention_out: Some(bf16(&[2, 8, 1, 32])),
            key: &quantised,
            value: &quantised,
            ..decode.clone()
        },
    );
    expect(
        "quant.output_band",
        FiaCall {
            attention_out: Some(int8(&[2, 8, 16, 32])),
            quant_scale2: TensorDesc::contiguous(DType::Float, &[1]),
            sparse_mode: 4,
            atten_mask: mask(&[2048, 2048]),
            pre_tokens: 10,
            next_tokens: -1,
            ..prefill.clone()
        },
    );
    expect(
        "input_layout.prefill",
        FiaCall {
            input_layout: "BNSD_NBSD",
            attention_out: Some(half(&[8, 2, 16, 32])),
            ..prefill.clone()
        },
    );
    for (version, soc) in [
        (Version::V5, Soc::AtlasA2),
        (Version::V4, Soc::Ascend950),
        (Version::V1, Soc::AtlasInference),
        (Version::V1, Soc::AtlasTraining),
        (Version::V1, Soc::Atlas200I500A2),
    ] {
        seen.insert(refused_on(&prefill, version, soc));
    }

    let square = [half(&[2, 4, 16, 32])];
    let slopes = FiaCall {
        key: &square,
        value: &square,
        pse_type: 2,
        pse_shift: lse(DType::Float, &[8]),
        ..prefill.clone()
    };
    let newest = |call: &FiaCall<'_>| refused_on(call, Version::V5, Soc::Ascend950);
    for (id, call) in [
        (
            "pse_type.known",
            FiaCall {
                pse_type: 1,
                ..prefill.clone()
            },
        ),
        (
            "pse_shift.slopes",
            FiaCall {
                pse_shift: lse(DType::Float, &[4]),
                ..slopes.clone()
            },
        ),
        (
            "pse_type.square",
            FiaCall {
                key: &key,
                value: &key,
                ..slopes.clone()
            },
        ),
        (
            "start_idx.range",
            FiaCall {
                kv_start_idx: Some(&[1 << 31]),
                ..slopes.clone()
            },
        ),
        (
            "start_idx.range",
            FiaCall {
                q_start_idx: Some(&[-1_048_577]),
                ..slopes.clone()
            },
        ),
        (
            "start_idx.range",
            FiaCall {
                q_start_idx: Some(&[0, 0]),
                ..slopes.clone()
            },
        ),
    ] {
        assert_eq!(newest(&call), id);
        seen.insert(id);
    }

    let mixed = FiaCall {
        query: Some(bf16(&[2, 8, 1, 32])),
        attention_out: Some(bf16(&[2, 8, 1, 32])),
        key: &quantised,
        value: &quantised,
        key_antiquant_scale: Some(bf16(&[1, 4, 32])),
        value_antiquant_scale: TensorDesc::contiguous(DType::Float, &[2, 64]),
        value_antiquant_mode: 1,
        ..decode.clone()
    };
    let empty = [int8(&[2, 4, 0, 32])];
    let without_keys = FiaCall {
        query: Some(int8(&[2, 8, 16, 32])),
        key: &empty,
        value: &empty,
        ..prefill.clone()
    };
    for (id, call) in [
        ("antiquant.mixed_modes", mixed),
        ("quant.int8_query_empty", without_keys),
    ] {
        assert_eq!(refused_on(&call, Version::V4, Soc::AtlasA2), id);
        seen.insert(id);
    }

    for recorded in recorded::sample() {
        if let Err(Refusal::Violation(violation)) = recorded.check() {
            seen.insert(violation.rule.id);
        }
    }

    let all: BTreeSet<_> = rules::all()
        .filter(|rule| rule.level == Level::Rule)
        .map(|rule| rule.id)
        .collect();
    assert_eq!(
        seen, all,
        "rules without a call that breaks them, or the reverse"
    );
}

#[test]
fn a_call_that_holds_every_rule_says_what_to_compute() {
    let key = [half(&[2, 4, 64, 32])];
    let call = FiaCall {
        query: Some(half(&[2, 8, 16, 32])),
        key: &key,
        value: &key,
        num_heads: 8,
        num_key_value_heads: 4,
        actual_seq_lengths: Some(&[3]),
        actual_seq_lengths_kv: Some(&[64, 10]),
        attention_out: Some(half(&[2, 16, 8, 32])),
        ..FiaCall::new("BNSD_BSND")
    };
    let problem = call.check(Version::V1, Soc::AtlasA3).unwrap();
    assert_eq!(
        (
            problem.batch,
            problem.heads,
            problem.kv_heads,
            problem.group()
        ),
        (2, 8, 4, 2)
    );
    assert_eq!(
        (problem.q_len(0), problem.q_len(1), problem.kv_len(1)),
        (3, 3, 10)
    );
    assert_eq!((problem.out.view.head, problem.out.view.row), (32, 8 * 32));
    assert_eq!(
        (problem.query.view.head, problem.query.view.row),
        (16 * 32, 32)
    );
}
