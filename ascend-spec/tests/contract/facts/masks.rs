//! Mask shapes, sparse modes and tokens.

use super::{Call, Probe, hold, hold_for_both, kept, mask, probe, refusal, triangle};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{Cann, Soc, Target, TensorDesc};

fn masked(call: Call, sparse_mode: i64, atten_mask: Option<TensorDesc>) -> Call {
    FiaCall { sparse_mode, atten_mask, ..call }
}

#[test]
fn of_one_row() {
    hold_for_both(|d| {
        let one = |mode, shape: &[i64]| masked(probe("BNSD", [2, 4, 4, 1, 64, d]).call(), mode, mask(shape));
        vec![
            ("a row for each", ["aaaa"; 2], one(0, &[2, 64])),
            ("a longer row for each", ["aaaa"; 2], one(0, &[2, 80])),
            ("mode 1", ["aaaa"; 2], one(1, &[2, 64])),
            ("three axes", ["aaaa"; 2], one(0, &[2, 1, 64])),
            ("four axes", ["aaaa"; 2], one(0, &[2, 1, 1, 64])),
            ("one row for all", ["rrra"; 2], one(0, &[1, 64])),
            ("one row for all, three axes", ["raaa", "rraa"], one(0, &[1, 1, 64])),
            ("one row for all, four axes", ["raaa", "rraa"], one(0, &[1, 1, 1, 64])),
            ("triangle, mode 0", ["rrra"; 2], one(0, &[2048, 2048])),
            ("triangle, mode 2", ["rrra"; 2], one(2, &[2048, 2048])),
            ("triangle, mode 3", ["arra", "aara"], one(3, &[2048, 2048])),
            ("triangle, mode 4", ["arra", "aara"], one(4, &[2048, 2048])),
            ("triangle of three axes, mode 3", ["raaa", "rraa"], one(3, &[1, 2048, 2048])),
            ("triangle of four axes, mode 3", ["raaa", "rraa"], one(3, &[1, 1, 2048, 2048])),
            ("triangle of three axes, mode 2", ["raaa", "rraa"], one(2, &[1, 2048, 2048])),
            ("an axis of heads", ["arrr", "aarr"], one(0, &[2, 4, 1, 64])),
            ("too short", ["rrrr"; 2], one(0, &[2, 63])),
            ("mode 7", ["aaaa"; 2], one(7, &[2, 64])),
            (
                "mode -1 without a mask",
                ["aaaa"; 2],
                FiaCall { sparse_mode: -1, ..probe("BSH", [2, 4, 4, 1, 64, d]).call() },
            ),
            (
                "mode 3 without a mask",
                ["aaaa"; 2],
                FiaCall { sparse_mode: 3, ..probe("BSH", [2, 4, 4, 1, 64, d]).call() },
            ),
            ("negative tokens", ["aaaa"; 2], FiaCall { pre_tokens: -5, next_tokens: -7, ..one(0, &[2, 64]) }),
        ]
    });
}

