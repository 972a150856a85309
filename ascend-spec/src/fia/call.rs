//! A pure description of one call of FusedInferAttentionScore.

use crate::{Cann, DType, Target, TensorDesc};

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case, without `Optional`; `None` is a null pointer. The values are
/// what a caller wrote, right or wrong: [`FiaCall::check`] tells.
///
/// Source: aclnnFusedInferAttentionScore V1 to V5, parameter tables.
#[derive(Clone, Debug, PartialEq)]
pub struct FiaCall<'a> {
    /// Queries, in the order of `input_layout`.
    pub query: Option<TensorDesc>,
    /// Keys: one tensor, or one for each batch entry. Empty stands for a null or empty list.
    pub key: &'a [TensorDesc],
    /// Values, as `key`.
    pub value: &'a [TensorDesc],
    /// Additive position bias.
    pub pse_shift: Option<TensorDesc>,
    /// Mask; 1 hides.
    pub atten_mask: Option<TensorDesc>,
    /// Query lengths.
    pub actual_seq_lengths: Option<&'a [i64]>,
    /// Key and value lengths.
    pub actual_seq_lengths_kv: Option<&'a [i64]>,
    /// Dequantisation after Q K^T.
    pub deq_scale1: Option<TensorDesc>,
    /// Quantisation of the probabilities.
    pub quant_scale1: Option<TensorDesc>,
    /// Dequantisation after P V.
    pub deq_scale2: Option<TensorDesc>,
    /// Quantisation scale of the output.
    pub quant_scale2: Option<TensorDesc>,
    /// Quantisation offset of the output.
    pub quant_offset2: Option<TensorDesc>,
    /// Antiquantisation scale of key and value together.
    pub antiquant_scale: Option<TensorDesc>,
    /// Antiquantisation offset of key and value together.
    pub antiquant_offset: Option<TensorDesc>,
    /// Block table; given means a paged cache.
    pub block_table: Option<TensorDesc>,
    /// Left padding of the query.
    pub query_padding_size: Option<TensorDesc>,
    /// Left padding of key and value.
    pub kv_padding_size: Option<TensorDesc>,
    /// Antiquantisation scale of the key (V2).
    pub key_antiquant_scale: Option<TensorDesc>,
    /// Antiquantisation offset of the key (V2).
    pub key_antiquant_offset: Option<TensorDesc>,
    /// Antiquantisation scale of the value (V2).
    pub value_antiquant_scale: Option<TensorDesc>,
    /// Antiquantisation offset of the value (V2).
    pub value_antiquant_offset: Option<TensorDesc>,
    /// Shared prefix of the key (V2).
    pub key_shared_prefix: Option<TensorDesc>,
    /// Shared prefix of the value (V2).
    pub value_shared_prefix: Option<TensorDesc>,
    /// Valid length of the shared prefix (V2).
    pub actual_shared_prefix_len: Option<&'a [i64]>,
    /// Rotary part of the query (V3).
    pub query_rope: Option<TensorDesc>,
    /// Rotary part of the key (V3).
    pub key_rope: Option<TensorDesc>,
    /// Reserved (V3).
    pub key_rope_antiquant_scale: Option<TensorDesc>,
    /// Dequantisation scale of the query (V4).
    pub dequant_scale_query: Option<TensorDesc>,
    /// One extra logit a head (V4).
    pub learnable_sink: Option<TensorDesc>,
    /// First position of the queries (V5).
    pub q_start_idx: Option<&'a [i64]>,
    /// First position of the keys (V5).
    pub kv_start_idx: Option<&'a [i64]>,
    /// Number of query heads.
    pub num_heads: i64,
    /// Factor of the scores (`scaleValue`).
    pub scale: f64,
    /// Keys visible before the diagonal.
    pub pre_tokens: i64,
    /// Keys visible after the diagonal.
    pub next_tokens: i64,
    /// Axis orders, as CANN spells them.
    pub input_layout: &'a str,
    /// Number of key and value heads; 0 means `num_heads`.
    pub num_key_value_heads: i64,
    /// Meaning of mask and tokens.
    pub sparse_mode: i64,
    /// Precision (bit 0) and correction of rows without visible keys (bit 1).
    pub inner_precise: i64,
    /// Tokens in a block of a paged cache.
    pub block_size: i64,
    /// Kind of antiquantisation of key and value together.
    pub antiquant_mode: i64,
    /// Whether the log-sum-exp is written.
    pub softmax_lse_flag: bool,
    /// Kind of antiquantisation of the key (V2).
    pub key_antiquant_mode: i64,
    /// Kind of antiquantisation of the value (V2).
    pub value_antiquant_mode: i64,
    /// Kind of quantisation of the query (V4).
    pub query_quant_mode: i64,
    /// Kind of position bias (V5).
    pub pse_type: i64,
    /// Output.
    pub attention_out: Option<TensorDesc>,
    /// Log-sum-exp of each row.
    pub softmax_lse: Option<TensorDesc>,
}

