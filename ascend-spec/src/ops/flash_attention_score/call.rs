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

    /// The value of `softmax_out_layout` that gives softmax outputs the axis order of the query.
    pub const SAME_AS_INPUT: &'static str = "same_as_input";

    /// The mask; `None` for one without elements, which counts as not given.
    pub fn mask(&self) -> Option<&TensorDesc> {
        self.atten_mask.as_ref().filter(|mask| !mask.is_empty())
    }

    /// The sinks; `None` for a tensor without elements, which counts as not given.
    pub fn sinks(&self) -> Option<&TensorDesc> {
        self.sink.as_ref().filter(|sink| *sink.shape != [0])
    }

    /// The call as `version` reads it: arguments that the version does not have are set to their defaults.
    #[must_use]
    pub fn read_by(&self, version: Version) -> Self {
        self.keeping(|parameter| version.has(parameter))
    }
}
