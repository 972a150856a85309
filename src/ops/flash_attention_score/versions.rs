//! The entry points of the operator: which one takes a call, and its two phases.

use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, Parameter, Version};
use ascend_spec::{
    Target, arguments_of_version, flash_attention_score_arguments, flash_attention_var_len_score_arguments,
};
use ascend_sys::{Api, Library};

use crate::error::{Error, Result};
use crate::operator::{self, AllowedLints, Descriptors, EntryPoints, PhaseOne, Phases, lints_of, phase_one, phases};

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
    let mut able = Version::able(call).filter(|version| version.runs_on(target));
    let Some(version) = able.find(|&version| phases_of(version).are_installed(api)) else {
        return Err(Error::OperatorVersion {
            needed: first.symbol(),
            why: why(first),
            library: Library::Opapi.file_name(),
            since: first.since_cann(),
        });
    };
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

/// Both functions of each entry point, and how its arguments are listed.
macro_rules! versions {
    ($($version:ident: $one:ident, $two:ident, $arguments:ident $select:tt;)*) => {
        /// Returns both functions of an entry point.
        pub(crate) fn phases_of(version: Version) -> Phases {
            match version {
                $(Version::$version => phases!($one, $two),)*
            }
        }

        // SAFETY: each line names both functions of its version; `phase_one` passes what the descriptors hold.
        unsafe impl EntryPoints for FlashAttentionCall<'_> {
            type Version = Version;

            fn phases(version: Version) -> Phases {
                phases_of(version)
            }

            fn phase_one(
                &self,
                api: &Api,
                version: Version,
                descriptors: &mut Descriptors<Parameter>,
            ) -> Result<PhaseOne> {
                let call = self;
                match version {
                    $(Version::$version => {
                        versions!(@ $arguments $select { api.$one, Parameter, call, descriptors })
                    })*
                }
            }
        }
    };
    (@ dense ($number:tt) $with:tt) => {
        flash_attention_score_arguments! { arguments_of_version { $number phase_one $with } }
    };
    (@ packed ($number:tt) $with:tt) => {
        flash_attention_var_len_score_arguments! { $number phase_one $with }
    };
}

versions! {
    V1: aclnnFlashAttentionScoreGetWorkspaceSize, aclnnFlashAttentionScore, dense (1);
    V2: aclnnFlashAttentionScoreV2GetWorkspaceSize, aclnnFlashAttentionScoreV2, dense (2);
    V3: aclnnFlashAttentionScoreV3GetWorkspaceSize, aclnnFlashAttentionScoreV3, dense (3);
    V4: aclnnFlashAttentionScoreV4GetWorkspaceSize, aclnnFlashAttentionScoreV4, dense (4);
    VarLenV1: aclnnFlashAttentionVarLenScoreGetWorkspaceSize, aclnnFlashAttentionVarLenScore, packed (1);
    VarLenV2: aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV2, packed (2);
    VarLenV3: aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV3, packed (3);
    VarLenV4: aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV4, packed (4);
    VarLenV5: aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV5, packed (5);
}

impl operator::Parameter for Parameter {}