impl<'a> FiaCall<'a> {
    /// `i32::MAX`, the operator's default of both token counts: no bound.
    pub const ALL_TOKENS: i64 = 2_147_483_647;

    /// Most query rows of a sequence that the decode path takes, where it takes several.
    pub const MOST_DECODE_ROWS: i64 = 16;

    /// Most rows of a packed query, all sequences together.
    pub const MOST_PACKED_ROWS: i64 = 1_048_576;

    /// Most query rows of a sequence that the decode path takes on `target` under a query of `dtype`.
    pub(in crate::fia) fn most_decode_rows(target: Target, dtype: DType) -> i64 {
        if target.cann >= Cann::V9_1 && dtype == DType::Int8 {
            32
        } else {
            Self::MOST_DECODE_ROWS
        }
    }

    /// A call without tensors whose attributes have the operator's defaults, except `inner_precise`, which is 0 (high
    /// precision) as in the frameworks rather than the operator definition's 1.
    pub fn new(input_layout: &'a str) -> Self {
        FiaCall {
            query: None,
            key: &[],
            value: &[],
            pse_shift: None,
            atten_mask: None,
            actual_seq_lengths: None,
            actual_seq_lengths_kv: None,
            deq_scale1: None,
            quant_scale1: None,
            deq_scale2: None,
            quant_scale2: None,
            quant_offset2: None,
            antiquant_scale: None,
            antiquant_offset: None,
            block_table: None,
            query_padding_size: None,
            kv_padding_size: None,
            key_antiquant_scale: None,
            key_antiquant_offset: None,
            value_antiquant_scale: None,
            value_antiquant_offset: None,
            key_shared_prefix: None,
            value_shared_prefix: None,
            actual_shared_prefix_len: None,
            query_rope: None,
            key_rope: None,
            key_rope_antiquant_scale: None,
            dequant_scale_query: None,
            learnable_sink: None,
            q_start_idx: None,
            kv_start_idx: None,
            num_heads: 1,
            scale: 1.0,
            pre_tokens: Self::ALL_TOKENS,
            next_tokens: Self::ALL_TOKENS,
            input_layout,
            num_key_value_heads: 0,
            sparse_mode: 0,
            inner_precise: 0,
            block_size: 0,
            antiquant_mode: 0,
            softmax_lse_flag: false,
            key_antiquant_mode: 0,
            value_antiquant_mode: 0,
            query_quant_mode: 0,
            pse_type: 0,
            attention_out: None,
            softmax_lse: None,
        }
    }

    /// `sparse_mode` as the operator reads it: in 32 bits.
    pub(in crate::fia) fn mode(&self) -> i64 {
        i64::from(self.sparse_mode as i32)
    }

    /// The mask that counts: one without elements is as good as none.
    pub fn mask(&self) -> Option<&TensorDesc> {
        self.atten_mask.as_ref().filter(|mask| !mask.is_empty())
    }
}
