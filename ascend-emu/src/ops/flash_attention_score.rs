//! FlashAttentionScore, versions 1 to 4, and FlashAttentionVarLenScore, versions 1 to 5.

use super::attention::{AttentionCall, attention_functions, of_machine};
use crate::descriptor::DescribedTensor;
use ascend_spec::attention_problem::TensorRole;
use ascend_spec::ops::flash_attention_score::{Arguments, Version};
use ascend_spec::{TensorDesc, flash_attention_score_arguments, flash_attention_var_len_score_arguments};

impl AttentionCall for Arguments<TensorDesc> {
    const IN_ORDER: &'static [TensorRole] =
        &[TensorRole::Mask, TensorRole::Bias, TensorRole::DropMask, TensorRole::SoftmaxMax, TensorRole::SoftmaxSum];
}

attention_functions! {
    flash_attention_score_arguments;
    1 V1: aclnnFlashAttentionScoreGetWorkspaceSize, aclnnFlashAttentionScore;
    2 V2: aclnnFlashAttentionScoreV2GetWorkspaceSize, aclnnFlashAttentionScoreV2;
    3 V3: aclnnFlashAttentionScoreV3GetWorkspaceSize, aclnnFlashAttentionScoreV3;
    4 V4: aclnnFlashAttentionScoreV4GetWorkspaceSize, aclnnFlashAttentionScoreV4;
}

/// The arguments of a version of FlashAttentionVarLenScore, each of which has a list of its own.
macro_rules! var_len_arguments {
    ($($arguments_of_version:ident)::+ { $($version:tt)* }) => {
        flash_attention_var_len_score_arguments! { $($version)* }
    };
}

attention_functions! {
    var_len_arguments;
    1 VarLenV1: aclnnFlashAttentionVarLenScoreGetWorkspaceSize, aclnnFlashAttentionVarLenScore;
    2 VarLenV2: aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV2;
    3 VarLenV3: aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV3;
    4 VarLenV4: aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV4;
    5 VarLenV5: aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV5;
}
