//! Quantised keys.

use super::super::{Call, Probe, float, kept, of, probe, refusal, triangle, with};
use super::{hold, masked};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

/// Quantised keys under a half-precision query, with scales of a mode.
fn antiquant(p: Probe, keys: DType, modes: (i64, i64), scale: (DType, &[i64])) -> Call {
    let small = Probe { dtype: keys, ..p };
    FiaCall {
        key: small.call().key,
        value: small.call().value,
        key_antiquant_scale: of(scale.0, scale.1),
        value_antiquant_scale: of(scale.0, scale.1),
        key_antiquant_mode: modes.0,
        value_antiquant_mode: modes.1,
        ..p.call()
    }
}

#[test]
fn rows_over_quantised_keys_name_the_condition_that_is_not_met() {
    let rows = |rows| probe("BNSD", [2, 8, 2, rows, 64, 128]);
    let channel = (DType::Bf16, &[2, 128][..]);
    let good = antiquant(rows(16).bf16(), DType::Int8, (0, 0), channel);
    hold(&[("all of them", 'a', good.clone())]);
    let half = (DType::Float16, &[2, 128][..]);
    for (call, allowed) in [
        (antiquant(rows(17).bf16(), DType::Int8, (0, 0), channel), "at most 16 rows"),
        (antiquant(rows(16), DType::Int8, (0, 0), half), "a BF16 query"),
        (antiquant(rows(4).bf16(), DType::Int8, (2, 2), (DType::Bf16, &[2])), "modes 0 or 1 of key and value alike"),
        (antiquant(rows(4).bf16(), DType::Int4, (0, 0), channel), "1 row"),
        (with(&good, |call| call.attention_out = of(DType::Int8, &[2, 8, 16, 128])), "a BF16 output"),
        (
            with(&good, |call| {
                call.actual_seq_lengths_kv = Some(kept(vec![64, 64]));
                call.kv_padding_size = of(DType::Int64, &[1]);
            }),
            "no left padding",
        ),
    ] {
        let said = refusal(&call, Target::new(Soc::Ascend950, Cann::V9_1));
        let names = said.starts_with("antiquant.rows") && said.contains(&format!("allowed: {allowed}; fix"));
        assert!(names, "{allowed}: {said}");
    }
}

