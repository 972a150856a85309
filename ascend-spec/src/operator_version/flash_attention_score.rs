//! Entry points of FlashAttentionScore and FlashAttentionVarLenScore.

use crate::{Cann, Soc, Target};
use std::fmt;

/// An entry point: FlashAttentionScore (`V1` to `V4`) has a batch axis, FlashAttentionVarLenScore (`VarLenV1` to `VarLenV5`)
/// packs its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// CANN 8.1 and older.
    V1,
    /// Adds kinds of position bias, and first positions.
    V2,
    /// Adds sinks.
    V3,
    /// Adds quantisation, rotary parts, packed sequences and dropout of its own: the version of Ascend 950.
    V4,
    /// CANN 8.1 and older.
    VarLenV1,
    /// Adds kinds of position bias, and first positions.
    VarLenV2,
    /// Adds rotary parts to the second.
    VarLenV3,
    /// Adds the order of the softmax outputs to the first.
    VarLenV4,
    /// Adds sinks and the order of the softmax outputs to the third.
    VarLenV5,
}

impl Version {
    /// Every version, those with a batch axis first.
    pub const ALL: [Version; 9] = [
        Version::V1,
        Version::V2,
        Version::V3,
        Version::V4,
        Version::VarLenV1,
        Version::VarLenV2,
        Version::VarLenV3,
        Version::VarLenV4,
        Version::VarLenV5,
    ];

    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            Version::V1 => "aclnnFlashAttentionScore",
            Version::V2 => "aclnnFlashAttentionScoreV2",
            Version::V3 => "aclnnFlashAttentionScoreV3",
            Version::V4 => "aclnnFlashAttentionScoreV4",
            Version::VarLenV1 => "aclnnFlashAttentionVarLenScore",
            Version::VarLenV2 => "aclnnFlashAttentionVarLenScoreV2",
            Version::VarLenV3 => "aclnnFlashAttentionVarLenScoreV3",
            Version::VarLenV4 => "aclnnFlashAttentionVarLenScoreV4",
            Version::VarLenV5 => "aclnnFlashAttentionVarLenScoreV5",
        }
    }

    /// The version of FlashAttentionScore, or with `packed` of FlashAttentionVarLenScore, with this number.
    pub fn numbered(packed: bool, number: u8) -> Option<Version> {
        let of = |version: &Version| version.is_var_len() == packed && version.number() == number;
        Version::ALL.into_iter().find(of)
    }

    /// The number behind the `V`.
    pub const fn number(self) -> u8 {
        match self {
            Version::V1 | Version::VarLenV1 => 1,
            Version::V2 | Version::VarLenV2 => 2,
            Version::V3 | Version::VarLenV3 => 3,
            Version::V4 | Version::VarLenV4 => 4,
            Version::VarLenV5 => 5,
        }
    }

    /// Whether it is one of FlashAttentionVarLenScore.
    pub const fn is_var_len(self) -> bool {
        matches!(
            self,
            Version::VarLenV1
                | Version::VarLenV2
                | Version::VarLenV3
                | Version::VarLenV4
                | Version::VarLenV5
        )
    }

    /// The CANN releases known to export this version, as they stand behind "CANN": the first one, or `after` one that
    /// does not.
    pub const fn since_cann(self) -> &'static str {
        match self {
            Version::V1 | Version::V2 | Version::VarLenV1 | Version::VarLenV2 => "8.1",
            Version::VarLenV3 | Version::VarLenV4 => "after 8.1",
            Version::V3 | Version::VarLenV5 => "8.5",
            Version::V4 => "9.0",
        }
    }

    /// Whether a product has this version in a release. The snapshot that stands in for 8.1 to 8.4 has the third and the
    /// fourth of FlashAttentionVarLenScore.
    pub fn runs_on(self, target: Target) -> bool {
        let since = match self {
            Version::V1
            | Version::V2
            | Version::VarLenV1
            | Version::VarLenV2
            | Version::VarLenV3
            | Version::VarLenV4 => Cann::V8_1,
            Version::V3 | Version::VarLenV5 => Cann::V8_5,
            Version::V4 => Cann::V9_0,
        };
        let product = match target.soc {
            Soc::AtlasA2 | Soc::AtlasA3 => self != Version::V4,
            Soc::Ascend950 => target.is_950(),
            Soc::AtlasInference | Soc::AtlasTraining | Soc::Atlas200I500A2 => false,
        };
        product && target.cann >= since
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}
