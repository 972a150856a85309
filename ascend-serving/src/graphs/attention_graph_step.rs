//! A step in progress, replayed layer by layer.

use std::fmt;

use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::engine::{
    AnyLayerInputs, ConvolutionInputs, LayerInputs, LayerPlace, RangeChecker, STATES_AGAIN, STEP_HEADS_FIX, StepRows,
    latent_tensors, packed_tensors,
};
use crate::error::{Error, Result};
use crate::kv::{StepLease, no_layer};
use crate::rules;

use super::captured_group::CapturedGroup;
use super::graph_pool::GraphStep;
use super::graph_tensors::{GraphTensors, check_captured};
use super::linear_buffers::{LinearGraphTensors, SizeBuffers};
use super::linear_replay::{LinearPlace, LinearReplay, ReplayedRows};

/// A step whose layers are replayed from graphs. From [`AttentionGraphs::begin`](crate::AttentionGraphs::begin); end
/// it when the last layer is queued, as a [`Step`](crate::Step).
pub struct AttentionGraphStep<'a, T: Element> {
    /// The leases, which end after the last replay.
    pub(super) _leases: Vec<StepLease<'a, Stream>>,
    pub(super) step: GraphStep<'a, SizeBuffers<T>>,
    pub(super) layers: CapturedLayers<'a>,
    /// The layers of linear attention, if there are any.
    pub(super) linear: Option<LinearReplay<'a>>,
    pub(super) stream: &'a Stream,
    pub(super) actual: usize,
    pub(super) rows: usize,
    pub(super) range_checker: Option<&'a mut RangeChecker<T>>,
}

/// The layers of captured steps, and what was captured with them.
#[derive(Clone, Copy)]
pub(super) struct CapturedLayers<'a> {
    pub(super) places: &'a [LayerPlace],
    pub(super) groups: &'a [CapturedGroup],
    /// The sinks of each layer; empty without sinks.
    pub(super) sinks: &'a [Option<AnyTensor>],
}

impl<'a> CapturedLayers<'a> {
    fn place(self, layer: usize) -> Option<&'a LayerPlace> {
        self.places.get(layer)
    }

    /// The place of a layer of linear attention; `None` for one of attention.
    fn linear_place(self, layer: usize) -> Result<Option<LinearPlace>> {
        let place = self.place(layer).ok_or_else(|| self.missing(layer))?;
        let linear = LinearPlace { layer, own: place.layer, layers: self.places.len() };
        Ok((place.group == self.groups.len()).then_some(linear))
    }

    /// The place of a layer of linear attention, whose convolution is meant.
    fn convolution_place(self, layer: usize) -> Result<LinearPlace> {
        let given = format_args!("a convolution for layer {layer}");
        Ok(self.linear_place(layer)?.ok_or_else(|| rules::STEP_KIND.broken(given, "query, key and value"))?)
    }

    /// The refusal of a layer that does not exist.
    pub(super) fn missing(self, layer: usize) -> Error {
        no_layer(layer, self.places.len())
    }

    /// Refuses a mask and sinks other than those of the capture.
    fn check_inputs<T: Element>(self, layer: usize, inputs: &LayerInputs<'_, T>) -> Result<(), Violation> {
        let captured = self.place(layer).and_then(|place| {
            let group = self.groups.get(place.group)?;
            group.mask(place.layer)
        });
        if let (Some(given), Some(own)) = (inputs.mask, captured)
            && given != own
        {
            return Err(Violation::new(
                &rules::STEP_CAUSALITY,
                format_args!("{given} in layer {layer}"),
                own,
                "leave the mask out, since the graph has the layer's, or capture the layers with it by \
                 `Attention::capture_layers`",
            ));
        }
        // Left out, the graph has those of the capture.
        let Some(given) = inputs.learnable_sink else {
            return Ok(());
        };
        let own = self.sinks.get(layer).and_then(Option::as_ref);
        check_captured(("learnable_sink", format_args!("layer {layer}")), Some(given), own, SINKS_FIX)
    }
}

/// How to bring the sinks of a captured layer.
const SINKS_FIX: &str = "leave the sinks out, or bring the tensor that `GraphLimits::learnable_sinks` got for the \
     layer; for other sinks copy them into that tensor, and for sinks of layers without them capture again";

impl<'a, T: Element> AttentionGraphStep<'a, T> {
    /// Query tokens of the captured size, padding included.
    pub fn tokens(&self) -> usize {
        self.rows
    }

    /// The tensors of a layer of attention, to be filled in place on the step's stream before
    /// [`AttentionGraphStep::launch`]. Padding rows may hold anything.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist,
    /// [`STEP_KIND`](crate::rules::STEP_KIND) for one of linear attention.
    pub fn tensors(&self, layer: usize) -> Result<&GraphTensors<T>> {
        self.of(layer)
    }

