//! What a version of IncreFlashAttention reads of a call, and the same attention as a call of FusedInferAttentionScore.

use super::{IncreCall, Version};
use crate::ops::fused_infer_attention_score::FiaCall;

impl<'a> IncreCall<'a> {
    /// The layout of calls that do not name one.
    pub const DEFAULT_LAYOUT: &'static str = "BSH";

    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        IncreCall {
            input_layout: Some(input_layout),
            ..IncreCall::default()
        }
    }

    /// The call as `version` computes it: arguments that the version does not have are set to their defaults, and so
    /// is the position bias that V1 and V2 take and ignore.
    #[must_use]
    pub fn computed_by(&self, version: Version) -> Self {
        self.keeping(|parameter| version.computes(parameter))
    }

    /// This call as a call of FusedInferAttentionScore that computes the same attention.
    pub fn as_fused(&self) -> FiaCall<'a> {
        FiaCall {
            query: self.query,
            key: self.key,
            value: self.value,
            pse_shift: self.pse_shift,
            atten_mask: self.atten_mask,
            actual_seq_lengths_kv: self.actual_seq_lengths,
            deq_scale1: self.dequant_scale1,
            quant_scale1: self.quant_scale1,
            deq_scale2: self.dequant_scale2,
            quant_scale2: self.quant_scale2,
            quant_offset2: self.quant_offset2,
            antiquant_scale: self.antiquant_scale,
            antiquant_offset: self.antiquant_offset,
            block_table: self.block_table,
            kv_padding_size: self.kv_padding_size,
            num_heads: self.num_heads,
            scale: self.scale,
            num_key_value_heads: self.num_key_value_heads,
            block_size: self.block_size,
            inner_precise: self.inner_precise,
            attention_out: self.attention_out,
            ..FiaCall::new(self.input_layout.unwrap_or(Self::DEFAULT_LAYOUT))
        }
    }
}
