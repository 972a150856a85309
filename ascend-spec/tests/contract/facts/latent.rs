//! Multi-head latent attention and the tree mask.

use super::{Call, Fact, Probe, hold, kept, mask, of, probe, triangle, with};
use ascend_spec::DType;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

fn masked(call: Call, sparse_mode: i64, atten_mask: Option<ascend_spec::TensorDesc>) -> Call {
    FiaCall { sparse_mode, atten_mask, ..call }
}

#[test]
fn split_heads_of_128_and_64() {
    let all = |layout| probe(layout, [2, 4, 4, 16, 64, 128]).bf16();
    let mut facts: Vec<Fact> = Vec::new();
    for layout in ["TND", "NTD_TND"] {
        facts.push(("packed, as ever", "aaaa", all(layout).rope()));
        facts.push(("FLOAT16", "raaa", Probe { dtype: DType::Float16, ..all(layout) }.rope()));
    }
    for layout in ["BSH", "BSND", "BNSD", "BNSD_BSND", "NTD", "BSH_BNSD", "BSND_BNSD"] {
        facts.push((layout, "raaa", all(layout).rope()));
        facts.push((layout, "raaa", all(layout).paged_rope(128, 3)));
    }
    for layout in ["BSH_NBSD", "BSND_NBSD", "TND_NTD"] {
        facts.push((layout, "rrrr", all(layout).rope()));
    }
    facts.push(("one row", "raaa", Probe { rows: 1, ..all("BSND") }.rope()));
    facts.push((
        "with padding",
        "rrrr",
        FiaCall {
            kv_padding_size: of(DType::Int64, &[1]),
            actual_seq_lengths_kv: Some(kept(vec![4, 4])),
            ..all("BSND").rope()
        },
    ));
    facts.push((
        "with an INT8 output",
        "rrrr",
        FiaCall {
            attention_out: of(DType::Int8, &[2, 16, 4, 128]),
            quant_scale2: of(DType::Float, &[1]),
            ..all("BSND").rope()
        },
    ));
    facts.push((
        "192 and 128, an INT8 output",
        "rrra",
        FiaCall {
            attention_out: of(DType::Int8, &[2, 16, 4, 128]),
            quant_scale2: of(DType::Float, &[1]),
            ..Probe { dim: 192, ..all("BSND") }.value(128).call()
        },
    ));
    let combined = |layout| Probe { dim: 192, ..all(layout) }.value(128);
    facts.push(("192 and 128 over a cache", "raaa", combined("BSND").paged(128, 3)));
    facts.push((
        "192 and 128 with the log-sum-exp",
        "raaa",
        FiaCall { softmax_lse_flag: true, softmax_lse: combined("BNSD").lse(), ..combined("BNSD").call() },
    ));
    facts.push((
        "192 and 128, a band",
        "aaaa",
        FiaCall { pre_tokens: 5, next_tokens: 5, ..masked(combined("TND").call(), 4, triangle()) },
    ));
    hold(&facts);
}

fn absorbed(layout: &'static str, rows: i64) -> Probe {
    probe(layout, [2, 32, 1, rows, 100, 512]).bf16()
}

