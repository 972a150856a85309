//! Outputs: the attention, and maximum and sum of each row.

use super::entry::Required;
use super::{Report, lint};
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, Version};
use crate::rule::{require, rules};
use crate::{DType, Violation};

rules! {
    in Scope::ALL;
    SHAPE = "flash.out_shape", PARAM_NULLPTR, V1, "FlashAttentionScore, copy to attentionOutOut",
        "attentionOutOut has the query's shape with the value's head dimension, and the query's dtype",
        "give the output the shape that is allowed";
    SOFTMAX = "flash.softmax_shape", PARAM_NULLPTR, V1, "FlashAttentionScore, copy to softmaxMaxOut and softmaxSumOut",
        "softmaxMaxOut and softmaxSumOut are FLOAT [B, N, Sq, 8], of packed sequences [T, N, 8]",
        "give the output the shape that is allowed: eight equal numbers for each row";
    ORDER = "flash.softmax_out_layout_known",
        Lint("the default order is written"), VarLenV4, "FlashAttentionVarLenScoreV4 documentation, softmaxOutLayout",
        "softmaxOutLayout is null, empty or same_as_input",
        "pass same_as_input to have [T, N, 8] as it reads, or nothing to have a block [N, Sq, 8] for each sequence";
}

/// Checks shapes and types of the outputs.
pub(crate) fn check(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> Result<(), Violation> {
    let out = p.layout.out_shape(required.query.shape, p.heads, p.value_dim);
    require!(
        required.attention_out.shape == out && required.attention_out.dtype == required.query.dtype,
        SHAPE,
        required.attention_out,
        format_args!("{} {out}", required.query.dtype),
    );
    let softmax = p.layout.softmax_shape(required.query.shape, p.heads);
    for (desc, name) in [(required.softmax_max, "softmaxMaxOut"), (required.softmax_sum, "softmaxSumOut")] {
        require!(
            desc.shape == softmax && desc.dtype == DType::Float,
            SOFTMAX,
            format_args!("{name} {desc}"),
            format_args!("{} {softmax}", DType::Float),
        );
    }
    Ok(())
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let order = p.call.softmax_out_layout.unwrap_or_default();
    lint!(
        report,
        matches!(order, "" | FlashAttentionCall::SAME_AS_INPUT),
        ORDER,
        format_args!("{order:?}"),
        format_args!("null, \"\" or {:?}", FlashAttentionCall::SAME_AS_INPUT),
    );
}
