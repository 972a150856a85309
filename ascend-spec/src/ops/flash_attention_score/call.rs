//! A pure description of one call of FlashAttentionScore or FlashAttentionVarLenScore.

use super::Version;
use crate::TensorDesc;

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case, without `Optional`; `None` is a null pointer. The values are what
/// a caller wrote, right or wrong: [`FlashAttentionCall::check`] tells.
///
/// Source: aclnnFlashAttentionScore V1 to V4 and aclnnFlashAttentionVarLenScore V1 to V5, parameter tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashAttentionCall<'a> {
    /// Queries, in the order of `input_layout`.
    pub query: Option<TensorDesc>,
    /// Keys.
    pub key: Option<TensorDesc>,
    /// Values.
    pub value: Option<TensorDesc>,
    /// Rotary part of the query (VarLen V3, V5; V4).
    pub query_rope: Option<TensorDesc>,
    /// Rotary part of the key (VarLen V3, V5; V4).
    pub key_rope: Option<TensorDesc>,
    /// Position bias, or its slopes (`realShift`).
    pub real_shift: Option<TensorDesc>,
    /// One bit for each score: 1 keeps it.
    pub drop_mask: Option<TensorDesc>,
    /// Reserved.
    pub padding_mask: Option<TensorDesc>,
    /// Mask; 1 hides.
    pub atten_mask: Option<TensorDesc>,
    /// Dequantisation scale of the query (V4).
    pub d_scale_q: Option<TensorDesc>,
    /// Dequantisation scale of the key (V4).
    pub d_scale_k: Option<TensorDesc>,
    /// Dequantisation scale of the value (V4).
    pub d_scale_v: Option<TensorDesc>,
    /// One extra logit a head (V3, V4; VarLen V5).
    pub sink: Option<TensorDesc>,
    /// Keys that every row of a sequence sees in modes 5 and 6.
    pub prefix: Option<&'a [i64]>,
    /// Ends of the sequences in a packed query (`actualSeqQLen`).
    pub actual_seq_lengths: Option<&'a [i64]>,
    /// Ends of the sequences in packed keys and values (`actualSeqKvLen`).
    pub actual_seq_lengths_kv: Option<&'a [i64]>,
    /// First position of the queries.
    pub q_start_idx: Option<&'a [i64]>,
    /// First position of the keys.
    pub kv_start_idx: Option<&'a [i64]>,
    /// Factor of the scores (`scaleValue`).
    pub scale: f64,
    /// Share of the scores that dropout keeps.
    pub keep_prob: f64,
    /// Keys visible before the diagonal.
    pub pre_tokens: i64,
    /// Keys visible after the diagonal.
    pub next_tokens: i64,
    /// Number of query heads (`headNum`).
    pub num_heads: i64,
    /// Axis orders, as CANN spells them; `None` is a null pointer.
    pub input_layout: Option<&'a str>,
    /// Correction of rows without visible keys, in its lowest byte.
    pub inner_precise: i64,
    /// Meaning of mask and tokens.
    pub sparse_mode: i64,
    /// Kind of position bias (V2 on; VarLen V2, V3, V5).
    pub pse_type: i64,
    /// Type of a quantised call's output (V4).
    pub out_dtype: i64,
    /// Order of packed softmax outputs (VarLen V4, V5; V4).
    pub softmax_out_layout: Option<&'a str>,
    /// Seed of the operator's own dropout (V4).
    pub seed: i64,
    /// Offset of the operator's own dropout (V4).
    pub offset: i64,
    /// Maximum of each row's scores.
    pub softmax_max: Option<TensorDesc>,
    /// Sum of each row's exponentials.
    pub softmax_sum: Option<TensorDesc>,
    /// Reserved.
    pub softmax_out: Option<TensorDesc>,
    /// Output.
    pub attention_out: Option<TensorDesc>,
}

