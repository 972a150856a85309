//! What every call needs before shapes are compared: an entry point, required arguments, formats and types.

use super::{Report, lint};
use crate::allowed::Outcome;
use crate::attention_problem::{lint_scale, size};
use crate::dtype::Names;
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, Version};
use crate::rule::{require, rules};
use crate::{DType, Dims, Lengths, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL;
    ENTRY_POINT = "flash.entry_point", FIND_KERNEL_ERROR, V1, "FlashAttentionScore documentation, products",
        "the product has the entry point in the release",
        "run on Atlas A2 or A3, where FlashAttentionVarLenScore takes packed sequences and rotary parts; V4 needs \
         Ascend 950 and CANN 9.0, V3 and VarLen V5 need CANN 8.5";
    REQUIRED = "flash.required", PARAM_NULLPTR, V1, "FlashAttentionScore documentation, return values",
        "query, key, value, inputLayout, softmaxMaxOut, softmaxSumOut and attentionOutOut are given",
        "pass every required argument";
    COUNTABLE = "flash.countable", PARAM_INVALID, V1, "FlashAttentionScore documentation, constraints",
        "no dimension is negative, and the elements of each tensor can be counted and addressed",
        "give the tensor a shape that memory can hold";
    FORMAT = "flash.format", PARAM_INVALID, V1, "FlashAttentionScore documentation, formats",
        "every tensor is in a plain format such as ND or NCHW",
        "describe the tensor as ND";
    PADDING_MASK = "flash.padding_mask_ignored",
        Lint("the tensor is not looked at"), V1, "FlashAttentionScore documentation, paddingMaskOptional",
        "paddingMask, which is reserved, is null",
        "pass padding as part of attenMask";
    SOFTMAX_OUT = "flash.softmax_out_ignored",
        Lint("the tensor is not looked at"), V1, "FlashAttentionScore documentation, softmaxOutOut",
        "softmaxOut, which is reserved, has no elements",
        "give softmaxOut the shape [0]: the operator leaves it as it is";
    EMPTY = "flash.tensor_empty", Lint("the tensor counts as absent"), V1, "FlashAttentionScore, optional tensors",
        "attenMask, realShift and sink have elements where they are given",
        "pass a null pointer instead: the operator takes an empty tensor for one that is not given";
    INNER_PRECISE = "flash.inner_precise_known",
        Lint("the number is cut to its lowest byte"), V1, "FlashAttentionScore documentation, innerPrecise",
        "innerPrecise is 0, 1 or 2",
        "pass 2 to have rows without visible keys corrected, 0 otherwise";
    SCALE = "flash.scale_finite", Lint("only numbers change"), V1, "FlashAttentionScore documentation, scaleValue",
        "scaleValue is a finite number",
        "pass the factor of the scores, usually one over the root of the head dimension";
    SCALE_ZERO = "flash.scale_zero", Lint("only numbers change"), V1, "FlashAttentionScore documentation, scaleValue",
        "scaleValue is not 0 in 32 bits",
        "pass one over the root of the head dimension: with 0 each visible key weighs alike, whatever query and key \
         are";
    SCALE_INVERSE = "flash.scale_inverse",
        Lint("only numbers change"), V1, "FlashAttentionScore documentation, scaleValue",
        "scaleValue is neither the head dimension nor its root",
        "pass one over the root: the operator multiplies scores by scaleValue, it does not divide";
    LIMITS = "flash.documented_limits",
        Overrun("the documents promise nothing beyond, and the operator does not ask"),
        V1, "FlashAttentionScore documentation, constraints",
        "there are at most 2097152 sequences (20000 packed ones), 256 heads and 1048576 rows and keys",
        "cut the call into several";
    DTYPE = "flash.dtype", PARAM_INVALID, V1, "FlashAttentionScore documentation, query, key and value",
        "query, key and value are FLOAT16, BF16 or FLOAT, all the same",
        "convert the three to one of the allowed dtypes";
    OUT_DTYPE = "flash.out_dtype", PARAM_INVALID, V2, "FlashAttentionScoreV2 documentation, attentionOutOut",
        "attentionOutOut has the dtype of the query",
        "convert the output afterwards";
}

/// Most heads that the documents promise.
const MOST_HEADS: i64 = 256;
/// Most rows, and most keys: of a sequence, or of all where they are packed.
const MOST_ROWS: usize = 1 << 20;
/// Most sequences with a batch axis.
const MOST_BATCH: usize = 2 << 20;
/// Most packed sequences.
const MOST_PACKED: usize = 20_000;

/// The required arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Required<'a> {
    pub(crate) query: &'a TensorDesc,
    pub(crate) key: &'a TensorDesc,
    pub(crate) value: &'a TensorDesc,
    pub(crate) layout: &'a str,
    pub(crate) softmax_max: &'a TensorDesc,
    pub(crate) softmax_sum: &'a TensorDesc,
    pub(crate) attention_out: &'a TensorDesc,
}

