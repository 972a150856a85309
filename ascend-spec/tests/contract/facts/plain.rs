//! Heads, precision, layouts, lists, outputs, and what plain calls carry without need.

use super::{Call, Probe, float, hold, hold_for_both, kept, mask, of, probe, with};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, StridedKeys, Target, TensorDesc};

const NONE: [&str; 2] = ["rrrr"; 2];

#[test]
fn heads_and_precision() {
    hold_for_both(|d| {
        let one = |n, nk| probe("BSND", [2, n, nk, 1, 64, d]).call();
        let more = |n, nk| probe("BNSD", [2, n, nk, 16, 64, d]).call();
        let precise = |call: Call, inner_precise| FiaCall { inner_precise, ..call };
        vec![
            ("130 heads over 1, one row", ["raaa", "rraa"], one(130, 1)),
            ("130 heads over 1, rows", ["raaa", "rraa"], more(130, 1)),
            ("512 heads, one row", ["raaa", "rraa"], one(512, 512)),
            ("512 heads over 8, rows", ["raaa", "rraa"], more(512, 8)),
            ("64 heads over 1", ["aaaa"; 2], one(64, 1)),
            ("heads that do not divide", NONE, one(9, 2)),
            ("precision 2, one row", ["raaa", "rraa"], precise(one(8, 2), 2)),
            ("precision 3, one row", ["raaa", "rraa"], precise(one(8, 2), 3)),
            ("precision 2, rows", ["aaaa"; 2], precise(more(8, 2), 2)),
            ("precision 4, one row", ["rrra"; 2], precise(one(8, 2), 4)),
            ("precision 4, rows", ["rrra"; 2], precise(more(8, 2), 4)),
            ("precision 5, rows", ["arrr", "aarr"], precise(more(8, 2), 5)),
            ("precision -1, rows", ["arrr", "aarr"], precise(more(8, 2), -1)),
            ("precision 5, one row", ["rrrr"; 2], precise(one(8, 2), 5)),
        ]
    });
    let kept_decode =
        |layout, precise| FiaCall { inner_precise: precise, ..probe(layout, [2, 8, 8, 1, 64, 256]).call() };
    hold(&[
        ("256 channels, own heads, one row", "aaaa", kept_decode("BSH", 1)),
        ("the same, precision 2", "rrrr", kept_decode("BSH", 2)),
        ("the same, precision 4", "rrrr", kept_decode("BNSD", 4)),
        ("shared heads", "rraa", FiaCall { inner_precise: 2, ..probe("BNSD", [2, 8, 2, 1, 64, 256]).call() }),
        ("paged", "rraa", FiaCall { inner_precise: 2, ..probe("BNSD", [2, 8, 8, 1, 64, 256]).paged(128, 4) }),
        ("130 heads of 256, one row", "-aaa", probe("BNSD", [2, 130, 130, 1, 64, 256]).call()),
    ]);
}

#[test]
fn layouts_and_head_dimensions() {
    hold_for_both(|d| {
        let of = |layout, rows| probe(layout, [2, 8, 2, rows, 64, d]).call();
        vec![
            ("BNSD_BSND, one row", ["raaa", "rraa"], of("BNSD_BSND", 1)),
            ("BNSD_BSND, rows", ["aaaa"; 2], of("BNSD_BSND", 4)),
            ("NTD", ["raaa", "rrrr"], of("NTD", 4)),
            ("BSH_BNSD", ["raaa", "rrrr"], of("BSH_BNSD", 4)),
            ("BSND_BNSD", ["raaa", "rrrr"], of("BSND_BNSD", 4)),
            ("BSND_BNSD, one row", ["raaa", "rrrr"], of("BSND_BNSD", 1)),
            ("NTD_TND, FLOAT16", ["raaa", "rrrr"], of("NTD_TND", 4)),
            ("BSH_NBSD without rotary parts", NONE, of("BSH_NBSD", 4)),
            ("TND_NTD without rotary parts", NONE, of("TND_NTD", 4)),
        ]
    });
    let dims = |layout, rows, d, dv| probe(layout, [2, 8, 2, rows, 64, d]).value(dv).call();
    hold(&[
        ("values wider than keys", "rrrr", dims("BSND", 4, 64, 128)),
        ("128 and 64", "rrrr", dims("BSND", 4, 128, 64)),
        ("128 and 64, one row", "rrrr", dims("BSND", 1, 128, 64)),
        ("192 and 128, BSND", "raaa", dims("BSND", 4, 192, 128)),
        ("192 and 128, BNSD, one row", "raaa", dims("BNSD", 1, 192, 128)),
        ("192 and 128, BSH_BNSD", "raaa", dims("BSH_BNSD", 4, 192, 128)),
        ("192 and 128, NTD", "raaa", dims("NTD", 4, 192, 128)),
        ("192 and 128, BNSD_BSND", "raaa", dims("BNSD_BSND", 4, 192, 128)),
        ("40 channels, rows", "rrrr", dims("BNSD", 4, 40, 40)),
        ("40 channels, one row", "aaaa", dims("BNSD", 1, 40, 40)),
        ("512 channels", "aaaa", dims("BNSD", 4, 512, 512)),
        ("528 channels", "rrrr", dims("BNSD", 4, 528, 528)),
        ("48 channels, BNSD_BSND, one row", "rraa", dims("BNSD_BSND", 1, 48, 48)),
        ("40 channels, BNSD_BSND, one row", "rrrr", dims("BNSD_BSND", 1, 40, 40)),
    ]);
}

