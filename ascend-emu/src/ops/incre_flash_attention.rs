//! IncreFlashAttention, versions 1 to 4.

use super::attention::{AttentionCall, attention_functions, of_machine};
use crate::descriptor::DescribedTensor;
use ascend_spec::ops::incre_flash_attention::{Arguments, Version};
use ascend_spec::{TensorDesc, incre_flash_attention_arguments};

impl AttentionCall for Arguments<TensorDesc> {}

attention_functions! {
    incre_flash_attention_arguments;
    1 V1: aclnnIncreFlashAttentionGetWorkspaceSize, aclnnIncreFlashAttention;
    2 V2: aclnnIncreFlashAttentionV2GetWorkspaceSize, aclnnIncreFlashAttentionV2;
    3 V3: aclnnIncreFlashAttentionV3GetWorkspaceSize, aclnnIncreFlashAttentionV3;
    4 V4: aclnnIncreFlashAttentionV4GetWorkspaceSize, aclnnIncreFlashAttentionV4;
}
