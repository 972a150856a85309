//! Which entry point a call needs, and what it has.

use super::{FlashAttentionCall, InputLayout};
use crate::Target;
use crate::operator_version::flash_attention_score::Version;

impl Version {
    /// The oldest version of the call's kind that can express it, whatever the product; the newest where none can.
    pub fn oldest_for(call: &FlashAttentionCall<'_>) -> Version {
        Self::first(call, |_| true).unwrap_or(Version::V4)
    }

    /// The version that a call goes to: the oldest that can express it and that the product has in the release. Where it
    /// has none, the oldest that can express it, which the check refuses.
    pub fn oldest_on(call: &FlashAttentionCall<'_>, target: Target) -> Version {
        let found = Self::first(call, |version| version.runs_on(target));
        found.unwrap_or_else(|| Self::oldest_for(call))
    }

    fn first(call: &FlashAttentionCall<'_>, admits: impl Fn(Version) -> bool) -> Option<Version> {
        let packed = call.input_layout == Some(InputLayout::Tnd.as_str())
            || call.actual_seq_lengths.is_some()
            || call.actual_seq_lengths_kv.is_some();
        // Numbers that may not equal themselves; every version has them.
        let call = FlashAttentionCall {
            scale: 1.0,
            keep_prob: 1.0,
            softmax_out_layout: call.softmax_out_layout.filter(|order| !order.is_empty()),
            ..*call
        };
        let of_kind = |version: &Version| version.is_var_len() == packed && *version != Version::V4;
        let mut versions = Version::ALL
            .into_iter()
            .filter(of_kind)
            .chain([Version::V4]);
        versions.find(|&version| admits(version) && call.read_by(version) == call)
    }

    pub(super) const fn has_pse_type(self) -> bool {
        !matches!(self, Version::V1 | Version::VarLenV1 | Version::VarLenV4)
    }

    pub(super) const fn has_rope(self) -> bool {
        matches!(self, Version::V4 | Version::VarLenV3 | Version::VarLenV5)
    }

    pub(super) const fn has_sink(self) -> bool {
        matches!(self, Version::V3 | Version::V4 | Version::VarLenV5)
    }

    pub(super) const fn has_softmax_out_layout(self) -> bool {
        matches!(self, Version::V4 | Version::VarLenV4 | Version::VarLenV5)
    }

    pub(super) const fn has_lengths(self) -> bool {
        self.is_var_len() || matches!(self, Version::V4)
    }
}
