//! Corners of quantised keys, values and queries in the decode path.

use crate::corners::{answers, bf16, half, int8, of, with};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

fn float(shape: &[i64]) -> Option<TensorDesc> {
    Some(of(DType::Float, shape))
}

fn causal() -> Option<TensorDesc> {
    Some(of(DType::Bool, &[2048, 2048]))
}

fn scales<'a>(call: &FiaCall<'a>, scale: TensorDesc) -> FiaCall<'a> {
    with(call, |c| {
        c.key_antiquant_scale = Some(scale);
        c.value_antiquant_scale = Some(scale);
    })
}

fn modes<'a>(call: &FiaCall<'a>, key: i64, value: i64) -> FiaCall<'a> {
    with(call, |c| {
        (c.key_antiquant_mode, c.value_antiquant_mode) = (key, value);
    })
}

/// INT8 keys of eight heads in an NZ cache, under 64 query heads.
fn nz<'a>(layout: &'a str, query: &[i64], cache: &'a [TensorDesc]) -> FiaCall<'a> {
    FiaCall {
        query: Some(bf16(query)),
        attention_out: Some(bf16(query)),
        key: cache,
        value: cache,
        num_heads: 64,
        num_key_value_heads: 8,
        block_table: Some(of(DType::Int32, &[2, 4])),
        block_size: 128,
        inner_precise: 1,
        actual_seq_lengths_kv: Some(&[40, 500]),
        ..FiaCall::new(layout)
    }
}

#[test]
fn a_scale_for_each_token_is_there_for_every_sequence() {
    // J14: (B, >= S) or (1, B, >= S).
    let key = [int8(&[2, 32, 4, 64])];
    let call = FiaCall {
        query: Some(half(&[2, 1, 4, 64])),
        attention_out: Some(half(&[2, 1, 4, 64])),
        key: &key,
        value: &key,
        num_heads: 4,
        ..FiaCall::new("BSND")
    };
    let call = modes(&call, 1, 1);
    for (id, shape) in [
        ("accepted", &[2, 32][..]),
        ("accepted", &[1, 2, 40]),
        ("antiquant.scale_shape", &[1, 32]),
        ("antiquant.scale_shape", &[2, 31]),
        ("antiquant.scale_shape", &[2, 1, 32]),
    ] {
        let scale = of(DType::Float, shape);
        answers(&[(id, "key and value", scales(&call, scale))]);
        let key = with(&call, |c| {
            c.key_antiquant_scale = Some(scale);
            c.value_antiquant_scale = float(&[2, 32]);
        });
        answers(&[(id, "key", key)]);
    }
}

#[test]
fn mixed_modes_are_int8_under_float16() {
    let (bytes, nibbles) = ([int8(&[2, 32, 4, 64])], [of(DType::Int4, &[2, 32, 4, 64])]);
    let call = |scale: fn(&[i64]) -> TensorDesc, keys| FiaCall {
        query: Some(scale(&[2, 1, 4, 64])),
        attention_out: Some(scale(&[2, 1, 4, 64])),
        key: keys,
        value: keys,
        num_heads: 4,
        key_antiquant_scale: Some(scale(&[1, 4, 64])),
        value_antiquant_scale: float(&[2, 32]),
        value_antiquant_mode: 1,
        ..FiaCall::new("BSND")
    };
    answers(&[
        ("accepted", "FLOAT16, INT8", call(half, &bytes)),
        ("antiquant.mixed_modes", "BF16, INT8", call(bf16, &bytes)),
        ("antiquant.mixed_modes", "FLOAT16, INT4", call(half, &nibbles)),
    ]);
}

