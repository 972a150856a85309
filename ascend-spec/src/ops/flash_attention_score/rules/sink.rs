//! Sinks: one extra logit a head.

use crate::ops::flash_attention_score::facts::Facts;
use crate::ops::flash_attention_score::{FlashAttentionCall, Version};
use crate::rule::rules;
use crate::{DType, Dims, Violation};

rules! {
    in Scope::ALL;
    DTYPE = "flash.sink_dtype", PARAM_INVALID, V3, "FlashAttentionScoreV3 documentation, sinkOptional",
        "sink is FLOAT",
        "convert the sinks to FLOAT";
    DTYPE_SLOPES = "flash.sink_dtype_slopes", PARAM_NULLPTR, V3, "FlashAttentionScore tiling, sink",
        "beside slopes, too, sink is FLOAT",
        "convert the sinks to FLOAT";
    SHAPE = "flash.sink_shape", PARAM_NULLPTR, V3, "FlashAttentionScore tiling, sink",
        "sink is [N]",
        "pass one logit for each query head";
}

/// Checks the type of the sinks, in calls where the operator checks it before anything is inferred.
pub(crate) fn dtype(call: &FlashAttentionCall<'_>) -> Result<(), Violation> {
    if let Some(sink) = call.sinks() {
        DTYPE.takes(sink.dtype, DType::Float)?;
    }
    Ok(())
}

pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(sink) = f.call.sinks() else {
        return Ok(());
    };
    DTYPE_SLOPES.takes(sink.dtype, DType::Float)?;
    SHAPE.takes(sink.shape, Dims::of([f.heads]))
}