#[test]
fn absorbed_heads_of_512_and_64() {
    let paged = |layout, rows, bs, axes| absorbed(layout, rows).paged_rope(bs, axes);
    let lse = |p: Probe| FiaCall { softmax_lse_flag: true, softmax_lse: p.lse(), ..p.paged_rope(128, 3) };
    let precise = |inner_precise| FiaCall { inner_precise, ..paged("BSND", 1, 128, 3) };
    let band = |layout: &'static str, heads| FiaCall {
        pre_tokens: 100,
        next_tokens: 0,
        ..masked(Probe { heads, ..absorbed(layout, 4) }.paged_rope(128, 3), 4, triangle())
    };
    hold(&[
        ("one row", "aaaa", paged("BSND", 1, 128, 3)),
        ("several rows", "aaaa", masked(paged("BSND", 4, 128, 3), 3, triangle())),
        ("20 rows", "raaa", masked(paged("BSND", 20, 128, 3), 3, triangle())),
        ("TND", "aaaa", masked(paged("TND", 4, 128, 3), 3, triangle())),
        ("BSND_NBSD", "aaaa", paged("BSND_NBSD", 1, 128, 3)),
        ("TND_NTD", "aaaa", masked(paged("TND_NTD", 4, 128, 3), 3, triangle())),
        ("BNSD_BSND", "rrrr", paged("BNSD_BSND", 4, 128, 4)),
        ("NTD_TND", "rrrr", paged("NTD_TND", 4, 128, 4)),
        ("blocks of 16", "aaaa", paged("BSND", 1, 16, 3)),
        ("blocks of 1024", "raaa", paged("BSND", 1, 1024, 3)),
        ("blocks of 1040", "rrrr", paged("BSND", 1, 1040, 3)),
        ("BSND over BnNBsD", "raaa", paged("BSND", 1, 128, 4)),
        ("BNSD over NZ", "raaa", paged("BNSD", 1, 128, 5)),
        ("BSND over NZ", "aaaa", paged("BSND", 1, 128, 5)),
        ("NZ, blocks of 16", "raaa", paged("BSND", 1, 16, 5)),
        ("dense", "raaa", absorbed("BSND", 1).rope()),
        ("dense TND", "raaa", absorbed("TND", 4).rope()),
        ("the log-sum-exp", "raaa", lse(absorbed("BSND", 1))),
        ("precision 2", "raaa", precise(2)),
        ("precision 4", "rrra", precise(4)),
        ("mode 0 with three axes", "raaa", masked(paged("BSND", 4, 128, 3), 0, mask(&[2, 4, 256]))),
        ("mode 0 with two axes", "rrrr", masked(paged("BSND", 4, 128, 3), 0, mask(&[4, 256]))),
        ("several rows without a mask", "raaa", paged("BSND", 4, 128, 3)),
        ("one row with mode 3", "raaa", masked(paged("BSND", 1, 128, 3), 3, triangle())),
        ("mode 1", "rrrr", masked(paged("BSND", 4, 128, 3), 1, mask(&[2, 4, 256]))),
        ("mode 2", "rrrr", masked(paged("BSND", 4, 128, 3), 2, triangle())),
        ("a band, 128 heads", "aaaa", band("BSND", 128)),
        ("a band, 32 heads", "raaa", band("BSND", 32)),
        ("a band in BNSD", "raaa", band("BNSD", 128)),
        ("query lengths", "raaa", FiaCall { actual_seq_lengths: Some(kept(vec![1, 1])), ..paged("BSND", 1, 128, 3) }),
        ("24 heads", "rrrr", Probe { heads: 24, ..absorbed("BSND", 1) }.paged_rope(128, 3)),
        ("256 heads", "rrrr", Probe { heads: 256, ..absorbed("BSND", 1) }.paged_rope(128, 3)),
        (
            "one head, numKeyValueHeads 0",
            "-aar",
            FiaCall { num_key_value_heads: 0, ..Probe { heads: 1, ..absorbed("BSND", 1) }.paged_rope(128, 3) },
        ),
        ("a prefix length", "rrra", FiaCall { actual_shared_prefix_len: Some(&[4]), ..paged("BSND", 1, 128, 3) }),
        (
            "an INT8 output",
            "rrrr",
            FiaCall {
                attention_out: of(DType::Int8, &[2, 1, 32, 512]),
                quant_scale2: of(DType::Float, &[1]),
                ..paged("BSND", 1, 128, 3)
            },
        ),
        ("a sink", "rraa", FiaCall { learnable_sink: of(DType::Bf16, &[32]), ..paged("BSND", 1, 128, 3) }),
        (
            "TND with fewer key lengths",
            "raar",
            FiaCall { actual_seq_lengths_kv: Some(kept(vec![100])), ..paged("TND", 4, 128, 3) },
        ),
        ("left padding", "rrrr", FiaCall { kv_padding_size: of(DType::Int64, &[1]), ..paged("BSND", 1, 128, 3) }),
        (
            "a position bias",
            "rrrr",
            FiaCall { pse_shift: of(DType::Bf16, &[2, 32, 1, 256]), ..paged("BSND", 1, 128, 3) },
        ),
    ]);
}

/// INT8 queries over an NZ cache of INT8.
fn int8(layout: &'static str, rows: i64) -> Call {
    let p = Probe { dtype: DType::Int8, ..absorbed(layout, rows) };
    let half = absorbed(layout, rows);
    let call = p.paged(128, 5);
    let blocks = call.key[0].shape[0];
    let grid: &[i64] = match layout {
        "TND" | "TND_NTD" => &[2 * rows, 32],
        _ => &[2, rows, 32],
    };
    FiaCall {
        query_rope: Some(half.input(32, rows, 64)),
        key_rope: Some(half.cache(blocks, 128, 5, 64)),
        attention_out: half.call().attention_out,
        dequant_scale_query: of(DType::Float, grid),
        key_antiquant_scale: of(DType::Float, &[1]),
        value_antiquant_scale: of(DType::Float, &[1]),
        query_quant_mode: 3,
        ..call
    }
}

#[test]
fn absorbed_with_an_int8_query() {
    let lse = |call: Call| FiaCall { softmax_lse_flag: true, softmax_lse: of(DType::Float, &[2, 32, 1, 1]), ..call };
    hold(&[
        ("one row", "aaaa", int8("BSND", 1)),
        ("16 rows", "aaaa", masked(int8("BSND", 16), 3, triangle())),
        ("17 rows", "rrra", masked(int8("BSND", 17), 3, triangle())),
        ("32 rows", "rrra", masked(int8("BSND", 32), 3, triangle())),
        ("33 rows", "rrrr", masked(int8("BSND", 33), 3, triangle())),
        ("TND, 32 rows", "rrra", masked(int8("TND", 32), 3, triangle())),
        ("TND, 33 rows", "rrrr", masked(int8("TND", 33), 3, triangle())),
        ("the log-sum-exp", "rraa", lse(int8("BSND", 1))),
        ("tree", "rrra", masked(int8("BSND", 4), 9, mask(&[2, 4, 4]))),
        ("tree of one row", "rrrr", masked(int8("BSND", 1), 9, mask(&[2, 1, 1]))),
        ("tree of another size", "rrrr", masked(int8("BSND", 4), 9, mask(&[2, 4, 5]))),
        ("packed tree", "rrra", masked(int8("TND", 4), 9, mask(&[32]))),
        ("packed tree of another size", "rrra", masked(int8("TND", 4), 9, mask(&[7]))),
        (
            "packed tree of more rows than keys",
            "rrra",
            with(&masked(int8("TND", 4), 9, mask(&[32])), |call| {
                call.actual_seq_lengths_kv = Some(&[3, 64]);
            }),
        ),
        ("TND_NTD tree", "rrra", masked(int8("TND_NTD", 4), 9, mask(&[32]))),
    ]);
}

