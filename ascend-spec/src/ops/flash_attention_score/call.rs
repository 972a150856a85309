//! What an entry point reads of a call.

use super::{FlashAttentionCall, Version};
use crate::TensorDesc;

impl<'a> FlashAttentionCall<'a> {
    /// `i32::MAX`, the operator's default of both token counts: no bound.
    pub const ALL_TOKENS: i64 = 2_147_483_647;

    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        FlashAttentionCall {
            input_layout: Some(input_layout),
            ..FlashAttentionCall::default()
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
}
