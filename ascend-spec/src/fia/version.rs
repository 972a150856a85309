//! Versions of the operator, and which one a call needs.

use crate::fia::FiaCall;
use crate::fia::rules::entry::entry_point;
use crate::{Cann, DType, Refusal, Soc, Target, TensorDesc};
use std::fmt;

/// A version of FusedInferAttentionScore: each adds arguments to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// CANN 7.0 and later.
    V1,
    /// Adds separate key and value antiquantisation, keys and values of INT32 that hold eight INT4 each, and the shared
    /// prefix.
    V2,
    /// Adds the rotary parts of multi-head latent attention.
    V3,
    /// Adds the query's dequantisation scale and learnable sinks.
    V4,
    /// Adds position start indices and position bias types; the version of Ascend 950.
    V5,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Version; 5] = [
        Version::V1,
        Version::V2,
        Version::V3,
        Version::V4,
        Version::V5,
    ];

    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            Version::V1 => "aclnnFusedInferAttentionScore",
            Version::V2 => "aclnnFusedInferAttentionScoreV2",
            Version::V3 => "aclnnFusedInferAttentionScoreV3",
            Version::V4 => "aclnnFusedInferAttentionScoreV4",
            Version::V5 => "aclnnFusedInferAttentionScoreV5",
        }
    }

    /// The version whose phase one, phase two or `GetMaxWorkspaceSize` has this name.
    pub fn of_function(name: &str) -> Option<Version> {
        let of = |version: &Version| {
            let phase = name.strip_prefix(version.symbol());
            phase.is_some_and(|phase| {
                ["", "GetWorkspaceSize", "GetMaxWorkspaceSize"].contains(&phase)
            })
        };
        Version::ALL.into_iter().find(of)
    }

    /// The first CANN release known to export this version.
    pub const fn since_cann(self) -> &'static str {
        match self {
            Version::V1 | Version::V2 | Version::V3 => "8.1",
            Version::V4 => "8.5",
            Version::V5 => "9.0",
        }
    }

    /// The newest version that the libraries of a release export.
    pub const fn newest_of(cann: Cann) -> Version {
        match cann {
            Cann::V8_1 => Version::V3,
            Cann::V8_5 => Version::V4,
            Cann::V9_0 | Cann::V9_1 => Version::V5,
        }
    }

    /// What the entry points answer before they look at any argument: those before V5 refuse Ascend 950 where it is known.
    ///
    /// # Errors
    /// The broken rule.
    pub fn enter(self, target: Target) -> Result<(), Refusal> {
        entry_point(self, target)
    }

    /// Whether a product has this version in a release.
    ///
    /// The snapshot that stands in for 8.1 to 8.4 has V4, which is released from 8.5 on ([`Version::since_cann`]).
    pub fn runs_on(self, target: Target) -> bool {
        match target.soc {
            Soc::AtlasA2 | Soc::AtlasA3 => self != Version::V5 || target.cann >= Cann::V9_0,
            Soc::Ascend950 => self == Version::V5,
            Soc::AtlasInference | Soc::AtlasTraining | Soc::Atlas200I500A2 => false,
        }
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

    /// Its number: 1 for V1.
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "V{}", self.number())
    }
}
