//! Replayed layers whose inputs are filled in place, in the tensors of their graphs.

use std::fmt;

use ascend_attention::Element;

use crate::error::Result;
use crate::graphs::GraphTensors;
use crate::kv::{QueuedLayers, no_layer};
use crate::rules;

use super::layer_group::LayerPlace;
use super::linear_buffers::LinearGraphTensors;
use super::replayed_layers::ReplayedLayers;
use super::step::{DELTA_TENSORS, QUERY_KEY_VALUE, Step, StepCalls};

impl<'a, T: Element> Step<'a, T> {
    /// The graph's tensors of a layer of attention in a step that is replayed, to be filled in place on the step's
    /// stream: [`forward`](Self::forward) with their [`inputs`](GraphTensors::inputs) copies nothing. Padding rows may
    /// hold anything. The layers of a group share these tensors: until this layer is queued, no other layer of its
    /// group can be queued, nor its tensors taken. Inputs in tensors that were not taken for their layer are refused.
    ///
    /// # Errors
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) for a step without graphs, and while the tensors are
    /// lent for another layer that is not queued; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that
    /// does not exist, [`STEP_KIND`](crate::rules::STEP_KIND) for one of linear attention.
    pub fn tensors(&mut self, layer: usize) -> Result<&'a GraphTensors<T>> {
        let (replayed, place, queued) = self.lender(layer, false, format_args!("tensors of layer {layer}"))?;
        replayed.lend(layer, place, queued)?;
        replayed.tensors(place)
    }

    /// The graphs' tensors of a layer of linear attention in a step that is replayed, to be filled in place on the
    /// step's stream: [`convolve`](Self::convolve) with their `x`, and [`forward`](Self::forward) with
    /// their [`inputs`](LinearGraphTensors::inputs), copy nothing. Padding rows may hold anything. All layers of linear
    /// attention share these tensors: until this layer is queued, no other one can be convolved or queued, nor its
    /// tensors taken.
    ///
    /// # Errors
    /// As for [`tensors`](Self::tensors), with [`STEP_KIND`](crate::rules::STEP_KIND) for a layer of attention.
    pub fn linear_tensors(&mut self, layer: usize) -> Result<&'a LinearGraphTensors<T>> {
        let (replayed, place, queued) = self.lender(layer, true, format_args!("{DELTA_TENSORS} of layer {layer}"))?;
        replayed.lend(layer, place, queued)?;
        Ok(&replayed.linear(place)?.tensors)
    }

    /// The layers of a step that is replayed, the place of one of them, of linear attention or not, and what is queued;
    /// a step without graphs has no tensors to be filled.
    fn lender(
        &mut self,
        layer: usize,
        is_linear: bool,
        what: fmt::Arguments<'_>,
    ) -> Result<(&mut ReplayedLayers<'a, T>, LayerPlace, &QueuedLayers)> {
        if let StepCalls::Planned(_) = self.calls {
            let given = format_args!("{what}, in a step without graphs");
            return Err(rules::STEP_IN_PLACE.broken(given, "a step of `AttentionGraphs::begin`").into());
        }
        let place = self.place_of_kind(layer, is_linear, if is_linear { DELTA_TENSORS } else { QUERY_KEY_VALUE })?;
        match &mut self.calls {
            StepCalls::Replayed(replayed) => Ok((replayed, place, &self.layers)),
            StepCalls::Planned(_) => Err(no_layer(layer, 0)),
        }
    }
}
