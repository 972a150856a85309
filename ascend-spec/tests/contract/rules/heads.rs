//! Calls that break the rules on heads and their dimensions.

use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use super::{Broken, Good, half};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { prefill, decode, .. } = good;
    broken.by("num_heads.query", FiaCall { num_heads: 4, ..prefill.clone() });
    let many = [half(&[2, 257, 64, 32])];
    broken.by(
        "num_heads.max",
        FiaCall {
            query: Some(half(&[2, 257, 16, 32])),
            attention_out: Some(half(&[2, 257, 16, 32])),
            key: &many,
            value: &many,
            num_heads: 257,
            num_key_value_heads: 0,
            ..prefill.clone()
        },
    );
    broken.by("num_key_value_heads.range", FiaCall { num_key_value_heads: 9, ..prefill.clone() });
    broken.by("num_key_value_heads.range", FiaCall { num_key_value_heads: -1, ..decode.clone() });
    broken.by("num_key_value_heads.divides", FiaCall { num_key_value_heads: 3, ..prefill.clone() });
    let one = [half(&[2, 1, 64, 32])];
    broken.by(
        "num_key_value_heads.group",
        FiaCall {
            query: Some(half(&[2, 65, 16, 32])),
            attention_out: Some(half(&[2, 65, 16, 32])),
            key: &one,
            value: &one,
            num_heads: 65,
            num_key_value_heads: 1,
            ..prefill.clone()
        },
    );
    broken.by("num_key_value_heads.key", FiaCall { num_key_value_heads: 2, ..prefill.clone() });
    let wide = [half(&[2, 4, 64, 528])];
    broken.by(
        "head_dim.max",
        FiaCall {
            query: Some(half(&[2, 8, 16, 528])),
            attention_out: Some(half(&[2, 8, 16, 528])),
            key: &wide,
            value: &wide,
            ..prefill.clone()
        },
    );
    broken.by("head_dim.equal", FiaCall { key: &[half(&[2, 4, 64, 48])], ..prefill.clone() });
    let odd = [half(&[2, 4, 64, 40])];
    broken.by(
        "head_dim.aligned",
        FiaCall {
            query: Some(half(&[2, 8, 16, 40])),
            attention_out: Some(half(&[2, 8, 16, 40])),
            key: &odd,
            value: &odd,
            ..prefill.clone()
        },
    );
}