#[test]
fn batches_and_values() {
    hold_for_both(|d| {
        let more = probe("BSND", [2, 4, 4, 16, 64, d]);
        let shifted = |p: Probe, keys, batch| FiaCall {
            value: kept(vec![Probe { keys, batch, ..p }.input(4, keys, d)]),
            ..p.call()
        };
        vec![
            ("batch of 65537", ["raar", "rrar"], probe("BSND", [65_537, 1, 1, 2, 2, d]).call()),
            ("batch of 65536", ["aaaa"; 2], probe("BSND", [65_536, 1, 1, 2, 2, d]).call()),
            ("values of other rows", ["arrr", "aarr"], shifted(more, 60, 2)),
            ("values of another batch", ["arrr", "aarr"], shifted(more, 64, 3)),
            ("no query rows, one row a sequence", ["rraa"; 2], probe("BSND", [0, 4, 4, 1, 64, d]).call()),
            (
                "heads of the attribute over a cache, one row",
                ["arrr", "aarr"],
                FiaCall { num_key_value_heads: 2, ..probe("BNSD", [2, 4, 4, 1, 64, d]).paged(128, 4) },
            ),
            ("heads of the attribute, rows", NONE, FiaCall { num_key_value_heads: 2, ..more.call() }),
        ]
    });
    let nothing = |rows| {
        let p = probe("BSND", [2, 4, 4, rows, 0, 64]);
        FiaCall { sparse_mode: 3, ..p.call() }
    };
    hold(&[
        ("no keys and a wrong mode, one row", "aaaa", nothing(1)),
        ("no keys and a wrong mode, rows", "aaaa", nothing(8)),
    ]);
}

#[test]
fn what_a_call_carries_without_need() {
    hold_for_both(|d| {
        let one = probe("BSND", [2, 4, 4, 1, 64, d]).call();
        let more = probe("BSND", [2, 4, 4, 16, 64, d]).call();
        let scale = of(DType::Float16, &[4, d]);
        vec![
            ("keyAntiquantScale, one row", ["rrra"; 2], with(&one, |c| c.key_antiquant_scale = scale)),
            ("valueAntiquantScale, one row", ["rrra"; 2], with(&one, |c| c.value_antiquant_scale = scale)),
            ("keyAntiquantScale, rows", ["rrra"; 2], with(&more, |c| c.key_antiquant_scale = scale)),
            (
                "both scales, rows",
                ["rrra"; 2],
                with(&more, |c| (c.key_antiquant_scale, c.value_antiquant_scale) = (scale, scale)),
            ),
            ("dequantScaleQuery, one row", ["rrra"; 2], with(&one, |c| c.dequant_scale_query = float(&[2, 4]))),
            ("dequantScaleQuery, rows", ["rrra"; 2], with(&more, |c| c.dequant_scale_query = float(&[2, 4]))),
            ("antiquantScale, one row", ["rrra"; 2], with(&one, |c| c.antiquant_scale = scale)),
            ("antiquantScale, rows", ["arra", "aara"], with(&more, |c| c.antiquant_scale = scale)),
            ("antiquantOffset, one row", ["rrra"; 2], with(&one, |c| c.antiquant_offset = scale)),
            ("antiquantOffset, rows", ["arra", "aara"], with(&more, |c| c.antiquant_offset = scale)),
            ("keyAntiquantOffset, one row", ["rrra"; 2], with(&one, |c| c.key_antiquant_offset = scale)),
            ("keyAntiquantOffset, rows", ["arra", "aara"], with(&more, |c| c.key_antiquant_offset = scale)),
            ("valueAntiquantOffset, rows", ["arra", "aara"], with(&more, |c| c.value_antiquant_offset = scale)),
            ("deqScale1, one row", ["rrra"; 2], with(&one, |c| c.deq_scale1 = float(&[1]))),
            // Recorded calls (rel-00237) decide: 8.5 and 9.0 do not take it.
            ("deqScale1, rows", ["arra", "aara"], with(&more, |c| c.deq_scale1 = float(&[1]))),
            ("quantScale1, rows", ["arra", "aara"], with(&more, |c| c.quant_scale1 = float(&[1]))),
            ("antiquantMode, one row", ["arra", "aara"], with(&one, |c| c.antiquant_mode = 1)),
            ("antiquantMode, rows", ["rrra"; 2], with(&more, |c| c.antiquant_mode = 1)),
            ("keyAntiquantMode, one row", ["arra", "aara"], with(&one, |c| c.key_antiquant_mode = 1)),
            ("keyAntiquantMode, rows", ["arra", "aara"], with(&more, |c| c.key_antiquant_mode = 1)),
            ("queryQuantMode, one row", ["arra", "aara"], with(&one, |c| c.query_quant_mode = 1)),
            ("queryQuantMode, rows", ["rrra"; 2], with(&more, |c| c.query_quant_mode = 1)),
        ]
    });
}

