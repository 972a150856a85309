//! The entry points of the operator: which one takes a call, its two phases, and which sequences it may lose.

use ascend_spec::ops::ring_attention_update::{Parameter, RingUpdateCall, Version, admits_keyless, rules};
use ascend_spec::{Target, ring_attention_update_arguments};
use ascend_sys::Api;

use crate::error::Result;
use crate::operator::{AllowedLints, EntryPoints, entry_points, lints_of, phase_one};
use crate::ops::flash_attention_score::{Keyless, SoftmaxState};
use crate::tensor::Tensor;

/// Where packed sequences begin and the last one ends, on the host and on the device.
pub(super) type Starts = Option<(Vec<i64>, Tensor<i64>)>;

/// Checks a call against the contract, and finds the oldest installed version that can express it. All run on the same
/// products.
pub(super) fn choose(
    api: &Api,
    target: Target,
    call: &RingUpdateCall<'_>,
    allowed: &AllowedLints,
    starts: &Starts,
) -> Result<Version> {
    let oldest = Version::oldest_for(call);
    let problem = match call.check(oldest, target) {
        Err(mut violation) if violation.rule.id == rules::LAYOUT.id => {
            violation.fix = "compute both parts in the layout SBH or TND".into();
            return Err(violation.into());
        }
        checked => checked?,
    };
    call.lint(target, &allowed.ids(lints_of::<Version>)?)?;
    if let Some((starts, _)) = starts {
        problem.admits_lengths(starts).map_err(|mut violation| {
            violation.fix = "compute both parts of tensors that end with the last sequence's rows".into();
            violation
        })?;
    }
    let able = Version::ALL.into_iter().filter(|version| *version >= oldest);
    let why = match oldest {
        Version::V1 => "",
        Version::V2 => " (for maxima and sums in the order of the query)",
    };
    RingUpdateCall::installed(api, able, oldest, why)
}

entry_points! {
    ring_attention_update_arguments, RingUpdateCall<'_>, AnyArguments::RingAttentionUpdate;
    Version::V1 => 1: aclnnRingAttentionUpdateGetWorkspaceSize, aclnnRingAttentionUpdate;
    Version::V2 => 2: aclnnRingAttentionUpdateV2GetWorkspaceSize, aclnnRingAttentionUpdateV2;
}

/// Returns the sequences that have no keys in either part, and so none in the merged one.
///
/// # Errors
/// The lint that is broken by a sequence without keys in a part.
#[inline]
pub(super) fn merged_keyless(
    previous: &SoftmaxState,
    current: &SoftmaxState,
    allowed: &AllowedLints,
) -> Result<Keyless> {
    match (previous.keyless(), current.keyless()) {
        (None, None) => Ok(None),
        parts => found(parts.0.as_deref(), parts.1.as_deref(), allowed),
    }
}

#[cold]
fn found(prev: Option<&[bool]>, cur: Option<&[bool]>, allowed: &AllowedLints) -> Result<Keyless> {
    let sequences = prev.or(cur).map_or(0, <[bool]>::len);
    let all_have_keys = vec![false; sequences];
    let [prev, cur] = [prev, cur].map(|keyless| keyless.unwrap_or(&all_have_keys));
    admits_keyless(prev, cur, &allowed.ids(lints_of::<Version>)?)?;
    let in_both = prev.iter().zip(cur).map(|(prev, cur)| *prev && *cur);
    let in_both: Vec<bool> = in_both.collect();
    Ok(in_both.contains(&true).then(|| in_both.into()))
}