#[test]
fn trees() {
    let split = |layout| probe(layout, [2, 4, 4, 4, 64, 128]).bf16();
    let tree = |call: Call, shape: &[i64]| masked(call, 9, mask(shape));
    let absorbed = |layout| absorbed(layout, 4).paged_rope(128, 3);
    let short = |layout| probe(layout, [2, 4, 4, 4, 3, 128]).bf16();
    let ends_of = |rows: &[i64], keys: &[i64]| FiaCall {
        actual_seq_lengths: Some(kept(rows.to_vec())),
        actual_seq_lengths_kv: Some(kept(keys.to_vec())),
        ..tree(split("TND").rope(), &[32])
    };
    let few = |lengths: &[i64]| FiaCall {
        actual_seq_lengths: Some(kept(vec![4, 4])),
        actual_seq_lengths_kv: Some(kept(lengths.to_vec())),
        ..tree(split("BSND").rope(), &[2, 4, 4])
    };
    hold(&[
        ("split", "rrra", tree(split("BSND").rope(), &[2, 4, 4])),
        ("split, NTD", "rrra", tree(split("NTD").rope(), &[32])),
        ("split, packed", "rrra", tree(split("TND").rope(), &[32])),
        ("absorbed", "rrra", tree(absorbed("BSND"), &[2, 4, 4])),
        ("absorbed, packed", "rrra", tree(absorbed("TND"), &[32])),
        ("absorbed, TND_NTD", "rrra", tree(absorbed("TND_NTD"), &[32])),
        ("of any size", "rrra", tree(absorbed("BSND"), &[1, 2, 3])),
        ("one axis in BSND", "rrra", tree(absorbed("BSND"), &[3])),
        ("two axes", "rrrr", tree(absorbed("BSND"), &[4, 4])),
        ("four axes", "rrrr", tree(absorbed("BSND"), &[2, 1, 4, 4])),
        ("without a mask", "rrrr", masked(absorbed("BSND"), 9, None)),
        ("without rotary parts", "rrrr", tree(split("BSND").call(), &[2, 4, 4])),
        ("192 and 128", "rrrr", tree(Probe { dim: 192, ..split("BSND") }.call(), &[2, 4, 4])),
        // With a batch axis the rows of the tensors are compared, not the lengths.
        ("lengths of more rows than keys", "rrra", few(&[4, 3])),
        ("more rows than no keys", "rrra", few(&[4, 0])),
        ("more rows than keys", "rrrr", tree(short("BSND").rope(), &[2, 4, 4])),
        ("more rows than keys by hidden size", "rrrr", tree(short("BSH").rope(), &[2, 4, 4])),
        ("packed, as many keys in one sequence", "rrra", ends_of(&[4, 8], &[4, 128])),
        ("packed, more rows than keys in one sequence", "rrrr", ends_of(&[4, 8], &[3, 128])),
        ("packed, no keys in one sequence", "rrra", ends_of(&[4, 8], &[0, 128])),
        // Over a paged cache nothing is compared.
        (
            "paged, more rows than keys",
            "rrra",
            with(&tree(absorbed("BSND"), &[2, 4, 4]), |call| {
                call.actual_seq_lengths_kv = Some(&[3, 100]);
            }),
        ),
        (
            "paged and packed, more rows than keys",
            "rrra",
            with(&tree(absorbed("TND"), &[32]), |call| {
                call.actual_seq_lengths_kv = Some(&[3, 100]);
            }),
        ),
        ("tokens", "rrra", FiaCall { pre_tokens: -5, next_tokens: -5, ..tree(absorbed("BSND"), &[2, 4, 4]) }),
        (
            "the log-sum-exp and precision 4",
            "rrra",
            with(&tree(split("BSND").rope(), &[2, 4, 4]), |call| {
                call.inner_precise = 4;
                call.softmax_lse_flag = true;
                call.softmax_lse = of(DType::Float, &[2, 4, 4, 1]);
            }),
        ),
        ("another mode", "rrrr", masked(absorbed("BSND"), 8, mask(&[2, 4, 4]))),
        (
            "a single row without rotary parts",
            "aaaa",
            masked(probe("BSND", [2, 4, 4, 1, 64, 64]).call(), 9, mask(&[2, 64])),
        ),
    ]);
}
