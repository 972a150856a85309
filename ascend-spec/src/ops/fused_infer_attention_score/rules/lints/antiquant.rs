//! Antiquantisation of key and value.

use super::{Report, lint};
use crate::allowed::Outcome;
use crate::attention_problem::ScaleOffset;
use crate::ops::fused_infer_attention_score::{Argument, CheckedCall, Checker, Parameter, Route, Version};
use crate::rule::rules;
use crate::{DType, TensorDesc};

rules! {
    in Scope::ALL;
    IGNORED = "antiquant.ignored", Lint("the tensors are not looked at"), V1, "checks J14, J23, J25",
        "every antiquantisation scale and offset that is given is used",
        "drop the scales and offsets that are not used: split ones come before merged ones, and none count with plain \
         keys";
    MODE_IGNORED = "antiquant_mode.ignored", Lint("only an attribute is ignored"), V1, "check J14",
        "antiquantMode, keyAntiquantMode, valueAntiquantMode and queryQuantMode are 0 where the operator ignores them",
        "set the mode to 0";
    MERGED_MODE = "antiquant_mode.merged",
        Lint("the tensors are checked as those of the mode in force"), V1, "check J14",
        "antiquantMode is 0 or 1",
        "pass mode 0: the operator takes mode 2 for it";
    SCALE_DTYPE = "antiquant.dtype_unchecked",
        Overrun("each element is read as one of the mode's type"), V1, "checks E6.3, F16, J14, J26",
        "scales and offsets have the dtype of their mode: FLOAT for each token, otherwise the query's",
        "convert the scales and offsets";
    VALUE_SCALE = "antiquant.value_scale_unchecked",
        Overrun("a factor is read for each token of each sequence"), V2, "check J14",
        "a value's scale for each token beside per-channel keys is [B, S] or [1, B, S]",
        "shape the value's scale by its mode";
    ROPE_SCALE = "key_rope_antiquant_scale.ignored", Lint("the tensor is not looked at"), V3, "check J15",
        "keyRopeAntiquantScale is not given",
        "drop keyRopeAntiquantScale: it is reserved";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    ROPE_SCALE.forbids([("a tensor", call.key_rope_antiquant_scale.is_some())]).report(report);
    let affines = [&p.problem.key_quantisation, &p.problem.value_quantisation];
    let mut used = affines.into_iter().flatten().flat_map(grids);
    for parameter in [
        Parameter::AntiquantScale,
        Parameter::AntiquantOffset,
        Parameter::KeyAntiquantScale,
        Parameter::KeyAntiquantOffset,
        Parameter::ValueAntiquantScale,
        Parameter::ValueAntiquantOffset,
    ] {
        lint!(
            report,
            call.tensor(parameter).is_none() || used.clone().any(|grid| grid == parameter),
            IGNORED,
            parameter.acl_name(),
            "none",
        );
    }
    let merged = used.clone().any(|grid| grid == Parameter::AntiquantScale);
    let split = used.any(|grid| grid == Parameter::KeyAntiquantScale);
    let query = p.problem.query_quantisation.is_some();
    for (mode, counts, name) in [
        (call.antiquant_mode, merged, "antiquantMode"),
        (call.key_antiquant_mode, split, "keyAntiquantMode"),
        (call.value_antiquant_mode, split, "valueAntiquantMode"),
        (call.query_quant_mode, query, "queryQuantMode"),
    ] {
        lint!(report, counts || mode == 0, MODE_IGNORED, format_args!("{name} {mode}"), 0,);
    }
    lint!(report, !merged || matches!(call.antiquant_mode, 0 | 1), MERGED_MODE, call.antiquant_mode, "0 or 1",);
    // Ascend 950 checks these dtypes itself.
    if !query && p.checker != Checker::Unified {
        dtypes(p, merged, report);
    }
    if split && (call.key_antiquant_mode, call.value_antiquant_mode) == (0, 1) {
        let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        let (batch, keys) = (size(p.problem.batch), size(p.problem.key_rows));
        if let Some(scale) = &call.value_antiquant_scale {
            let fits = matches!(scale.shape[..], [b, s] | [1, b, s] if b == batch && s >= keys);
            lint!(report, fits, VALUE_SCALE, scale.shape, format_args!("[{batch}, {keys}]"),);
        }
    }
}

/// The parameters of scale and offset.
fn grids(scales: &ScaleOffset) -> impl Iterator<Item = Parameter> + Clone {
    let grids = [Some(scales.scale), scales.offset].into_iter().flatten();
    grids.filter_map(|grid| Some(Argument::of_role(grid.tensor.role)?.parameter))
}

fn dtypes(p: &CheckedCall<'_>, merged: bool, report: Report<'_>) {
    let call = p.call;
    let modes = if merged { [call.antiquant_mode; 2] } else { [call.key_antiquant_mode, call.value_antiquant_mode] };
    for (affine, mode) in [&p.problem.key_quantisation, &p.problem.value_quantisation].into_iter().zip(modes) {
        // Per-channel scales of few prefill rows are BF16 whatever the query is: a rule checks that.
        let own = matches!(mode, 0 | 2);
        let want = match (own, p.route) {
            (true, Route::Prefill) if !merged && p.problem.pages.is_none() => DType::Bf16,
            (true, _) => p.problem.query.dtype,
            (false, _) => DType::Float,
        };
        let others = affine
            .iter()
            .flat_map(grids)
            .filter_map(|parameter| Some((parameter, call.tensor(parameter)?)))
            .filter(|(_, desc): &(Parameter, &TensorDesc)| desc.dtype != want);
        for (parameter, desc) in others {
            lint!(report, false, SCALE_DTYPE, format_args!("{} {}", parameter.acl_name(), desc.dtype), want,);
        }
        if merged {
            // Key and value share one tensor.
            break;
        }
    }
}
