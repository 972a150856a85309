//! Packed sequences without keys, which a merge may lose.

use ascend_spec::ops::ring_attention_update::{Version, admits_keyless};

use crate::error::Result;
use crate::operator::{AllowedLints, lints_of};
use crate::ops::flash_attention_score::{Keyless, SoftmaxState};

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
    let [prev, cur] = [prev, cur].map(|of| of.unwrap_or(&all_have_keys));
    admits_keyless(prev, cur, &allowed.ids(lints_of::<Version>)?)?;
    let in_both = prev.iter().zip(cur).map(|(prev, cur)| *prev && *cur);
    let in_both: Vec<bool> = in_both.collect();
    Ok(in_both.contains(&true).then(|| in_both.into()))
}
