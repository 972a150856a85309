//! MXFP8 on Ascend 950: E4M3 elements, 32 of which share an exponent.

use super::{OUT_DTYPE, UNUSED, alone, heads, modes};
use crate::allowed::Named;
use crate::ops::fused_infer_attention_score::rules::Facts;
use crate::ops::fused_infer_attention_score::rules::paged::blocks;
use crate::ops::fused_infer_attention_score::{Cache, FiaCall, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, DType, Dims, TensorDesc, Violation};

rules! {
    in Scope::ASCEND_950;
    FORM = "mxfp8.form", TILING_ERROR, V5, "Ascend 950, MXFP8",
        "query, key and value are FLOAT8_E4M3FN with head dimensions of 64 or 128, with or without BF16 rotary parts, \
         and innerPrecise is 0 or 1",
        "convert the tensors, pad their head dimension with zeros to 64 or 128, and set innerPrecise to 0 or 1";
    CACHE = "mxfp8.cache", TILING_ERROR, V5, "Ascend 950, A5 and A6",
        "caches are BnNBsD or NZ, of blocks of 512 or 1024 tokens, from 9.2 on also of 64, 128 or 256",
        "use blocks of 512 tokens";
    SCALES = "mxfp8.scales", TILING_ERROR, V5, "Ascend 950, MXFP8, scale shapes",
        "dequantScaleQuery, keyAntiquantScale and valueAntiquantScale are FLOAT8_E8M0, one for 32 elements, in pairs",
        "shape the scales by rows, heads and groups: those of the value run along its tokens";
    PROBABILITIES = "mxfp8.quant_scale1", TILING_ERROR, V5, "Ascend 950, MXFP8",
        "quantScale1 is FLOAT [1] where it is given",
        "pass one factor, or none";
}

/// Elements that share a pair of scales.
pub(crate) const PAIR: i64 = 2 * FiaCall::MXFP8_GROUP;
/// Rows or elements that are contiguous in the scales of an NZ cache.
pub(crate) const LANES: i64 = 16;

pub(super) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    heads(f)?;
    let rope = |rope: &Option<TensorDesc>| rope.as_ref().is_none_or(|rope| rope.dtype == DType::Bf16);
    require!(
        f.query.dtype == DType::Float8E4M3Fn
            && matches!((f.q.dim, f.v.dim), (64, 64) | (128, 128))
            && rope(&call.query_rope)
            && rope(&call.key_rope)
            && matches!(call.inner_precise, 0 | 1),
        FORM,
        format_args!(
            "{} query of {}, value of {}, innerPrecise {}",
            f.query.dtype, f.q.dim, f.v.dim, call.inner_precise
        ),
        "FLOAT8_E4M3FN of 64 or 128, innerPrecise 0 or 1",
    );
    require!(
        f.out.dtype == DType::Bf16 || (f.out.dtype == DType::Float16 && !f.rope()),
        OUT_DTYPE,
        f.out.dtype,
        "BF16, or FLOAT16 without rotary parts",
    );
    let sizes: &[i64] = match f.since(Cann::V9_2) {
        true => &[64, 128, 256, 512, 1024],
        false => &[512, 1024],
    };
    if let Some(cache) = f.cache {
        require!(cache != Cache::BnBsH, CACHE, f.key.shape, "BnNBsD, NZ",);
        CACHE.takes(Named("blockSize", call.block_size), sizes)?;
    }
    UNUSED.leaves_out(call, &Parameter::SPLIT_OFFSETS)?;
    UNUSED.leaves_out(call, &[Parameter::DeqScale1, Parameter::DeqScale2])?;
    UNUSED.leaves_out(call, &Parameter::OUTPUT_QUANTISATION)?;
    UNUSED.leaves_out(call, &Parameter::MERGED_ANTIQUANT)?;
    UNUSED.leaves_out(call, &[Parameter::KeyRopeAntiquantScale])?;
    require!(
        (call.quant_scale1.as_ref()).is_none_or(|scale| scale.dtype == DType::Float && *scale.shape == [1]),
        PROBABILITIES,
        "another tensor",
        "FLOAT [1]",
    );
    alone(f)?;
    scales(f)?;
    modes(f)
}

fn scales(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let (t, n, nk) = (f.q.rows, f.call.num_heads, f.kv_heads);
    let (pairs, dim) = (f.q.dim / PAIR, f.v.dim);
    let query = [Dims::of([t, n, pairs, 2]), Dims::of([nk, t, n / nk.max(1), pairs, 2])];
    let (bn, bs) = (f.k.batch, call.block_size);
    let (key, value) = match f.cache {
        None => {
            let groups = crate::ops::fused_infer_attention_score::rules::lengths::total(f.call, f.batch(), |b| {
                blocks(f.kv_len(b), PAIR)
            });
            (Dims::of([f.k.rows, nk, pairs, 2]), Dims::of([groups, nk, dim, 2]))
        }
        Some(Cache::Nz) => (
            Dims::of([bn, nk, blocks(bs, LANES), pairs, LANES, 2]),
            Dims::of([bn, nk, dim / LANES, blocks(bs, PAIR), LANES, 2]),
        ),
        Some(_) => (Dims::of([bn, nk, bs, pairs, 2]), Dims::of([bn, nk, blocks(bs, PAIR), dim, 2])),
    };
    let is = |scale: &Option<TensorDesc>, shapes: &[Dims]| {
        (scale.as_ref()).is_some_and(|scale| scale.dtype == DType::Float8E8M0 && shapes.contains(&scale.shape))
    };
    require!(
        is(&call.dequant_scale_query, &query)
            && is(&call.key_antiquant_scale, &[key])
            && is(&call.value_antiquant_scale, &[value]),
        SCALES,
        "not all of them",
        format_args!("FLOAT8_E8M0 {} or {}, {key} and {value}", query[0], query[1]),
    );
    Ok(())
}
