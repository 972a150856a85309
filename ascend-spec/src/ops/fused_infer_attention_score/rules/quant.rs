//! Quantised query and quantised output.

use super::Facts;
use crate::allowed::Noted;
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{require, rules};
use crate::{DType, SparseMode, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    INT8_IN = "quant.int8_query", TILING_ERROR, V1, "check D5",
        "an INT8 query has deqScale1, quantScale1 and deqScale2",
        "pass the scales of Q K^T, of the probabilities and of P V";
    INT8_DECODE = "quant.int8_query_decode", TILING_ERROR, V1, "check F3",
        "an INT8 query with one row a sequence is multi-head latent attention",
        "dequantise the query";
    INT8_EMPTY = "quant.int8_query_empty", TILING_ERROR, V1, "FusedInferAttentionScore documentation, empty tensors",
        "an INT8 query goes with keys and values that are not empty",
        "skip the call, or dequantise the query: without keys the output is 0";
    FP_OUT = "quant.half_output", TILING_ERROR, V1, "check D6",
        "an INT8 query with a FLOAT16 output has no quantScale2 and no quantOffset2",
        "drop quantScale2 and quantOffset2, or make the output INT8";
    FP_IN = "quant.half_query", TILING_ERROR, V1, "checks J18, F8",
        "deqScale1, quantScale1 and deqScale2 are not given with a FLOAT16 query and INT8 output, nor in the decode \
         path",
        "drop deqScale1, quantScale1 and deqScale2: they belong to an INT8 query with several rows";
    OUT_SCALE = "quant_scale2.required", TILING_ERROR, V1, "checks D7, F9" in Scope::ALL,
        "an INT8 output has quantScale2",
        "pass the scale of the output";
    OUT_UNUSED = "quant_scale2.unused", TILING_ERROR, V1, "check F9",
        "in the decode path quantScale2 and quantOffset2 go with an INT8 output only",
        "drop quantScale2 and quantOffset2, or make the output INT8";
    OUT_DTYPE = "quant_scale2.dtype", TILING_ERROR, V1, "checks D7, J18, F9" in Scope::ALL,
        "quantScale2 is FLOAT, or BF16 with a BF16 query, or until 8.5 FLOAT16 with a FLOAT16 query in the prefill \
         path",
        "convert quantScale2";
    OUT_SIZE = "quant_scale2.size", TILING_ERROR, V1, "check D8",
        "quantScale2 has one element, or one for each head and dimension",
        "pass one scale, or one for each head and dimension";
    OFFSET = "quant_offset2.like_scale", TILING_ERROR, V1, "checks D7, F9" in Scope::ALL,
        "quantOffset2 has the dtype and size of quantScale2",
        "shape the offset as the scale";
    CHANNEL = "quant_scale2.channel", TILING_ERROR, V1, "check D9",
        "a quantScale2 for each channel goes with no left padding, no softmaxLse, and no band with a negative token",
        "use one scale for the whole output";
    BAND = "quant.output_band", TILING_ERROR, V1, "check E4.8",
        "an INT8 output with sparse mode 4 has no negative token",
        "use a band around the diagonal";
    ROWS = "quant_offset2.rows", TILING_ERROR, V1, "check E4.9; post-quantisation, rows",
        "quantOffset2 goes with calls in which every query row sees a key",
        "drop the offset, or the rows";
    INT4_OUT = "quant.int4_output", TILING_ERROR, V1, "check F9",
        "INT4 keys go with no INT8 output",
        "quantise the output in a step of its own";
}

/// Number of elements of a tensor; 0 without one.
fn count(tensor: &Option<TensorDesc>) -> u64 {
    tensor.as_ref().and_then(TensorDesc::elements).unwrap_or(0)
}

/// Checks a call without keys, whose output is filled.
pub(crate) fn filled(f: &Facts<'_>) -> Result<(), Violation> {
    require!(
        f.query.dtype != DType::Int8,
        INT8_EMPTY,
        format_args!("key {}, value {}", f.key.shape, f.value.shape),
        "at least one key",
    );
    Ok(())
}

pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let int8_out = f.out.dtype == DType::Int8;
    if f.query.dtype == DType::Int8 {
        require!(
            [&call.deq_scale1, &call.quant_scale1, &call.deq_scale2].into_iter().all(|tensor| count(tensor) > 0),
            INT8_IN,
            "not all of them",
            "three tensors",
        );
        if !int8_out {
            FP_OUT.leaves_out(call, &Parameter::OUTPUT_QUANTISATION)?;
        }
    } else if int8_out && f.query.dtype == DType::Float16 {
        FP_IN.leaves_out(call, &Parameter::DEQUANTISATION)?;
    }
    if !int8_out {
        return Ok(());
    }
    output(f, true)?;
    let channel = count(&call.quant_scale2) > 1;
    let band = SparseMode::from_acl(call.mode()) == Some(SparseMode::Band);
    let negative = band && (call.pre_tokens < 0 || call.next_tokens < 0);
    if channel {
        CHANNEL.forbids([
            ("left padding", super::padding::given(f)),
            ("softmaxLseFlag", call.softmax_lse_flag),
            ("a negative token", negative),
        ])?;
    }
    require!(
        !negative,
        BAND,
        format_args!("preTokens {}, nextTokens {}", call.pre_tokens, call.next_tokens),
        "0 or more",
    );
    Ok(())
}

/// Checks that every row sees a key, once the mask's mode is known; this is required only with an output offset.
pub(crate) fn rows(f: &Facts<'_>, mode: SparseMode, pre: i64, next: i64) -> Result<(), Violation> {
    if f.out.dtype != DType::Int8 || count(&f.call.quant_offset2) == 0 {
        return Ok(());
    }
    let prefix = super::prefix::length(f);
    // Of packed sequences the operator takes the ends for the lengths.
    let read = |entries: Option<&[i64]>, b: usize, len: i64| match entries {
        Some(entries) if f.packed() => entries.get(b).copied().unwrap_or(len),
        _ => len,
    };
    for b in f.sequences() {
        let q = read(f.call.actual_seq_lengths, b, f.q_len(b));
        let kv = read(f.call.actual_seq_lengths_kv, b, f.kv_len(b)).saturating_add(prefix);
        let (pre, next) = match mode {
            SparseMode::RightDownCausal => (pre, kv - q),
            SparseMode::Band => (pre.saturating_sub(kv).saturating_add(q), next.saturating_add(kv).saturating_sub(q)),
            _ => (pre, next),
        };
        require!(
            pre.saturating_add(kv).saturating_sub(q) >= 0 && next >= 0,
            ROWS,
            format_args!("sequence {b}: {q} rows, {kv} keys"),
            "no row without a key",
        );
    }
    Ok(())
}

fn output(f: &Facts<'_>, prefill: bool) -> Result<(), Violation> {
    let call = f.call;
    let Some(scale) = &call.quant_scale2 else {
        return Err(OUT_SCALE.broken("none", "a FLOAT or BF16 tensor"));
    };
    let allowed: &[DType] = match f.query.dtype {
        DType::Bf16 => &[DType::Float, DType::Bf16],
        DType::Float16 if prefill => &[DType::Float, DType::Float16],
        _ => &[DType::Float],
    };
    let note = format_args!("with a {} query", f.query.dtype);
    OUT_DTYPE.takes(Noted(scale.dtype, note), allowed)?;
    let size = count(&call.quant_scale2);
    let channels = u64::try_from(call.num_heads.saturating_mul(super::output::value_dim(f))).unwrap_or(0);
    OUT_SIZE.takes(size, [1, channels])?;
    if let Some(offset) = call.quant_offset2.as_ref().filter(|offset| !(prefill && offset.is_empty())) {
        require!(
            offset.dtype == scale.dtype
                && if prefill {
                    offset.elements() == scale.elements()
                } else {
                    // The decode path compares only the axes that the offset has.
                    scale.shape.starts_with(&offset.shape)
                },
            OFFSET,
            offset,
            scale,
        );
    }
    Ok(())
}

pub(crate) fn decode(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    require!(f.query.dtype != DType::Int8 || f.rope(), INT8_DECODE, "INT8 without queryRope", "FLOAT16 or BF16",);
    FP_IN.leaves_out(call, &Parameter::DEQUANTISATION)?;
    if f.out.dtype != DType::Int8 {
        return OUT_UNUSED.leaves_out(call, &Parameter::OUTPUT_QUANTISATION);
    }
    INT4_OUT.forbids([("INT4 keys", f.kv_dtype() == DType::Int4)])?;
    output(f, false)
}
