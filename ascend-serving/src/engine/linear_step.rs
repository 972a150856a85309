//! The layers of linear attention of a step in progress.

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::{AnyTensor, Element, Stream, Tensor};

use crate::backends::apart;
use crate::error::{Error, Result};
use crate::kv::no_layer;

use super::convolution_step::{ConvolutionInputs, ConvolutionStep};
use super::layer_check::{StepRows, check_output};
use super::layer_group::LayerPlace;
use super::leased_states::LeasedStates;
use super::linear_calls::{DeltaCall, DeltaRows, DeltaRun};

/// The calls that the layers of linear attention share in a step.
#[derive(Debug)]
pub(super) struct LinearStep<'a, T: Element> {
    runs: Vec<DeltaRun>,
    /// The convolutions in front of the layers, if the pool has their windows.
    convolution: Option<ConvolutionStep<T>>,
    /// What the first layer has prepared for all.
    calls: Option<Vec<DeltaCall>>,
    rows: StepRows<'a>,
}

impl<'a, T: Element> LinearStep<'a, T> {
    /// The layers of linear attention of a step that writes these states, if the model has any.
    pub(super) fn new(leased: Option<&LeasedStates<'_>>, rows: StepRows<'a>) -> Self {
        let runs = leased.map_or(Vec::new(), |leased| DeltaRun::of(leased.states()));
        let convolution = leased.and_then(|leased| ConvolutionStep::of(leased.pool(), leased.states()));
        Self { runs, convolution, calls: None, rows }
    }

    /// Queues the convolution of a layer.
    pub(super) fn convolve(
        &mut self,
        stream: &Stream,
        layer: (usize, LayerPlace),
        inputs: &ConvolutionInputs<'_, T>,
        leased: &mut LeasedStates<'_>,
    ) -> Result<Tensor<T>> {
        let Some(convolution) = &mut self.convolution else {
            return Err(no_layer(layer.0, 0));
        };
        let (pool, place) = (leased.pool(), (layer, &self.rows));
        convolution.queue_layer(pool, stream, place, inputs, || leased.begin_write())
    }

    /// Queues a layer, whose output is zero in the rows of the padding.
    pub(super) fn queue_layer(
        &mut self,
        stream: &Stream,
        (layer, place): (usize, LayerPlace),
        tensors: &DeltaTensors<'_, T>,
        into: Option<&Tensor<T>>,
        leased: &mut LeasedStates<'_>,
    ) -> Result<Tensor<T>> {
        let pool = leased.pool();
        let states = pool.layer(place.layer)?;
        let given = by_name(tensors).into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
        for (name, tensor) in given.clone() {
            self.rows.check_number(name, format_args!("layer {layer}, of linear attention"), tensor)?;
        }
        // Each call of several would refuse them for itself, behind those that have written.
        apart("the states of the pool", states.tensor(), given.clone())?;
        if let Some(output) = into {
            check_output("output", output, (stream.device(), tensors.value.shape()), given)?;
        }
        let calls = match &self.calls {
            Some(calls) => calls,
            None => {
                let calls = self.runs.iter().map(|run| run.plan(pool, stream, states, tensors));
                let calls = calls.collect::<Result<Vec<_>>>()?;
                self.calls.insert(calls.into_iter().flatten().collect())
            }
        };
        if calls.is_empty() {
            return Err(Error::invalid("requests", 0, "1 or more").fix("leave out a step without requests"));
        }
        // All rows before the first launch, so that nothing is written where one is refused.
        calls.iter().try_for_each(|call| DeltaRows::of(tensors, call.rows()).map(drop))?;
        let output = match into {
            Some(output) => output.clone(),
            None => Tensor::empty(stream.device(), tensors.value.shape())?,
        };
        let mut end = 0;
        for call in calls {
            let mut part = output.narrow(0, call.rows())?;
            let launched = call.launch_into(stream, states, &DeltaRows::of(tensors, call.rows())?, &mut part);
            leased.note_call(launched)?;
            end = call.rows().end;
        }
        if end < self.rows.padded {
            output.narrow(0, end..self.rows.padded)?.clear(stream)?;
        }
        leased.end_write();
        Ok(output)
    }
}

/// The tensors of a layer of linear attention, by name.
pub(super) fn by_name<'a, T: Element>(tensors: &DeltaTensors<'a, T>) -> [(&'static str, Option<&'a AnyTensor>); 6] {
    let DeltaTensors { query, key, value, beta, g, gk, .. } = *tensors;
    [
        ("query", Some(query)),
        ("key", Some(key)),
        ("value", Some(value)),
        ("beta", Some(beta)),
        ("g", g.map(|tensor| &**tensor)),
        ("gk", gk.map(|tensor| &**tensor)),
    ]
}
