//! The versions of the operator: which one takes a call, and its two phases.

use ascend_spec::ops::fused_infer_attention_score::rules::lints::releases::DEPRECATED;
use ascend_spec::ops::fused_infer_attention_score::{ContentBounds, FiaCall, Parameter, Version};
use ascend_spec::{Cann, Target, Violation, fused_infer_attention_score_arguments};
use ascend_sys::Api;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::operator::{AllowedLints, EntryPoints, entry_points, lints_of, phase_one};

/// Checks a call against the contract, and finds the version of the operator that takes it: the first of
/// [`Version::able`] that is installed. Also returns the bounds of what the call reads on the device as positions.
pub(super) fn choose(
    api: &Api,
    target: Target,
    call: &FiaCall<'_>,
    allowed: &[&str],
) -> Result<(Version, Option<ContentBounds>)> {
    // Where no version runs on the product, the contract refuses the call.
    let first = Version::chosen_on(call, Version::V1, target);
    // Newer releases are checked only where this one refuses.
    let told = |mut violation: Violation| {
        violation.taken_by = call.taken_by(Version::V1, target, allowed);
        violation
    };
    let checked = call.check(first, target).map_err(|violation| match violation.is_unsupported() {
        true => violation,
        false => told(violation),
    })?;
    let able = Version::able(call, Version::V1, target);
    let version = FiaCall::installed(api, able, first, why(Version::oldest_for(call)))?;
    let checked = match version == first {
        true => checked,
        false => call.check(version, target)?,
    };
    // A deprecated version is chosen only where no other is installed.
    let mut allowed = SmallVec::<[&str; 4]>::from_slice(allowed);
    allowed.push(DEPRECATED.id);
    checked.lint(&allowed).map_err(told)?;
    Ok((version, checked.content_bounds()))
}

/// Refuses a call that some release of the product from `since` on refuses, or computes otherwise.
pub(super) fn portable(
    target: Target,
    version: Version,
    since: Cann,
    call: &FiaCall<'_>,
    allowed: &[&str],
) -> Result<()> {
    let mut first = None;
    call.each_difference(version, target, since, &mut |lint| {
        if first.is_none() && !allowed.contains(&lint.rule.id) {
            first = Some(lint);
        }
    });
    first.map_or(Ok(()), |lint| Err(lint.into()))
}

/// What makes a version the oldest that can express a call, in brackets.
fn why(oldest: Version) -> &'static str {
    match oldest {
        Version::V1 => "",
        Version::V2 => " (for a shared prefix, or separate antiquantisation of key and value)",
        Version::V3 => " (for rotary parts)",
        Version::V4 => " (for a quantised query, or learnable sinks)",
        Version::V5 => " (for start positions, or a kind of position bias)",
    }
}

/// The lints that a call may break, by id, and whether it is to be portable.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowed {
    lints: AllowedLints,
    portable_since: Option<Cann>,
}

impl Allowed {
    /// Allows a lint that stays within the call's tensors; [`Allowed::ids`] refuses one that does not.
    pub(super) fn lint(&mut self, id: impl Into<String>) {
        self.lints.lint(id);
    }

    /// Allows any lint.
    ///
    /// # Safety
    /// As for [`FusedInferAttention::allow_overrun`](super::FusedInferAttention::allow_overrun).
    pub(super) unsafe fn overrun(&mut self, id: impl Into<String>) {
        // SAFETY: handed on to the caller.
        unsafe { self.lints.overrun(id) };
    }

    /// Requires that every release from this one on takes the call alike.
    pub(super) fn portable_since(&mut self, since: Cann) {
        self.portable_since = Some(since);
    }

    /// The first release that has to take the call as its own does.
    pub(super) fn portable(&self) -> Option<Cann> {
        self.portable_since
    }

    /// All lints that are allowed.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for what is no lint of the
    /// operator, and for a lint that overruns memory and was allowed as one that does not.
    pub(super) fn ids(&self) -> Result<SmallVec<[&str; 4]>> {
        self.lints.ids(lints_of::<Version>)
    }
}

entry_points! {
    fused_infer_attention_score_arguments, FiaCall<'_>, AnyArguments::FusedInferAttentionScore;
    Version::V1 => 1: aclnnFusedInferAttentionScoreGetWorkspaceSize, aclnnFusedInferAttentionScore;
    Version::V2 => 2: aclnnFusedInferAttentionScoreV2GetWorkspaceSize, aclnnFusedInferAttentionScoreV2;
    Version::V3 => 3: aclnnFusedInferAttentionScoreV3GetWorkspaceSize, aclnnFusedInferAttentionScoreV3;
    Version::V4 => 4: aclnnFusedInferAttentionScoreV4GetWorkspaceSize, aclnnFusedInferAttentionScoreV4;
    Version::V5 => 5: aclnnFusedInferAttentionScoreV5GetWorkspaceSize, aclnnFusedInferAttentionScoreV5;
    {
        #[cold]
        fn shares_memory(self, other: Self) -> Error {
            let with = if other.is_output() { "another output" } else { other.name() };
            Error::shared("output", format_args!("memory that is shared with {with}"), "memory of its own")
        }
    }
}
