//! A pure description of one call of IncreFlashAttention.

use super::Version;
use crate::TensorDesc;
use crate::fia::FiaCall;

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case; `None` and an empty list are null pointers. The values are what a
/// caller wrote, right or wrong: [`IncreCall::check`] tells.
///
/// Source: aclnnIncreFlashAttention V1 to V4, parameter tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IncreCall<'a> {
    /// Queries, one row a sequence, in the order of `input_layout`.
    pub query: Option<TensorDesc>,
    /// Keys: one tensor, or one for each batch entry.
    pub key: &'a [TensorDesc],
    /// Values, as `key`.
    pub value: &'a [TensorDesc],
    /// Additive position bias.
    pub pse_shift: Option<TensorDesc>,
    /// Mask; 1 hides.
    pub atten_mask: Option<TensorDesc>,
    /// Lengths of keys and values, whatever the name says.
    pub actual_seq_lengths: Option<&'a [i64]>,
    /// Dequantisation after Q K^T (V2).
    pub dequant_scale1: Option<TensorDesc>,
    /// Quantisation of the probabilities (V2).
    pub quant_scale1: Option<TensorDesc>,
    /// Dequantisation after P V (V2).
    pub dequant_scale2: Option<TensorDesc>,
    /// Quantisation scale of the output (V2).
    pub quant_scale2: Option<TensorDesc>,
    /// Quantisation offset of the output (V2).
    pub quant_offset2: Option<TensorDesc>,
    /// Antiquantisation scale of key and value together (V3).
    pub antiquant_scale: Option<TensorDesc>,
    /// Antiquantisation offset of key and value together (V3).
    pub antiquant_offset: Option<TensorDesc>,
    /// Block table (V3); given means a paged cache.
    pub block_table: Option<TensorDesc>,
    /// Left padding of key and value (V4).
    pub kv_padding_size: Option<TensorDesc>,
    /// Number of query heads.
    pub num_heads: i64,
    /// Factor of the scores (`scaleValue`).
    pub scale: f64,
    /// Axis orders, as CANN spells them; `None` is a null pointer.
    pub input_layout: Option<&'a str>,
    /// Number of key and value heads; 0 means `num_heads`.
    pub num_key_value_heads: i64,
    /// Tokens in a block of a paged cache (V3).
    pub block_size: i64,
    /// Precision (V3).
    pub inner_precise: i64,
    /// Output.
    pub attention_out: Option<TensorDesc>,
}

impl<'a> IncreCall<'a> {
    /// `inner_precise` of the versions that have no such argument: high performance.
    pub const DEFAULT_PRECISE: i64 = 1;

    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        IncreCall {
            query: None,
            key: &[],
            value: &[],
            pse_shift: None,
            atten_mask: None,
            actual_seq_lengths: None,
            dequant_scale1: None,
            quant_scale1: None,
            dequant_scale2: None,
            quant_scale2: None,
            quant_offset2: None,
            antiquant_scale: None,
            antiquant_offset: None,
            block_table: None,
            kv_padding_size: None,
            num_heads: 1,
            scale: 1.0,
            input_layout: Some(input_layout),
            num_key_value_heads: 0,
            block_size: 0,
            inner_precise: Self::DEFAULT_PRECISE,
            attention_out: None,
        }
    }

    /// The call as `version` computes it: what the version has no argument for has its default, and the position bias that
    /// V1 and V2 take is gone.
    #[must_use]
    pub fn computed_by(&self, version: Version) -> Self {
        let mut call = *self;
        if version < Version::V4 {
            call.kv_padding_size = None;
        }
        if version < Version::V3 {
            (call.pse_shift, call.antiquant_scale, call.antiquant_offset) = (None, None, None);
            call.block_table = None;
            (call.block_size, call.inner_precise) = (0, Self::DEFAULT_PRECISE);
        }
        if version < Version::V2 {
            (call.dequant_scale1, call.quant_scale1) = (None, None);
            (call.dequant_scale2, call.quant_scale2, call.quant_offset2) = (None, None, None);
        }
        call
    }

    /// The same attention as a call of FusedInferAttentionScore.
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
            ..FiaCall::new(self.input_layout.unwrap_or_default())
        }
    }
}
