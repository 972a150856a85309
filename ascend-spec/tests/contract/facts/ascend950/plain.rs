//! Layouts, head dimensions, lengths, masks and caches.

use super::super::{Call, kept, mask, of, probe, triangle, with};
use super::{hold, masked};
use ascend_spec::DType;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

#[test]
fn layouts_and_head_dimensions() {
    let p = |layout, rows, d| probe(layout, [2, 8, 2, rows, 64, d]);
    let mut facts = Vec::new();
    for layout in ["BSH", "BSND", "BNSD", "TND", "NTD", "NTD_TND", "BNSD_BSND", "BSND_BNSD", "BSH_BNSD"] {
        facts.push((layout, 'a', p(layout, 4, 64).call()));
        facts.push((layout, 'a', p(layout, 1, 128).call()));
        facts.push((layout, 'a', p(layout, 4, 128).bf16().rope()));
        facts.push((layout, 'a', p(layout, 4, 192).value(128).call()));
    }
    for layout in ["BSH", "BSND", "BNSD", "TND"] {
        for d in [1, 7, 80, 100, 256, 512] {
            facts.push((layout, 'a', p(layout, 4, d).call()));
        }
        facts.push((layout, 'r', p(layout, 4, 513).call()));
        facts.push((layout, 'a', p(layout, 4, 64).value(128).call()));
        facts.push((layout, 'a', p(layout, 4, 128).value(7).call()));
        facts.push((layout, 'r', p(layout, 4, 64).value(129).call()));
    }
    for layout in ["NTD", "NTD_TND", "BSND_BNSD", "BSH_BNSD"] {
        facts.push((layout, 'r', p(layout, 4, 96).call()));
        facts.push((layout, 'r', p(layout, 4, 128).value(64).call()));
    }
    for layout in ["BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"] {
        facts.push((layout, 'r', p(layout, 4, 128).call()));
        facts.push((layout, 'r', p(layout, 4, 128).bf16().rope()));
    }
    facts.extend([
        ("BNSD_BSND, 48", 'a', p("BNSD_BSND", 4, 48).call()),
        ("BNSD_BSND, 40", 'r', p("BNSD_BSND", 4, 40).call()),
        ("BNSD_BSND, one row, 40", 'r', p("BNSD_BSND", 1, 40).call()),
        ("BNSD_BSND, unequal", 'r', p("BNSD_BSND", 4, 64).value(32).call()),
        ("1000 heads over 1", 'a', probe("BSND", [1, 1000, 1, 4, 64, 64]).call()),
        ("heads that do not divide", 'r', probe("BSND", [1, 9, 2, 4, 64, 64]).call()),
        ("batch of 65537", 'r', probe("BSND", [65_537, 1, 1, 1, 2, 16]).call()),
        ("rotary parts of 96", 'r', p("BSND", 4, 96).bf16().rope()),
        ("precision 4", 'a', FiaCall { inner_precise: 4, ..p("BSND", 4, 64).call() }),
        ("precision 5", 'r', FiaCall { inner_precise: 5, ..p("BSND", 4, 64).call() }),
        ("a kind of bias", 'r', FiaCall { pse_type: 2, ..p("BSND", 4, 64).call() }),
        ("positions", 'a', FiaCall { q_start_idx: Some(&[3]), kv_start_idx: Some(&[4]), ..p("BSND", 4, 64).call() }),
    ]);
    hold(&facts);
}

#[test]
fn unequal_head_dimensions() {
    let p = probe("BSND", [2, 8, 2, 4, 64, 128]).value(64);
    hold(&[
        ("mode 3", 'a', masked(p.call(), 3, triangle())),
        ("mode 2", 'a', masked(p.call(), 2, triangle())),
        ("mode 4", 'r', masked(p.call(), 4, triangle())),
        ("mode 1", 'r', masked(p.call(), 1, mask(&[1, 4, 64]))),
        ("mode 0 with a mask", 'a', masked(p.call(), 0, mask(&[1, 4, 64]))),
        ("paged", 'r', p.paged(128, 3)),
        ("the log-sum-exp", 'r', FiaCall { softmax_lse_flag: true, softmax_lse: p.lse(), ..p.call() }),
        ("a list", 'a', p.list()),
        ("a bias", 'r', FiaCall { pse_shift: of(DType::Float16, &[1, 8, 4, 64]), ..p.call() }),
        ("a sink", 'a', FiaCall { learnable_sink: of(DType::Float16, &[8]), ..p.call() }),
        (
            "left padding",
            'r',
            FiaCall {
                kv_padding_size: of(DType::Int64, &[1]),
                actual_seq_lengths_kv: Some(kept(vec![5, 6])),
                ..p.call()
            },
        ),
    ]);
}

#[test]
fn lengths() {
    let p = probe("BSND", [2, 8, 2, 4, 64, 64]);
    let tnd = probe("TND", [2, 8, 2, 4, 64, 64]);
    let of = |call: Call, q: Option<&[i64]>, kv: Option<&[i64]>| FiaCall {
        actual_seq_lengths: q.map(|all| kept(all.to_vec())),
        actual_seq_lengths_kv: kv.map(|all| kept(all.to_vec())),
        ..call
    };
    hold(&[
        ("one of each", 'a', of(p.call(), Some(&[3]), Some(&[60]))),
        ("more than the batch", 'a', of(p.call(), Some(&[3, 3, 9]), Some(&[60, 1, 99]))),
        ("empty", 'r', of(p.call(), Some(&[]), None)),
        ("empty keys", 'r', of(p.call(), None, Some(&[]))),
        ("beyond the rows", 'r', of(p.call(), Some(&[5, 1]), None)),
        ("beyond the keys", 'r', of(p.call(), None, Some(&[65, 1]))),
        ("packed", 'a', of(tnd.call(), Some(&[4, 8]), Some(&[64, 128]))),
        ("packed without rows", 'a', of(tnd.call(), Some(&[0, 8]), Some(&[0, 128]))),
        ("packed, falling", 'r', of(tnd.call(), Some(&[9, 8]), Some(&[64, 128]))),
        ("packed, short of the keys", 'r', of(tnd.call(), Some(&[4, 8]), Some(&[64, 127]))),
        ("packed, of other number", 'r', of(tnd.call(), Some(&[4, 8]), Some(&[128]))),
        ("packed, none", 'r', of(tnd.call(), None, Some(&[64, 128]))),
        (
            "packed, mode 3 with more rows than keys",
            'a',
            masked(probe("TND", [2, 8, 2, 64, 4, 64]).call(), 3, triangle()),
        ),
    ]);
}

