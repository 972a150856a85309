//! Outputs and `innerPrecise`.

use super::{Report, lint};
use crate::allowed::Outcome;
use crate::layout::{Axes, Extents};
use crate::ops::fused_infer_attention_score::rules::{Given, paged};
use crate::ops::fused_infer_attention_score::{CheckedCall, Route, Version};
use crate::rule::rules;
use crate::{DType, TensorDesc};

rules! {
    in Scope::ALL;
    LAYOUT = "input_layout.heads_first",
        Lint("the output has as many elements in either order"),
        V3, "FusedInferAttentionScore documentation, inputLayout",
        "the layouts BSH_NBSD, BSND_NBSD and BNSD_NBSD go with multi-head latent attention in its absorbed form",
        "use the layout without _NBSD, and put the heads first afterwards";
    OUT_SHAPE = "attention_out.shape_unchecked",
        Overrun("the operator writes the whole of its own shape"), V1, "checks B9, J4",
        "attentionOut has the shape that the operator writes",
        "make attentionOut of this shape";
    LSE_UNCHECKED = "softmax_lse.unchecked",
        Overrun("the operator writes a FLOAT for each row wherever softmaxLse points"), V1, "check J13",
        "softmaxLse is a FLOAT tensor of shape [B, N, S, 1] when softmaxLseFlag is true",
        "pass a softmaxLse of this shape, or set softmaxLseFlag to false";
    LSE_IGNORED = "softmax_lse.ignored",
        Lint("nothing is written there"), V1, "FusedInferAttentionScore documentation, softmaxLse",
        "softmaxLse is given when softmaxLseFlag is true, and otherwise stands in with one element at most",
        "set softmaxLseFlag to true: otherwise softmaxLse comes back as it was";
    PRECISE_UNCHECKED = "inner_precise.unchecked",
        Overrun("nothing is checked, and everything is read as the attributes say"), V1, "checks J1, J2",
        "innerPrecise is 0 or 1 over an INT8 cache in the decode path",
        "use innerPrecise 0 or 1: with 2 and query lengths the operator leaves the call unchecked";
    PRECISE_MEANING = "inner_precise.meaning", Lint("only numbers change"), V1, "check J20",
        "innerPrecise is from 0 to 3",
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    lint!(report, p.layout.output() != Axes::Nbsd || call.query_rope.is_some(), LAYOUT, p.layout, "BSH, BSND, BNSD",);
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    let mut extents = Extents {
        batch: size(p.problem.batch),
        heads: size(p.problem.heads),
        rows: size(p.problem.query_rows),
        dim: size(p.problem.value_dim),
    };
    let want = p.layout.out_shape(extents);
    if let Some(out) = &call.attention_out {
        OUT_SHAPE.takes(out.shape, want).report(report);
    }
    extents.dim = 1;
    let want = TensorDesc::packed(DType::Float, p.layout.lse_shape(extents));
    let lse = call.softmax_lse.as_ref();
    if call.softmax_lse_flag {
        lint!(
            report,
            lse.is_some_and(|lse| lse.shape == want.shape && lse.dtype == want.dtype),
            LSE_UNCHECKED,
            Given(lse, "softmaxLse"),
            want,
        );
    } else {
        lint!(
            report,
            lse.and_then(TensorDesc::elements).is_none_or(|count| count <= 1),
            LSE_IGNORED,
            Given(lse, "softmaxLse"),
            "none",
        );
    }
}

/// Whether the operator leaves the call unchecked.
pub(super) fn bypass(p: &CheckedCall<'_>, report: Report<'_>) -> bool {
    // The absorbed form with an INT8 query has checks of its own.
    let unchecked = p.route == Route::Decode
        && (p.call.query_rope.is_none() || p.problem.query.dtype != DType::Int8)
        && p.call.key.first().is_some_and(|key| paged::unchecked(p.call, key));
    lint!(report, !unchecked, PRECISE_UNCHECKED, "2 with query lengths", "0 or 1");
    unchecked
}

pub(super) fn precision(p: &CheckedCall<'_>, report: Report<'_>) {
    PRECISE_MEANING.takes(p.call.inner_precise, 0..=3).report(report);
}