#[test]
fn of_several_rows() {
    hold_for_both(|d| {
        let more = |mode, shape: &[i64]| masked(probe("BNSD", [2, 4, 4, 16, 64, d]).call(), mode, mask(shape));
        vec![
            ("two axes", ["aaaa"; 2], more(0, &[16, 64])),
            ("two larger axes", ["aaaa"; 2], more(1, &[20, 80])),
            ("three axes", ["aaaa"; 2], more(0, &[2, 16, 64])),
            ("three axes for all", ["aaaa"; 2], more(1, &[1, 16, 64])),
            ("four axes", ["aaaa"; 2], more(0, &[2, 1, 16, 64])),
            ("an axis of heads", ["arrr", "aarr"], more(0, &[2, 4, 16, 64])),
            ("another batch", ["rrrr"; 2], more(0, &[3, 16, 64])),
            ("too few rows", ["rrrr"; 2], more(0, &[15, 64])),
            ("too short", ["rrrr"; 2], more(1, &[16, 63])),
            ("triangle, mode 2", ["aaaa"; 2], more(2, &[2048, 2048])),
            ("triangle, mode 3", ["aaaa"; 2], more(3, &[1, 2048, 2048])),
            ("triangle, mode 4", ["aaaa"; 2], more(4, &[1, 1, 2048, 2048])),
            ("small triangle", ["rrrr"; 2], more(3, &[64, 64])),
            ("mode 1 without a mask", ["rrrr"; 2], FiaCall { atten_mask: None, ..more(1, &[1]) }),
            ("mode 3 without a mask", ["rrrr"; 2], FiaCall { atten_mask: None, ..more(3, &[1]) }),
            ("mode 5", ["rrrr"; 2], more(5, &[16, 64])),
            ("a negative mode", ["rrrr"; 2], more(-1, &[16, 64])),
            (
                "a band beyond the rows",
                ["raaa", "rraa"],
                FiaCall { pre_tokens: 400, next_tokens: -300, ..more(0, &[16, 64]) },
            ),
            (
                "a band of mode 4 beyond the keys",
                ["raaa", "rraa"],
                FiaCall { pre_tokens: 400, next_tokens: -300, ..more(4, &[2048, 2048]) },
            ),
            ("an empty band", ["rrrr"; 2], FiaCall { pre_tokens: 3, next_tokens: -4, ..more(4, &[2048, 2048]) }),
            ("two negative tokens", ["rrrr"; 2], FiaCall { pre_tokens: -3, next_tokens: -4, ..more(4, &[2048, 2048]) }),
            ("an empty band of mode 0", ["rrrr"; 2], FiaCall { pre_tokens: 3, next_tokens: -4, ..more(0, &[16, 64]) }),
            (
                "the least preTokens beside the most nextTokens, mode 0",
                ["raaa", "rraa"],
                FiaCall { pre_tokens: i64::from(i32::MIN), next_tokens: i64::from(i32::MAX), ..more(0, &[16, 64]) },
            ),
            (
                "the most preTokens beside the least nextTokens, mode 0",
                ["raaa", "rraa"],
                FiaCall { pre_tokens: i64::MAX, next_tokens: i64::MIN, ..more(0, &[16, 64]) },
            ),
            (
                "the least preTokens beside one nextToken less than the most, mode 0",
                ["rrrr", "rrrr"],
                FiaCall { pre_tokens: i64::MIN, next_tokens: i64::from(i32::MAX) - 1, ..more(0, &[16, 64]) },
            ),
            (
                "the least preTokens beside the most nextTokens, mode 4",
                ["raaa", "rraa"],
                FiaCall { pre_tokens: i64::from(i32::MIN), next_tokens: i64::from(i32::MAX), ..more(4, &[2048, 2048]) },
            ),
            (
                "the most preTokens beside the least nextTokens, mode 4",
                ["raaa", "rraa"],
                FiaCall { pre_tokens: i64::MAX, next_tokens: i64::MIN, ..more(4, &[2048, 2048]) },
            ),
            (
                "the least preTokens beside one nextToken less than the most, mode 4",
                ["rrrr", "rrrr"],
                FiaCall { pre_tokens: i64::MIN, next_tokens: i64::from(i32::MAX) - 1, ..more(4, &[2048, 2048]) },
            ),
            (
                "an empty band of mode 0 without a mask",
                ["aaaa"; 2],
                FiaCall { pre_tokens: 3, next_tokens: -4, atten_mask: None, ..more(0, &[1]) },
            ),
        ]
    });
    let two = |call| masked(call, 0, mask(&[16, 64]));
    hold(&[
        ("two axes with 192 and 128", "rrrr", two(probe("BSND", [2, 4, 4, 16, 64, 192]).value(128).call())),
        (
            "three axes with 192 and 128",
            "raaa",
            masked(probe("BSND", [2, 4, 4, 16, 64, 192]).value(128).call(), 0, mask(&[2, 16, 64])),
        ),
        ("two axes with rotary parts", "rrrr", two(probe("BSND", [2, 4, 4, 16, 64, 128]).rope())),
        ("two axes with BSH_BNSD", "rrrr", two(probe("BSH_BNSD", [2, 4, 4, 16, 64, 64]).call())),
        (
            "three axes with BSH_BNSD",
            "raaa",
            masked(probe("BSH_BNSD", [2, 4, 4, 16, 64, 64]).call(), 0, mask(&[1, 16, 64])),
        ),
    ]);
}

#[test]
fn that_cover_the_longest_length_alone() {
    hold_for_both(|d| {
        let lengths: &[i64] = kept(vec![40, 50]);
        let dense = |rows, shape: &[i64]| FiaCall {
            actual_seq_lengths_kv: Some(lengths),
            ..masked(probe("BSND", [2, 4, 4, rows, 64, d]).call(), 0, mask(shape))
        };
        // Four blocks in a row of the table, of which the lengths use three.
        let paged = |rows, shape: &[i64]| FiaCall {
            actual_seq_lengths_kv: Some(kept(vec![300, 260])),
            ..masked(probe("BSND", [2, 4, 4, rows, 300, d]).paged(128, 3), 0, mask(shape))
        };
        vec![
            ("dense, rows", ["rrra"; 2], dense(16, &[2, 16, 50])),
            ("dense, one row", ["arra", "aara"], dense(1, &[2, 1, 50])),
            ("dense, one row, two axes", ["arra", "aara"], dense(1, &[2, 50])),
            ("dense, shorter than the lengths", ["rrrr"; 2], dense(16, &[2, 16, 49])),
            ("paged, rows", ["arra", "aara"], paged(16, &[2, 16, 384])),
            ("paged, one row", ["rrra"; 2], paged(1, &[2, 1, 384])),
            ("paged, shorter than the blocks", ["rrrr"; 2], paged(16, &[2, 16, 300])),
            ("paged, whole, rows", ["aaaa"; 2], paged(16, &[2, 16, 512])),
            ("paged, whole, one row", ["aaaa"; 2], paged(1, &[2, 1, 512])),
        ]
    });
}

