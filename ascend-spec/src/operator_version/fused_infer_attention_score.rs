//! Versions of FusedInferAttentionScore.

use crate::{Cann, Soc, Target};
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
