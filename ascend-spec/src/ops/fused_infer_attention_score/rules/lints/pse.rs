//! Position bias.

use super::{Report, lint};
use crate::ops::fused_infer_attention_score::{CheckedCall, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    IGNORED = "pse_shift.ignored", Lint("the tensor is not looked at"), V1, "check E2.9",
        "packed sequences come without pseShift, but for one that covers the longest of them in the split-fuse path",
        "drop pseShift, or use a layout with a batch axis: the operator adds no bias to packed sequences";
    PREFIX = "pse_shift.prefix_unchecked", Overrun("columns are read for the prefix's keys too"), V2, "check E5.1",
        "pseShift covers the keys of a shared prefix too",
        "give pseShift a column for each key of prefix and sequence";
    START = "start_idx.ignored", Lint("only attributes are ignored"), V5, "FusedInferAttentionScore documentation, qStartIdx and kvStartIdx",
        "qStartIdx and kvStartIdx go with pseType 2 and 3",
        "drop the start positions, or choose the slopes that use them";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    if call.pse_type == 0 {
        lint!(
            report,
            call.q_start_idx.is_none() && call.kv_start_idx.is_none(),
            START,
            "start positions with pseType 0",
            "none",
        );
    }
    let Some(pse) = call.pse_shift.as_ref().filter(|pse| !pse.is_empty()) else {
        return;
    };
    lint!(
        report,
        !p.problem.packed || p.problem.bias.is_some(),
        IGNORED,
        pse,
        "none",
    );
    let axis = |desc: &crate::TensorDesc| desc.shape.get(p.layout.input().row_axis()).copied();
    if let Some(prefix) = call.key_shared_prefix.as_ref().and_then(axis)
        && p.problem.prefix.is_some()
        && call.pse_type == 0
    {
        let keys = i64::try_from(p.problem.key_rows).unwrap_or(i64::MAX);
        let need = match p.route {
            crate::ops::fused_infer_attention_score::Route::Prefill => keys.saturating_add(prefix),
            crate::ops::fused_infer_attention_score::Route::Decode => 0,
        };
        lint!(
            report,
            pse.shape.last().is_some_and(|&last| last >= need),
            PREFIX,
            pse.shape,
            format_args!("{need} columns or more"),
        );
    }
}
