//! Entry points, required tensors, dtypes and formats.

use super::*;

pub(super) fn entry(broken: &mut Broken) {
    let entry_point = "flash.entry_point";
    for (version, soc, cann) in [
        (Version::V4, Soc::AtlasA2, Cann::V9_1),
        (Version::V3, Soc::AtlasA3, Cann::V8_1),
        (Version::VarLenV5, Soc::AtlasA2, Cann::V8_1),
        (Version::V1, Soc::AtlasInference, Cann::V9_1),
        (Version::V4, Soc::Ascend950, Cann::V8_5),
    ] {
        let target = Target::new(soc, cann);
        match dense().check(version, target) {
            Err(violation) => {
                assert_eq!(violation.rule.id, entry_point, "{violation}");
                assert_eq!(violation.rule.status, 561_003);
            }
            other => panic!("{version} on {target}: {other:?}"),
        }
        broken.0.insert(entry_point);
    }
    let required = "flash.required";
    for call in [
        FlashAttentionCall { query: None, ..dense() },
        FlashAttentionCall { key: None, ..dense() },
        FlashAttentionCall { value: None, ..dense() },
        FlashAttentionCall { input_layout: None, ..dense() },
        FlashAttentionCall { softmax_max: None, ..dense() },
        FlashAttentionCall { softmax_sum: None, ..dense() },
        FlashAttentionCall { attention_out: None, ..dense() },
    ] {
        broken.by(required, 161_001, call);
    }
    let negative = FlashAttentionCall { sink: float(&[-1]), ..dense() };
    broken.by("flash.countable", 161_002, negative);
    let value = TensorDesc { format: Format::FractalNz, ..half(&[2, 2, 40, 64]).unwrap() };
    broken.by("flash.format", 161_002, FlashAttentionCall { value: Some(value), ..dense() });
    let padding_mask = mask(&[24, 40]);
    broken.lint("flash.padding_mask_ignored", FlashAttentionCall { padding_mask, ..dense() });
    let softmax_out = float(&[2, 4, 24, 40]);
    broken.lint("flash.softmax_out_ignored", FlashAttentionCall { softmax_out, ..dense() });
    for scale in [f64::NAN, f64::NEG_INFINITY, 1e39] {
        broken.lint("flash.scale_finite", FlashAttentionCall { scale, ..dense() });
    }
    for (id, scale) in [("flash.scale_zero", 0.0), ("flash.scale_inverse", 8.0)] {
        broken.lint(id, FlashAttentionCall { scale, ..dense() });
    }
    broken.lint("flash.inner_precise_known", FlashAttentionCall { inner_precise: 3, ..dense() });
    let many = FlashAttentionCall {
        query: half(&[2, 260, 24, 64]),
        num_heads: 260,
        softmax_max: float(&[2, 260, 24, 8]),
        softmax_sum: float(&[2, 260, 24, 8]),
        attention_out: half(&[2, 260, 24, 64]),
        ..dense()
    };
    broken.lint("flash.documented_limits", many);
}