impl<'a> FlashAttentionCall<'a> {
    /// `i32::MAX`, the operator's default of both token counts: no bound.
    pub const ALL_TOKENS: i64 = 2_147_483_647;

    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        FlashAttentionCall {
            query: None,
            key: None,
            value: None,
            query_rope: None,
            key_rope: None,
            real_shift: None,
            drop_mask: None,
            padding_mask: None,
            atten_mask: None,
            d_scale_q: None,
            d_scale_k: None,
            d_scale_v: None,
            sink: None,
            prefix: None,
            actual_seq_lengths: None,
            actual_seq_lengths_kv: None,
            q_start_idx: None,
            kv_start_idx: None,
            scale: 1.0,
            keep_prob: 1.0,
            pre_tokens: Self::ALL_TOKENS,
            next_tokens: Self::ALL_TOKENS,
            num_heads: 1,
            input_layout: Some(input_layout),
            inner_precise: 0,
            sparse_mode: 0,
            pse_type: Self::DEFAULT_PSE_TYPE,
            out_dtype: 0,
            softmax_out_layout: None,
            seed: 0,
            offset: 0,
            softmax_max: None,
            softmax_sum: None,
            softmax_out: None,
            attention_out: None,
        }
    }

    /// The kind of position bias of the versions that have no `pseType`: added before the scale.
    pub const DEFAULT_PSE_TYPE: i64 = 1;

    /// The value of `softmax_out_layout` that lays softmax outputs like the query.
    pub const SAME_AS_INPUT: &'static str = "same_as_input";

    /// The mask that counts: one without elements is as good as none.
    pub fn mask(&self) -> Option<&TensorDesc> {
        self.atten_mask.as_ref().filter(|mask| !mask.is_empty())
    }

    /// The sinks that count: a tensor without elements is as good as none.
    pub fn sinks(&self) -> Option<&TensorDesc> {
        self.sink.as_ref().filter(|sink| *sink.shape != [0])
    }

    /// The call as `version` reads it: what the version has no argument for has its default.
    #[must_use]
    pub fn read_by(&self, version: Version) -> Self {
        let mut call = *self;
        let plain = FlashAttentionCall::new("");
        if !version.has_pse_type() {
            call.pse_type = plain.pse_type;
            (call.q_start_idx, call.kv_start_idx) = (None, None);
        }
        if !version.has_rope() {
            (call.query_rope, call.key_rope) = (None, None);
        }
        if !version.has_sink() {
            call.sink = None;
        }
        if !version.has_softmax_out_layout() {
            call.softmax_out_layout = None;
        }
        if !version.has_lengths() {
            (call.actual_seq_lengths, call.actual_seq_lengths_kv) = (None, None);
        }
        if version != Version::V4 {
            (call.d_scale_q, call.d_scale_k, call.d_scale_v) = (None, None, None);
            (call.out_dtype, call.seed, call.offset) = (plain.out_dtype, plain.seed, plain.offset);
        }
        call
    }

    /// Calls `visit` with every tensor that is given, and CANN's name of it.
    pub(super) fn each_tensor<E>(
        &self,
        mut visit: impl FnMut(&TensorDesc, &'static str) -> Result<(), E>,
    ) -> Result<(), E> {
        for (desc, name) in [
            (&self.query, "query"),
            (&self.key, "key"),
            (&self.value, "value"),
            (&self.query_rope, "queryRope"),
            (&self.key_rope, "keyRope"),
            (&self.real_shift, "realShift"),
            (&self.drop_mask, "dropMask"),
            (&self.padding_mask, "paddingMask"),
            (&self.atten_mask, "attenMask"),
            (&self.d_scale_q, "dScaleQ"),
            (&self.d_scale_k, "dScaleK"),
            (&self.d_scale_v, "dScaleV"),
            (&self.sink, "sink"),
            (&self.softmax_max, "softmaxMax"),
            (&self.softmax_sum, "softmaxSum"),
            (&self.softmax_out, "softmaxOut"),
            (&self.attention_out, "attentionOut"),
        ] {
            if let Some(desc) = desc {
                visit(desc, name)?;
            }
        }
        Ok(())
    }
}
