//! Which version a call needs, and what entry points answer before they look at it.

use crate::fia::FiaCall;
use crate::fia::rules::entry::entry_point;
use crate::operator_version::fused_infer_attention_score::Version;
use crate::{DType, Refusal, Target, TensorDesc};

impl Version {
    /// What the entry points answer before they look at any argument: those before V5 refuse Ascend 950 where it is known.
    ///
    /// # Errors
    /// The broken rule.
    pub fn enter(self, target: Target) -> Result<(), Refusal> {
        entry_point(self, target)
    }

    /// The version that a call goes to: the oldest, `at_least` one, that can express it and that the product has in the
    /// release. Where it has none, the oldest that can express it, which the check refuses.
    pub fn oldest_on(call: &FiaCall<'_>, at_least: Version, target: Target) -> Version {
        let oldest = Version::oldest_for(call).max(at_least);
        let able = |version: &Version| *version >= oldest && version.runs_on(target);
        Version::ALL.into_iter().find(able).unwrap_or(oldest)
    }

    /// The oldest version whose arguments can express `call`, whatever the product.
    pub fn oldest_for(call: &FiaCall<'_>) -> Version {
        let int32 = |list: &[TensorDesc]| list.iter().any(|desc| desc.dtype == DType::Int32);
        let oldest = match call.oldest_version() {
            // Only from V2 on are they eight INT4 each.
            1 if int32(call.key) || int32(call.value) => 2,
            oldest => oldest,
        };
        let numbered = |version: &Version| version.number() == oldest;
        Version::ALL
            .into_iter()
            .find(numbered)
            .unwrap_or(Version::V5)
    }
}
