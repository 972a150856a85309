//! Masks, tokens and prefixes.

use super::*;

pub(super) fn masks(broken: &mut Broken) {
    let with = |sparse_mode, atten_mask| FlashAttentionCall { sparse_mode, atten_mask, ..dense() };
    let int8 = of(DType::Int8, &[24, 40]);
    broken.by("flash.atten_mask_dtype", 161_001, with(0, int8));
    broken.by("flash.atten_mask_rank", 161_001, with(0, mask(&[2, 24, 40])));
    for sparse_mode in [-1, 7, 9] {
        broken.by("flash.sparse_mode", 161_001, with(sparse_mode, mask(&[2048, 2048])));
    }
    broken.by("flash.sparse_mode", 161_001, masked(5, packed()));
    for shape in [&[2, 1, 1, 40][..], &[24, 41], &[1, 4, 24, 40], &[1, 1, 2048, 2048]] {
        broken.by("flash.atten_mask_shape", 161_001, with(1, mask(shape)));
    }
    // A compressed mask of four axes is held to the lengths as well.
    broken.by("flash.atten_mask_shape", 161_001, with(3, mask(&[1, 1, 2048, 2048])));
    broken.by("flash.atten_mask_compressed", 161_001, with(3, mask(&[24, 40])));
    broken.lint("flash.mode_without_mask", with(3, None));
    let four_axes = FlashAttentionCall { atten_mask: mask(&[2, 1, 20, 33]), ..packed() };
    broken.lint("flash.atten_mask_packed", four_axes);
    let window = FlashAttentionCall { next_tokens: 0, ..with(0, mask(&[24, 40])) };
    let problem = window.check(Version::V1, TARGET).unwrap();
    let triangle = |hides: fn(i64, i64) -> bool| -> Vec<u8> {
        let cells = (0..24).flat_map(|i| (0..40).map(move |j| (i, j)));
        cells.map(|(i, j)| u8::from(hides(i, j))).collect()
    };
    assert_eq!(problem.admits_mask(&triangle(|i, j| j > i)), Ok(()));
    let loose = problem.admits_mask(&triangle(|i, j| j > i + 1)).unwrap_err();
    assert!(loose.given.contains("key 1 for row 0"), "{loose}");
    broken.named("flash.atten_mask_loose", &loose, TARGET);
}

pub(super) fn tokens(broken: &mut Broken) {
    let with = |call: Call, pre_tokens, next_tokens| FlashAttentionCall { pre_tokens, next_tokens, ..call };
    let full = || FlashAttentionCall { atten_mask: mask(&[24, 40]), ..dense() };
    broken.by("flash.tokens_negative", 161_001, with(full(), -1, -1));
    broken.by("flash.pre_tokens", 161_001, with(full(), -40, 100));
    broken.by("flash.next_tokens", 161_001, with(full(), 100, -24));
    // Counted from the bottom right: 16 less, and 16 more, from the top left.
    broken.by("flash.pre_tokens", 161_001, with(masked(4, dense()), 10, -11));
    assert!(with(masked(4, dense()), 10, -10).check(Version::V1, TARGET).is_ok());
    let full_packed = || FlashAttentionCall { atten_mask: mask(&[30, 45]), ..packed() };
    broken.by("flash.packed_window", 161_001, with(full_packed(), 30, -1));
    broken.by("flash.packed_window", 161_001, with(full_packed(), -3, 2));
    let reversed = || FlashAttentionCall {
        query: half(&[45, 4, 64]),
        key: half(&[30, 2, 64]),
        value: half(&[30, 2, 64]),
        actual_seq_lengths: Some(&[12, 45]),
        actual_seq_lengths_kv: Some(&[10, 30]),
        softmax_max: float(&[45, 4, 8]),
        softmax_sum: float(&[45, 4, 8]),
        attention_out: half(&[45, 4, 64]),
        ..packed()
    };
    let keys = |ends: &'static [i64]| FlashAttentionCall { actual_seq_lengths_kv: Some(ends), ..packed() };
    broken.by("flash.packed_band", 161_001, with(masked(4, packed()), -1, 1));
    broken.by("flash.packed_band", 161_001, with(masked(4, reversed()), 1, 12));
    assert!(with(masked(4, reversed()), 1, 13).check(Version::VarLenV1, TARGET).is_ok());
    broken.by("flash.packed_rows", 161_001, masked(3, reversed()));
    broken.by("flash.packed_rows", 161_001, with(masked(7, reversed()), 30, 0));
    for (pre, next) in [(32, 0), (33, 1), (33, -14)] {
        broken.by("flash.cut_sequence", 161_001, with(masked(7, packed()), pre, next));
    }
    for (pre, next) in [(11, 0), (12, -3)] {
        broken.by("flash.cut_sequence", 161_001, with(masked(8, packed()), pre, next));
    }
    // Rows without keys: mode 7 looks at no such sequence, mode 3 at all, mode 8 at the cut one, which is the first.
    let keyless_first = || keys(&[0, 45]);
    let keyless_last = || keys(&[45, 45]);
    let taken = |call: Call| {
        let verdict = call.check(Version::VarLenV1, TARGET);
        assert!(verdict.is_ok(), "{verdict:?}");
    };
    for call in [keyless_first(), keyless_last()] {
        broken.by("flash.packed_rows", 161_001, masked(3, call));
    }
    taken(with(masked(7, keyless_first()), 45, -25));
    for next in [0, -30, i64::MIN] {
        taken(with(masked(7, keyless_last()), 0, next));
    }
    for (mode, pre, next) in [(7, -1, 0), (7, 0, 1)] {
        broken.by("flash.cut_sequence", 161_001, with(masked(mode, keyless_last()), pre, next));
    }
    taken(with(masked(8, keyless_last()), 45, -35));
    taken(with(masked(8, keyless_first()), 0, 10));
    broken.by("flash.cut_sequence", 161_001, with(masked(8, keyless_first()), 0, 9));
    broken.lint("flash.tokens_without_mask", with(dense(), 100, 0));
    broken.lint("flash.tokens_ignored", with(masked(3, dense()), 10, 0));
}

pub(super) fn prefixes(broken: &mut Broken) {
    let with = |sparse_mode, shape: &[i64], prefix: Option<&'static [i64]>| FlashAttentionCall {
        sparse_mode,
        atten_mask: mask(shape),
        prefix,
        ..dense()
    };
    for prefix in [None, Some(&[16][..]), Some(&[15, 40]), Some(&[16, 41])] {
        broken.by("flash.prefix", 161_001, with(6, &[3072, 2048], prefix));
        broken.lint("flash.prefix_ignored", with(5, &[24, 40], prefix));
    }
    broken.by("flash.prefix_mask_batch", 161_001, with(5, &[24, 40], Some(&[16, 40])));
    broken.lint("flash.prefix_unread", with(1, &[24, 40], Some(&[16, 40])));
    // What PyTorch's extension passes where the caller gives no prefix.
    let none = with(1, &[24, 40], Some(&[]));
    let version = Version::chosen_on(&none, TARGET);
    assert_eq!(none.check(version, TARGET).unwrap().lint(&[]), Ok(()));
}
