//! Outputs that follow from a call's inputs.

use super::rules::heads::kv_heads;
use super::{Cache, FiaCall};
use crate::layout::Extents;
use crate::{DType, Layout, Target, TensorDesc};

impl FiaCall<'_> {
    /// Descriptions of `attentionOut` and, if the call writes it, `softmaxLse`, as they follow from inputs and
    /// attributes, whatever outputs the call has.
    ///
    /// Where a wrong call implies no output shape, the output has the query's: a check then reports what is wrong
    /// rather than a missing output. An output that no memory could hold is left out.
    ///
    /// ```
    /// use ascend_spec::ops::fused_infer_attention_score::FiaCall;
    /// use ascend_spec::{DType, TensorDesc};
    ///
    /// let half = |shape: &[i64]| TensorDesc::contiguous(DType::Float16, shape);
    /// let keys = [half(&[2, 1, 96, 64]).unwrap()];
    /// let mut call = FiaCall::new("BNSD_BSND");
    /// call.query = half(&[2, 4, 7, 64]);
    /// (call.key, call.value) = (&keys, &keys);
    /// (call.num_heads, call.num_key_value_heads) = (4, 1);
    /// let (attention_out, softmax_lse) = call.implied_outputs();
    /// assert_eq!(attention_out, half(&[2, 7, 4, 64]));
    /// assert_eq!(softmax_lse, None);
    /// ```
    pub fn implied_outputs(&self) -> (Option<TensorDesc>, Option<TensorDesc>) {
        let extents = self.output_extents();
        let shape = match (extents, &self.query) {
            (Some((layout, extents)), _) => Some(layout.out_shape(extents)),
            (None, query) => query.map(|query| query.shape),
        };
        let attention_out = shape.map(|shape| TensorDesc::packed(self.output_dtype(), shape));
        let softmax_lse = extents
            .filter(|_| self.softmax_lse_flag)
            .map(|(layout, extents)| TensorDesc::packed(DType::Float, layout.lse_shape(extents)));
        (attention_out.filter(|out| out.byte_range().is_some()), softmax_lse.filter(|lse| lse.byte_range().is_some()))
    }

    /// Whether `softmaxLse` of a call with a learnable sink is known to include the sink, as the maximum and the
    /// denominator of its softmax do: true on Ascend 950. For other products nothing is documented, so partial
    /// results with sinks cannot be merged there by their log-sum-exps.
    pub fn lse_counts_sink(target: Target) -> bool {
        target.is_950()
    }

    /// The output's type: INT8 with an output quantisation; with a quantised query the type of its rotary part, or
    /// FLOAT16; else the query's.
    fn output_dtype(&self) -> DType {
        let dtype = |tensor: &Option<TensorDesc>| tensor.map(|tensor| tensor.dtype);
        if self.quant_scale2.is_some() {
            return DType::Int8;
        }
        match dtype(&self.query) {
            Some(DType::Int8 | DType::HiFloat8 | DType::Float8E4M3Fn) => {
                dtype(&self.query_rope).unwrap_or(DType::Float16)
            }
            query => query.unwrap_or(DType::Float16),
        }
    }

    /// Layout and axes of the output.
    fn output_extents(&self) -> Option<(Layout, Extents)> {
        let layout = Layout::parse(self.input_layout)?;
        let query = self.query.as_ref()?;
        let extents = layout.input().extents(&query.shape, self.num_heads)?;
        let dim = self.value_head_dim(layout)?;
        Some((layout, Extents { dim, ..extents }))
    }

    /// Head dimension of the value.
    fn value_head_dim(&self, layout: Layout) -> Option<i64> {
        let value = self.value.first()?;
        let heads = kv_heads(self);
        let Extents { dim, .. } = match self.block_table {
            Some(_) => Cache::of_rank(value.shape.rank())?.extents(value, heads)?,
            None => layout.input().extents(&value.shape, heads)?,
        };
        match value.dtype {
            // Each INT32 holds eight INT4.
            DType::Int32 => dim.checked_mul(8),
            _ => Some(dim),
        }
    }
}
