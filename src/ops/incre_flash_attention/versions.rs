//! The entry points of the operator, and its newest version, to which calls go.

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::fused_infer_attention_score::ContentBounds;
use ascend_spec::ops::incre_flash_attention::{IncreCall, Parameter, Version};
use ascend_spec::{
    Target, TensorDesc, Violation, arguments_of_version, incre_flash_attention_arguments,
};
use ascend_sys::Api;

use crate::error::Result;
use crate::operator::{Descriptors, PhaseOne, Phases, entry_points, phase_one};
use crate::ops::inference_attention::InferenceCall;

entry_points! {
    incre_flash_attention_arguments, IncreCall<'_>, Parameter, Version;
    Version::V1 => 1: aclnnIncreFlashAttentionGetWorkspaceSize, aclnnIncreFlashAttention;
    Version::V2 => 2: aclnnIncreFlashAttentionV2GetWorkspaceSize, aclnnIncreFlashAttentionV2;
    Version::V3 => 3: aclnnIncreFlashAttentionV3GetWorkspaceSize, aclnnIncreFlashAttentionV3;
    Version::V4 => 4: aclnnIncreFlashAttentionV4GetWorkspaceSize, aclnnIncreFlashAttentionV4;
}

/// The version that calls go to: the others are deprecated, and V1 and V2 compute without a position bias.
const VERSION: Version = Version::V4;

impl InferenceCall for IncreCall<'_> {
    type Version = Version;
    const VERSION: Version = VERSION;

    fn phases() -> Phases {
        phases_of(VERSION)
    }

    fn check(&self, target: Target) -> Result<(), Violation> {
        self.check(VERSION, target)
    }

    fn lint(&self, allowed: &[&str]) -> Result<(), Violation> {
        self.lint(VERSION, allowed)
    }

    fn content_bounds(&self) -> Result<Option<ContentBounds>, Violation> {
        self.content_bounds(VERSION)
    }

    fn recorded(&self) -> AnyArguments<TensorDesc> {
        AnyArguments::IncreFlashAttention(self.to_arguments())
    }

    fn phase_one(&self, api: &Api, descriptors: &mut Descriptors<Parameter>) -> Result<PhaseOne> {
        phase_one(api, VERSION, self, descriptors)
    }
}