#[test]
fn quantised_keys() {
    use DType::{Bf16, Float, Float4E2M1, Float8E4M3Fn, Float8E8M0, Float16, HiFloat8, Int4, Int8};
    let p = |rows| probe("BNSD", [2, 8, 2, rows, 64, 128]);
    let of = |rows, keys, mode, dtype, shape: &[i64]| antiquant(p(rows), keys, (mode, mode), (dtype, shape));
    let bf16 = |rows, keys, mode, dtype, shape: &[i64]| antiquant(p(rows).bf16(), keys, (mode, mode), (dtype, shape));
    let channel: &[i64] = &[2, 128];
    let token: &[i64] = &[2, 64];
    let mut facts = Vec::new();
    for keys in [Int8, Int4, HiFloat8, Float8E4M3Fn] {
        for shape in [&[256][..], &[1, 256], &[2, 128], &[1, 2, 128], &[2, 1, 128], &[1, 2, 1, 128], &[1, 1, 2, 128]] {
            facts.push(("by channel", 'a', of(1, keys, 0, Float16, shape)));
        }
        facts.push(("by channel, FLOAT scales", 'r', of(1, keys, 0, Float, channel)));
        facts.push(("mode 7", 'r', of(1, keys, 7, Float16, channel)));
        let letter = if keys == HiFloat8 { 'r' } else { 'a' };
        facts.push(("by token", letter, of(1, keys, 1, Float, token)));
        facts.push(("by token, too short", 'r', of(1, keys, 1, Float, &[2, 63])));
        let letter = if keys == Int8 { 'a' } else { 'r' };
        facts.push(("one scale", letter, of(1, keys, 0, Float16, &[1])));
        facts.push(("by head", letter, of(1, keys, 2, Float16, &[2])));
        let letter = if matches!(keys, Int8 | Int4) { 'a' } else { 'r' };
        facts.push(("by token and head", letter, of(1, keys, 3, Float, &[2, 2, 64])));
    }
    facts.extend([
        ("groups", 'a', of(1, Float4E2M1, 6, Float8E8M0, &[1, 2, 2, 64, 4])),
        ("groups, rows", 'a', of(4, Float4E2M1, 6, Float8E8M0, &[1, 2, 2, 64, 4])),
        ("groups in mode 0", 'r', of(1, Float4E2M1, 0, Float16, channel)),
        (
            "key by channel, value by token",
            'a',
            with(&of(1, Int8, 0, Float16, channel), |call| {
                call.value_antiquant_mode = 1;
                call.value_antiquant_scale = float(&[2, 64]);
            }),
        ),
        (
            "the reverse",
            'r',
            with(&of(1, Int8, 0, Float16, channel), |call| {
                call.key_antiquant_mode = 1;
                call.key_antiquant_scale = float(&[2, 64]);
            }),
        ),
        ("INT8, rows, BF16", 'a', bf16(16, Int8, 0, Bf16, channel)),
        ("INT8, rows, FLOAT16", 'r', of(16, Int8, 0, Float16, channel)),
        ("INT8, 17 rows", 'r', bf16(17, Int8, 0, Bf16, channel)),
        ("INT8, rows by token", 'a', bf16(4, Int8, 1, Float, token)),
        ("INT8, rows by head", 'r', bf16(4, Int8, 2, Bf16, &[2])),
        ("INT4, rows", 'r', bf16(4, Int4, 0, Bf16, channel)),
        ("E4M3, rows", 'a', bf16(40, Float8E4M3Fn, 0, Bf16, channel)),
        ("HIF8, rows", 'a', of(40, HiFloat8, 0, Float16, channel)),
        (
            "merged scales",
            'r',
            FiaCall {
                antiquant_scale: of(1, Int8, 0, Float16, channel).key_antiquant_scale,
                ..of(1, Int8, 0, Float16, channel)
            },
        ),
        ("antiquantMode", 'r', FiaCall { antiquant_mode: 1, ..of(1, Int8, 0, Float16, channel) }),
        (
            "offsets",
            'a',
            with(&of(1, Int8, 0, Float16, channel), |call| {
                call.key_antiquant_offset = call.key_antiquant_scale;
                call.value_antiquant_offset = call.key_antiquant_scale;
            }),
        ),
        (
            "one offset",
            'r',
            with(&of(1, Int8, 0, Float16, channel), |call| call.key_antiquant_offset = call.key_antiquant_scale),
        ),
        (
            "offsets of E4M3",
            'r',
            with(&of(1, Float8E4M3Fn, 0, Float16, channel), |call| {
                call.key_antiquant_offset = call.key_antiquant_scale;
                call.value_antiquant_offset = call.key_antiquant_scale;
            }),
        ),
        ("mode 3 of one row", 'r', masked(of(1, Int8, 0, Float16, channel), 3, triangle())),
        (
            "a mask of INT8 over INT4",
            'r',
            masked(of(1, Int4, 0, Float16, channel), 0, TensorDesc::contiguous(Int8, &[2, 1, 64])),
        ),
        (
            "a mask of INT8 over INT8",
            'a',
            masked(of(1, Int8, 0, Float16, channel), 0, TensorDesc::contiguous(Int8, &[2, 1, 64])),
        ),
        (
            "BNSD_BSND, one row",
            'r',
            antiquant(probe("BNSD_BSND", [2, 8, 2, 1, 64, 128]), Int8, (0, 0), (Float16, channel)),
        ),
        ("TND, INT8", 'r', antiquant(probe("TND", [2, 8, 2, 1, 64, 128]), Int8, (0, 0), (Float16, channel))),
        ("TND, E4M3", 'a', antiquant(probe("TND", [2, 8, 2, 1, 64, 128]), Float8E4M3Fn, (0, 0), (Float16, channel))),
        (
            "an INT8 output",
            'a',
            with(&of(1, Int8, 0, Float16, channel), |call| {
                call.attention_out = TensorDesc::contiguous(Int8, &[2, 8, 1, 128]);
                call.quant_scale2 = float(&[1]);
            }),
        ),
        (
            "an E4M3 output over INT8",
            'r',
            with(&of(1, Int8, 0, Float16, channel), |call| {
                call.attention_out = TensorDesc::contiguous(Float8E4M3Fn, &[2, 8, 1, 128]);
                call.quant_scale2 = float(&[1]);
            }),
        ),
    ]);
    hold(&facts);
}

