//! INT8 outputs, and INT8 keys.

use super::{Call, Probe, float, hold, hold_for_both, kept, mask, of, probe, triangle, with};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

/// A call with an INT8 output.
fn out(p: Probe, scale: Option<TensorDesc>) -> Call {
    with(&p.call(), |call| {
        call.attention_out = call.attention_out.map(|out| TensorDesc::packed(DType::Int8, out.shape));
        call.quant_scale2 = scale;
    })
}

#[test]
fn outputs() {
    hold_for_both(|d| {
        let p = |layout, rows| probe(layout, [2, 4, 2, rows, 64, d]);
        let half = |shape: &[i64]| of(DType::Float16, shape);
        let lse = |p: Probe, call| FiaCall { softmax_lse_flag: true, softmax_lse: p.lse(), ..call };
        let plain = |p: Probe, change: fn(&mut Call)| with(&p.call(), change);
        vec![
            ("one scale, one row", ["aaaa"; 2], out(p("BSND", 1), float(&[1]))),
            ("one scale, rows", ["aaaa"; 2], out(p("BNSD", 16), float(&[1]))),
            ("a scale a channel, rows", ["aaaa"; 2], out(p("BNSD", 16), float(&[4, d]))),
            ("a scale a channel in a row", ["aaaa"; 2], out(p("BSH", 16), float(&[4 * d]))),
            ("another size", ["rrrr"; 2], out(p("BNSD", 16), float(&[4, d + 1]))),
            (
                "a scale a channel with the log-sum-exp",
                ["rraa"; 2],
                lse(p("BNSD", 16), out(p("BNSD", 16), float(&[4, d]))),
            ),
            ("one scale with the log-sum-exp", ["aaaa"; 2], lse(p("BNSD", 16), out(p("BNSD", 16), float(&[1])))),
            ("a FLOAT16 scale, rows", ["aarr"; 2], out(p("BNSD", 16), half(&[1]))),
            ("a FLOAT16 scale, one row", ["rrrr"; 2], out(p("BNSD", 1), half(&[1]))),
            ("no scale, one row", ["rrar"; 2], out(p("BNSD", 1), None)),
            ("no scale, rows", ["rrar"; 2], out(p("BNSD", 16), None)),
            (
                "a scale without an INT8 output, one row",
                ["rrra"; 2],
                plain(p("BNSD", 1), |call| call.quant_scale2 = float(&[1])),
            ),
            (
                "a scale without an INT8 output, rows",
                ["aara"; 2],
                plain(p("BNSD", 16), |call| call.quant_scale2 = float(&[1])),
            ),
            ("an offset alone, one row", ["rraa"; 2], plain(p("BNSD", 1), |call| call.quant_offset2 = float(&[1]))),
            ("an offset alone, rows", ["aaaa"; 2], plain(p("BNSD", 16), |call| call.quant_offset2 = float(&[1]))),
            ("BNSD_BSND", ["aaaa"; 2], out(p("BNSD_BSND", 16), float(&[1]))),
            ("BSH_BNSD", ["rrra", "rrrr"], out(p("BSH_BNSD", 16), float(&[1]))),
            ("BSND_BNSD", ["rrra", "rrrr"], out(p("BSND_BNSD", 16), float(&[1]))),
            ("NTD", ["rrra", "rrrr"], out(p("NTD", 16), float(&[1]))),
        ]
    });
    let p = |layout, d| probe(layout, [2, 4, 2, 16, 64, d]);
    let offset = |call: Call, offset| FiaCall { quant_offset2: offset, ..call };
    let behind = |call: Call| FiaCall {
        sparse_mode: 3,
        atten_mask: triangle(),
        actual_seq_lengths_kv: Some(kept(vec![8, 64])),
        ..call
    };
    hold(&[
        ("48 channels, rows", "rrra", out(p("BNSD", 48), float(&[1]))),
        ("48 channels, BNSD_BSND", "rrrr", out(p("BNSD_BSND", 48), float(&[1]))),
        ("96 channels, BNSD_BSND", "aaaa", out(p("BNSD_BSND", 96), float(&[1]))),
        (
            "48 channels, a scale a channel with the log-sum-exp",
            "rrra",
            FiaCall { softmax_lse_flag: true, softmax_lse: p("BNSD", 48).lse(), ..out(p("BNSD", 48), float(&[4, 48])) },
        ),
        ("NTD_TND", "arra", out(p("NTD_TND", 64).bf16(), float(&[1]))),
        ("TND, unified", "rrra", FiaCall { inner_precise: 1, ..out(p("TND", 64).bf16(), float(&[1])) }),
        (
            "TND, a scale a channel in a row",
            "rrrr",
            FiaCall { inner_precise: 1, ..out(p("TND", 64).bf16(), float(&[256])) },
        ),
        ("TND, a scale a channel", "rrra", FiaCall { inner_precise: 1, ..out(p("TND", 64).bf16(), float(&[4, 64])) }),
        ("an offset like the scale", "aaaa", offset(out(p("BNSD", 64), float(&[1])), float(&[1]))),
        ("an offset of another dtype", "rrrr", offset(out(p("BNSD", 64).bf16(), float(&[1])), of(DType::Bf16, &[1]))),
        ("an offset with rows without keys", "rrrr", offset(behind(out(p("BNSD", 64), float(&[1]))), float(&[1]))),
        ("rows without keys", "aaaa", behind(out(p("BNSD", 64), float(&[1])))),
    ]);
}

