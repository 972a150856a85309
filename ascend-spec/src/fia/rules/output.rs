//! Output, log-sum-exp and precision.

use crate::fia::rules::entry::{Names, Operands};
use crate::fia::{FiaCall, Route};
use crate::layout::Extents;
use crate::rule::{require, rules};
use crate::{DType, Layout, Refusal, TensorDesc};

rules! {
    OUT_DTYPE = "attention_out.dtype", TILING_ERROR, V1, "checks F21, J22",
        "attentionOut has the query's dtype unless it is quantised";
    OUT_SHAPE = "attention_out.shape", TILING_ERROR, V1, "checks B8 to B11",
        "attentionOut has the shape that query, value and layout imply";
    LSE_REQUIRED = "softmax_lse.required", TILING_ERROR, V1, "check A4",
        "softmaxLse is given when softmaxLseFlag is true, in the prefill path";
    LSE_SHAPE = "softmax_lse.shape", TILING_ERROR, V1, "check C3",
        "softmaxLse is [B, N, S, 1] when softmaxLseFlag is true, in the prefill path";
    LSE_DTYPE = "softmax_lse.dtype", PARAM_INVALID, V1, "FusedInferAttentionScore documentation, softmaxLse",
        "softmaxLse is FLOAT when softmaxLseFlag is true, in the prefill path";
    PRECISE = "inner_precise.known", TILING_ERROR, V1, "checks D11, F5, J20",
        "innerPrecise is 0 or 1 in the decode path, and not 4 in the prefill path";
    ANTIQUANT_MODE = "antiquant_mode.unused", TILING_ERROR, V1, "check C1",
        "antiquantMode is 0 in the prefill path";
}

pub(in crate::fia) fn dtype(at: &Operands<'_>) -> Result<(), Refusal> {
    require!(
        at.out.dtype == at.query.dtype,
        OUT_DTYPE,
        format_args!("{} for a {} query", at.out.dtype, at.query.dtype),
        Names(&[at.query.dtype]),
        "make attentionOut of the query's dtype",
    );
    Ok(())
}

/// The shape that the output should have.
pub(in crate::fia) fn expected(query: Extents, value_dim: i64) -> Extents {
    Extents {
        dim: value_dim,
        ..query
    }
}

pub(in crate::fia) fn shape(
    layout: Layout,
    route: Route,
    query: Extents,
    at: &Operands<'_>,
    value_dim: i64,
) -> Result<(), Refusal> {
    let want = match layout {
        Layout::Bsh => at.query.shape,
        _ => layout.out_shape(expected(query, value_dim)),
    };
    let holds = match (layout, route) {
        // The operator looks at nothing here in the prefill path, and at the rank alone in the decode path.
        (Layout::Bsnd, Route::Prefill) => true,
        (Layout::Bsnd, Route::Decode) => at.out.shape.rank() == 4,
        _ => at.out.shape == want,
    };
    require!(
        holds,
        OUT_SHAPE,
        format_args!("{} with {layout}", at.out.shape),
        want,
        "make attentionOut of this shape",
    );
    Ok(())
}

pub(in crate::fia) fn lse(
    call: &FiaCall<'_>,
    layout: Layout,
    route: Route,
    query: Extents,
) -> Result<(), Refusal> {
    if !call.softmax_lse_flag || route == Route::Decode {
        return Ok(());
    }
    let want = layout.lse_shape(query);
    let Some(lse) = &call.softmax_lse else {
        return Err(crate::rule::broken(
            &LSE_REQUIRED,
            "no softmaxLse with softmaxLseFlag true",
            want,
            "pass a FLOAT tensor of this shape, or set softmaxLseFlag to false",
        )
        .into());
    };
    require!(
        lse.shape == want,
        LSE_SHAPE,
        lse.shape,
        want,
        "make softmaxLse of this shape",
    );
    require!(
        lse.dtype == DType::Float,
        LSE_DTYPE,
        lse.dtype,
        DType::Float,
        "make softmaxLse a FLOAT tensor",
    );
    Ok(())
}

/// The log-sum-exp tensor that is written: the decode path takes a null or empty one as none.
pub(in crate::fia) fn written_lse<'a>(call: &'a FiaCall<'a>) -> Option<&'a TensorDesc> {
    call.softmax_lse
        .as_ref()
        .filter(|lse| call.softmax_lse_flag && !lse.is_empty())
}

pub(in crate::fia) fn precision(call: &FiaCall<'_>, route: Route) -> Result<(), Refusal> {
    let (holds, allowed) = match route {
        Route::Decode => (matches!(call.inner_precise, 0 | 1), "0 or 1"),
        Route::Prefill => (call.inner_precise != 4, "0 to 3"),
    };
    require!(
        holds,
        PRECISE,
        call.inner_precise,
        allowed,
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys",
    );
    require!(
        route == Route::Decode || call.antiquant_mode == 0,
        ANTIQUANT_MODE,
        call.antiquant_mode,
        0,
        "set antiquantMode to 0",
    );
    Ok(())
}
