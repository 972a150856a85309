//! Caches of blocks, left padding and position bias.

use super::{Call, hold, hold_for_both, kept, of, probe, with};
use ascend_spec::DType;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

#[test]
fn block_sizes_and_formats() {
    hold_for_both(|d| {
        let of = |layout, rows, bs, axes| probe(layout, [2, 8, 2, rows, 100, d]).paged(bs, axes);
        vec![
            ("blocks of 128, one row", ["aaaa"; 2], of("BSND", 1, 128, 3)),
            ("blocks of 128, rows", ["aaaa"; 2], of("BSND", 16, 128, 3)),
            ("blocks of 16, one row", ["aaaa"; 2], of("BSND", 1, 16, 3)),
            ("blocks of 512, one row", ["aaaa"; 2], of("BSND", 1, 512, 3)),
            ("blocks of 528, one row", ["raaa", "rrrr"], of("BSND", 1, 528, 3)),
            ("blocks of 1024, one row", ["raaa", "rrrr"], of("BSND", 1, 1024, 3)),
            ("blocks of 1040, one row", ["rrrr"; 2], of("BSND", 1, 1040, 3)),
            ("blocks of 24, one row", ["rrrr"; 2], of("BSND", 1, 24, 3)),
            ("blocks of 16, rows", ["raaa", "rrrr"], of("BSND", 16, 16, 3)),
            ("blocks of 144, rows", ["raaa", "rrrr"], of("BSND", 16, 144, 3)),
            ("blocks of 1024, rows", ["aaaa"; 2], of("BSND", 16, 1024, 3)),
            ("blocks of 1152, rows", ["rrrr"; 2], of("BSND", 16, 1152, 3)),
            ("BNSD over BnBsH", ["aaaa"; 2], of("BNSD", 16, 128, 3)),
            ("BNSD over BnNBsD", ["aaaa"; 2], of("BNSD", 16, 128, 4)),
            ("BNSD over BnNBsD, one row", ["aaaa"; 2], of("BNSD", 1, 128, 4)),
            ("BSND over BnNBsD, one row", ["raaa", "rraa"], of("BSND", 1, 128, 4)),
            ("BSND over BnNBsD, rows", ["raaa", "rraa"], of("BSND", 16, 128, 4)),
            ("BSH over BnNBsD, rows", ["raaa", "rraa"], of("BSH", 16, 128, 4)),
            ("BNSD_BSND over BnBsH, one row", ["raaa", "rraa"], of("BNSD_BSND", 1, 128, 3)),
            ("BNSD_BSND over BnNBsD, one row", ["raaa", "rraa"], of("BNSD_BSND", 1, 128, 4)),
            ("BSH_BNSD over BnBsH", ["raaa", "rrrr"], of("BSH_BNSD", 16, 128, 3)),
            ("BSND_BNSD over BnNBsD", ["raaa", "rrrr"], of("BSND_BNSD", 16, 128, 4)),
            ("BNSD over NZ, one row", ["raaa", "rrrr"], of("BNSD", 1, 128, 5)),
            ("BSND over NZ, rows", ["raaa", "rrrr"], of("BSND", 16, 128, 5)),
            ("BNSD_BSND over NZ", ["raaa", "rrrr"], of("BNSD_BSND", 16, 128, 5)),
            ("NTD over NZ", ["raaa", "rrrr"], of("NTD", 16, 128, 5)),
        ]
    });
}

#[test]
fn tables_and_caches() {
    hold_for_both(|d| {
        let p = |rows| probe("BNSD", [2, 8, 2, rows, 100, d]);
        let paged = |rows, change: fn(&mut Call)| with(&p(rows).paged(128, 4), change);
        let few = |rows| {
            let all = p(rows).paged(128, 4);
            FiaCall {
                key: kept(vec![p(rows).cache(1, 128, 4, d)]),
                value: kept(vec![p(rows).cache(1, 128, 4, d)]),
                ..all
            }
        };
        let long: &[i64] = kept(vec![257, 100]);
        let long = |rows| FiaCall { actual_seq_lengths_kv: Some(long), ..p(rows).paged(128, 4) };
        let padded = |rows| with(&p(rows).paged(128, 4), |call| call.kv_padding_size = of(DType::Int64, &[1]));
        let other_value = |rows, d| FiaCall { value: kept(vec![p(rows).cache(5, 128, 4, d)]), ..p(rows).paged(128, 4) };
        let narrow = |rows| with(&p(rows).paged(128, 4), |call| call.block_table = of(DType::Int32, &[2, 1]));
        let long_for_one: &[i64] = kept(vec![129, 100]);
        vec![
            ("fewer blocks than needed, one row", ["aaaa"; 2], few(1)),
            ("fewer blocks than needed, rows", ["raaa", "rraa"], few(16)),
            (
                "a table of another batch, one row",
                ["aaar"; 2],
                paged(1, |call| call.block_table = of(DType::Int32, &[3, 2])),
            ),
            (
                "a table of another batch, rows",
                ["raar", "rrar"],
                paged(16, |call| call.block_table = of(DType::Int32, &[3, 2])),
            ),
            ("a table of INT64, one row", ["aaar"; 2], paged(1, |call| call.block_table = of(DType::Int64, &[2, 2]))),
            (
                "a table of INT64, rows",
                ["raar", "rrar"],
                paged(16, |call| call.block_table = of(DType::Int64, &[2, 2])),
            ),
            ("lengths beyond the table, one row", ["rrrr"; 2], long(1)),
            ("lengths beyond the table, rows", ["rrrr"; 2], long(16)),
            (
                "a table one block short",
                ["rrrr"; 2],
                FiaCall { actual_seq_lengths_kv: Some(long_for_one), ..narrow(16) },
            ),
            ("left padding, one row", ["aaar"; 2], padded(1)),
            ("left padding, rows", ["rrrr"; 2], padded(16)),
            ("values of other blocks, one row", ["arrr", "aarr"], other_value(1, d)),
            ("values of other blocks, rows", ["rrrr"; 2], other_value(16, d)),
            ("no key lengths, one row", ["rrrr"; 2], paged(1, |call| call.actual_seq_lengths_kv = None)),
            ("no key lengths, rows", ["rrrr"; 2], paged(16, |call| call.actual_seq_lengths_kv = None)),
        ]
    });
    let wide = |d, n: i64| probe("BSND", [1, n, n, 16, 100, d]).paged(128, 3);
    hold(&[
        ("a hidden size of 65536", "raar", wide(64, 1024)),
        ("a hidden size of 67584", "rrar", wide(96, 704)),
        ("BnNBsD has no such limit", "raaa", probe("BNSD", [1, 1024, 1024, 16, 100, 64]).paged(128, 4)),
    ]);
}

