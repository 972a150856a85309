//! The versions of the operator, and which one a call needs.

use super::IncreCall;
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

    /// The oldest version that can express a call and computes all of it.
    pub fn oldest_for(call: &IncreCall<'_>) -> Version {
        let given = |tensors: &[bool]| tensors.contains(&true);
        if call.kv_padding_size.is_some() {
            return Version::V4;
        }
        let third = [
            call.pse_shift.is_some(),
            call.antiquant_scale.is_some(),
            call.antiquant_offset.is_some(),
            call.block_table.is_some(),
            call.block_size != 0,
            call.inner_precise != IncreCall::DEFAULT_PRECISE,
        ];
        let second = [
            call.dequant_scale1.is_some(),
            call.quant_scale1.is_some(),
            call.dequant_scale2.is_some(),
            call.quant_scale2.is_some(),
            call.quant_offset2.is_some(),
        ];
        match (given(&third), given(&second)) {
            (true, _) => Version::V3,
            (false, true) => Version::V2,
            (false, false) => Version::V1,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}