/// Single rows over an NZ cache of INT8.
fn nz(layout: &'static str, rows: i64, heads: (i64, i64)) -> Call {
    let p = probe(layout, [2, heads.0, heads.1, rows, 400, 128]).bf16();
    let keys = Probe { dtype: DType::Int8, ..p }.paged(128, 5);
    let scale: &[i64] = match layout {
        "BSH" => &[heads.1 * 128],
        "BSND" | "TND" => &[heads.1, 128],
        _ => &[heads.1, 1, 128],
    };
    let scale = of(DType::Bf16, scale);
    FiaCall {
        key: keys.key,
        value: keys.value,
        key_antiquant_scale: scale,
        value_antiquant_scale: scale,
        inner_precise: 1,
        ..p.paged(128, 5)
    }
}

#[test]
fn int8_keys_in_an_nz_cache() {
    let causal = |call: Call| FiaCall { sparse_mode: 3, atten_mask: triangle(), ..call };
    let by_token = |call: Call| FiaCall {
        key_antiquant_scale: float(&[2, 640]),
        value_antiquant_scale: float(&[2, 640]),
        key_antiquant_mode: 1,
        value_antiquant_mode: 1,
        ..call
    };
    hold(&[
        ("64 over 8, one row", "aaaa", nz("BNSD", 1, (64, 8))),
        ("64 over 8, several rows", "aaaa", causal(nz("BNSD", 4, (64, 8)))),
        ("64 over 8, BSND", "aaaa", nz("BSND", 1, (64, 8))),
        ("64 over 8, BSH", "aaaa", nz("BSH", 1, (64, 8))),
        ("40 over 8", "raaa", nz("BNSD", 1, (40, 8))),
        ("TND", "rraa", nz("TND", 1, (64, 8))),
        ("TND, mode 3 of single rows", "rraa", causal(nz("TND", 1, (64, 8)))),
        ("TND, 16 rows", "rraa", causal(nz("TND", 16, (64, 8)))),
        ("TND, 17 rows", "rrrr", causal(nz("TND", 17, (64, 8)))),
        ("TND, scales by token", "rrrr", by_token(nz("TND", 1, (64, 8)))),
        (
            "TND, FLOAT scales",
            "rrrr",
            with(&nz("TND", 1, (64, 8)), |call| {
                call.key_antiquant_scale = float(&[8, 128]);
                call.value_antiquant_scale = float(&[8, 128]);
            }),
        ),
        ("TND, mode 0 with a mask", "rrrr", FiaCall { atten_mask: mask(&[2, 1, 512]), ..nz("TND", 1, (64, 8)) }),
        ("one row in mode 3", "rrrr", causal(nz("BNSD", 1, (64, 8)))),
        ("several rows in mode 0", "rrrr", nz("BNSD", 4, (64, 8))),
        ("a mask in mode 0", "rrrr", FiaCall { atten_mask: mask(&[2, 1, 512]), ..nz("BNSD", 1, (64, 8)) }),
        ("by token", "aaaa", by_token(nz("BNSD", 1, (64, 8)))),
        ("mode 9", "rrrr", FiaCall { sparse_mode: 9, atten_mask: mask(&[2, 4, 4]), ..nz("BNSD", 4, (64, 8)) }),
    ]);
}

#[test]
fn int8_keys() {
    let keys = |p: Probe, call: Call| FiaCall {
        key: Probe { dtype: DType::Int8, ..p }.call().key,
        value: Probe { dtype: DType::Int8, ..p }.call().value,
        ..call
    };
    let one = probe("BNSD", [2, 8, 2, 1, 64, 128]);
    let scales = |call: Call, shape: &[i64], dtype| FiaCall {
        key_antiquant_scale: of(dtype, shape),
        value_antiquant_scale: of(dtype, shape),
        ..call
    };
    let few = probe("BNSD", [2, 8, 2, 4, 64, 128]).bf16();
    let bypass = |kv_heads| {
        let p = probe("TND", [2, 8, kv_heads, 4, 64, 128]);
        let cache = Probe { dtype: DType::Int8, ..p }.paged(128, 3);
        FiaCall {
            key: cache.key,
            value: cache.value,
            antiquant_scale: float(&[2, kv_heads * 128]),
            antiquant_offset: float(&[2, kv_heads * 128]),
            inner_precise: 2,
            ..p.paged(128, 3)
        }
    };
    let half = DType::Float16;
    hold(&[
        ("by channel, one row", "aaaa", scales(keys(one, one.call()), &[1, 2, 1, 128], half)),
        ("merged, one row", "aaaa", FiaCall { antiquant_scale: of(half, &[2, 2, 1, 128]), ..keys(one, one.call()) }),
        ("no scales", "rrrr", keys(one, one.call())),
        ("by channel, rows", "aaaa", scales(keys(few, few.call()), &[2, 1, 128], DType::Bf16)),
        ("130 heads over 1", "rrrr", {
            let p = probe("BNSD", [2, 130, 1, 1, 64, 128]);
            scales(keys(p, p.call()), &[1, 1, 1, 128], half)
        }),
        ("packed, unchecked, own heads", "aarr", bypass(8)),
        ("packed, unchecked, shared heads", "aaaa", bypass(2)),
        ("mode 9", "aaaa", FiaCall { sparse_mode: 9, ..scales(keys(one, one.call()), &[1, 2, 1, 128], half) }),
    ]);
}
