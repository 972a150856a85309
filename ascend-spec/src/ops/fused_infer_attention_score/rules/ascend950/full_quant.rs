//! Quantised queries on Ascend 950: the absorbed form, and INT8 with a factor for each tensor.

use super::{ALONE, MODE, OUT_DTYPE, UNUSED, alone, heads, modes};
use crate::ops::fused_infer_attention_score::rules::{Facts, mla};
use crate::ops::fused_infer_attention_score::{Cache, FiaCall, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Axes, DType, Dims, Layout, TensorDesc, Violation};

rules! {
    in Scope::ASCEND_950;
    ABSORBED = "mla.full_quant_950", TILING_ERROR, V5, "Ascend 950, full quantisation of MLA",
        "a quantised query of the absorbed form has 512 and 64 channels of INT8, FLOAT8_E4M3FN or HIFLOAT8 with BF16 \
         rotary parts, at most 16 rows, keys in one tensor or in blocks of 128, NZ ones for INT8, and no \
         actualSeqLengths unless packed",
        "meet all of the conditions";
    SCALES = "mla.full_quant_scales", TILING_ERROR, V5, "Ascend 950, full quantisation of MLA",
        "dequantScaleQuery is FLOAT of the query's shape without its head dimension, keyAntiquantScale and \
         valueAntiquantScale are FLOAT [1]",
        "pass one scale for each query row and head, one for the keys and one for the values";
    TENSOR = "quant.per_tensor", TILING_ERROR, V5, "Ascend 950, full quantisation per tensor",
        "a fully quantised call without rotary parts is MXFP8, or INT8 with modes 0, several rows, no block table and \
         one head dimension",
        "use the modes 6, 6 and 8 (MXFP8) with FLOAT8_E4M3FN";
    FACTORS = "quant.per_tensor_scales", TILING_ERROR, V5, "Ascend 950, full quantisation per tensor",
        "an INT8 query has deqScale1, quantScale1 and deqScale2 of shape [1]",
        "pass the factors of Q K^T, of the probabilities and of P V";
}

/// Checks the absorbed form.
pub(super) fn absorbed(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    mla::heads(f)?;
    OUT_DTYPE.takes(f.out.dtype, DType::Bf16)?;
    let int8 = f.query.dtype == DType::Int8;
    let bf16 = |rope: &Option<TensorDesc>| rope.as_ref().is_some_and(|rope| rope.dtype == DType::Bf16);
    let dtypes = matches!(f.query.dtype, DType::Int8 | DType::Float8E4M3Fn | DType::HiFloat8);
    let stored = match f.cache {
        None => !int8,
        Some(cache) => {
            let split = !matches!(f.layout, Layout::Bsh | Layout::Bsnd | Layout::BshNbsd | Layout::BsndNbsd);
            call.block_size == 128
                && match cache {
                    Cache::Nz => true,
                    Cache::BnBsH => !int8,
                    Cache::BnNBsD => !int8 && split,
                }
        }
    };
    require!(
        (f.q.dim, f.v.dim) == (512, 512)
            && dtypes
            && bf16(&call.query_rope)
            && bf16(&call.key_rope)
            && f.most_rows() <= FiaCall::MOST_DECODE_ROWS
            && stored
            && (f.packed() || call.actual_seq_lengths.is_none()),
        ABSORBED,
        format_args!("{} query {}, key {}, {} rows", f.query.dtype, f.query.shape, f.key.shape, f.most_rows()),
        "the conditions",
    );
    let grid = match f.layout.input() {
        Axes::Bsh | Axes::Bsnd => Dims::of([f.q.batch, f.q.rows, f.q.heads]),
        Axes::Bnsd => Dims::of([f.q.batch, f.q.heads, f.q.rows]),
        _ => Dims::of([f.q.rows, f.q.heads]),
    };
    let is = |scale: &Option<TensorDesc>, shape: Dims| {
        (scale.as_ref()).is_some_and(|scale| scale.dtype == DType::Float && scale.shape == shape)
    };
    require!(
        is(&call.dequant_scale_query, grid)
            && is(&call.key_antiquant_scale, Dims::of([1]))
            && is(&call.value_antiquant_scale, Dims::of([1])),
        SCALES,
        "not all of them",
        format_args!("FLOAT {grid}, [1] and [1]"),
    );
    UNUSED.leaves_out(call, &Parameter::SPLIT_OFFSETS)?;
    UNUSED.leaves_out(call, &Parameter::DEQUANTISATION)?;
    UNUSED.leaves_out(call, &Parameter::MERGED_ANTIQUANT)?;
    UNUSED.leaves_out(call, &[Parameter::KeyRopeAntiquantScale])?;
    alone(f)?;
    modes(f)?;
    if int8 && !f.packed() {
        require!(
            (f.q.rows == 1) == (call.mode() == 0),
            MODE,
            format_args!("{} with {} rows", call.mode(), f.q.rows),
            "0 for one row, 3 for several",
        );
    }
    Ok(())
}

/// Checks INT8 with one factor for each tensor. The checks take it, but the release has no kernel for it.
pub(super) fn tensor(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    heads(f)?;
    let modes = [call.query_quant_mode, call.key_antiquant_mode, call.value_antiquant_mode];
    require!(
        f.query.dtype == DType::Int8
            && modes == [0; 3]
            && f.q.rows >= 2
            && !f.paged()
            && !f.rope()
            && f.q.dim == f.v.dim,
        TENSOR,
        format_args!("{} query of {} rows, modes {modes:?}", f.query.dtype, f.q.rows),
        "INT8, 2 rows or more, modes 0",
    );
    OUT_DTYPE.takes(f.out.dtype, DType::Bf16)?;
    let factors = [&call.deq_scale1, &call.quant_scale1, &call.deq_scale2];
    let one = |scale: &Option<TensorDesc>| scale.as_ref().is_some_and(|scale| *scale.shape == [1]);
    require!(factors.into_iter().all(one), FACTORS, "not all of them", "three of shape [1]",);
    UNUSED.leaves_out(call, &Parameter::MERGED_ANTIQUANT)?;
    UNUSED.leaves_out(call, &Parameter::SPLIT_SCALES)?;
    UNUSED.leaves_out(call, &Parameter::SPLIT_OFFSETS)?;
    UNUSED.leaves_out(call, &[Parameter::DequantScaleQuery, Parameter::KeyRopeAntiquantScale])?;
    ALONE.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    ALONE.leaves_out(call, &[Parameter::LearnableSink])
}
