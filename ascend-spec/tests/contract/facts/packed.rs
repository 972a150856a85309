//! Packed rows: the unified checker, and the split-fuse path that looks at little.

use super::{Call, Probe, hold, kept, mask, of, probe, triangle, with};
use ascend_spec::DType;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

fn precise(call: Call, inner_precise: i64) -> Call {
    FiaCall { inner_precise, ..call }
}

/// Key heads fewer than query heads, or as many.
fn tnd(kv_heads: i64, dim: i64) -> Probe {
    probe("TND", [2, 8, kv_heads, 16, 64, dim])
}

#[test]
fn head_dimensions_by_route() {
    for d in [80, 96, 256] {
        hold(&[
            ("unified, shared heads", "rrrr", precise(tnd(2, d).bf16().call(), 1)),
            ("unified, own heads", "rrrr", precise(tnd(8, d).bf16().call(), 1)),
            ("split-fuse, shared heads", "raaa", precise(tnd(2, d).bf16().call(), 0)),
            ("split-fuse, shared heads, FLOAT16", "raaa", precise(tnd(2, d).call(), 0)),
            ("shared heads, FLOAT16, precision 1", "rrrr", precise(tnd(2, d).call(), 1)),
            ("own heads, FLOAT16, precision 1", "raaa", precise(tnd(8, d).call(), 1)),
            ("own heads, FLOAT16, precision 0", "rraa", precise(tnd(8, d).call(), 0)),
            ("own heads, FLOAT16, precision 2", "rraa", precise(tnd(8, d).call(), 2)),
            ("own heads, FLOAT16, precision 3", "rraa", precise(tnd(8, d).call(), 3)),
            ("own heads, precision 0", "rraa", precise(tnd(8, d).bf16().call(), 0)),
            ("own heads, precision 2", "rraa", precise(tnd(8, d).bf16().call(), 2)),
            ("own heads, precision 3", "rraa", precise(tnd(8, d).bf16().call(), 3)),
        ]);
    }
    hold(&[
        ("64, FLOAT16", "raaa", precise(tnd(2, 64).call(), 1)),
        ("64, FLOAT16, split-fuse", "raaa", precise(tnd(2, 64).call(), 0)),
        ("64", "aaaa", precise(tnd(2, 64).bf16().call(), 1)),
        ("64, split-fuse", "aaaa", precise(tnd(2, 64).bf16().call(), 0)),
        ("192, own heads", "aaaa", precise(tnd(8, 192).bf16().call(), 1)),
        ("192, own heads, precision 0", "aaaa", precise(tnd(8, 192).bf16().call(), 0)),
        ("192, shared heads, unified", "rraa", precise(tnd(2, 192).bf16().call(), 1)),
        ("192 and 128", "aaaa", precise(tnd(2, 192).value(128).bf16().call(), 1)),
        ("192 and 128, FLOAT16", "raaa", precise(tnd(2, 192).value(128).call(), 0)),
        ("17, which nothing aligns, split-fuse", "raaa", precise(tnd(2, 17).call(), 0)),
        ("272, split-fuse", "rrrr", precise(tnd(2, 272).call(), 0)),
        ("130 heads over 1", "raaa", precise(probe("TND", [2, 130, 1, 4, 16, 128]).bf16().call(), 1)),
        ("precision 7, own heads", "-raa", precise(tnd(8, 128).bf16().call(), 7)),
        ("precision 7, shared heads", "-rrr", precise(tnd(2, 128).bf16().call(), 7)),
        ("precision -1, own heads", "-raa", precise(tnd(8, 128).bf16().call(), -1)),
    ]);
}

