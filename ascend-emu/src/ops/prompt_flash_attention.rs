//! PromptFlashAttention, versions 1 to 3.

use super::entry_point::{phase_one, phase_two};
use super::inference_attention::InferenceAttention;
use super::lints;
use super::phase_one::executor_of;
use crate::descriptor::Described;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::prompt_flash_attention::{Argument, Arguments, Version};
use ascend_spec::{TensorDesc, arguments_of_version, prompt_flash_attention_arguments};

type Checked = InferenceAttention<Arguments<TensorDesc>>;

fn new(version: Version) -> impl FnOnce(&Arguments<Described>) -> Outcome<Checked> {
    move |arguments| {
        let descs = arguments.map(|_, tensor| tensor.desc);
        let call = descs.call();
        let problem = call.problem(version, context::machine().target)?;
        lints::report_first(version.symbol(), &descs, |allowed| {
            call.lint(version, allowed)
        })?;
        let known = (version.symbol(), version.number());
        Ok(Checked::new(descs, known, problem, Argument::of_role)?)
    }
}

prompt_flash_attention_arguments! { arguments_of_version {
    1 phase_one { aclnnPromptFlashAttentionGetWorkspaceSize, Arguments, executor_of(new(Version::V1)) }
} }
phase_two!(aclnnPromptFlashAttention, Version::V1.symbol());

prompt_flash_attention_arguments! { arguments_of_version {
    2 phase_one { aclnnPromptFlashAttentionV2GetWorkspaceSize, Arguments, executor_of(new(Version::V2)) }
} }
phase_two!(aclnnPromptFlashAttentionV2, Version::V2.symbol());

prompt_flash_attention_arguments! { arguments_of_version {
    3 phase_one { aclnnPromptFlashAttentionV3GetWorkspaceSize, Arguments, executor_of(new(Version::V3)) }
} }
phase_two!(aclnnPromptFlashAttentionV3, Version::V3.symbol());
