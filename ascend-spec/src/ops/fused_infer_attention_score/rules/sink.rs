//! Learnable sink.

use super::Facts;
use crate::allowed::Named;
use crate::ops::fused_infer_attention_score::{FiaCall, Version};
use crate::rule::rules;
use crate::{Cann, DType, Dims, Layout, Target, Violation};

rules! {
    in Scope::A2_A3;
    LAYOUT = "learnable_sink.layout", TILING_ERROR, V4, "check B15" in Scope::A2_A3.until(V8_1),
        "a learnable sink goes with TND and NTD_TND",
        "pack the sequences, with head dimensions of 64 or 128";
    DIM = "learnable_sink.head_dim", TILING_ERROR, V4, "checks B15, J5" in Scope::A2_A3.until(V8_1),
        "a learnable sink goes with head dimensions of 64 or 128 for query and value",
        "pad shorter heads with zeros; for longer ones install CANN 8.5 or newer";
    SHAPE = "learnable_sink.shape", TILING_ERROR, V4, "check J5" in Scope::ALL,
        "learnableSink has one entry for each query head",
        "pass one logit for each query head";
    DTYPE = "learnable_sink.dtype", PARAM_INVALID, V4, "check J5",
        "learnableSink is BF16, from 9.0 on BF16 or FLOAT16",
        "convert the sink to BF16";
}

pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(sink) = f.call.learnable_sink.filter(|sink| !sink.is_empty()) else {
        return Ok(());
    };
    LAYOUT.takes_on(f.target, f.layout, [Layout::Tnd, Layout::NtdTnd])?;
    DIM.takes_on(f.target, f.q.dim, [64, 128])?;
    DIM.takes_on(f.target, Named("value", f.v.dim), [64, 128])?;
    SHAPE.takes(sink.shape, Dims::of([f.call.num_heads]))
}

/// Checks the dtype that the operator is registered with, whichever checker is to judge the call.
pub(crate) fn dtype(call: &FiaCall<'_>, target: Target) -> Result<(), Violation> {
    let Some(sink) = call.learnable_sink.filter(|sink| !sink.is_empty()) else {
        return Ok(());
    };
    let allowed: &[DType] = match target.cann >= Cann::V9_0 {
        true => &[DType::Bf16, DType::Float16],
        false => &[DType::Bf16],
    };
    DTYPE.takes(sink.dtype, allowed)
}
