//! Calls that break the rules on quantised queries, keys, values and outputs.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{DType, Soc};

use super::{Broken, Good, bf16, desc, half, int8, mask};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { prefill, decode, .. } = good;
    let nibbles = [desc(DType::Int4, &[2, 4, 64, 32]).unwrap()];
    broken.by(
        "antiquant.head_dim",
        FiaCall { key: &nibbles, value: &nibbles, antiquant_scale: Some(half(&[2])), ..prefill.clone() },
    );
    broken.by(
        "antiquant.head_dim",
        FiaCall { key: &nibbles, value: &nibbles, antiquant_scale: Some(half(&[2])), ..decode.clone() },
    );
    let quantised = [int8(&[2, 4, 64, 32])];
    broken.by(
        "quant.int8_query_decode",
        FiaCall {
            query: Some(int8(&[2, 8, 1, 32])),
            attention_out: Some(bf16(&[2, 8, 1, 32])),
            key: &quantised,
            value: &quantised,
            ..decode.clone()
        },
    );
    broken.by(
        "quant.output_band",
        FiaCall {
            attention_out: Some(int8(&[2, 8, 16, 32])),
            quant_scale2: desc(DType::Float, &[1]),
            sparse_mode: 4,
            atten_mask: mask(&[2048, 2048]),
            pre_tokens: 10,
            next_tokens: -1,
            ..prefill.clone()
        },
    );
    let mixed = FiaCall {
        query: Some(bf16(&[2, 8, 1, 32])),
        attention_out: Some(bf16(&[2, 8, 1, 32])),
        key: &quantised,
        value: &quantised,
        key_antiquant_scale: Some(bf16(&[1, 4, 32])),
        value_antiquant_scale: desc(DType::Float, &[2, 64]),
        value_antiquant_mode: 1,
        ..decode.clone()
    };
    let empty = [int8(&[2, 4, 0, 32])];
    let without_keys = FiaCall { query: Some(int8(&[2, 8, 16, 32])), key: &empty, value: &empty, ..prefill.clone() };
    let latents = [int8(&[20, 128, 512])];
    let roped = FiaCall {
        query: Some(bf16(&[2, 1, 4, 512])),
        attention_out: Some(bf16(&[2, 1, 4, 512])),
        query_rope: Some(bf16(&[2, 1, 4, 64])),
        key: &latents,
        value: &latents,
        key_rope: Some(bf16(&[20, 128, 64])),
        num_heads: 4,
        num_key_value_heads: 1,
        block_table: desc(DType::Int32, &[2, 4]),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[40, 500]),
        key_antiquant_scale: Some(bf16(&[1])),
        value_antiquant_scale: Some(bf16(&[1])),
        ..FiaCall::new("BSND")
    };
    for (id, call) in
        [("antiquant.mixed_modes", mixed), ("mla.quantised_cache", roped), ("quant.int8_query_empty", without_keys)]
    {
        broken.on(Version::V4, Soc::AtlasA2, id, &call);
    }
}
