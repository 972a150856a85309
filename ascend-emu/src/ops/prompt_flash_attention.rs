//! PromptFlashAttention, versions 1 to 3.

use super::attention::{AttentionCall, attention_functions, of_machine};
use crate::descriptor::DescribedTensor;
use ascend_spec::ops::prompt_flash_attention::{Arguments, Version};
use ascend_spec::{TensorDesc, prompt_flash_attention_arguments};

impl AttentionCall for Arguments<TensorDesc> {}

attention_functions! {
    prompt_flash_attention_arguments;
    1 V1: aclnnPromptFlashAttentionGetWorkspaceSize, aclnnPromptFlashAttention;
    2 V2: aclnnPromptFlashAttentionV2GetWorkspaceSize, aclnnPromptFlashAttentionV2;
    3 V3: aclnnPromptFlashAttentionV3GetWorkspaceSize, aclnnPromptFlashAttentionV3;
}
