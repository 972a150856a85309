//! Replayed layers whose inputs are filled in place, in the tensors of their graphs.

use std::fmt;

use ascend_attention::{Element, Tensor, Violation};

use crate::error::Result;
use crate::graphs::GraphTensors;
use crate::kv::no_layer;
use crate::rules;

use super::linear_buffers::LinearGraphTensors;
use super::replayed_layers::ReplayedLayers;
use super::step::{DELTA_TENSORS, QUERY_KEY_VALUE, Step, StepCalls};

impl<'a, T: Element> Step<'a, T> {
    /// The graph's tensors of a layer of attention in a step that is replayed, to be filled in place on the step's
    /// stream before [`launch`](Self::launch). Padding rows may hold anything. The layers of a group share these
    /// tensors: until this layer is queued, no other layer of its group can be queued, nor its tensors taken. A layer
    /// whose tensors were not taken is launched on what is in them.
    ///
    /// # Errors
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) for a step without graphs, and while the tensors are lent for a
    /// layer that is not queued; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist,
    /// [`STEP_KIND`](crate::rules::STEP_KIND) for one of linear attention.
    pub fn tensors(&mut self, layer: usize) -> Result<&GraphTensors<T>> {
        self.replayed(format_args!("tensors of layer {layer}"))?;
        let place = self.place_of_kind(layer, false, QUERY_KEY_VALUE)?;
        let Self { calls: StepCalls::Replayed(replayed), layers, .. } = self else {
            return Err(no_layer(layer, 0));
        };
        replayed.lend(layer, place, layers)
    }

    /// The graphs' tensors of layers of linear attention in a step that is replayed, to be filled in place on the
    /// step's stream before [`launch_convolution`](Self::launch_convolution) and [`launch`](Self::launch). Padding rows
    /// may hold anything.
    ///
    /// # Errors
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) for a step without graphs;
    /// [`STEP_KIND`](crate::rules::STEP_KIND) where the model has no such layers.
    pub fn linear_tensors(&self) -> Result<&LinearGraphTensors<T>> {
        let replayed = self.replayed(DELTA_TENSORS)?;
        let given = format_args!("{DELTA_TENSORS}, of a model without layers of linear attention");
        let buffers = replayed.linear_buffers().map(|buffers| &buffers.tensors);
        Ok(buffers.ok_or_else(|| rules::STEP_KIND.broken(given, QUERY_KEY_VALUE))?)
    }

    /// Launches a layer's graph on the tensors that were filled. Returns at once. The output is lent as that of
    /// [`forward`](Self::forward) is.
    ///
    /// # Errors
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) for a step without graphs; as for [`forward`](Self::forward) with
    /// these tensors.
    pub fn launch(&mut self, layer: usize) -> Result<&Tensor<T>> {
        let replayed = self.replayed(format_args!("a launch of layer {layer}"))?;
        let inputs = replayed.own_inputs(self.place(layer)?)?;
        self.forward(layer, inputs)
    }

    /// Launches the graph of the convolution in front of a layer of linear attention, on the rows that were filled.
    /// Returns at once. The rows are lent as those of [`convolve`](Self::convolve) are.
    ///
    /// # Errors
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) for a step without graphs; as for [`convolve`](Self::convolve)
    /// with these rows.
    pub fn launch_convolution(&mut self, layer: usize) -> Result<&Tensor<T>> {
        let replayed = self.replayed(format_args!("a launch of the convolution of layer {layer}"))?;
        let inputs = replayed.own_rows(self.convolution_place(layer)?)?;
        self.convolve(layer, inputs)
    }

    /// The layers of a step that is replayed; a step without graphs has no tensors to be filled.
    fn replayed(&self, what: impl fmt::Display) -> Result<&ReplayedLayers<'a, T>, Violation> {
        match &self.calls {
            StepCalls::Replayed(replayed) => Ok(replayed),
            StepCalls::Planned(_) => Err(rules::STEP_IN_PLACE
                .broken(format_args!("{what}, in a step without graphs"), "a step of `AttentionGraphs::begin`")),
        }
    }
}
