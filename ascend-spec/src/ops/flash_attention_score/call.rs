//! What an entry point reads of a call, and the outputs that its inputs imply.

use super::rules::heads::HeadDims;
use super::{FlashAttentionCall, InputLayout, Version};
use crate::{DType, TensorDesc};

impl<'a> FlashAttentionCall<'a> {
    /// `i32::MAX`, the operator's default of both token counts: no bound.
    pub const ALL_TOKENS: i64 = 2_147_483_647;

    /// A call without tensors whose attributes have the operator's defaults.
    pub fn new(input_layout: &'a str) -> Self {
        FlashAttentionCall { input_layout: Some(input_layout), ..FlashAttentionCall::default() }
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

impl FlashAttentionCall<'_> {
    /// The attention output that the inputs imply, and the maxima; the sums have the same layout. `None` without
    /// heads, without query, key and value of the layout's axes, or where memory cannot hold the outputs.
    ///
    /// ```
    /// use ascend_spec::ops::flash_attention_score::FlashAttentionCall;
    /// use ascend_spec::{DType, TensorDesc};
    ///
    /// let half = |shape: &[i64]| TensorDesc::contiguous(DType::Float16, shape);
    /// let mut call = FlashAttentionCall::new("SBH");
    /// (call.query, call.key, call.value) = (half(&[7, 2, 128]), half(&[9, 2, 64]), half(&[9, 2, 32]));
    /// call.num_heads = 4;
    /// let (attention_out, softmax) = call.implied_outputs().unwrap();
    /// assert_eq!(Some(attention_out), half(&[7, 2, 64]));
    /// assert_eq!(Some(softmax), TensorDesc::contiguous(DType::Float, &[2, 4, 7, 8]));
    /// ```
    pub fn implied_outputs(&self) -> Option<(TensorDesc, TensorDesc)> {
        let layout = InputLayout::parse(self.input_layout?)?;
        let [query, key, value] = [self.query.as_ref()?, self.key.as_ref()?, self.value.as_ref()?];
        let inputs = [query, key, value];
        let has_axes = |desc: &&TensorDesc| desc.shape.rank() == layout.rank();
        if self.num_heads < 1 || !inputs.iter().all(has_axes) {
            return None;
        }
        let (dims, _) = HeadDims::of(layout, self.num_heads, inputs);
        let out = layout.out_shape(query.shape, self.num_heads, dims.value);
        let softmax = layout.softmax_shape(query.shape, self.num_heads);
        let desc = |dtype, shape| {
            let desc = TensorDesc::packed(dtype, shape);
            let fits = desc.is_countable() && desc.byte_range().is_some();
            fits.then_some(desc)
        };
        Some((desc(query.dtype, out)?, desc(DType::Float, softmax)?))
    }
}