#[test]
fn beside_a_shared_prefix() {
    hold_for_both(|d| {
        let with_prefix = |rows, len: Option<&'static [i64]>, mode, atten_mask| {
            let p = probe("BNSD", [2, 4, 4, rows, 64, d]);
            let prefix = Some(Probe { batch: 1, ..p }.input(4, 16, d));
            FiaCall {
                key_shared_prefix: prefix,
                value_shared_prefix: prefix,
                actual_shared_prefix_len: len,
                ..masked(p.call(), mode, atten_mask)
            }
        };
        let len: Option<&'static [i64]> = Some(kept(vec![10]));
        vec![
            ("keys alone, one row", ["rrrr"; 2], with_prefix(1, None, 0, mask(&[2, 64]))),
            ("keys alone, rows", ["rrrr"; 2], with_prefix(16, None, 0, mask(&[16, 64]))),
            ("keys and prefix, one row", ["aaaa"; 2], with_prefix(1, len, 0, mask(&[2, 80]))),
            ("keys and prefix, rows", ["aaaa"; 2], with_prefix(16, len, 0, mask(&[16, 80]))),
            ("keys and its length, one row", ["aaaa"; 2], with_prefix(1, len, 0, mask(&[2, 74]))),
            ("keys and less than its length, one row", ["rrrr"; 2], with_prefix(1, len, 0, mask(&[2, 73]))),
            ("keys and its length, rows", ["raaa"; 2], with_prefix(16, len, 0, mask(&[16, 74]))),
            ("keys and less than its length, rows", ["rrrr"; 2], with_prefix(16, len, 0, mask(&[16, 73]))),
            ("three axes in mode 3, one row", ["rraa"; 2], with_prefix(1, len, 3, mask(&[1, 2048, 2048]))),
            ("the triangle in mode 3, rows", ["aaaa"; 2], with_prefix(16, len, 3, triangle())),
        ]
    });
}

#[test]
fn a_refused_tree_mask_names_the_release_that_has_it_and_what_does_without() {
    let rows = |layout| masked(probe(layout, [2, 8, 2, 16, 64, 64]).call(), 9, triangle());
    let latent = masked(probe("BSND", [2, 8, 1, 4, 256, 512]).bf16().paged_rope(128, 5), 9, mask(&[2, 4, 4]));
    for (call, soc, cann) in [
        (rows("BNSD"), Soc::AtlasA2, Cann::V8_1),
        (rows("BSH"), Soc::AtlasA2, Cann::V8_5),
        (rows("TND"), Soc::AtlasA3, Cann::V9_0),
        (rows("BSND"), Soc::Ascend950, Cann::V9_1),
        (latent.clone(), Soc::AtlasA2, Cann::V8_5),
    ] {
        let said = refusal(&call, Target::new(soc, cann));
        let helps = ["mode 9, the tree mask, exists from CANN 9.1 on", "mode 1", "TreeVerification"];
        assert!(helps.iter().all(|help| said.contains(help)), "{said}");
    }
    let said = refusal(&latent, Target::new(Soc::AtlasA2, Cann::V8_1));
    assert!(said.contains("the tree mask of mode 9 exists from CANN 9.1 on"), "{said}");
    hold(&[("the tree mask of latents", "rrra", latent)]);
}

#[test]
fn a_triangle_over_single_rows_is_advised_away() {
    let one = |mode, atten_mask| masked(probe("BSND", [3, 4, 2, 1, 64, 64]).call(), mode, atten_mask);
    for cann in [Cann::V8_5, Cann::V9_0] {
        let target = Target::new(Soc::AtlasA2, cann);
        let said = refusal(&one(3, triangle()), target);
        assert!(said.contains("fix: set sparseMode to 0, drop attenMask: a single row sees every key"), "{said}");
        let said = refusal(&one(0, mask(&[3, 63])), target);
        assert!(said.contains("fix: expand the mask"), "{said}");
    }
    hold(&[("as advised", "aaaa", one(0, None))]);
}

#[test]
fn the_last_axis_alone_of_an_empty_mask_is_looked_at_over_a_cache_from_9_1_on() {
    let call = probe("BNSD", [2, 4, 2, 16, 100, 64]).paged(128, 3);
    hold(&[
        ("wide", "--ra", masked(call.clone(), 0, mask(&[0, 128]))),
        ("narrow", "--rr", masked(call, 0, mask(&[0, 127]))),
    ]);
}
