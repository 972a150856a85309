//! The entry points of the operator: which one takes a call, and its two phases.

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::flash_attention_score::{
    Arguments, FlashAttentionCall, FlashAttentionProblem, InputLayout, Parameter, Version,
};
use ascend_spec::{Target, TensorDesc, flash_attention_score_arguments, flash_attention_var_len_score_arguments};
use ascend_sys::Api;

use crate::error::Result;
use crate::operator::{AllowedLints, EntryPoints, entry_points, lints_of, phase_one};

/// Checks a call against the contract, and finds the oldest entry point that is installed, runs on the product and
/// can express the call.
pub(super) fn choose<'a>(
    api: &Api,
    target: Target,
    call: &FlashAttentionCall<'a>,
    allowed: &AllowedLints,
) -> Result<(Version, FlashAttentionProblem<'a>)> {
    let first = Version::chosen_on(call, target);
    let checked = call.check(first, target)?;
    let able = Version::able(call).filter(|version| version.runs_on(target));
    let version = FlashAttentionCall::installed(api, able, first, why(first))?;
    let problem = match version == first {
        true => checked,
        false => call.check(version, target)?,
    };
    problem.lint(&allowed.ids(lints_of::<Version>)?)?;
    Ok((version, problem))
}

/// What makes an entry point the oldest that can express a call.
fn why(oldest: Version) -> &'static str {
    match oldest {
        Version::V1 | Version::VarLenV1 => "",
        Version::V2 | Version::VarLenV2 => " (for a kind of position bias, or first places)",
        Version::V3 => " (for sinks)",
        Version::V4 => " (for what Ascend 950 alone has)",
        Version::VarLenV3 => " (for rotary parts)",
        Version::VarLenV4 => " (for the order of the softmax outputs)",
        Version::VarLenV5 => " (for sinks, or the order of the softmax outputs beside other features)",
    }
}

/// The arguments of an entry point: those of a version of FlashAttentionScore (`dense`), or of one of
/// FlashAttentionVarLenScore (`packed`), each of which has a list of its own.
macro_rules! entry_point_arguments {
    ($($then:ident)::+ { (dense $number:tt) $($with:tt)* }) => {
        flash_attention_score_arguments! { $($then)::+ { $number $($with)* } }
    };
    ($($then:ident)::+ { (packed $number:tt) $($with:tt)* }) => {
        flash_attention_var_len_score_arguments! { $number $($with)* }
    };
}

/// A call as case files have it: one of packed sequences has another name there.
fn recorded(call: Arguments<TensorDesc>) -> AnyArguments<TensorDesc> {
    match call.input_layout.as_deref().and_then(InputLayout::parse).is_some_and(InputLayout::is_packed) {
        true => AnyArguments::FlashAttentionVarlenScore(call),
        false => AnyArguments::FlashAttentionScore(call),
    }
}

entry_points! {
    entry_point_arguments, FlashAttentionCall<'_>, recorded;
    Version::V1 => (dense 1): aclnnFlashAttentionScoreGetWorkspaceSize, aclnnFlashAttentionScore;
    Version::V2 => (dense 2): aclnnFlashAttentionScoreV2GetWorkspaceSize, aclnnFlashAttentionScoreV2;
    Version::V3 => (dense 3): aclnnFlashAttentionScoreV3GetWorkspaceSize, aclnnFlashAttentionScoreV3;
    Version::V4 => (dense 4): aclnnFlashAttentionScoreV4GetWorkspaceSize, aclnnFlashAttentionScoreV4;
    Version::VarLenV1 => (packed 1): aclnnFlashAttentionVarLenScoreGetWorkspaceSize, aclnnFlashAttentionVarLenScore;
    Version::VarLenV2 => (packed 2): aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV2;
    Version::VarLenV3 => (packed 3): aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV3;
    Version::VarLenV4 => (packed 4): aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV4;
    Version::VarLenV5 => (packed 5): aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV5;
}
