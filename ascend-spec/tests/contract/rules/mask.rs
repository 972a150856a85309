//! Calls that break the rules on sparse modes and masks.

use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use super::{Broken, Good, mask};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { prefill, decode, .. } = good;
    broken.by("sparse_mode.known", FiaCall { sparse_mode: 5, ..prefill.clone() });
    broken.by("atten_mask.required", FiaCall { sparse_mode: 3, ..prefill.clone() });
    broken
        .by("atten_mask.compressed_shape", FiaCall { sparse_mode: 4, atten_mask: mask(&[16, 64]), ..prefill.clone() });
    broken.by(
        "atten_mask.compressed_shape_decode",
        FiaCall { sparse_mode: 3, atten_mask: mask(&[1, 2048, 2048]), ..decode.clone() },
    );
    broken.by("atten_mask.full_shape", FiaCall { sparse_mode: 1, atten_mask: mask(&[16, 63]), ..prefill.clone() });
    broken.by("atten_mask.full_shape_decode", FiaCall { atten_mask: mask(&[1, 64]), ..decode.clone() });
    let banded = |pre_tokens, next_tokens| FiaCall {
        sparse_mode: 4,
        atten_mask: mask(&[2048, 2048]),
        pre_tokens,
        next_tokens,
        ..prefill.clone()
    };
    broken.by("tokens.both_negative", banded(-1, -1));
    broken.by("tokens.empty_band", banded(3, -4));
    broken.by("next_tokens.reach", banded(100, -64));
    broken.by("pre_tokens.reach", banded(-16, 100));
}