#[test]
fn masks_and_modes() {
    let masked = |call: Call, sparse_mode, atten_mask| FiaCall { sparse_mode, atten_mask, ..call };
    let unified = || precise(tnd(2, 64).bf16().call(), 1);
    let fuse = || precise(tnd(2, 64).bf16().call(), 0);
    let long = |inner_precise| precise(probe("TND", [2, 8, 2, 64, 16, 64]).bf16().call(), inner_precise);
    let band = |call: Call, pre_tokens, next_tokens| FiaCall { pre_tokens, next_tokens, ..masked(call, 4, triangle()) };
    hold(&[
        ("mode 1", "raaa", masked(unified(), 1, mask(&[1, 16, 64]))),
        ("mode 2", "raaa", masked(unified(), 2, triangle())),
        ("mode 3", "aaaa", masked(unified(), 3, triangle())),
        ("mode 4", "aaaa", masked(unified(), 4, triangle())),
        ("mode 0 with three axes", "raaa", masked(unified(), 0, mask(&[2, 16, 64]))),
        ("mode 0 with two axes", "rrrr", masked(unified(), 0, mask(&[16, 64]))),
        ("mode 3 without a mask", "rrrr", masked(unified(), 3, None)),
        ("mode 3 with more rows than keys", "raaa", masked(long(1), 3, triangle())),
        ("split-fuse, mode 3 with more rows than keys", "raaa", masked(long(0), 3, triangle())),
        ("split-fuse, mode 3", "aaaa", masked(fuse(), 3, triangle())),
        ("split-fuse, mode 3, a small mask", "rrrr", masked(fuse(), 3, mask(&[64, 64]))),
        ("split-fuse, mode 3, three axes", "aaaa", masked(fuse(), 3, mask(&[1, 2048, 2048]))),
        ("split-fuse, mode 3 without a mask", "rrrr", masked(fuse(), 3, None)),
        ("split-fuse, mode 4", "aaaa", band(fuse(), 10, 3)),
        ("split-fuse, an empty band", "rrrr", band(fuse(), 3, -4)),
        ("split-fuse, two negative tokens", "rrrr", band(fuse(), -1, -1)),
        // From 9.0 on the split-fuse path takes shared heads whatever the mask is, and then refuses one in mode 0.
        ("mode 0 with three axes and precision 0", "rrrr", masked(fuse(), 0, mask(&[2, 16, 64]))),
        (
            "own heads, mode 0 with three axes",
            "raaa",
            masked(precise(tnd(8, 64).bf16().call(), 0), 0, mask(&[2, 16, 64])),
        ),
    ]);
}

#[test]
fn lengths() {
    let unified = |q: &[i64], kv: &[i64]| lengthed(1, q, kv);
    let fuse = |q: &[i64], kv: &[i64]| lengthed(0, q, kv);
    fn lengthed(inner_precise: i64, q: &[i64], kv: &[i64]) -> Call {
        FiaCall {
            actual_seq_lengths: Some(kept(q.to_vec())),
            actual_seq_lengths_kv: Some(kept(kv.to_vec())),
            ..precise(tnd(2, 64).bf16().call(), inner_precise)
        }
    }
    let many = |n: usize, inner_precise| {
        let base = probe("TND", [n as i64, 2, 1, 1, 1, 64]).bf16();
        precise(base.call(), inner_precise)
    };
    hold(&[
        ("rising", "aaaa", unified(&[16, 32], &[64, 128])),
        ("falling", "rrrr", unified(&[40, 32], &[64, 128])),
        ("negative", "rrrr", unified(&[-1, 32], &[64, 128])),
        ("short of the rows", "rrrr", unified(&[16, 31], &[64, 128])),
        ("short of the keys", "rrrr", unified(&[16, 32], &[64, 127])),
        ("of other number", "rrrr", unified(&[16, 32], &[128])),
        ("split-fuse, falling", "raaa", fuse(&[40, 32], &[64, 128])),
        ("split-fuse, negative", "raaa", fuse(&[-1, 32], &[64, 128])),
        ("split-fuse, falling keys", "raaa", fuse(&[16, 32], &[200, 128])),
        ("split-fuse, short of the rows", "rrrr", fuse(&[16, 31], &[64, 128])),
        ("split-fuse, short of the keys", "rrrr", fuse(&[16, 32], &[64, 127])),
        ("split-fuse, of other number", "raaa", fuse(&[16, 32], &[128])),
        ("split-fuse, none", "rrrr", with(&fuse(&[32], &[128]), |call| call.actual_seq_lengths = None)),
        ("split-fuse, no keys", "rrrr", fuse(&[16, 32], &[])),
        ("5000 sequences", "raaa", many(5000, 1)),
        ("65537 sequences, unified", "rrrr", many(65_537, 1)),
        ("65537 sequences, split-fuse", "raaa", many(65_537, 0)),
        ("more than 1048576 rows", "raaa", precise(probe("TND", [2, 2, 1, 600_000, 4, 64]).bf16().call(), 1)),
    ]);
}

#[test]
fn lengths_in_ntd() {
    let ntd = |layout, q: &[i64], kv: &[i64]| FiaCall {
        actual_seq_lengths: Some(kept(q.to_vec())),
        actual_seq_lengths_kv: Some(kept(kv.to_vec())),
        ..probe(layout, [2, 8, 2, 16, 64, 64]).bf16().call()
    };
    hold(&[
        ("NTD, rising", "raaa", ntd("NTD", &[16, 32], &[64, 128])),
        ("NTD, falling", "rrrr", ntd("NTD", &[40, 32], &[64, 128])),
        ("NTD_TND, rising", "aaaa", ntd("NTD_TND", &[16, 32], &[64, 128])),
        ("NTD_TND, falling", "rrrr", ntd("NTD_TND", &[16, 32], &[130, 128])),
    ]);
}

