//! Learnable sink.

use super::Facts;
use crate::rule::{require, rules};
use crate::{DType, Refusal};

rules! {
    LAYOUT = "learnable_sink.layout", TILING_ERROR, V4, "check B15",
        "a learnable sink goes with TND and NTD_TND",
        "pack the sequences";
    DIM = "learnable_sink.head_dim", TILING_ERROR, V4, "checks B15, J5",
        "a learnable sink goes with head dimensions of 64 or 128 for query and value",
        "pad the head dimension with zeros";
    SHAPE = "learnable_sink.shape", TILING_ERROR, V4, "check J5",
        "learnableSink has one entry for each query head",
        "pass one logit for each query head";
    DTYPE = "learnable_sink.dtype", PARAM_INVALID, V4, "check J5",
        "learnableSink is BF16",
        "convert the sink to BF16";
}

pub(in crate::fia) fn check(f: &Facts<'_>) -> Result<(), Refusal> {
    let Some(sink) = f.call.learnable_sink.filter(|sink| !sink.is_empty()) else {
        return Ok(());
    };
    require!(
        f.packed() && f.layout != crate::Layout::TndNtd,
        LAYOUT,
        f.layout,
        "TND, NTD_TND",
    );
    require!(
        matches!(f.q.dim, 64 | 128) && matches!(f.v.dim, 64 | 128),
        DIM,
        format_args!("{} and {}", f.q.dim, f.v.dim),
        "64 or 128",
    );
    require!(
        *sink.shape == [f.call.num_heads],
        SHAPE,
        sink.shape,
        format_args!("[{}]", f.call.num_heads),
    );
    require!(sink.dtype == DType::Bf16, DTYPE, sink.dtype, DType::Bf16,);
    Ok(())
}
