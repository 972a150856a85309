//! The causal convolutions in front of the layers of linear attention of a step in progress, over the windows of
//! requests in a pool of states.

use ascend_attention::spec::TensorDesc;
use ascend_attention::{AnyTensor, Device, Element, Stream, Tensor, Violation};

use crate::backends::apart;
use crate::error::Result;
use crate::kv::{StateLease, StatePool};
use crate::rules;

use super::convolution_calls::{ConvolutionCalls, ConvolutionRows, ConvolutionTensors};
use super::layer_check::StepRows;
use super::layer_group::LayerPlace;

/// What the convolution of a layer of linear attention computes with: what the model projects, and its weights. From
/// the pair `(&x, &weight)`.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until a step convolves them"]
pub struct ConvolutionInputs<'a, T: Element> {
    pub(crate) x: &'a Tensor<T>,
    pub(crate) weight: &'a Tensor<T>,
    pub(crate) bias: Option<&'a Tensor<T>>,
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>)> for ConvolutionInputs<'a, T> {
    /// Rows `[tokens, channels]`, with the padding of the metadata, and weights `[width, channels]`, which are the
    /// model's `[channels, width]` transposed.
    fn from((x, weight): (&'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self { x, weight, bias: None }
    }
}

impl<'a, T: Element> ConvolutionInputs<'a, T> {
    /// Sets what is added to each sum, `[channels]`.
    pub fn bias(mut self, bias: &'a Tensor<T>) -> Self {
        self.bias = Some(bias);
        self
    }
}

/// The shapes and strides of the rows, the weights and the bias of a layer.
#[derive(Clone, Copy, Debug)]
struct ConvolutionForm([Option<TensorDesc>; 3]);

impl ConvolutionForm {
    const NAMES: [&'static str; 3] = ["x", "weight", "bias"];

    /// The form of tensors of a device.
    fn of<T: Element>(inputs: &ConvolutionInputs<'_, T>, device: &Device) -> Result<Self> {
        let given: [Option<&AnyTensor>; 3] = [Some(inputs.x), Some(inputs.weight), inputs.bias.map(|bias| &**bias)];
        for (name, tensor) in Self::NAMES.into_iter().zip(given) {
            tensor.map_or(Ok(()), |tensor| tensor.check_device(name, device))?;
        }
        Ok(Self(given.map(|tensor| tensor.map(|tensor| *tensor.desc()))))
    }

    /// Refuses a layer with tensors of another form than the first one's, for which the plan is made.
    fn check_same(self, first: Self, layer: usize) -> Result<(), Violation> {
        for ((name, given), planned) in Self::NAMES.into_iter().zip(self.0).zip(first.0) {
            let is_same = match (given, planned) {
                (Some(given), Some(planned)) => planned.lies_as(&given),
                (given, planned) => given.is_none() && planned.is_none(),
            };
            if !is_same {
                let text = |desc: Option<TensorDesc>| desc.map_or_else(|| "none".to_owned(), |desc| desc.to_string());
                return Err(Violation::new(
                    &rules::STEP_LAYERS,
                    format_args!("{name} {} in the convolution of layer {layer}", text(given)),
                    format_args!("{}, as in the step's first one", text(planned)),
                    "bring rows and weights of one shape, with the same strides, to every convolution of a step, and \
                     a bias to every one or to none; zeros are no bias",
                ));
            }
        }
        Ok(())
    }
}

/// What the convolutions of a step share.
#[derive(Debug)]
pub(super) struct ConvolutionStep<T: Element> {
    numbers: ConvolutionRows,
    /// What the first layer has prepared for all, and the form of its tensors.
    calls: Option<Box<(ConvolutionCalls<T>, ConvolutionForm)>>,
    /// New rows of the requests, in front of the padding.
    rows: usize,
}

impl<T: Element> ConvolutionStep<T> {
    /// The convolutions of the states of a step; `None` where the pool has none.
    pub(super) fn of(pool: &StatePool, states: &[StateLease]) -> Option<Self> {
        let front = pool.shape().convolution?.front();
        let rows = states.iter().fold(0usize, |sum, state| sum.saturating_add(state.new_tokens()));
        let numbers = ConvolutionRows::of(front, states, (0, rows));
        Some(Self { numbers, calls: None, rows })
    }

    /// Queues the convolution of a layer, and says before the first call that windows are written. Nothing is written
    /// where the tensors are refused.
    pub(super) fn queue_layer(
        &mut self,
        pool: &StatePool,
        stream: &Stream,
        ((layer, place), step_rows): ((usize, LayerPlace), &StepRows<'_>),
        inputs: &ConvolutionInputs<'_, T>,
        wrote: impl FnOnce(),
    ) -> Result<Tensor<T>> {
        let form = ConvolutionForm::of(inputs, stream.device())?;
        let &ConvolutionInputs { x, weight, bias } = inputs;
        step_rows.check_number("x", format_args!("layer {layer}, of linear attention"), x)?;
        if let Some((_, first)) = self.calls.as_deref() {
            form.check_same(*first, layer)?;
        }
        let windows = pool.windows(place.layer)?.clone().typed::<T>()?;
        let rows = x.narrow(0, 0..self.rows)?;
        let keeps = self.numbers.keeps();
        if keeps && !rows.is_contiguous() {
            let given = format_args!("x {} in layer {layer}, of linear attention, with drafts", x.desc());
            return Err(rules::STEP_CONTIGUOUS.broken(given, "row-major strides").into());
        }
        // Before rows are copied; the call itself would refuse them too late.
        let read = [Some(("x", &**x)), Some(("weight", &**weight)), bias.map(|bias| ("bias", &**bias))];
        apart("the windows of the pool", &windows, read.into_iter().flatten())?;
        let tensors = ConvolutionTensors { x: &rows, weight, bias, windows: &windows };
        let (calls, _) = &**match &self.calls {
            Some(planned) => planned,
            None => {
                let calls = ConvolutionCalls::plan(pool, stream, (&self.numbers, keeps), tensors)?;
                self.calls.insert(Box::new((calls, form)))
            }
        };
        let y = Tensor::empty(stream.device(), x.shape())?;
        let tensors = match calls.own_rows() {
            None => tensors,
            Some(own) => {
                own.copy_from(stream, &rows)?;
                ConvolutionTensors { x: own, ..tensors }
            }
        };
        calls.launch(stream, tensors, &mut y.narrow(0, 0..self.rows)?, wrote)?;
        y.narrow(0, self.rows..step_rows.padded)?.clear(stream)?;
        Ok(y)
    }
}
