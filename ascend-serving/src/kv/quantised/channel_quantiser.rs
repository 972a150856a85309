//! Rows quantised by scales of channels.

use ascend_attention::attention::{Affine, Inputs, Quantisation};
use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::{AnyTensor, Device, Element, FusedInferAttention, Layout, Output, Plan, Queue, Tensor};

use crate::error::{Error, Result};

use super::quantised_type::QuantisedType;

/// Quantises rows by scales that are the same for all of them.
///
/// The library has no operator that quantises and nothing else. Attention with a single key returns the value of that
/// key, and FusedInferAttentionScore quantises what it computes: a call with a sequence for each row, whose query and
/// key are zeros and whose value is the row, multiplies the row by the inverses of the scales, which are FLOAT, and
/// rounds the products to the stored type.
#[derive(Debug)]
pub(crate) struct ChannelQuantiser {
    argument: &'static str,
    stored: QuantisedType,
    plan: Plan,
    /// Number of rows up to the last one that is written.
    rows: usize,
    /// Queries and keys of all rows, all zeros.
    zeros: AnyTensor,
    /// The quantised rows, of the shape of the rows, used by one layer after the other.
    quantised: Tensor<i8>,
}

impl ChannelQuantiser {
    pub(in crate::kv) fn plan<T: Element>(
        device: &Device,
        (argument, stored): (&'static str, QuantisedType),
        rows: usize,
        numbers: &Tensor<T>,
        inverses: &Tensor<f32>,
        quantised: Tensor<i8>,
    ) -> Result<Self> {
        let numbers = one_row_each(argument, numbers, rows, inverses)?;
        let zeros = device.alloc_zeroed::<T>(numbers.len())?;
        let zeros: AnyTensor = Tensor::from_buffer(&zeros, numbers.shape())?.into();
        let inputs = Inputs::<T>::of_any(&zeros, &zeros, &numbers);
        // The inverses are [N, D].
        let plan = one_key_each(inverses.shape()[0])
            .out_dtype(stored.dtype())
            .plan(inputs.quantisation(Quantisation::Output(Affine::scale(inverses))))?;
        Ok(Self { argument, stored, plan, rows, zeros, quantised })
    }

    /// Queues the quantisation of a layer's rows.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        queue: &impl Queue,
        numbers: &Tensor<T>,
        inverses: &Tensor<f32>,
    ) -> Result<&Tensor<i8>> {
        let numbers = one_row_each(self.argument, numbers, self.rows, inverses)?;
        let inputs = Inputs::<T>::of_any(&self.zeros, &self.zeros, &numbers);
        let inputs = inputs.quantisation(Quantisation::Output(Affine::scale(inverses)));
        let bytes = one_row_each(self.argument, &self.quantised, self.rows, inverses)?;
        match self.stored {
            QuantisedType::Int8 => self.launch(queue, inputs.output_type::<i8>(), &bytes)?,
            QuantisedType::Float8E4M3Fn => self.launch(queue, inputs.output_type::<Float8E4M3Fn>(), &bytes)?,
            QuantisedType::HiFloat8 => self.launch(queue, inputs.output_type::<HiFloat8>(), &bytes)?,
        }
        Ok(&self.quantised)
    }

    fn launch<Q: Element>(&self, queue: &impl Queue, inputs: Inputs<'_, Q>, bytes: &Tensor<i8>) -> Result<()> {
        let mut output = Output { attention: bytes.bits_as(Q::DTYPE)?.typed::<Q>()?, softmax_lse: None };
        Ok(self.plan.launch_into(queue, inputs, &mut output)?)
    }
}

/// The first rows `[tokens, N, D]` as sequences of one row, `[rows, 1, N * D]`.
fn one_row_each<T: Element>(
    argument: &'static str,
    rows: &Tensor<T>,
    count: usize,
    inverses: &Tensor<f32>,
) -> Result<Tensor<T>> {
    if rows.shape().get(1..) != Some(inverses.shape()) {
        return Err(Error::invalid(
            argument,
            rows.desc(),
            format_args!("[tokens, N, D] with {:?} heads and elements, as the scales have", inverses.shape()),
        )
        .fix("bring the heads and elements that the scales were made for"));
    }
    Ok(rows.narrow(0, 0..count)?.reshape([count, 1, inverses.len()])?)
}

/// A call with a sequence for each row: a row attends to its own key alone, so that the call returns the rows of the
/// value.
pub(crate) fn one_key_each(heads: usize) -> FusedInferAttention {
    FusedInferAttention::new(Layout::Bsh).heads(heads).kv_heads(heads).scale(1.0)
}