#[test]
fn left_padding() {
    hold_for_both(|d| {
        let padded = |layout, rows, query: Option<&[i64]>, key: Option<&[i64]>| {
            let size = |shape: &[i64]| of(DType::Int64, shape);
            FiaCall {
                query_padding_size: query.and_then(size),
                kv_padding_size: key.and_then(size),
                actual_seq_lengths: Some(kept(vec![1, 1])),
                actual_seq_lengths_kv: Some(kept(vec![40, 50])),
                ..probe(layout, [2, 4, 4, rows, 64, d]).call()
            }
        };
        let one: Option<&[i64]> = Some(&[1]);
        let two: Option<&[i64]> = Some(&[2]);
        let unlengthed = |rows| FiaCall { actual_seq_lengths_kv: None, ..padded("BSND", rows, None, one) };
        vec![
            ("of the keys, one row", ["aaaa"; 2], padded("BNSD", 1, None, one)),
            ("of the keys, rows", ["aaaa"; 2], padded("BNSD", 16, None, one)),
            ("of both, rows", ["aaaa"; 2], padded("BSH", 16, one, one)),
            ("of two elements, one row", ["aaar"; 2], padded("BNSD", 1, None, two)),
            ("of two elements, rows", ["rrrr"; 2], padded("BNSD", 16, None, two)),
            ("of the query, one row", ["aaaa"; 2], padded("BSND", 1, one, None)),
            ("of the query, BNSD_BSND, one row", ["rraa"; 2], padded("BNSD_BSND", 1, one, None)),
            ("of the query, BNSD_BSND, rows", ["aaaa"; 2], padded("BNSD_BSND", 16, one, None)),
            ("without lengths, one row", ["aaaa"; 2], unlengthed(1)),
            ("without lengths, rows", ["rrrr"; 2], unlengthed(16)),
        ]
    });
}

#[test]
fn position_bias() {
    hold_for_both(|d| {
        let p = |layout, rows| probe(layout, [2, 4, 2, rows, 64, d]);
        let biased = |call: Call, shape: &[i64]| FiaCall { pse_shift: of(DType::Float16, shape), ..call };
        let typed = |rows, pse_type| FiaCall { pse_type, ..p("BNSD", rows).call() };
        vec![
            ("one row", ["aaaa"; 2], biased(p("BSND", 1).call(), &[2, 4, 1, 64])),
            ("rows", ["aaaa"; 2], biased(p("BSND", 16).call(), &[1, 4, 16, 64])),
            ("BNSD_BSND", ["aaaa"; 2], biased(p("BNSD_BSND", 16).call(), &[1, 4, 16, 64])),
            ("three axes", ["rrrr"; 2], biased(p("BSND", 16).call(), &[4, 16, 64])),
            ("too few keys", ["rrrr"; 2], biased(p("BSND", 16).call(), &[1, 4, 16, 63])),
            ("one row for all", ["rrra"; 2], biased(p("BSND", 16).call(), &[1, 4, 1, 64])),
            ("of BF16", ["rrrr"; 2], FiaCall { pse_shift: of(DType::Bf16, &[1, 4, 16, 64]), ..p("BSND", 16).call() }),
            ("over NZ", ["rraa", "rrrr"], biased(p("BSND", 16).paged(128, 5), &[1, 4, 16, 256])),
            ("type 1, one row", ["--ar"; 2], typed(1, 1)),
            ("type 2, rows", ["--ar"; 2], typed(16, 2)),
            ("type 3, rows", ["--ar"; 2], typed(16, 3)),
        ]
    });
    let packed = |layout, inner_precise| FiaCall {
        pse_shift: of(DType::Bf16, &[1, 4, 32, 128]),
        inner_precise,
        ..probe(layout, [2, 4, 2, 16, 64, 64]).bf16().call()
    };
    hold(&[
        ("NTD_TND", "arrr", packed("NTD_TND", 1)),
        ("TND, unified", "rrrr", packed("TND", 1)),
        ("TND, split-fuse", "raaa", packed("TND", 0)),
        (
            "40 channels, one row",
            "aaaa",
            FiaCall { pse_shift: of(DType::Float16, &[2, 4, 1, 64]), ..probe("BSND", [2, 4, 2, 1, 64, 40]).call() },
        ),
        (
            "BSH_BNSD",
            "rrrr",
            FiaCall {
                pse_shift: of(DType::Float16, &[2, 4, 16, 64]),
                ..probe("BSH_BNSD", [2, 4, 2, 16, 64, 64]).call()
            },
        ),
    ]);
}