#[test]
fn per_channel_scales_have_the_head_dimension_of_the_query() {
    let (fitting, odd, wide) = ([int8(&[20, 32, 128])], [int8(&[20, 32, 129])], [int8(&[20, 32, 256])]);
    let call = FiaCall {
        query: Some(half(&[2, 1, 2, 64])),
        attention_out: Some(half(&[2, 1, 2, 64])),
        key: &fitting,
        value: &fitting,
        num_heads: 2,
        block_table: Some(of(DType::Int32, &[2, 4])),
        block_size: 32,
        actual_seq_lengths_kv: Some(&[40, 64]),
        ..FiaCall::new("BSND")
    };
    let merged = |keys, shape: &[i64]| {
        with(&call, |c| {
            c.key = keys;
            c.antiquant_scale = Some(half(shape));
        })
    };
    answers(&[
        ("accepted", "as implied", merged(&fitting, &[2, 2, 64])),
        ("accepted", "an odd key", merged(&odd, &[2, 2, 64])),
        ("accepted", "a wide key", merged(&wide, &[2, 2, 64])),
        ("antiquant.scale_shape", "the key's", merged(&wide, &[2, 2, 128])),
        ("accepted", "split", scales(&with(&call, |c| c.key = &wide), half(&[1, 128]))),
    ]);
}

#[test]
fn scales_over_nz_caches_follow_the_layout() {
    let cache = [int8(&[8, 8, 4, 128, 32])];
    let shapes: [&[i64]; 5] = [&[1024], &[8, 128], &[8, 1, 128], &[1, 8, 128], &[1, 1024]];
    for (layout, query, right) in
        [("BSH", &[2, 1, 8192][..], 0), ("BSND", &[2, 1, 64, 128], 1), ("BNSD", &[2, 64, 1, 128], 2)]
    {
        let call = nz(layout, query, &cache);
        for (index, shape) in shapes.iter().enumerate() {
            let id = match index == right {
                true => "accepted",
                false => "antiquant.scale_shape",
            };
            answers(&[(id, layout, scales(&call, bf16(shape)))]);
        }
        let token = modes(&call, 1, 1);
        answers(&[
            ("accepted", layout, scales(&token, of(DType::Float, &[2, 512]))),
            ("antiquant.scale_shape", layout, scales(&token, of(DType::Float, &[2, 511]))),
        ]);
    }
}

#[test]
fn nz_caches_are_int8_and_have_split_scales_alone() {
    let cache = [int8(&[8, 8, 4, 128, 32])];
    let call = scales(&nz("BSND", &[2, 1, 64, 128], &cache), bf16(&[8, 128]));
    let narrow = [int8(&[8, 8, 8, 128, 16])];
    let (lanes, four) = ([bf16(&[8, 8, 8, 128, 16])], [bf16(&[8, 8, 32, 128, 4])]);
    let plain = |keys| FiaCall {
        key: keys,
        value: keys,
        key_antiquant_scale: None,
        value_antiquant_scale: None,
        ..call.clone()
    };
    let merged = with(&plain(&cache), |c| {
        c.antiquant_scale = Some(bf16(&[2, 8, 128]));
    });
    let value = |scale| with(&call, |c| c.value_antiquant_scale = Some(scale));
    let mixed = with(&modes(&call, 0, 1), |c| {
        c.value_antiquant_scale = float(&[2, 512]);
    });
    let several = FiaCall {
        query: Some(bf16(&[2, 4, 64, 128])),
        attention_out: Some(bf16(&[2, 4, 64, 128])),
        sparse_mode: 3,
        atten_mask: causal(),
        ..call.clone()
    };
    let heads_first =
        FiaCall { input_layout: "BSND_NBSD", attention_out: Some(bf16(&[64, 2, 1, 128])), ..call.clone() };
    let rounded = with(&call, |c| {
        c.attention_out = Some(int8(&[2, 1, 64, 128]));
        c.quant_scale2 = float(&[1]);
    });
    answers(&[
        ("accepted", "single rows", call.clone()),
        ("accepted", "several rows", several),
        ("antiquant.nz_cache", "BSND_NBSD", heads_first),
        ("antiquant.nz_cache", "runs of 16", with(&call, |c| c.key = &narrow)),
        ("antiquant.nz_cache", "BF16 keys", plain(&lanes)),
        ("antiquant.nz_cache", "BF16 keys in runs of 4", plain(&four)),
        ("antiquant.nz_cache", "a merged scale", merged),
        ("antiquant.nz_cache", "a scale for each head", modes(&scales(&call, bf16(&[8])), 2, 2)),
        ("antiquant.mixed_modes", "modes 0 and 1", mixed),
        ("antiquant.nz_cache", "an INT8 output", rounded),
        ("antiquant.nz_cache", "a bias", with(&call, |c| c.pse_shift = Some(bf16(&[1, 64, 1, 512])))),
        // J14: over NZ the value's scale is looked at too.
        ("antiquant.scale_dtype", "FLOAT16", value(half(&[8, 128]))),
        ("antiquant.scale_dtype", "INT8", value(int8(&[8, 128]))),
        (
            "antiquant.scale_dtype",
            "BF16 for each token",
            with(&modes(&call, 1, 1), |c| {
                c.key_antiquant_scale = float(&[2, 512]);
                c.value_antiquant_scale = Some(bf16(&[2, 512]));
            }),
        ),
    ]);
}

