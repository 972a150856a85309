//! Position biases and where positions start, dropout and sinks.

use super::*;
use ascend_spec::declared::AnyArguments;

pub(super) fn biases(broken: &mut Broken) {
    let with = |call: Call, pse_type, real_shift| FlashAttentionCall { pse_type, real_shift, ..call };
    broken.by("flash.pse_dtype", 161_002, with(dense(), 1, float(&[2, 4, 24, 40])));
    for slopes in [None, half(&[4])] {
        broken.by("flash.pse_slopes", 161_002, with(square(24), 2, slopes));
    }
    for pse_type in [-1, 4] {
        broken.by("flash.pse_type", 161_001, with(dense(), pse_type, None));
    }
    broken.by("flash.pse_required", 161_001, with(dense(), 0, None));
    for shape in [&[2, 2, 24, 40][..], &[2, 4, 24, 41], &[2, 4, 1000, 40], &[4, 24, 40]] {
        broken.by("flash.pse_shape", 161_001, with(dense(), 1, half(shape)));
    }
    let last_rows = |rows: i64| with(square(rows), 0, half(&[1, 4, 1024, rows]));
    for rows in [1000, 1025] {
        broken.by("flash.pse_last_rows", 161_001, last_rows(rows));
    }
    for call in [last_rows(1024), masked(3, last_rows(1025))] {
        assert!(call.check(Version::V2, TARGET).is_ok());
    }
    broken.by("flash.pse_packed_shape", 161_001, with(packed(), 1, half(&[100])));
    for count in [4 * 45, 4 * (10 * 12 + 20 * 33)] {
        assert!(with(packed(), 1, half(&[count])).check(Version::VarLenV1, TARGET).is_ok());
    }
    let packed_last = with(packed(), 1, half(&[2, 4, 1024, 33]));
    broken.by("flash.pse_packed_last_rows", 161_001, masked(3, packed_last));
    broken.by("flash.pse_slopes_shape", 161_001, with(square(24), 2, float(&[3])));
    broken.by("flash.pse_slopes_square", 161_001, with(dense(), 3, float(&[4])));
    let cut =
        |mode| FlashAttentionCall { pre_tokens: 33, next_tokens: 0, ..masked(mode, with(packed(), 2, float(&[4]))) };
    broken.by("flash.pse_slopes_cut", 161_001, cut(7));
    broken.by("flash.pse_slopes_cut", 161_001, cut(8));
    for mode in [7, 8] {
        let cut =
            FlashAttentionCall { pre_tokens: 33, next_tokens: 0, ..masked(mode, with(packed(), 1, half(&[4 * 45]))) };
        broken.lint("flash.pse_cut", cut);
    }
    let empty = FlashAttentionCall {
        actual_seq_lengths: Some(&[10, 10, 30]),
        actual_seq_lengths_kv: Some(&[12, 12, 45]),
        ..with(packed(), 1, half(&[4 * 45]))
    };
    broken.lint("flash.pse_empty_sequence", empty);
}

/// What no description shows: the numbers of a bias, here one for each key of a head.
pub(super) fn numbers(broken: &mut Broken) {
    let call = FlashAttentionCall { pse_type: 1, real_shift: half(&[2, 4, 1, 40]), ..dense() };
    let described = AnyArguments::FlashAttentionScore(call.to_arguments());
    let (lowest, infinity) = (0xfbff_u16, 0xfc00);
    for (numbers, lints) in [
        (vec![], &[][..]),
        (vec![(319, lowest), (0, lowest)], &[]),
        (vec![(319, infinity)], &["flash.pse_finite"]),
        ((80..120).map(|at| (at, lowest)).collect(), &["flash.pse_hidden_row"]),
        (
            (40..80).chain([9]).map(|at| (at, if at == 9 { 0x7e00 } else { lowest })).collect(),
            &["flash.pse_finite", "flash.pse_hidden_row"],
        ),
    ] {
        let mut bias = [0_u16; 320];
        numbers.iter().for_each(|&(at, number)| bias[at] = number);
        let bytes: Vec<u8> = bias.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut found = Vec::new();
        let held = |name: &str| (name == "real_shift").then(|| bytes.clone());
        described.lint_contents(2, TARGET, &held, &mut |lint| {
            broken.named(lint.rule.id, &lint, TARGET);
            found.push(lint.rule.id);
        });
        assert_eq!(found, lints, "{numbers:?}");
        // Content that is not known, and less of it than there should be.
        described.lint_contents(2, TARGET, &|_| None, &mut |lint| panic!("{lint}"));
        described.lint_contents(2, TARGET, &|_| Some(vec![1]), &mut |lint| panic!("{lint}"));
    }
}

