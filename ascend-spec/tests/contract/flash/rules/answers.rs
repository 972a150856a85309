//! What calls at the edges of the rules are answered.

use super::*;

#[test]
fn calls_without_heads_imply_no_outputs_and_are_refused_for_it() {
    for call in [dense(), hidden(), packed()] {
        let call = FlashAttentionCall { num_heads: 0, ..call };
        assert_eq!(call.implied_outputs(), None);
        Broken::default().by("flash.head_num", 161_002, call);
    }
}

#[test]
fn slopes_in_a_lone_row_are_told_from_one_row_a_sequence() {
    let with = |shape: &[i64]| FlashAttentionCall { pse_type: 2, real_shift: float(shape), ..square(24) };
    for shape in [&[4][..], &[2, 4]] {
        assert!(with(shape).check(Version::V2, TARGET).is_ok());
    }
    let refusal = with(&[1, 4]).check(Version::V2, TARGET).unwrap_err();
    assert_eq!(refusal.rule.id, "flash.pse_slopes_shape");
    assert_eq!(refusal.allowed, "[4] or [2, 4]");
    assert!(refusal.fix.contains("as many such rows"), "{refusal}");
}

#[test]
fn ascend_950_takes_its_own_version_and_computes_half_precision() {
    let target = Target::new(Soc::Ascend950, Cann::V9_1);
    for call in [dense(), hidden(), packed(), masked(3, packed())] {
        assert!(call.check(Version::V4, target).is_ok());
    }
    let float_call = FlashAttentionCall {
        query: float(&[2, 4, 24, 64]),
        key: float(&[2, 2, 40, 64]),
        value: float(&[2, 2, 40, 64]),
        attention_out: float(&[2, 4, 24, 64]),
        ..dense()
    };
    for call in [
        float_call,
        FlashAttentionCall { d_scale_q: float(&[1]), ..dense() },
        FlashAttentionCall { sink: float(&[4]), ..dense() },
        FlashAttentionCall { keep_prob: 0.5, ..dense() },
    ] {
        let verdict = call.check(Version::V4, target);
        assert!(verdict.as_ref().is_err_and(Violation::is_unsupported), "{verdict:?}");
    }
}

#[test]
fn what_a_short_version_has_no_argument_for_has_its_default() {
    let call = FlashAttentionCall { pse_type: 2, real_shift: float(&[4]), sink: float(&[4]), ..square(24) };
    assert_eq!(Version::oldest_for(&call), Version::V3);
    assert!(call.check(Version::V3, TARGET).is_ok());
    // Version 1 takes the slopes for a bias of type 1.
    let refusal = call.check(Version::V1, TARGET).unwrap_err();
    assert!(refusal.to_string().starts_with("flash.pse_dtype"), "{refusal}");
    let ids = [
        (packed(), Version::VarLenV1),
        (roped(), Version::VarLenV3),
        (FlashAttentionCall { softmax_out_layout: Some("same_as_input"), ..packed() }, Version::VarLenV4),
        (FlashAttentionCall { softmax_out_layout: Some("same_as_input"), ..roped() }, Version::VarLenV5),
        (FlashAttentionCall { scale: f64::NAN, ..dense() }, Version::V1),
        (FlashAttentionCall { seed: 1, ..dense() }, Version::V4),
    ];
    for (call, version) in ids {
        assert_eq!(Version::oldest_for(&call), version);
    }
}

#[test]
fn shapes_without_sense_are_refused_or_answered() {
    let dims = Dims::of([i64::MAX, 0, i64::MAX]);
    let huge = Some(TensorDesc::packed(DType::Float16, dims));
    for input_layout in ["BSH", "SBH", "TND"] {
        for num_heads in [1, i64::MAX] {
            let call = FlashAttentionCall {
                query: huge,
                key: huge,
                value: huge,
                input_layout: Some(input_layout),
                num_heads,
                ..dense()
            };
            assert!(call.check(Version::oldest_for(&call), TARGET).is_err());
        }
    }
}
