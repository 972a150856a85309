//! The entry points of the operator, and its newest version, to which calls go.

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::fused_infer_attention_score::ContentBounds;
use ascend_spec::ops::prompt_flash_attention::{Parameter, PromptCall, Version};
use ascend_spec::{
    Target, TensorDesc, Violation, arguments_of_version, prompt_flash_attention_arguments,
};
use ascend_sys::Api;

use crate::error::Result;
use crate::operator::{Descriptors, PhaseOne, Phases, entry_points, phase_one};
use crate::ops::inference_attention::InferenceCall;

entry_points! {
    prompt_flash_attention_arguments, PromptCall<'_>, Parameter, Version;
    Version::V1 => 1: aclnnPromptFlashAttentionGetWorkspaceSize, aclnnPromptFlashAttention;
    Version::V2 => 2: aclnnPromptFlashAttentionV2GetWorkspaceSize, aclnnPromptFlashAttentionV2;
    Version::V3 => 3: aclnnPromptFlashAttentionV3GetWorkspaceSize, aclnnPromptFlashAttentionV3;
}

/// The version that calls go to: V1 and V2 are deprecated, and compute without a position bias.
const VERSION: Version = Version::V3;

impl InferenceCall for PromptCall<'_> {
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

    /// The operator has neither paged caches nor left padding.
    fn content_bounds(&self) -> Result<Option<ContentBounds>, Violation> {
        Ok(None)
    }

    fn recorded(&self) -> AnyArguments<TensorDesc> {
        AnyArguments::PromptFlashAttention(self.to_arguments())
    }

    fn phase_one(&self, api: &Api, descriptors: &mut Descriptors<Parameter>) -> Result<PhaseOne> {
        phase_one(api, VERSION, self, descriptors)
    }
}
