//! A pure description of one call of PromptFlashAttention.

use super::Version;
use crate::fia::FiaCall;
use crate::{DType, TensorDesc};

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case; `None` is a null pointer. The values are what a caller wrote, right
/// or wrong: [`PromptCall::check`] tells.
///
/// Source: aclnnPromptFlashAttention V1 to V3, parameter tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptCall<'a> {
    /// Queries, in the order of `input_layout`.
    pub query: Option<TensorDesc>,
    /// Keys.
    pub key: Option<TensorDesc>,
    /// Values.
    pub value: Option<TensorDesc>,
    /// Additive position bias.
    pub pse_shift: Option<TensorDesc>,
    /// Mask; 1 hides.
    pub atten_mask: Option<TensorDesc>,
    /// Query lengths.
    pub actual_seq_lengths: Option<&'a [i64]>,
    /// Key and value lengths (V2).
    pub actual_seq_lengths_kv: Option<&'a [i64]>,
    /// Dequantisation after Q K^T (V2).
    pub deq_scale1: Option<TensorDesc>,
    /// Quantisation of the probabilities (V2).
    pub quant_scale1: Option<TensorDesc>,
    /// Dequantisation after P V (V2).
    pub deq_scale2: Option<TensorDesc>,
    /// Quantisation scale of the output (V2).
    pub quant_scale2: Option<TensorDesc>,
    /// Quantisation offset of the output (V2).
    pub quant_offset2: Option<TensorDesc>,
    /// Number of query heads.
    pub num_heads: i64,
    /// Factor of the scores (`scaleValue`).
    pub scale: f64,
    /// Keys visible before the diagonal.
    pub pre_tokens: i64,
    /// Keys visible after the diagonal.
    pub next_tokens: i64,
    /// Axis orders, as CANN spells them; `None` is a null pointer.
    pub input_layout: Option<&'a str>,
    /// Number of key and value heads; 0 means `num_heads`.
    pub num_key_value_heads: i64,
    /// Meaning of mask and tokens (V2).
    pub sparse_mode: i64,
    /// Precision (bit 0) and correction of rows without visible keys (bit 1) (V3).
    pub inner_precise: i64,
    /// Output.
    pub attention_out: Option<TensorDesc>,
}

impl<'a> PromptCall<'a> {
    /// `inner_precise` of the versions that have no such argument: high performance.
    pub const DEFAULT_PRECISE: i64 = 1;

    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        PromptCall {
            query: None,
            key: None,
            value: None,
            pse_shift: None,
            atten_mask: None,
            actual_seq_lengths: None,
            actual_seq_lengths_kv: None,
            deq_scale1: None,
            quant_scale1: None,
            deq_scale2: None,
            quant_scale2: None,
            quant_offset2: None,
            num_heads: 1,
            scale: 1.0,
            pre_tokens: FiaCall::ALL_TOKENS,
            next_tokens: 0,
            input_layout: Some(input_layout),
            num_key_value_heads: 0,
            sparse_mode: 0,
            inner_precise: Self::DEFAULT_PRECISE,
            attention_out: None,
        }
    }

    /// The call as `version` computes it: what the version has no argument for has its default, and the position bias that
    /// V1 and V2 take is gone.
    #[must_use]
    pub fn computed_by(&self, version: Version) -> Self {
        let mut call = *self;
        if version < Version::V3 {
            call.pse_shift = None;
            call.inner_precise = Self::DEFAULT_PRECISE;
        }
        if version < Version::V2 {
            call.actual_seq_lengths_kv = None;
            call.sparse_mode = 0;
            (call.deq_scale1, call.quant_scale1, call.deq_scale2) = (None, None, None);
            (call.quant_scale2, call.quant_offset2) = (None, None);
        }
        call
    }

    /// The same attention as a call of FusedInferAttentionScore. A mask of FLOAT16, which the operator converts first, is
    /// described as what it is converted to.
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
