//! Versions of IncreFlashAttention.

use crate::{Soc, Target};
use std::fmt;

/// A version of IncreFlashAttention: each adds arguments to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// The first. It takes a position bias and computes without it.
    V1,
    /// Adds quantisation. It takes a position bias and computes without it.
    V2,
    /// Adds quantised keys and values, paged caches and the precision, and uses the position bias.
    V3,
    /// Adds left padding of keys and values.
    V4,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Version; 4] = [Version::V1, Version::V2, Version::V3, Version::V4];

    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            Version::V1 => "aclnnIncreFlashAttention",
            Version::V2 => "aclnnIncreFlashAttentionV2",
            Version::V3 => "aclnnIncreFlashAttentionV3",
            Version::V4 => "aclnnIncreFlashAttentionV4",
        }
    }

    /// The first CANN release known to export this version.
    pub const fn since_cann(self) -> &'static str {
        "8.1"
    }

    /// Whether a product has this version in a release. Ascend 950 exports it and refuses every call.
    pub fn runs_on(self, target: Target) -> bool {
        matches!(
            target.soc,
            Soc::AtlasA2 | Soc::AtlasA3 | Soc::AtlasInference
        )
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}
