//! Versions of RingAttentionUpdate.

use crate::{Soc, Target};
use std::fmt;

/// A version of RingAttentionUpdate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// The first.
    V1,
    /// Adds the order of packed softmax tensors.
    V2,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Version; 2] = [Version::V1, Version::V2];

    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            Version::V1 => "aclnnRingAttentionUpdate",
            Version::V2 => "aclnnRingAttentionUpdateV2",
        }
    }

    /// The CANN releases known to export this version, as they stand behind "CANN": the first one, or `after` one that
    /// does not.
    pub const fn since_cann(self) -> &'static str {
        match self {
            Version::V1 => "8.1",
            Version::V2 => "after 8.1",
        }
    }

    /// Whether a product has this version in a release.
    pub fn runs_on(self, target: Target) -> bool {
        match target.soc {
            Soc::AtlasA2 | Soc::AtlasA3 => true,
            Soc::Ascend950 => target.is_950(),
            Soc::AtlasInference | Soc::AtlasTraining | Soc::Atlas200I500A2 => false,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}
