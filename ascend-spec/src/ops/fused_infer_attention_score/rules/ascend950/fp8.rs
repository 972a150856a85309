//! FLOAT8_E4M3FN queries, keys and values with a scale for each row and head ("FP8 GQA"), which Ascend 950 has from 9.2
//! on.

use super::{ALONE, OUT_DTYPE, UNUSED, alone, modes};
use crate::ops::fused_infer_attention_score::rules::Facts;
use crate::ops::fused_infer_attention_score::{Cache, Parameter, Version};
use crate::rule::{require, rules};
use crate::{DType, Dims, TensorDesc, Violation};

rules! {
    in Scope::ASCEND_950.since_on_950(V9_2);
    FORM = "fp8.form", TILING_ERROR, V5, "9.2, FP8 GQA",
        "with the modes 3, 3 and 2 query, key and value are FLOAT8_E4M3FN with head dimensions of 128 and no rotary \
         parts, and innerPrecise is 0 or 1",
        "convert the tensors, pad their head dimension with zeros to 128, and set innerPrecise to 0 or 1";
    CACHE = "fp8.cache", TILING_ERROR, V5, "9.2, FP8 GQA",
        "with the modes 3, 3 and 2 keys and values are in BnNBsD caches of blocks of 128 tokens",
        "page the keys, in blocks of 128 tokens";
    SCALES = "fp8.scales", TILING_ERROR, V5, "9.2, FP8 GQA",
        "with the modes 3, 3 and 2 dequantScaleQuery is FLOAT [N, T], keyAntiquantScale FLOAT [blocks, Nk, 128], \
         valueAntiquantScale FLOAT [Nk]",
        "pass a scale for each query row and head, each key row and head, and each value head";
    PROBABILITIES = "fp8.quant_scale1", TILING_ERROR, V5, "9.2, FP8 GQA",
        "with the modes 3, 3 and 2 quantScale1 is FLOAT [1] where it is given",
        "pass one factor, or none";
}

/// Tokens of a block.
const BLOCK: i64 = 128;

pub(super) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    require!(
        f.query.dtype == DType::Float8E4M3Fn
            && (f.q.dim, f.v.dim) == (128, 128)
            && !f.rope()
            && matches!(call.inner_precise, 0 | 1),
        FORM,
        format_args!(
            "{} query of {}, value of {}, innerPrecise {}",
            f.query.dtype, f.q.dim, f.v.dim, call.inner_precise
        ),
        "FLOAT8_E4M3FN of 128, innerPrecise 0 or 1",
    );
    OUT_DTYPE.takes(f.out.dtype, [DType::Float16, DType::Bf16])?;
    require!(
        f.cache == Some(Cache::BnNBsD) && call.block_size == BLOCK,
        CACHE,
        format_args!("{} with blockSize {}", f.key.shape, call.block_size),
        format_args!("[blocks, {}, {BLOCK}, 128]", f.kv_heads),
    );
    UNUSED.leaves_out(call, &Parameter::SPLIT_OFFSETS)?;
    UNUSED.leaves_out(call, &[Parameter::DeqScale1, Parameter::DeqScale2])?;
    UNUSED.leaves_out(call, &[Parameter::QuantOffset2])?;
    UNUSED.leaves_out(call, &Parameter::MERGED_ANTIQUANT)?;
    UNUSED.leaves_out(call, &[Parameter::KeyRopeAntiquantScale])?;
    require!(
        (call.quant_scale1.as_ref()).is_none_or(|scale| scale.dtype == DType::Float && *scale.shape == [1]),
        PROBABILITIES,
        "another tensor",
        "FLOAT [1]",
    );
    ALONE.forbids([("several keys", call.key.len() > 1)])?;
    alone(f)?;
    scales(f)?;
    modes(f)
}

fn scales(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let query = Dims::of([call.num_heads, f.q.rows]);
    let key = Dims::of([f.k.batch, f.kv_heads, BLOCK]);
    let value = Dims::of([f.kv_heads]);
    let is = |scale: &Option<TensorDesc>, shape: Dims| {
        (scale.as_ref()).is_some_and(|scale| scale.dtype == DType::Float && scale.shape == shape)
    };
    require!(
        is(&call.dequant_scale_query, query)
            && is(&call.key_antiquant_scale, key)
            && is(&call.value_antiquant_scale, value),
        SCALES,
        "not all of them",
        format_args!("FLOAT {query}, {key} and {value}"),
    );
    Ok(())
}