pub(crate) fn entry_point(version: Version, target: Target) -> Result<(), Violation> {
    require!(
        version.runs_on(target),
        ENTRY_POINT,
        format_args!("{version} on {target}"),
        "an entry point of the product, in a release that has it",
    );
    Ok(())
}

pub(crate) fn required<'a>(call: &'a FlashAttentionCall<'_>) -> Result<Required<'a>, Violation> {
    Ok(Required {
        query: REQUIRED.requires(call.query.as_ref(), "query")?,
        key: REQUIRED.requires(call.key.as_ref(), "key")?,
        value: REQUIRED.requires(call.value.as_ref(), "value")?,
        layout: REQUIRED.requires(call.input_layout, "inputLayout")?,
        softmax_max: REQUIRED.requires(call.softmax_max.as_ref(), "softmaxMaxOut")?,
        softmax_sum: REQUIRED.requires(call.softmax_sum.as_ref(), "softmaxSumOut")?,
        attention_out: REQUIRED.requires(call.attention_out.as_ref(), "attentionOutOut")?,
    })
}

/// Refuses what V4 takes and this crate does not compute.
pub(crate) fn computed(call: &FlashAttentionCall<'_>, target: Target) -> Result<(), Violation> {
    if !target.is_950() {
        return Ok(());
    }
    let half = call.query.is_none_or(|query| query.dtype.is_half());
    let scales = [call.d_scale_q, call.d_scale_k, call.d_scale_v];
    let feature = match () {
        () if !half || scales.iter().any(Option::is_some) || call.out_dtype != 0 => {
            "FlashAttentionScore on Ascend 950 with other types than FLOAT16 and BF16"
        }
        () if call.query_rope.is_some() || call.key_rope.is_some() => {
            "FlashAttentionScore on Ascend 950 with rotary parts"
        }
        () if call.drop_mask.is_none() && call.keep_prob < 1.0 => {
            "the dropout that FlashAttentionScore on Ascend 950 makes of seed and offset"
        }
        () if call.sinks().is_some() => "sink of FlashAttentionScore on Ascend 950",
        () if call.softmax_out_layout.is_some_and(|order| !order.is_empty()) => {
            "softmaxOutLayout of FlashAttentionScore on Ascend 950"
        }
        () => return Ok(()),
    };
    Err(Violation::unsupported(feature))
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let call = &p.call;
    PADDING_MASK.forbids([("paddingMask", call.padding_mask.is_some())]).report(report);
    lint!(
        report,
        call.softmax_out.is_none_or(|out| out.is_empty()),
        SOFTMAX_OUT,
        call.softmax_out.map_or(Dims::of([]), |out| out.shape),
        "[0]",
    );
    for (desc, name) in [(&call.atten_mask, "attenMask"), (&call.real_shift, "realShift"), (&call.sink, "sink")] {
        let empty = desc.filter(TensorDesc::is_empty);
        lint!(
            report,
            empty.is_none(),
            EMPTY,
            format_args!("{name} {}", empty.map_or(Dims::of([]), |desc| desc.shape)),
            "a tensor with elements, or none",
        );
    }
    INNER_PRECISE.takes(call.inner_precise, 0..=2).report(report);
    lint_scale(call.scale, [p.head_dim, p.rope_dim].map(size), [&SCALE, &SCALE_ZERO, &SCALE_INVERSE], report);
    let most_batch = match p.lengths {
        Lengths::Packed { .. } => MOST_PACKED,
        Lengths::Dense { .. } => MOST_BATCH,
    };
    let (batch, (rows, keys)) = (p.lengths.batch(), p.axis_rows());
    lint!(
        report,
        batch <= most_batch && p.heads <= MOST_HEADS && rows <= MOST_ROWS && keys <= MOST_ROWS,
        LIMITS,
        format_args!("{batch} sequences, {} heads, {rows} rows and {keys} keys", p.heads),
        format_args!("at most {most_batch}, {MOST_HEADS}, {MOST_ROWS} and {MOST_ROWS}"),
    );
}

/// The types that the operator computes with.
const ALLOWED: &[DType] = &[DType::Float16, DType::Bf16, DType::Float];

pub(crate) fn inputs(required: &Required<'_>) -> Result<(), Violation> {
    let dtype = required.query.dtype;
    require!(
        ALLOWED.contains(&dtype) && required.key.dtype == dtype && required.value.dtype == dtype,
        DTYPE,
        format_args!("query {dtype}, key {}, value {}", required.key.dtype, required.value.dtype),
        format_args!("all of {}", Names(ALLOWED)),
    );
    Ok(())
}

/// Checks the output's type in the versions that compare it before anything is inferred.
pub(crate) fn output(version: Version, required: &Required<'_>) -> Result<(), Violation> {
    let compares = matches!(version, Version::V2 | Version::V3 | Version::V4);
    require!(
        !compares || required.attention_out.dtype == required.query.dtype,
        OUT_DTYPE,
        required.attention_out.dtype,
        required.query.dtype,
    );
    Ok(())
}
