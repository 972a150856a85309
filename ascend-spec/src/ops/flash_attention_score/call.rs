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
        self.keeping(|parameter| version.has(parameter))
    }
}