#[test]
fn the_rotary_part_of_a_quantised_query_has_the_axes_of_the_query() {
    // F18; the remainder of the last axis is forgotten.
    let cache = [int8(&[8, 1, 16, 128, 32])];
    let words = [of(DType::Int32, &[8, 1, 16, 128, 32])];
    let call = FiaCall {
        query: Some(int8(&[2, 1, 4096])),
        attention_out: Some(bf16(&[8, 2, 1, 512])),
        query_rope: Some(bf16(&[2, 1, 512])),
        key: &cache,
        value: &cache,
        key_rope: Some(bf16(&[8, 1, 4, 128, 16])),
        num_heads: 8,
        num_key_value_heads: 1,
        block_table: Some(of(DType::Int32, &[2, 4])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[40, 500]),
        key_antiquant_scale: float(&[1]),
        value_antiquant_scale: float(&[1]),
        dequant_scale_query: float(&[2, 1, 8]),
        query_quant_mode: 3,
        ..FiaCall::new("BSH_NBSD")
    };
    let rope = |shape: &[i64]| with(&call, |c| c.query_rope = Some(bf16(shape)));
    answers(&[
        ("accepted", "three axes", call.clone()),
        ("accepted", "a remainder", rope(&[2, 1, 513])),
        ("rope.absorbed_dims", "four axes", rope(&[2, 1, 512, 77])),
        ("rope.absorbed_dims", "two axes", rope(&[2, 512])),
        ("mla.full_quant", "INT32 keys", with(&call, |c| c.key = &words)),
        // F12, J10.
        ("mla.full_quant", "left padding", with(&call, |c| c.kv_padding_size = Some(of(DType::Int64, &[1])))),
    ]);
}

#[test]
fn rotary_parts_of_a_half_precision_query_over_a_quantised_cache_are_refused_by_every_release() {
    let cache = [int8(&[20, 128, 512])];
    let nz = [int8(&[20, 1, 16, 128, 32])];
    let call = FiaCall {
        query: Some(bf16(&[2, 1, 4, 512])),
        attention_out: Some(bf16(&[2, 1, 4, 512])),
        query_rope: Some(bf16(&[2, 1, 4, 64])),
        key: &cache,
        value: &cache,
        key_rope: Some(bf16(&[20, 128, 64])),
        num_heads: 4,
        num_key_value_heads: 1,
        block_table: Some(of(DType::Int32, &[2, 4])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[40, 500]),
        key_antiquant_scale: Some(bf16(&[1])),
        value_antiquant_scale: Some(bf16(&[1])),
        ..FiaCall::new("BSND")
    };
    let calls = [
        call.clone(),
        with(&call, |c| {
            c.query = Some(bf16(&[2, 4, 4, 512]));
            c.attention_out = Some(bf16(&[2, 4, 4, 512]));
            c.query_rope = Some(bf16(&[2, 4, 4, 64]));
            (c.sparse_mode, c.atten_mask) = (3, causal());
        }),
        with(&call, |c| {
            (c.key, c.value) = (&nz, &nz);
            c.key_rope = Some(bf16(&[20, 1, 4, 128, 16]));
        }),
        with(&call, |c| {
            c.attention_out = Some(int8(&[2, 1, 4, 512]));
            c.quant_scale2 = Some(of(DType::Float, &[1]));
        }),
    ];
    for call in &calls {
        for cann in Cann::ALL {
            let verdict = call.check(Version::V4, Target::new(Soc::AtlasA2, cann));
            let refusal = verdict.unwrap_err();
            assert_eq!(refusal.rule.id, "mla.quantised_cache", "{cann}: {refusal}");
        }
    }
}
