//! What launches compute.

use std::sync::Arc;

use ascend_spec::TensorDesc;
use ascend_spec::ops::flash_attention_score::Parameter;

use crate::error::Result;
use crate::memory::Element;
use crate::operator::new_output;
use crate::runtime::Context;
use crate::tensor::Tensor;

use super::SoftmaxState;
use super::softmax_state::{Keyless, StateRows};

/// What a launch computes. Clones share device memory: see [`SoftmaxState`].
#[derive(Clone, Debug)]
pub struct FlashOutput<T: Element> {
    /// The attention output (`attentionOut`): the query's shape, with the value's head dimension.
    pub attention: Tensor<T>,
    /// Maximum and sum of each row (`softmaxMax`, `softmaxSum`).
    pub softmax: SoftmaxState,
}

/// The outputs of a planned call.
#[derive(Debug)]
pub(crate) struct PlannedOutput {
    pub(crate) attention: TensorDesc,
    /// Descriptor of the maxima, and of the sums.
    pub(crate) softmax: TensorDesc,
    pub(crate) rows: StateRows,
    pub(crate) keyless: Keyless,
}

impl PlannedOutput {
    /// New tensors with unspecified content.
    pub(crate) fn empty<T: Element>(&self, context: &Arc<Context>) -> Result<FlashOutput<T>> {
        Ok(FlashOutput {
            attention: new_output(context, Parameter::AttentionOut.name(), self.attention)?,
            softmax: SoftmaxState::empty(
                context,
                self.softmax,
                self.rows.clone(),
                self.keyless.clone(),
            )?,
        })
    }
}
