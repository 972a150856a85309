//! The API layer of V1 to V4 on Atlas A2 and A3 from 9.2 on, which is written by hand where that of V5 is generated:
//! it checks a few arguments itself, and gives every refusal further in one status.

use super::{Facts, entry, output};
use crate::allowed::{Named, Outcome};
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter, Version};
use crate::rule::{INNER_NULLPTR, PARAM_INVALID, TILING_ERROR, require, rules};
use crate::{Cann, Change, NewArgument, Soc, Target, TensorDesc, Violation};

rules! {
    in Scope::A2_A3.since(V9_2);
    LSE = "softmax_lse.null", PARAM_NULLPTR, V1, "API layer of V1 to V4, softmaxLse",
        "from 9.2 on V1 to V4 have a softmaxLse when softmaxLseFlag is true, whatever the path",
        "pass a FLOAT tensor [B, N, S, 1], of packed rows [T, N, 1], or set softmaxLseFlag to false";
    LISTS = "key.list_sizes", PARAM_INVALID, V1, "API layer of V1 to V4, tensor lists",
        "from 9.2 on V1 to V4 have as many value tensors as key tensors, whatever the path",
        "pass a value for each key";
    OUT_SHAPE = "attention_out.inferred_shape", INNER_NULLPTR, V1, "API layer of V1 to V4, outputs",
        "from 9.2 on attentionOut and a requested softmaxLse of V1 to V4 have the inferred shape in every axis: the \
         operator computes into a tensor of its own, whose copy to the caller's demands it",
        "give the output the inferred shape";
}

/// Whether calls of `version` pass this layer on `target`.
pub(crate) fn applies(version: Version, target: Target) -> bool {
    version <= Version::V4 && matches!(target.soc, Soc::AtlasA2 | Soc::AtlasA3) && target.cann >= Cann::V9_2
}

/// How a call goes on after the first checks of this layer.
pub(crate) enum Progress {
    /// It ends, successfully: nothing else is checked of a call whose attentionOut has no elements.
    Ends,
    /// The operator's own checks follow.
    GoesOn,
}

/// Checks what comes before shapes are inferred.
pub(crate) fn arguments(call: &FiaCall<'_>) -> Result<Progress, Violation> {
    let main = entry::main_tensors(call)?;
    require!(
        !call.softmax_lse_flag || call.softmax_lse.is_some(),
        LSE,
        "no softmaxLse with softmaxLseFlag true",
        "a tensor",
        match call.implied_outputs().1 {
            Some(lse) => Ok(Change::to(Parameter::SoftmaxLse, NewArgument::Given(lse))),
            None => Err(LSE.fix),
        },
    );
    if main.out.is_empty() {
        return Ok(Progress::Ends);
    }
    LISTS.takes(Named(format_args!("{} keys, values", call.key.len()), call.value.len()), call.key.len())?;
    Ok(Progress::GoesOn)
}

/// Checks the outputs against the inferred shapes, which the copies of the results demand.
pub(crate) fn outputs(f: &Facts<'_>) -> Result<(), Violation> {
    let inferred = f.layout.out_shape(output::expected(f.q, output::value_dim(f)));
    OUT_SHAPE
        .takes(Named("attentionOut", f.out.shape), inferred)
        .fix(|| Change::to(Parameter::AttentionOut, NewArgument::Shape(inferred)))?;
    let Some(lse) = f.call.softmax_lse.filter(|_| f.call.softmax_lse_flag) else {
        return Ok(());
    };
    let inferred = f.layout.lse_shape(f.q);
    OUT_SHAPE.takes(Named("softmaxLse", lse.shape), inferred).fix(|| {
        let shaped = TensorDesc::packed(lse.dtype, inferred);
        Change::to(Parameter::SoftmaxLse, NewArgument::Given(shaped))
    })
}

/// The refusal of a stage further in, as the layer returns it: with one status for all of them.
pub(crate) fn with_its_status(mut violation: Violation) -> Violation {
    if matches!(violation.status(), PARAM_INVALID | TILING_ERROR) {
        violation.status = INNER_NULLPTR;
    }
    violation
}
