//! Output, log-sum-exp and precision.

use super::Facts;
use crate::allowed::{Noted, Outcome};
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::{Checker, FiaCall, Parameter, Route, Version};
use crate::rule::{require, rules};
use crate::{Cann, Change, DType, Dims, Layout, NewArgument, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    OUT_DTYPE = "attention_out.dtype", TILING_ERROR, V1, "checks F21, J22" in Scope::ALL,
        "attentionOut has the query's dtype unless it is quantised",
        "make attentionOut of the query's dtype, or INT8 with quantScale2";
    OUT_SHAPE = "attention_out.shape", TILING_ERROR, V1, "checks B8 to B11" in Scope::ALL,
        "attentionOut has the shape that query, value and layout imply",
        "make attentionOut of this shape";
    LSE_REQUIRED = "softmax_lse.required", TILING_ERROR, V1, "check A4" in Scope::ALL,
        "softmaxLse is given when softmaxLseFlag is true, in the prefill path",
        "pass a FLOAT tensor of this shape, or set softmaxLseFlag to false";
    LSE_SHAPE = "softmax_lse.shape", TILING_ERROR, V1, "check C3" in Scope::ALL,
        "softmaxLse is [B, N, S, 1] when softmaxLseFlag is true, in the prefill path",
        "make softmaxLse of this shape";
    LSE_DTYPE = "softmax_lse.dtype",
        PARAM_INVALID, V1, "FusedInferAttentionScore documentation, softmaxLse" in Scope::ALL,
        "softmaxLse is FLOAT when softmaxLseFlag is true, in the prefill path",
        "make softmaxLse a FLOAT tensor";
    PRECISE = "inner_precise.known", TILING_ERROR, V1, "checks D11, F5, J20",
        "innerPrecise is 0 or 1 in the decode path, and not 4 in the prefill path",
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys";
    ANTIQUANT_MODE = "antiquant_mode.unused", TILING_ERROR, V1, "check C1",
        "antiquantMode is 0 in the prefill path",
        "set antiquantMode to 0";
}

pub(crate) fn dtype(f: &Facts<'_>) -> Result<(), Violation> {
    let allowed: &[DType] = match (f.query.dtype, f.route) {
        (DType::Int8, Route::Prefill) => &[DType::Float16, DType::Int8],
        (DType::Int8, Route::Decode) => &[DType::Bf16],
        (DType::Bf16, _) => &[DType::Bf16, DType::Int8],
        _ => &[DType::Float16, DType::Int8],
    };
    // The prefill path has no absorbed form: what looks like one has more rows than the decode path takes.
    let is_absorbed = f.rope() && f.q.dim == 512 && f.query.dtype == DType::Int8 && f.prefill();
    let most = FiaCall::most_decode_rows(f.target, f.query.dtype);
    OUT_DTYPE.takes(Noted(f.out.dtype, format_args!("for a {} query", f.query.dtype)), allowed).fix(
        || match is_absorbed {
            true => Err(format!("compute at most {most} query rows of a sequence in a call over latents")),
            false => {
                let own = allowed.first().copied().unwrap_or(f.query.dtype);
                Ok(Change::to(Parameter::AttentionOut, NewArgument::DType(own)))
            }
        },
    )
}

/// The extents that the output should have.
pub(crate) fn expected(query: Extents, value_dim: i64) -> Extents {
    Extents { dim: value_dim, ..query }
}

/// Whether a single row in BSH over a paged cache has an output with the head dimension of the value, which the
/// value's axes show.
pub(crate) fn own_value_dim(f: &Facts<'_>) -> bool {
    f.layout == Layout::Bsh && f.paged() && !f.prefill() && !f.rope() && f.q.rows == 1 && f.value.shape.rank() == 3
}

/// Head dimension of the output. Over a paged cache the older paths take a value dimension that differs from the
/// query's only with packed queries, and with single rows in BSH.
pub(crate) fn value_dim(f: &Facts<'_>) -> i64 {
    if own_value_dim(f) {
        // The operator drops the remainder.
        let hidden = f.value.shape.last().copied().unwrap_or(0);
        return hidden.saturating_mul(f.nibbles) / f.kv_heads.max(1);
    }
    match f.layout {
        Layout::Tnd | Layout::NtdTnd => f.v.dim,
        _ if f.paged() && f.checker != Checker::Unified => f.q.dim,
        _ => f.v.dim,
    }
}