    /// The tensors of layers of linear attention, to be filled in place on the step's stream before
    /// [`AttentionGraphStep::launch_convolution`] and [`AttentionGraphStep::launch`]. Padding rows may hold anything.
    ///
    /// # Errors
    /// [`STEP_KIND`](crate::rules::STEP_KIND) where the model has no such layers.
    pub fn linear_tensors(&self) -> Result<&LinearGraphTensors<T>> {
        let linear = self.step.buffers().linear.as_ref().map(|linear| &linear.tensors);
        let given = "tensors of the delta rule, of a model without layers of linear attention";
        Ok(linear.ok_or_else(|| rules::STEP_KIND.broken(given, "query, key and value"))?)
    }

    fn of(&self, layer: usize) -> Result<&'a GraphTensors<T>> {
        let place = self.layers.place(layer).ok_or_else(|| self.layers.missing(layer))?;
        let buffers = self.step.buffers().groups.get(place.group).map(|buffers| &buffers.tensors);
        Ok(buffers.ok_or_else(|| {
            let given = format_args!("query, key and value for layer {layer}");
            rules::STEP_KIND.broken(given, "tensors of the delta rule")
        })?)
    }

    /// What layers of linear attention share, with the place of one.
    fn linear(&mut self, place: LinearPlace) -> Result<(&mut LinearReplay<'a>, &mut GraphStep<'a, SizeBuffers<T>>)> {
        let layers = self.layers;
        let linear = self.linear.as_mut().ok_or_else(|| layers.missing(place.layer))?;
        Ok((linear, &mut self.step))
    }

    fn rows(&self) -> ReplayedRows<'a> {
        ReplayedRows { stream: self.stream, actual: self.actual, padded: self.rows }
    }

    /// Launches a layer's graph on the tensors that were filled. Returns at once.
    ///
    /// All layers of a group write the same output, and all of linear attention, so it is lent until the next call of
    /// this step. Queue work that reads it on the step's stream before that; to keep the output longer, copy it. A
    /// clone of the tensor is the same memory.
    ///
    /// # Errors
    /// As for [`GraphStep::launch`]; with a [range check](crate::AttentionGraphs::set_range_check) also the errors of
    /// its copies: the layer is queued then. For a layer of linear attention
    /// [`STEP_CONVOLUTION`](crate::rules::STEP_CONVOLUTION) before its convolution, and
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch of such a layer has failed.
    pub fn launch(&mut self, layer: usize) -> Result<&Tensor<T>> {
        let Some(place) = self.layers.linear_place(layer)? else {
            return self.launch_attention(layer);
        };
        let (linear, step) = self.linear(place)?;
        let tensors = linear.launch(step, place)?;
        self.launched_linear(layer, tensors)
    }

    fn launch_attention(&mut self, layer: usize) -> Result<&Tensor<T>> {
        let tensors = self.of(layer)?;
        self.step.launch(layer)?;
        self.note_complete();
        if let Some(checker) = &mut self.range_checker {
            let (stream, output) = (self.stream, &tensors.output);
            let inputs = [&tensors.query, &tensors.key, &tensors.value];
            match &tensors.latent() {
                Some(latent) => checker.check(stream, layer, latent_tensors(inputs, latent, output))?,
                None => checker.check(stream, layer, packed_tensors(inputs, output))?,
            }
        }
        Ok(&tensors.output)
    }

    fn launched_linear(&mut self, layer: usize, tensors: &'a LinearGraphTensors<T>) -> Result<&Tensor<T>> {
        self.note_complete();
        if let Some(checker) = &mut self.range_checker {
            let inputs = [&tensors.query, &tensors.key, &tensors.value];
            checker.check(self.stream, layer, packed_tensors(inputs, &tensors.output))?;
        }
        Ok(&tensors.output)
    }

    /// Counts the tokens of the states, once every layer is queued.
    fn note_complete(&mut self) {
        if self.step.layers.is_complete()
            && let Some(linear) = &mut self.linear
        {
            linear.advance();
        }
    }

    /// Launches the graph of the convolution in front of a layer of linear attention, on the rows that were filled.
    /// Returns at once. The rows are lent as the output of [`AttentionGraphStep::launch`] is.
    ///
    /// # Errors
    /// [`STEP_CONVOLUTION`](crate::rules::STEP_CONVOLUTION) for a layer twice, and where the
    /// [`StateShape`](crate::kv::StateShape) has no convolution; [`STEP_KIND`](crate::rules::STEP_KIND) for a layer of
    /// attention; [`STATE_TORN`](crate::rules::STATE_TORN) once a launch of such a layer has failed; as for
    /// [`GraphStep::launch`].
    pub fn launch_convolution(&mut self, layer: usize) -> Result<&Tensor<T>> {
        let place = self.layers.convolution_place(layer)?;
        let (linear, step) = self.linear(place)?;
        linear.launch_convolution(step, place)
    }

    /// Copies the rows in front of a layer of linear attention into their tensor, unless they are its first rows, and
    /// launches the graph of the convolution: [`Step::convolve`](crate::Step::convolve). They have a row for each token
    /// of the step, with the padding or without it. What it returns has the padding, which holds anything, and is lent
    /// until the next call of this step. Views of it are the same memory, also where `contiguous` or `reshape` has made
    /// them of rows that were contiguous already: the next convolution overwrites them, and
    /// [`forward`](Self::forward) refuses them then.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for rows of other shapes or strides,
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for other weights or another bias than those of the capture
    /// ([`LinearCapture::convolutions`](crate::LinearCapture::convolutions)), also where other numbers are in them;
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) as for [`forward`](Self::forward); as for
    /// [`launch_convolution`](Self::launch_convolution).
    pub fn convolve<'i>(&mut self, layer: usize, inputs: impl Into<ConvolutionInputs<'i, T>>) -> Result<&Tensor<T>> {
        let place = self.layers.convolution_place(layer)?;
        let rows = self.rows();
        let (linear, step) = self.linear(place)?;
        linear.convolve(step, rows, place, &inputs.into())
    }

    /// Copies a layer's query, key and value into its tensors, unless they are the first rows of these, and launches
    /// its graph. They have a row for each token of the step, with the padding or without it; the output has the
    /// padding, and is lent until the next call of this step ([`AttentionGraphStep::launch`]), which overwrites its
    /// memory, that of its clones too. A mask and sinks may be left out, since the graph has those of the capture. Over
    /// a cache of latents the inputs are absorbed queries, latents and both rotary parts ([`LayerInputs::latent`]). A
    /// layer of linear attention gets its [`DeltaTensors`](ascend_attention::delta_rule::DeltaTensors), as in a
    /// [`Step`](crate::Step::forward); the rows of padding of what it returns hold anything.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of
    /// other shapes; [`STEP_KIND`](crate::rules::STEP_KIND) for the inputs of a layer of the other kind;
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for another mask and
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for [shared keys](LayerInputs::shared_keys), for
    /// other sinks than those of the capture, for queries over latents
    /// that are not absorbed, for inputs without latents over a cache that has them, for latents over another, and for
    /// other decays than those of the capture;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for one that was replayed in this step,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an input that shares memory with a tensor of the graph
    /// and is not in its own place, or of linear attention for rows that the convolution of another layer has
    /// overwritten; [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for inputs of linear attention with gaps, unlike
    /// [`Step::forward`](crate::Step::forward); as for [`AnyTensor::copy_from`](ascend_attention::AnyTensor::copy_from)
    /// and [`AttentionGraphStep::launch`].
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<AnyLayerInputs<'i, T>>) -> Result<&Tensor<T>> {
        match inputs.into() {
            AnyLayerInputs::Attention(inputs) => self.forward_attention(layer, &inputs),
            AnyLayerInputs::Linear(tensors) => {
                let Some(place) = self.layers.linear_place(layer)? else {
                    let given = format_args!("tensors of the delta rule for layer {layer}");
                    return Err(rules::STEP_KIND.broken(given, "query, key and value").into());
                };
                let rows = self.rows();
                let (linear, step) = self.linear(place)?;
                let tensors = linear.forward(step, rows, place, &tensors)?;
                self.launched_linear(layer, tensors)
            }
        }
    }

    fn forward_attention(&mut self, layer: usize, inputs: &LayerInputs<'_, T>) -> Result<&Tensor<T>> {
        let tensors = self.of(layer)?;
        self.step.admits(layer)?;
        self.layers.check_inputs(layer, inputs)?;
        inputs.check_own_keys(layer, &rules::GRAPH_INPUTS)?;
        let form = tensors.latent().map(|latent| latent.form.kind());
        let query_rope = inputs.absorbed_rope(layer, form, &rules::GRAPH_INPUTS)?;
        let rows = StepRows {
            actual: self.actual,
            padded: self.rows,
            padding: false,
            fixes: [rules::STEP_TOKENS.fix, STEP_HEADS_FIX],
        };
        tensors
            .places(inputs, query_rope)
            .try_for_each(|(name, from, to)| rows.check(name, from, Some(layer), size(to, 1), Some(size(to, 2))))?;
        tensors.copy_in(self.stream, inputs, query_rope)?;
        self.launch_attention(layer)
    }

    /// Ends the step, and checks that all its layers were queued: [`Step::end`](crate::Step::end).
    ///
    /// # Errors
    /// As for [`Step::end`](crate::Step::end).
    pub fn end(self) -> Result<()> {
        let ended = self.step.end();
        match self.linear.is_some_and(|linear| linear.has_written()) {
            true => ended.map_err(|why| why.fix(STATES_AGAIN)),
            false => ended,
        }
    }
}

impl<T: Element> fmt::Debug for AttentionGraphStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionGraphStep").field("step", &self.step).finish_non_exhaustive()
    }
}
