//! Quantisation arguments of the unified checker: those that the call does not use, and those of an INT8 output.

use super::Form;
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;
use crate::ops::fused_infer_attention_score::rules::{Facts, quant};
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, DType, Dims, Layout, SparseMode, TensorDesc, Violation};

rules! {
    in Scope::UNIFIED.until(V9_0);
    LEFT_OVER = "quant.left_over", TILING_ERROR, V1, "checks G2.3, G2.5; Ascend 950, non-quant call",
        "half-precision calls carry no quantisation tensor, on Atlas A2 and A3 until 9.0, on Ascend 950 always",
        "drop the tensor";
    MODES = "quant.left_over_mode", TILING_ERROR, V1, "checks G2.3, G2.5" in Scope::A2_A3.since(V8_5).until(V9_0),
        "until 9.0 the quantisation modes of half-precision calls are 0",
        "set antiquantMode, keyAntiquantMode, valueAntiquantMode and queryQuantMode to 0";
    PLAIN = "quant.output_unified", TILING_ERROR, V1, "routing of 8.5" in Scope::A2_A3.since(V8_5).until(V8_5),
        "in 8.5 an NZ cache, a reordered layout, and query and value of different head dimensions go with no INT8 \
         output, position bias, left padding, shared prefix or sink of the absorbed form",
        "use a BnBsH cache and one of BSH, BSND, BNSD, BNSD_BSND and TND, with quantScale2 for an INT8 output; in the \
         absorbed form drop the argument";
    OUT_UNUSED = "quant_scale2.half_output", TILING_ERROR, V1, "check G2.3" in Scope::A2_A3.since(V8_5).until(V9_0),
        "in 9.0, and in 8.5 with rotary parts, quantScale2 goes with an INT8 output only",
        "drop quantScale2, or make the output INT8";
    CHANNELS = "quant_scale2.grid", TILING_ERROR, V1, "check I12; Ascend 950, post-quant" in Scope::UNIFIED,
        "quantScale2 has one element or one for each head and dimension; other layouts than BSH, BSND, BNSD and \
         BNSD_BSND take [1] and [N, D] alone",
        "pass one scale as [1], or [N, D]";
    ROPE = "quant.output_rope", TILING_ERROR, V3, "checks G3.1, I12; Ascend 950, decode MLA" in Scope::UNIFIED,
        "a quantised output goes with no rotary parts on Atlas A2 and A3, and in the absorbed form on Ascend 950 not \
         with TND_NTD",
        "quantise the output in a step of its own";
    BAND = "quant.output_band_tokens", TILING_ERROR, V1, "check E4.8" in Scope::UNIFIED.until(V9_0),
        "an INT8 output with sparse mode 4 has no negative token: until 9.0, and over quantised keys on Ascend 950",
        "use a band around the diagonal";
    LAYOUT = "quant.output_layout", TILING_ERROR, V1, "check I12" in Scope::A2_A3.since(V8_5).until(V9_0),
        "until 9.0 an INT8 output goes with BSH, BSND, BNSD and BNSD_BSND, one head dimension and no rotary parts",
        "quantise the output in a step of its own";
}

/// Refuses quantisation arguments that a half-precision call does not use.
pub(crate) fn left_over(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    if f.kind() != QuantisationKind::Half {
        return Ok(());
    }
    if LEFT_OVER.scope.holds(f.target) {
        let all: [&[Parameter]; 5] = [
            &[Parameter::DequantScaleQuery],
            &Parameter::MERGED_ANTIQUANT,
            &Parameter::SPLIT_SCALES,
            &Parameter::SPLIT_OFFSETS,
            &Parameter::DEQUANTISATION,
        ];
        all.into_iter().try_for_each(|parameters| LEFT_OVER.leaves_out(call, parameters))?;
    }
    if MODES.scope.holds(f.target) {
        MODES.leaves_out(call, &Parameter::QUANTISATION_MODES)?;
    }
    if PLAIN.scope.holds(f.target) {
        PLAIN.forbids([
            ("a quantised output", !f.out.dtype.is_half()),
            ("a sink with the absorbed form", call.learnable_sink.is_some() && f.form() == Form::Absorbed),
        ])?;
        PLAIN.leaves_out(call, &[Parameter::PseShift])?;
        PLAIN.leaves_out(call, &Parameter::LEFT_PADDING)?;
        PLAIN.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    }
    // 8.5 requires it only of calls with rotary parts.
    let asked = f.since(Cann::V9_0) || f.rope();
    require!(
        for f.target => call.quant_scale2.is_none() || !asked || !f.out.dtype.is_half(),
        OUT_UNUSED,
        "quantScale2",
        "none",
    );
    Ok(())
}

