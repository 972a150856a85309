//! Cached rows that are gathered and dequantised to 16 bits.

use std::ops::Range;

use ascend_attention::attention::Inputs;
use ascend_attention::spec::ops::fused_infer_attention_score::{AntiquantMode, FiaCall};
use ascend_attention::{AnyTensor, DType, Device, Element, Output, Plan, Stream, Tensor};

use crate::error::Result;
use crate::kv::{one_key_each, split};

use super::step_context::size;
use super::step_memory::tensor_bytes;

/// Keys or values of a step: quantised, and dequantised to the query's type.
pub(super) struct DenseRows<T: Element> {
    /// Integers, or the bits of 8-bit floats: `[rows, N * D]`. The rows of the step's own tokens stay 0.
    pub(super) quantised: Tensor<i8>,
    pub(super) dequantised: Tensor<T>,
    /// Scales `[rows, 1]` where each token has its own; no rows where channels have scales.
    pub(super) scales: Tensor<f32>,
    /// The calls that turn `quantised` into `dequantised`.
    dequantiser: Dequantiser,
}

/// Calls that multiply rows by their scales.
struct Dequantiser {
    plan: Plan,
    /// The stored type.
    dtype: DType,
    /// The queries of a call, all zeros.
    zeros: AnyTensor,
    rows_per_call: usize,
    calls: usize,
}

/// The scales of these rows: of channels, or else of the rows' tokens.
fn scales_of_rows(
    channels: Option<&AnyTensor>,
    tokens: &Tensor<f32>,
    rows: Range<usize>,
) -> Result<(AntiquantMode, AnyTensor)> {
    match channels {
        Some(scales) => Ok((AntiquantMode::PerChannel, scales.clone())),
        None => Ok((AntiquantMode::PerToken, tokens.narrow(0, rows)?.into())),
    }
}

impl<T: Element> DenseRows<T> {
    /// Prepares `rows` rows of keys or values like these, stored as this type, with the scales of channels or of
    /// tokens.
    pub(super) fn plan(
        device: &Device,
        rows: usize,
        like: &Tensor<T>,
        (dtype, channels): (DType, Option<&AnyTensor>),
    ) -> Result<Self> {
        let [heads, dim] = [1, 2].map(|axis| size(like, axis));
        let hidden = heads * dim;
        // All calls have one size, so that one plan serves them.
        let calls = rows.div_ceil(FiaCall::MOST_SEQUENCES as usize);
        let rows_per_call = rows.div_ceil(calls.max(1));
        let all = rows_per_call * calls;
        let elements = all * hidden;
        let quantised = device.alloc_zeroed::<i8>(elements)?;
        let quantised = Tensor::from_buffer(&quantised, [all, hidden])?;
        let dequantised = Tensor::<T>::empty(device, [all, hidden])?;
        let zeros = device.alloc_zeroed::<T>(rows_per_call * hidden)?;
        let zeros: AnyTensor = Tensor::from_buffer(&zeros, [rows_per_call, 1, hidden])?.into();
        let of_tokens = if channels.is_some() { 0 } else { all };
        let scales = device.alloc_zeroed::<f32>(of_tokens)?;
        let scales = Tensor::from_buffer(&scales, [of_tokens, 1])?;
        let some = quantised.narrow(0, 0..rows_per_call)?.reshape([rows_per_call, 1, hidden])?.bits_as(dtype)?;
        let (mode, scales_of_call) = scales_of_rows(channels, &scales, 0..rows_per_call)?;
        let inputs = Inputs::<T>::of_any(&zeros, &some, &some);
        let plan = one_key_each(heads).plan(inputs.quantisation(split(mode, &scales_of_call, &scales_of_call)))?;
        Ok(Self {
            quantised,
            dequantised,
            scales,
            dequantiser: Dequantiser { plan, dtype, zeros, rows_per_call, calls },
        })
    }

    /// Bytes of workspace of its calls.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.dequantiser.plan.workspace_bytes()
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        let zeros = self.dequantiser.zeros.len() * size_of::<T>();
        tensor_bytes(&self.quantised) + tensor_bytes(&self.dequantised) + tensor_bytes(&self.scales) + zeros
    }

    /// Queues the dequantisation of all rows.
    pub(super) fn dequantise(&self, stream: &Stream, channels: Option<&AnyTensor>) -> Result<()> {
        let Dequantiser { plan, dtype, zeros, rows_per_call, calls } = &self.dequantiser;
        for call in 0..*calls {
            let first = call * rows_per_call;
            let place = first..first + rows_per_call;
            let shape = zeros.shape();
            let quantised = self.quantised.narrow(0, place.clone())?.reshape(shape)?;
            let quantised = quantised.bits_as(*dtype)?;
            let (mode, scales_of_call) = scales_of_rows(channels, &self.scales, place.clone())?;
            let mut output = Output::from(self.dequantised.narrow(0, place)?.reshape(shape)?);
            let inputs = Inputs::of_any(zeros, &quantised, &quantised);
            let inputs = inputs.quantisation(split(mode, &scales_of_call, &scales_of_call));
            plan.launch_into(stream, inputs, &mut output)?;
        }
        Ok(())
    }

    /// The first `rows` dequantised rows, with the heads of `like`.
    pub(super) fn packed(&self, rows: usize, like: &Tensor<T>) -> Result<Tensor<T>> {
        let [heads, dim] = [1, 2].map(|axis| size(like, axis));
        Ok(self.dequantised.narrow(0, 0..rows)?.reshape([rows, heads, dim])?)
    }
}