#[test]
fn masks() {
    let p = |rows| probe("BNSD", [2, 4, 4, rows, 64, 64]);
    let short = |shape: &[i64]| FiaCall {
        actual_seq_lengths_kv: Some(kept(vec![40, 50])),
        ..masked(p(4).call(), 0, mask(shape))
    };
    let band = |pre_tokens, next_tokens| FiaCall { pre_tokens, next_tokens, ..masked(p(4).call(), 4, triangle()) };
    hold(&[
        ("two axes", 'r', masked(p(4).call(), 0, mask(&[4, 64]))),
        ("two axes, one row", 'r', masked(p(1).call(), 0, mask(&[2, 64]))),
        ("three axes", 'a', masked(p(4).call(), 1, mask(&[2, 4, 64]))),
        ("four axes", 'a', masked(p(4).call(), 0, mask(&[1, 1, 4, 64]))),
        ("an axis of heads", 'r', masked(p(4).call(), 0, mask(&[1, 4, 4, 64]))),
        ("the longest length", 'a', short(&[2, 4, 50])),
        ("less than the longest length", 'r', short(&[2, 4, 49])),
        ("triangle", 'a', masked(p(4).call(), 2, triangle())),
        ("triangle, one row", 'a', masked(p(1).call(), 3, triangle())),
        ("small, one row", 'r', masked(p(1).call(), 3, mask(&[2, 1, 64]))),
        ("mode 3 without a mask, one row", 'r', masked(p(1).call(), 3, None)),
        ("mode 5, one row", 'r', masked(p(1).call(), 5, mask(&[2, 1, 64]))),
        ("mode 9", 'r', masked(p(4).bf16().call(), 9, mask(&[2, 4, 4]))),
        (
            "mode 9 with rotary parts",
            'r',
            masked(probe("BSND", [2, 4, 4, 4, 64, 128]).bf16().rope(), 9, mask(&[2, 4, 4])),
        ),
        ("a band far off", 'a', band(-500, 500)),
        ("a band beyond the keys", 'a', band(5000, -400)),
        ("an empty band", 'r', band(-5, 4)),
        ("no window without a mask", 'a', FiaCall { pre_tokens: -5, next_tokens: -9, ..p(4).call() }),
    ]);
}

#[test]
fn pages() {
    let p = |layout, rows, d| probe(layout, [2, 8, 2, rows, 100, d]);
    let change = |change: fn(&mut Call)| with(&p("BNSD", 4, 64).paged(128, 4), change);
    hold(&[
        ("64, blocks of 16", 'a', p("BSND", 4, 64).paged(16, 3)),
        ("64, blocks of 1024", 'a', p("BSND", 1, 64).paged(1024, 3)),
        ("64, blocks of 1040", 'r', p("BSND", 1, 64).paged(1040, 3)),
        ("96, one row, blocks of 512", 'a', p("BSND", 1, 96).paged(512, 3)),
        ("96, one row, blocks of 1024", 'r', p("BSND", 1, 96).paged(1024, 3)),
        ("96, rows, blocks of 16", 'r', p("BSND", 4, 96).paged(16, 3)),
        ("96, rows, blocks of 1024", 'a', p("BSND", 4, 96).paged(1024, 3)),
        ("96 over NZ", 'a', p("BSND", 4, 96).paged(128, 5)),
        ("BSH over BnNBsD", 'a', p("BSH", 4, 64).paged(128, 4)),
        ("TND over NZ", 'a', p("TND", 4, 64).paged(128, 5)),
        (
            "fewer blocks than needed",
            'a',
            FiaCall {
                key: kept(vec![p("BNSD", 4, 64).cache(1, 128, 4, 64)]),
                value: kept(vec![p("BNSD", 4, 64).cache(1, 128, 4, 64)]),
                ..p("BNSD", 4, 64).paged(128, 4)
            },
        ),
        ("a table of another batch", 'r', change(|call| call.block_table = of(DType::Int32, &[3, 2]))),
        (
            "a narrow table",
            'r',
            with(&p("BNSD", 4, 64).paged(16, 4), |call| call.block_table = of(DType::Int32, &[2, 6])),
        ),
        ("no lengths", 'r', change(|call| call.actual_seq_lengths_kv = None)),
        ("another block size", 'r', change(|call| call.block_size = 256)),
        ("a padding tensor", 'r', change(|call| call.kv_padding_size = of(DType::Int64, &[1]))),
        (
            "a padding tensor, one row",
            'r',
            with(&p("BNSD", 1, 64).paged(128, 4), |call| call.query_padding_size = of(DType::Int64, &[1])),
        ),
        ("a hidden size of 65536", 'r', probe("BSND", [1, 1024, 1024, 4, 100, 64]).paged(128, 3)),
    ]);
}
