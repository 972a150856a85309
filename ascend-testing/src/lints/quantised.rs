//! Lints of quantised calls.

use super::{Found, bf16, float, half, int8, of, with};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{Cann, DType, Soc, Target};

pub(super) fn quantised(found: &mut Found<'_>) {
    let key = [half(&[2, 64, 4, 32])];
    let out = FiaCall {
        query: Some(half(&[2, 16, 4, 32])),
        key: &key,
        value: &key,
        num_heads: 4,
        attention_out: Some(int8(&[2, 16, 4, 32])),
        quant_scale2: float(&[4, 1, 32]),
        quant_offset2: float(&[1, 1, 128]),
        ..FiaCall::new("BSND")
    };
    found.clean(&out);
    found.clean(&with(&out, |c| {
        (c.quant_scale2, c.quant_offset2) = (float(&[1, 1]), None);
    }));
    found.breaks("quant_scale2.shape_unchecked", with(&out, |c| c.quant_scale2 = float(&[32, 4])));
    found.breaks(
        "quant_scale2.half",
        with(&out, |c| {
            (c.quant_scale2, c.quant_offset2) = (Some(half(&[1])), None);
        }),
    );
    let plain = with(&out, |c| {
        c.attention_out = Some(half(&[2, 16, 4, 32]));
        (c.quant_scale2, c.quant_offset2) = (None, None);
    });
    found.breaks("quant_scale2.ignored", with(&plain, |c| c.quant_scale2 = float(&[1])));
    found.breaks("deq_scale.ignored", with(&plain, |c| c.deq_scale1 = float(&[1])));
    let bytes = [int8(&[2, 64, 4, 32])];
    let quantised = FiaCall {
        query: Some(int8(&[2, 16, 4, 32])),
        key: &bytes,
        value: &bytes,
        deq_scale1: Some(of(DType::UInt64, &[1])),
        quant_scale1: float(&[1]),
        deq_scale2: float(&[1]),
        ..plain
    };
    found.clean(&quantised);
    found.breaks("deq_scale.unchecked", with(&quantised, |c| c.deq_scale2 = float(&[4])));
    found.breaks("deq_scale.unchecked", with(&quantised, |c| c.quant_scale1 = Some(of(DType::UInt64, &[1]))));
    let on_950 = with(&quantised, |c| {
        c.deq_scale1 = float(&[1]);
        c.attention_out = Some(bf16(&[2, 16, 4, 32]));
    });
    let target = Target::new(Soc::Ascend950, Cann::V9_1);
    found.breaks_on("quant.per_tensor_kernel", &on_950, target);
}

pub(super) fn antiquantised(found: &mut Found<'_>) {
    let key = [int8(&[2, 64, 4, 32])];
    let merged = FiaCall {
        query: Some(half(&[2, 32, 4, 32])),
        key: &key,
        value: &key,
        num_heads: 4,
        attention_out: Some(half(&[2, 32, 4, 32])),
        antiquant_scale: Some(half(&[2, 4, 32])),
        antiquant_offset: Some(half(&[2, 4, 32])),
        ..FiaCall::new("BSND")
    };
    found.clean(&merged);
    found.breaks("antiquant.dtype_unchecked", with(&merged, |c| c.antiquant_offset = float(&[2, 4, 32])));
    found.breaks("antiquant_mode.ignored", with(&merged, |c| c.value_antiquant_mode = 1));
    found.breaks("key_rope_antiquant_scale.ignored", with(&merged, |c| c.key_rope_antiquant_scale = float(&[1])));
    let decode =
        FiaCall { query: Some(half(&[2, 1, 4, 32])), attention_out: Some(half(&[2, 1, 4, 32])), ..merged.clone() };
    found.clean(&decode);
    found.breaks("antiquant_mode.merged", with(&decode, |c| c.antiquant_mode = 2));
    let split = with(&decode, |c| {
        (c.antiquant_scale, c.antiquant_offset) = (None, None);
        c.key_antiquant_scale = Some(half(&[1, 4, 32]));
        c.value_antiquant_scale = Some(half(&[1, 4, 32]));
    });
    found.clean(&split);
    found.breaks("antiquant.ignored", with(&split, |c| c.antiquant_scale = Some(half(&[2, 4, 32]))));
    found.breaks("antiquant_mode.ignored", with(&split, |c| c.antiquant_mode = 1));
    found.breaks("antiquant.dtype_unchecked", with(&split, |c| c.value_antiquant_scale = Some(bf16(&[1, 4, 32]))));
    let mixed = with(&split, |c| {
        c.value_antiquant_mode = 1;
        c.value_antiquant_scale = float(&[1, 2, 64]);
    });
    found.clean(&mixed);
    found.breaks("antiquant.value_scale_unchecked", with(&mixed, |c| c.value_antiquant_scale = float(&[4, 64])));
    let plain_key = [half(&[2, 64, 4, 32])];
    let plain = FiaCall { key: &plain_key, value: &plain_key, antiquant_scale: None, antiquant_offset: None, ..merged };
    found.clean(&plain);
    found.breaks("antiquant.ignored", with(&plain, |c| c.antiquant_offset = Some(half(&[2, 4, 32]))));
    found.breaks("antiquant_mode.ignored", with(&plain, |c| c.key_antiquant_mode = 1));
}
