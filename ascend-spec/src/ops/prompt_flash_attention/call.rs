//! What a version of PromptFlashAttention reads of a call, and the same attention as a call of
//! FusedInferAttentionScore.

use super::{PromptCall, Version};
use crate::ops::fused_infer_attention_score::FiaCall;
use crate::{DType, TensorDesc};

impl<'a> PromptCall<'a> {
    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        PromptCall {
            input_layout: Some(input_layout),
            ..PromptCall::default()
        }
    }

    /// The call as `version` computes it: arguments that the version does not have are set to their defaults, and so
    /// is the position bias that V1 and V2 take and ignore.
    #[must_use]
    pub fn computed_by(&self, version: Version) -> Self {
        self.keeping(|parameter| version.computes(parameter))
    }

    /// This call as a call of FusedInferAttentionScore that computes the same attention. A mask of FLOAT16, which the
    /// operator converts first, is described by the type that it is converted to.
    pub fn as_fused(&'a self) -> FiaCall<'a> {
        let mask = self.atten_mask.map(|mask| TensorDesc {
            dtype: match mask.dtype {
                DType::Float16 => DType::Bool,
                dtype => dtype,
            },
            ..mask
        });
        FiaCall {
            query: self.query,
            key: self.key.as_slice(),
            value: self.value.as_slice(),
            pse_shift: self.pse_shift,
            atten_mask: mask,
            actual_seq_lengths: self.actual_seq_lengths,
            actual_seq_lengths_kv: self.actual_seq_lengths_kv,
            deq_scale1: self.deq_scale1,
            quant_scale1: self.quant_scale1,
            deq_scale2: self.deq_scale2,
            quant_scale2: self.quant_scale2,
            quant_offset2: self.quant_offset2,
            num_heads: self.num_heads,
            scale: self.scale,
            pre_tokens: self.pre_tokens,
            next_tokens: self.next_tokens,
            num_key_value_heads: self.num_key_value_heads,
            sparse_mode: self.sparse_mode,
            inner_precise: self.inner_precise,
            attention_out: self.attention_out,
            ..FiaCall::new(self.input_layout.unwrap_or_default())
        }
    }
}