pub(super) fn start_indices(broken: &mut Broken) {
    let with = |call: Call, q: Option<&'static [i64]>, kv: Option<&'static [i64]>| FlashAttentionCall {
        q_start_idx: q,
        kv_start_idx: kv,
        ..call
    };
    let slopes = |call: Call| FlashAttentionCall { pse_type: 2, real_shift: float(&[4]), ..call };
    broken.lint("flash.start_index_lone", with(slopes(square(24)), Some(&[3]), None));
    broken.lint("flash.start_index_unread", with(dense(), Some(&[3]), Some(&[0])));
    let first = FlashAttentionCall {
        query: half(&[30, 4, 64]),
        key: half(&[32, 2, 64]),
        value: half(&[32, 2, 64]),
        actual_seq_lengths_kv: Some(&[12, 32]),
        pre_tokens: 12,
        next_tokens: 0,
        ..masked(8, slopes(packed()))
    };
    broken.lint("flash.start_index_first", with(first, Some(&[2]), Some(&[0])));
}

pub(super) fn dropout(broken: &mut Broken) {
    let with = |drop_mask, keep_prob| FlashAttentionCall { drop_mask, keep_prob, ..dense() };
    let bytes = |count: i64| of(DType::UInt8, &[count]);
    for keep_prob in [0.0, -0.5, 1.01, f64::NAN] {
        broken.by("flash.keep_prob", 161_001, with(None, keep_prob));
    }
    broken.by("flash.drop_mask_dtype", 161_001, with(mask(&[960]), 0.5));
    let needed = 2 * 4 * 24 * 40 / 8;
    broken.by("flash.drop_mask_size", 161_001, with(bytes(needed - 1), 0.5));
    assert_eq!(with(bytes(needed), 0.5).check(Version::V1, TARGET).unwrap().lint(&[]), Ok(()));
    broken.lint("flash.drop_mask_unscaled", with(bytes(needed), 1.0));
    broken.lint("flash.keep_prob_unused", with(None, 0.5));
    let few = FlashAttentionCall {
        query: half(&[2, 4, 23, 64]),
        softmax_max: float(&[2, 4, 23, 8]),
        softmax_sum: float(&[2, 4, 23, 8]),
        attention_out: half(&[2, 4, 23, 64]),
        ..with(bytes(2 * 4 * 23 * 40 / 8), 0.5)
    };
    broken.lint("flash.drop_mask_short", few);
}

pub(super) fn sinks(broken: &mut Broken) {
    let with = |call: Call, sink| FlashAttentionCall { sink, ..call };
    broken.by("flash.sink_dtype", 161_002, with(dense(), half(&[4])));
    let slopes = FlashAttentionCall { pse_type: 2, real_shift: float(&[4]), ..square(24) };
    broken.by("flash.sink_dtype_slopes", 161_001, with(slopes, half(&[4])));
    broken.by("flash.sink_shape", 161_001, with(dense(), float(&[2])));
    let empty = with(dense(), half(&[0]));
    assert!(empty.check(Version::V3, TARGET).is_ok());
    broken.lint("flash.tensor_empty", empty);
    let real_shift = half(&[2, 4, 24, 0]);
    broken.lint("flash.tensor_empty", FlashAttentionCall { real_shift, ..dense() });
}