pub(crate) fn shape(f: &Facts<'_>) -> Result<(), Violation> {
    let out = &f.out.shape;
    let implied = f.layout.out_shape(expected(f.q, value_dim(f)));
    let of_query = f.layout.out_shape(f.q);
    let want = match f.layout {
        Layout::Bsh if own_value_dim(f) => implied,
        Layout::Bnsd if f.paged() => of_query,
        // From 8.5 on the prefill path drops a remainder of the query's hidden size.
        Layout::Bsh | Layout::BshNbsd | Layout::BsndNbsd | Layout::BnsdNbsd | Layout::TndNtd => of_query,
        _ => implied,
    };
    let holds = match (f.layout, f.route) {
        // Before 8.5 the operator checks nothing here in the prefill path, and only the rank in the decode path.
        (Layout::Bsnd, _) if f.target.cann >= Cann::V8_5 => *out == want,
        (Layout::Bsnd, Route::Prefill) => true,
        (Layout::Bsnd, Route::Decode) => f.paged() || out.rank() == 4,
        // The prefill path compares the four axes and ignores any others.
        (Layout::Bnsd, Route::Prefill) if !f.paged() => out.starts_with(&want),
        (Layout::BnsdBsnd, _) => out.starts_with(&want),
        _ => *out == want,
    };
    if !holds {
        // If heads or keys are wrong, the expected output is wrong too: report those first.
        plausible(f)?;
    }
    require!(
        holds,
        OUT_SHAPE,
        format_args!("{out} with {}", f.layout),
        want,
        Change::to(Parameter::AttentionOut, NewArgument::Shape(want)),
    );
    Ok(())
}

/// Checks what the output's shape follows from, apart from the query.
fn plausible(f: &Facts<'_>) -> Result<(), Violation> {
    super::heads::counts(f)?;
    super::lists::dtypes(f)?;
    if !f.paged() {
        super::heads::key_value(f)?;
    }
    if !f.paged() && !f.packed() {
        super::heads::equal_dims(f)?;
    }
    Ok(())
}

pub(crate) fn lse(f: &Facts<'_>) -> Result<(), Violation> {
    if !f.call.softmax_lse_flag || !f.prefill() {
        return Ok(());
    }
    let want = f.layout.lse_shape(f.q);
    let Some(lse) = &f.call.softmax_lse else {
        return Err(crate::rule::broken(&LSE_REQUIRED, "no softmaxLse with softmaxLseFlag true", want, lse_of(want)));
    };
    lse_fits(lse, want)
}

/// The change that gives a log-sum-exp of `shape`.
pub(crate) fn lse_of(shape: Dims) -> Change {
    let lse = TensorDesc::packed(DType::Float, shape);
    Change::to(Parameter::SoftmaxLse, NewArgument::Given(lse))
}

/// Checks shape and dtype of the log-sum-exp.
pub(crate) fn lse_fits(lse: &TensorDesc, want: Dims) -> Result<(), Violation> {
    LSE_SHAPE.takes(lse.shape, want).fix(|| lse_of(want))?;
    LSE_DTYPE.takes(lse.dtype, DType::Float).fix(|| lse_of(want))
}

/// The log-sum-exp tensor that is written; the decode path treats a null or empty one as none.
pub(crate) fn written_lse<'a>(call: &'a FiaCall<'a>) -> Option<&'a TensorDesc> {
    call.softmax_lse.as_ref().filter(|lse| call.softmax_lse_flag && !lse.is_empty())
}

pub(crate) fn precision(f: &Facts<'_>) -> Result<(), Violation> {
    let (call, route) = (f.call, f.route);
    let (holds, allowed) = match route {
        Route::Decode => (matches!(call.inner_precise, 0 | 1), "0 or 1"),
        Route::Prefill => (call.inner_precise != 4, "anything but 4"),
    };
    require!(holds, PRECISE, call.inner_precise, allowed,);
    require!(
        route == Route::Decode || call.antiquant_mode == 0,
        ANTIQUANT_MODE,
        call.antiquant_mode,
        0,
        Change::set(Parameter::AntiquantMode, 0),
    );
    Ok(())
}
