//! Versions of FusedInferAttentionScore, and which one a call needs.

use crate::Cann::{V8_1, V8_5, V9_0};
use crate::operator::{DeclaredParameter, DeclaredVersion, OperatorVersion, versions};
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter};
use crate::{Cann, DType, Target, TensorDesc};

versions! {
    /// A version of FusedInferAttentionScore: each adds arguments to the one before.
    pub enum Version {
        /// The first version, which CANN has had since 7.0; 8.1 is the first release with a contract here.
        V1 = OperatorVersion::new(1, "aclnnFusedInferAttentionScore", "8.1")
            .shown_as("V1").deprecated_since(V9_0).on_a2_a3(V8_1),
        /// Adds separate key and value antiquantisation, keys and values of INT32 that hold eight INT4 each, and the
        /// shared prefix.
        V2 = OperatorVersion::new(2, "aclnnFusedInferAttentionScoreV2", "8.1")
            .shown_as("V2").deprecated_since(V9_0).on_a2_a3(V8_1),
        /// Adds the rotary parts of multi-head latent attention.
        V3 = OperatorVersion::new(3, "aclnnFusedInferAttentionScoreV3", "8.1")
            .shown_as("V3").deprecated_since(V9_0).on_a2_a3(V8_1),
        // The snapshot that stands in for 8.1 to 8.4 has it, though it is released from 8.5 on.
        /// Adds the query's dequantisation scale and learnable sinks.
        V4 = OperatorVersion::new(4, "aclnnFusedInferAttentionScoreV4", "8.5")
            .shown_as("V4").exported_since(V8_5).on_a2_a3(V8_1),
        /// Adds position start indices and position bias types; the version of Ascend 950.
        V5 = OperatorVersion::new(5, "aclnnFusedInferAttentionScoreV5", "9.0")
            .shown_as("V5").exported_since(V9_0).on_a2_a3(V9_0)
            // Releases before 9.0 do not know Ascend 950; the contract that stands in for them there has V5.
            .on_ascend950(V8_1),
    }
}

impl Version {
    /// The version whose phase one, phase two or `GetMaxWorkspaceSize` has this name.
    pub fn of_function(name: &str) -> Option<Version> {
        Version::ALL.into_iter().find(|version| version.info().has_function(name))
    }

    /// The newest version that the libraries of a release export.
    pub fn newest_of(cann: Cann) -> Version {
        let mut newest_first = Version::ALL.into_iter().rev();
        let exported = newest_first.find(|version| version.info().is_exported(cann));
        exported.unwrap_or(Version::V1)
    }

    /// The version that a call is made with: of those from `at_least` on that can express it and that the product has
    /// in the release, the oldest that is not deprecated. Where there is none, the oldest that can express it, which
    /// the check refuses.
    pub fn chosen_on(call: &FiaCall<'_>, at_least: Version, target: Target) -> Version {
        let mut able = Version::able(call, at_least, target);
        able.next().unwrap_or_else(|| Version::oldest_for(call).max(at_least))
    }

    /// The versions from `at_least` on that can express a call and that the product has in the release, oldest first,
    /// but deprecated ones behind the others.
    pub fn able(call: &FiaCall<'_>, at_least: Version, target: Target) -> impl Iterator<Item = Version> + use<> {
        let oldest = Version::oldest_for(call).max(at_least);
        Version::preferred_on(target).filter(move |version| *version >= oldest)
    }

    /// The oldest version whose arguments can express `call`, whatever the product.
    pub fn oldest_for(call: &FiaCall<'_>) -> Version {
        let int32 = |list: &[TensorDesc]| list.iter().any(|desc| desc.dtype == DType::Int32);
        let oldest = match Parameter::oldest_version(call.given()) {
            // Only from V2 on does INT32 stand for eight INT4 each.
            1 if int32(call.key) || int32(call.value) => 2,
            oldest => oldest,
        };
        let numbered = |version: &Version| version.number() == oldest;
        Version::ALL.into_iter().find(numbered).unwrap_or(Version::V5)
    }
}