#[test]
fn strided_keys_are_refused_from_9_1_on() {
    let p = probe("BNSD", [2, 4, 4, 16, 64, 64]);
    let strided = TensorDesc { strides: ascend_spec::Dims::of([8 * 64 * 64, 64 * 64, 64, 1]), ..p.call().key[0] };
    let call = |rows| FiaCall { key: kept(vec![strided]), ..Probe { rows, ..p }.call() };
    hold(&[
        ("rows", "aaar", call(16)),
        ("one row", "aaar", call(1)),
        (
            "a mask may lie apart",
            "aaaa",
            FiaCall {
                atten_mask: mask(&[2, 16, 128])
                    .map(|desc| TensorDesc { shape: ascend_spec::Dims::of([2, 16, 64]), ..desc }),
                ..p.call()
            },
        ),
    ]);
}

/// The sources of 9.1 disagree about V1 to V4: the target says which of them is believed.
#[test]
fn strided_keys_are_taken_by_9_1_where_it_is_said_to_copy_them() {
    let p = probe("BNSD", [2, 4, 4, 16, 64, 64]);
    let strided = TensorDesc { strides: ascend_spec::Dims::of([8 * 64 * 64, 64 * 64, 64, 1]), ..p.call().key[0] };
    let call = FiaCall { key: kept(vec![strided]), ..p.call() };
    let taken = |soc, cann, reading, version| {
        let target = Target::new(soc, cann).strided_keys(reading);
        let refusal = call.check(version, target).err();
        assert!(refusal.as_ref().is_none_or(|refusal| refusal.rule.id == "tensor.contiguous"));
        refusal.is_none()
    };
    for soc in [Soc::AtlasA2, Soc::AtlasA3] {
        for version in [Version::V1, Version::V4] {
            assert!(taken(soc, Cann::V9_1, StridedKeys::Copied, version));
            assert!(!taken(soc, Cann::V9_1, StridedKeys::Refused, version));
            assert!(taken(soc, Cann::V9_2, StridedKeys::Refused, version));
        }
        for cann in [Cann::V9_1, Cann::V9_2] {
            assert!(!taken(soc, cann, StridedKeys::Copied, Version::V5));
        }
    }
    assert!(!taken(Soc::Ascend950, Cann::V9_1, StridedKeys::Copied, Version::V5));
}

#[test]
fn biases_padding_and_prefixes_of_the_unified_checker() {
    let bias = |call: FiaCall<'static>, shape: &[i64]| FiaCall { pse_shift: of(DType::Float16, shape), ..call };
    let rows = probe("BNSD", [2, 4, 2, 16, 100, 64]);
    let one = probe("BNSD", [2, 4, 2, 1, 100, 64]);
    let wide = probe("BNSD", [2, 4, 2, 16, 100, 192]).value(128);
    let padded = |p: Probe, shape: &[i64]| FiaCall {
        actual_seq_lengths_kv: Some(kept(vec![50, 60])),
        kv_padding_size: of(DType::Int64, shape),
        ..p.call()
    };
    let prefixed = |p: Probe| {
        let prefix = Probe { batch: 1, ..p }.call();
        FiaCall {
            key_shared_prefix: prefix.key.first().copied(),
            value_shared_prefix: prefix.value.first().copied(),
            ..p.call()
        }
    };
    hold(&[
        ("a bias", "--aa", bias(rows.call(), &[1, 4, 16, 100])),
        // From 9.1 on a bias of one row serves all, and over a cache it covers the blocks of the longest sequence.
        ("a row of bias", "--ra", bias(rows.call(), &[1, 4, 1, 100])),
        ("a bias of fewer rows", "--rr", bias(rows.call(), &[1, 4, 15, 100])),
        ("a bias as wide as the blocks", "--ra", bias(rows.paged(128, 3), &[1, 4, 16, 128])),
        ("a narrower bias", "--rr", bias(rows.paged(128, 3), &[1, 4, 16, 127])),
        ("a bias as wide as the table", "--aa", bias(rows.paged(128, 3), &[1, 4, 16, 256])),
        ("192 and 128", "--aa", wide.call()),
        ("192 and 128 with a bias", "--rr", bias(wide.call(), &[1, 4, 16, 100])),
        ("a prefix", "--aa", prefixed(rows)),
        ("192 and 128 with a prefix", "--rr", prefixed(wide)),
        ("padding", "--aa", padded(rows, &[1])),
        ("192 and 128 with padding", "--ra", padded(wide, &[1])),
        ("no padding", "--rr", padded(rows, &[0])),
        ("no padding, one row", "--aa", padded(one, &[0])),
        ("two paddings, one row", "--ar", padded(one, &[2])),
    ]);
}
