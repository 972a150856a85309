//! Rotary parts.

use super::*;

pub(super) fn ropes(broken: &mut Broken) {
    broken.by("flash.rope_paired", 161_001, FlashAttentionCall { key_rope: None, ..roped() });
    let query_rope = of(DType::Bf16, &[30, 4, 128]);
    broken.by("flash.rope_dim", 161_001, FlashAttentionCall { query_rope, ..roped() });
    let query_rope = half(&[30, 4, 32]);
    broken.by("flash.rope_dtype", 161_001, FlashAttentionCall { query_rope, ..roped() });
    broken.by("flash.rope_mode", 161_001, FlashAttentionCall { sparse_mode: 6, ..roped() });
    broken.by("flash.rope_mask", 161_001, FlashAttentionCall { atten_mask: None, ..roped() });
    let bias = of(DType::Bf16, &[4 * 45]);
    for call in [
        FlashAttentionCall { real_shift: bias, ..roped() },
        FlashAttentionCall { keep_prob: 0.5, ..roped() },
        FlashAttentionCall { drop_mask: of(DType::UInt8, &[400]), ..roped() },
    ] {
        broken.by("flash.rope_alone", 161_001, call);
    }
    let value = of(DType::Bf16, &[45, 2, 56]);
    broken.by("flash.rope_aligned", 161_001, FlashAttentionCall { value, ..roped() });
    let query_rope = of(DType::Bf16, &[31, 4, 32]);
    let key_rope = of(DType::Bf16, &[46, 2, 32]);
    for call in [FlashAttentionCall { query_rope, ..roped() }, FlashAttentionCall { key_rope, ..roped() }] {
        broken.lint("flash.rope_rows", call);
    }
}
