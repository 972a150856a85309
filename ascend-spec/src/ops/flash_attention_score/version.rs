//! Entry points of FlashAttentionScore and FlashAttentionVarLenScore, and which one a call needs.

use super::{FlashAttentionCall, InputLayout};
use crate::Cann::{self, V8_1, V8_5, V9_0};
use crate::Target;
use crate::operator::{OperatorVersion, versions};

/// A version that Atlas A2 and A3 have from release `since` on, and that no earlier library exports.
const fn version(number: u8, symbol: &'static str, since: &'static str, first: Cann) -> OperatorVersion {
    OperatorVersion::new(number, symbol, since).exported_since(first).on_a2_a3(first).on_ascend950(V9_0)
}

versions! {
    /// An entry point: FlashAttentionScore (`V1` to `V4`) has a batch axis, FlashAttentionVarLenScore (`VarLenV1` to
    /// `VarLenV5`) packs its sequences.
    pub enum Version {
        /// CANN 8.1 and older.
        V1 = version(1, "aclnnFlashAttentionScore", "8.1", V8_1),
        /// Adds kinds of position bias, and first positions.
        V2 = version(2, "aclnnFlashAttentionScoreV2", "8.1", V8_1),
        /// Adds sinks.
        V3 = version(3, "aclnnFlashAttentionScoreV3", "8.5", V8_5),
        /// Adds quantisation, rotary parts, packed sequences and dropout of its own: the version of Ascend 950.
        V4 = OperatorVersion::new(4, "aclnnFlashAttentionScoreV4", "9.0").exported_since(V9_0).on_ascend950(V9_0),
        /// CANN 8.1 and older.
        VarLenV1 = version(1, "aclnnFlashAttentionVarLenScore", "8.1", V8_1),
        /// Adds kinds of position bias, and first positions.
        VarLenV2 = version(2, "aclnnFlashAttentionVarLenScoreV2", "8.1", V8_1),
        // The snapshot that stands in for 8.1 to 8.4 has the third and the fourth.
        /// Adds rotary parts to the second.
        VarLenV3 = version(3, "aclnnFlashAttentionVarLenScoreV3", "after 8.1", V8_1),
        /// Adds the order of the softmax outputs to the first.
        VarLenV4 = version(4, "aclnnFlashAttentionVarLenScoreV4", "after 8.1", V8_1),
        /// Adds sinks and the order of the softmax outputs to the third.
        VarLenV5 = version(5, "aclnnFlashAttentionVarLenScoreV5", "8.5", V8_5),
    }
}

impl Version {
    /// Whether the version is one of FlashAttentionVarLenScore.
    pub const fn is_var_len(self) -> bool {
        matches!(
            self,
            Version::VarLenV1 | Version::VarLenV2 | Version::VarLenV3 | Version::VarLenV4 | Version::VarLenV5
        )
    }

    /// The version of FlashAttentionScore, or with `packed` of FlashAttentionVarLenScore, with this number.
    pub fn numbered(packed: bool, number: u8) -> Option<Version> {
        let is_it = |version: &Version| version.is_var_len() == packed && version.number() == number;
        Version::ALL.into_iter().find(is_it)
    }

    /// The oldest version of the call's kind that can express the call, whatever the product; the newest version
    /// where none can.
    pub fn oldest_for(call: &FlashAttentionCall<'_>) -> Version {
        Self::able(call).next().unwrap_or(Version::V4)
    }

    /// The version that a call is made with: the oldest that can express it and that the product has in the release.
    /// Where there is none, the oldest that can express it, which the check refuses.
    pub fn chosen_on(call: &FlashAttentionCall<'_>, target: Target) -> Version {
        let found = Self::able(call).find(|version| version.runs_on(target));
        found.unwrap_or_else(|| Self::oldest_for(call))
    }

    /// The versions that can express a call: those of its kind, oldest first, and the fourth of FlashAttentionScore,
    /// which has every argument.
    pub fn able(call: &FlashAttentionCall<'_>) -> impl Iterator<Item = Version> {
        let packed = call.input_layout == Some(InputLayout::Tnd.as_str())
            || call.actual_seq_lengths.is_some()
            || call.actual_seq_lengths_kv.is_some();
        let call = FlashAttentionCall {
            softmax_out_layout: call.softmax_out_layout.filter(|order| !order.is_empty()),
            ..*call
        };
        let of_kind = move |version: &Version| version.is_var_len() == packed && *version != Version::V4;
        let versions = Version::ALL.into_iter().filter(of_kind).chain([Version::V4]);
        versions.filter(move |version| call.given().all(|parameter| version.has(parameter)))
    }
}