/// Checks scale and offset of an INT8 output.
pub(crate) fn output(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    if f.out.dtype.is_half() {
        // From 9.1 on scale and offset are ignored, but their dtype is checked all the same.
        let given = [&call.quant_scale2, &call.quant_offset2];
        let mut given = given.into_iter().flatten().filter(|_| f.since(Cann::V9_1));
        return given.try_for_each(|unused| quant::OUT_DTYPE.takes(unused.dtype, [DType::Float, DType::Bf16]));
    }
    let Some(scale) = &call.quant_scale2 else {
        // 9.0 alone does not require a scale.
        if f.target.cann == Cann::V9_0 && !f.is_950() {
            return call.quant_offset2.as_ref().map_or(Ok(()), |offset| dtype(f, offset));
        }
        return Err(quant::OUT_SCALE.broken("none", "a FLOAT or BF16 tensor"));
    };
    let classic = f.classic_layout() && f.form() == Form::Plain;
    require!(
        for f.target => classic,
        LAYOUT,
        format_args!("INT8 output with {}", f.layout),
        "the query's dtype",
    );
    let fits_rope = match f.is_950() {
        true => f.layout != Layout::TndNtd || f.form() != Form::Absorbed,
        false => !f.rope(),
    };
    require!(
        fits_rope,
        ROPE,
        format_args!("{} output with queryRope and {}", f.out.dtype, f.layout),
        "the query's dtype",
    );
    dtype(f, scale)?;
    let (n, d) = (call.num_heads, f.v.dim);
    let count = i64::try_from(scale.elements().unwrap_or(0)).unwrap_or(i64::MAX);
    let fits = *scale.shape == [1]
        || match f.classic_layout() {
            // Until 9.0 any shape of one element counts as [1].
            true => count == n.saturating_mul(d) || (count == 1 && !f.since(Cann::V9_1)),
            false => scale.shape == Dims::of([n, d]),
        };
    require!(fits, CHANNELS, scale.shape, format_args!("[1], [{n}, {d}]"),);
    let band = f.mode() == SparseMode::Band.acl();
    // On Ascend 950 only quantised keys require it.
    let asked = !f.is_950() || (f.kind() == QuantisationKind::Antiquant && f.out.dtype == DType::Int8);
    require!(
        for f.target => !band || !asked || (call.pre_tokens >= 0 && call.next_tokens >= 0),
        BAND,
        format_args!("preTokens {}, nextTokens {}", call.pre_tokens, call.next_tokens),
        "0 or more",
    );
    if let Some(offset) = &call.quant_offset2 {
        require!(like(offset, scale), quant::OFFSET, offset, scale,);
    }
    Ok(())
}

/// Checks the dtype of a scale or offset.
fn dtype(f: &Facts<'_>, scale: &TensorDesc) -> Result<(), Violation> {
    require!(
        scale.dtype == DType::Float || (scale.dtype == DType::Bf16 && f.query.dtype == DType::Bf16),
        quant::OUT_DTYPE,
        format_args!("{} with a {} query", scale.dtype, f.query.dtype),
        "FLOAT, or BF16 with a BF16 query",
    );
    Ok(())
}

fn like(offset: &TensorDesc, scale: &TensorDesc) -> bool {
    offset.dtype == scale.dtype && offset.shape == scale.shape
}