#[test]
fn caches() {
    let fuse = |d, bs, axes| precise(tnd(2, d).bf16().paged(bs, axes), 0);
    let unified = |d, bs, axes| precise(tnd(2, d).bf16().paged(bs, axes), 1);
    let long: Option<&'static [i64]> = Some(kept(vec![257, 1]));
    hold(&[
        ("unified, blocks of 128", "aaaa", unified(64, 128, 3)),
        ("unified, blocks of 16", "raaa", unified(64, 16, 3)),
        ("unified, BnNBsD", "aaaa", unified(64, 128, 4)),
        ("unified, NZ", "aaaa", unified(64, 128, 5)),
        ("split-fuse, blocks of 128", "aaaa", fuse(64, 128, 3)),
        ("split-fuse, 96 channels, blocks of 128", "raaa", fuse(96, 128, 3)),
        // In 8.5 other blocks keep a call with the unified checker, which has no such head dimension to keep.
        ("split-fuse, 96 channels, blocks of 16", "raaa", fuse(96, 16, 3)),
        ("split-fuse, 96 channels, blocks of 512", "raaa", fuse(96, 512, 3)),
        ("split-fuse, 96 channels, blocks of 528", "rrrr", fuse(96, 528, 3)),
        ("96 channels over BnNBsD", "rrrr", fuse(96, 128, 4)),
        ("96 channels over NZ", "rrra", fuse(96, 128, 5)),
        ("192 channels over NZ, blocks of 48", "rrra", fuse(192, 48, 5)),
        ("64 channels over NZ", "aaaa", fuse(64, 128, 5)),
        ("unified, lengths beyond the table", "rrrr", FiaCall { actual_seq_lengths_kv: long, ..unified(64, 128, 3) }),
        ("split-fuse, lengths beyond the table", "raaa", FiaCall { actual_seq_lengths_kv: long, ..fuse(64, 128, 3) }),
        (
            "split-fuse, a table of another batch",
            "raaa",
            with(&fuse(64, 128, 3), |call| call.block_table = of(DType::Int32, &[5, 2])),
        ),
        (
            "split-fuse, a table of INT64",
            "raaa",
            with(&fuse(64, 128, 3), |call| call.block_table = of(DType::Int64, &[2, 2])),
        ),
        ("split-fuse, another block size", "rrrr", with(&fuse(64, 128, 3), |call| call.block_size = 256)),
        ("unified, numKeyValueHeads 0", "rrrr", with(&unified(64, 128, 3), |call| call.num_key_value_heads = 0)),
        ("own heads, FLOAT16, over a cache", "rraa", precise(tnd(8, 96).paged(128, 3), 0)),
        ("own heads, FLOAT16, precision 1, over a cache", "rraa", precise(tnd(8, 96).paged(128, 3), 1)),
    ]);
}

#[test]
fn what_the_split_fuse_path_does_not_look_at() {
    let fuse = |change: fn(&mut Call)| with(&precise(tnd(2, 64).bf16().call(), 0), change);
    hold(&[
        ("numKeyValueHeads of another number", "raaa", fuse(|call| call.num_key_value_heads = 4)),
        ("an INT8 output without a scale", "raaa", fuse(|call| call.attention_out = of(DType::Int8, &[32, 8, 64]))),
        ("an output of FLOAT16", "-aaa", fuse(|call| call.attention_out = of(DType::Float16, &[32, 8, 64]))),
        ("an output of another shape", "rrrr", fuse(|call| call.attention_out = of(DType::Bf16, &[32, 8, 32]))),
        ("left padding", "raaa", fuse(|call| call.kv_padding_size = of(DType::Int64, &[7]))),
        ("a scale of antiquantisation", "aaaa", fuse(|call| call.antiquant_scale = of(DType::Float, &[7]))),
        ("quantScale2 with a BF16 output", "aaaa", fuse(|call| call.quant_scale2 = of(DType::Float, &[1]))),
        (
            "a list of two",
            "-rrr",
            fuse(|call| {
                call.key = kept(vec![call.key[0]; 2]);
                call.value = kept(vec![call.value[0]; 2]);
            }),
        ),
        (
            "the log-sum-exp",
            "aaaa",
            fuse(|call| {
                call.softmax_lse_flag = true;
                call.softmax_lse = of(DType::Float, &[32, 8, 1]);
            }),
        ),
        (
            "a log-sum-exp of another shape",
            "rrrr",
            fuse(|call| {
                call.softmax_lse_flag = true;
                call.softmax_lse = of(DType::Float, &[32, 8]);
            }),
        ),
    ]);
}