#[test]
fn quantised_pages() {
    use DType::{Float, Float8E4M3Fn, Float16, Int4, Int8};
    let paged = |layout, keys, bs, axes: usize, modes: i64, scale: (DType, &[i64])| {
        let p = probe(layout, [2, 8, 2, 1, 100, 128]);
        // NZ caches run in 16 whatever their dtype is.
        let small = |axes| {
            let half = p.paged(bs, axes);
            kept(vec![TensorDesc::packed(keys, half.key[0].shape)])
        };
        FiaCall {
            key: small(axes),
            value: small(axes),
            key_antiquant_scale: of(scale.0, scale.1),
            value_antiquant_scale: of(scale.0, scale.1),
            key_antiquant_mode: modes,
            value_antiquant_mode: modes,
            ..p.paged(bs, axes)
        }
    };
    let channel: (DType, &[i64]) = (Float16, &[2, 128]);
    let paged_rows = |rows, scales: i64| {
        let p = probe("BNSD", [2, 8, 2, rows, 100, 128]);
        let half = p.paged(128, 4);
        let small = TensorDesc::packed(DType::Float4E2M1, half.key[0].shape);
        let scale = of(DType::Float8E8M0, &[1, 2, 2, scales, 4]);
        FiaCall {
            key: kept(vec![small]),
            value: kept(vec![small]),
            key_antiquant_scale: scale,
            value_antiquant_scale: scale,
            key_antiquant_mode: 6,
            value_antiquant_mode: 6,
            ..half
        }
    };
    hold(&[
        ("INT8, blocks of 32", 'a', paged("BSND", Int8, 32, 3, 0, channel)),
        ("INT8, blocks of 16", 'r', paged("BSND", Int8, 16, 3, 0, channel)),
        ("INT8, blocks of 512", 'a', paged("BSND", Int8, 512, 3, 0, channel)),
        ("INT8, blocks of 1024", 'r', paged("BSND", Int8, 1024, 3, 0, channel)),
        ("INT4, blocks of 32", 'r', paged("BSND", Int4, 32, 3, 0, channel)),
        ("INT4, blocks of 64", 'a', paged("BSND", Int4, 64, 3, 0, channel)),
        ("BSND over BnNBsD", 'r', paged("BSND", Int8, 128, 4, 0, channel)),
        ("BNSD over BnNBsD", 'a', paged("BNSD", Int8, 128, 4, 0, channel)),
        ("NZ", 'a', paged("BNSD", Int8, 128, 5, 0, channel)),
        ("scales in blocks", 'a', paged("BNSD", Int8, 128, 4, 4, (Float, &[4, 128]))),
        ("scales in blocks of E4M3", 'a', paged("BNSD", Float8E4M3Fn, 128, 4, 4, (Float, &[4, 128]))),
        ("scales in blocks by head", 'a', paged("BNSD", Int8, 128, 4, 5, (Float, &[4, 2, 128]))),
        ("scales in blocks by head of E4M3", 'r', paged("BNSD", Float8E4M3Fn, 128, 4, 5, (Float, &[4, 2, 128]))),
        // The table has two columns, of which the keys need one.
        (
            "a mask as wide as the table",
            'a',
            masked(paged("BNSD", Int4, 128, 4, 0, channel), 0, of(DType::Bool, &[2, 1, 1, 256])),
        ),
        (
            "a mask as wide as the keys' blocks",
            'r',
            masked(paged("BNSD", Int4, 128, 4, 0, channel), 0, of(DType::Bool, &[2, 1, 1, 128])),
        ),
        (
            "a mask as wide as the table, several rows",
            'a',
            masked(paged_rows(4, 256), 1, of(DType::Bool, &[2, 1, 4, 256])),
        ),
        (
            "a mask as wide as the keys' blocks, several rows",
            'r',
            masked(paged_rows(4, 256), 1, of(DType::Bool, &[2, 1, 4, 128])),
        ),
        ("by token, the whole table", 'a', paged("BNSD", Int8, 128, 4, 1, (Float, &[2, 256]))),
        ("by token, the length alone", 'r', paged("BNSD", Int8, 128, 4, 1, (Float, &[2, 128]))),
    ]);
}
