//! The outputs that the inputs of a call imply.

use super::rules::heads::HeadDims;
use super::{FlashAttentionCall, InputLayout};
use crate::{DType, TensorDesc};

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
        let [query, key, value] = [
            self.query.as_ref()?,
            self.key.as_ref()?,
            self.value.as_ref()?,
        ];
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
