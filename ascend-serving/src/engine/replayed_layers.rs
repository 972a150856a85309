//! Steps that are replayed from graphs, layer by layer.

use std::fmt;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::backends::{LatentForm, LayerInputs, LayerTensors};
use crate::error::{Error, Result};
use crate::graphs::{CachedLayer, CapturedGroup, GraphTensors, LentTensors, Replays, check_captured, copy_rows};
use crate::kv::{QueuedLayers, no_layer};
use crate::rules;

use super::convolution_step::ConvolutionInputs;
use super::layer_check::{STEP_HEADS_FIX, StepRows, check_output};
use super::layer_group::LayerPlace;
use super::leased_states::LeasedStates;
use super::linear_buffers::{LinearBuffers, LinearGraphTensors, SizeBuffers, TypedWeights};
use super::linear_step::by_name;

/// The layers of a step that is replayed from graphs, and what was captured with them.
pub(super) struct ReplayedLayers<'a, T: Element> {
    pub(super) replays: Replays<'a, SizeBuffers<T>>,
    /// The number of layers: the graphs of convolutions come after theirs.
    pub(super) layers: usize,
    pub(super) groups: &'a [CapturedGroup],
    /// For each group the cache of each of its layers.
    pub(super) caches: &'a [Vec<CachedLayer<T>>],
    /// The sinks of each layer; empty without sinks.
    pub(super) sinks: &'a [Option<AnyTensor>],
    /// The weights of the convolution of each layer of linear attention; empty without convolutions.
    pub(super) convolutions: &'a [TypedWeights<T>],
    pub(super) rows: StepRows<'a>,
    /// The loans of each group's tensors, and behind these of those for layers of linear attention.
    pub(super) lent: Vec<LentTensors>,
    /// The layer whose convolution was replayed last, counted among those of linear attention.
    pub(super) convolved: Option<usize>,
}

/// How to bring the sinks of a captured layer.
const SINKS_FIX: &str = "leave the sinks out, or bring the tensor that `GraphLimits::learnable_sinks` got for the \
     layer; for other sinks copy them into that tensor, and for sinks of layers without them capture again";

/// How to bring the tensors of a layer of linear attention.
const LINEAR_HEADS_FIX: &str = "bring the heads of the `StateShape`";

/// How to bring the weights of a captured convolution.
const WEIGHTS_FIX: &str = "bring the tensor that `GraphLimits::convolutions` got for the layer, and copy other \
     numbers into it";

impl<'a, T: Element> ReplayedLayers<'a, T> {
    /// The tensors of a layer of attention.
    pub(super) fn tensors(&self, place: LayerPlace) -> Result<&'a GraphTensors<T>> {
        let buffers = self.replays.buffers().groups.get(place.group);
        buffers.map(|buffers| &buffers.tensors).ok_or_else(|| self.missing(place))
    }

    /// The buffers of the layers of linear attention.
    pub(super) fn linear(&self, place: LayerPlace) -> Result<&'a LinearBuffers<T>> {
        self.replays.buffers().linear.as_ref().ok_or_else(|| self.missing(place))
    }

    /// Notes that the tensors of a layer are lent to be filled for it.
    pub(super) fn lend(&mut self, layer: usize, place: LayerPlace, queued: &QueuedLayers) -> Result<(), Violation> {
        self.lent.get_mut(place.group).map_or(Ok(()), |lent| lent.lend(layer, queued))
    }

    /// The loans of a layer's tensors.
    fn lent(&self, place: LayerPlace) -> LentTensors {
        self.lent.get(place.group).copied().unwrap_or_default()
    }

    fn missing(&self, place: LayerPlace) -> Error {
        no_layer(place.layer, self.layers)
    }

    /// Copies the inputs of a layer of attention into its tensors, unless they are the first rows of these, and
    /// launches its graph.
    pub(super) fn queue_attention(
        &mut self,
        stream: &Stream,
        (layer, place): (usize, LayerPlace),
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        queued: &mut QueuedLayers,
    ) -> Result<Tensor<T>> {
        let tensors = self.tensors(place)?;
        self.lent(place).check_lent(layer, queued)?;
        self.check_inputs(layer, place, inputs)?;
        let form = tensors.latent().map(|latent| latent.form.kind());
        let query_rope = inputs.absorbed_rope(layer, form, &rules::GRAPH_INPUTS)?;
        let cache = self.caches.get(place.group).and_then(|layers| layers.get(place.layer));
        let (cache, quantised) = cache.ok_or_else(|| self.missing(place))?;
        let quantised = quantised.as_ref();
        if let Some(LatentForm::Quantised(queries)) = inputs.latent.map(|latent| latent.form) {
            queries.check_latents(layer, quantised)?;
        }
        let places = tensors.places(inputs, query_rope);
        self.lent(place).check_taken(layer, places.clone().chain(tensors.scale_place(inputs)))?;
        places.clone().try_for_each(|place| self.check_rows(place, format_args!("layer {layer}"), STEP_HEADS_FIX))?;
        if let Some(output) = into {
            let scale = tensors.quantised_query.as_ref().map(|queries| &**queries.scale());
            let own = places.map(|(_, _, to)| to).chain([&*tensors.output]).chain(scale);
            let own = own.map(|own| ("that of the graph", own));
            check_output("output", output, (stream.device(), tensors.output.shape()), own)?;
            let LayerInputs { query, key, value, latent, .. } = *inputs;
            // The graph reads the sinks of the capture, which the inputs may leave out.
            let learnable_sink = self.captured_sink(layer);
            LayerTensors { layer: place.layer, query, key, value, cache, quantised, learnable_sink, latent }
                .check_outputs(Some(output))?;
        }
        tensors.copy_in(stream, inputs, query_rope)?;
        self.replays.launch(layer, queued)?;
        output_of(stream, &tensors.output, into)
    }

    /// Refuses a mask and sinks other than those of the capture.
    fn check_inputs(&self, layer: usize, place: LayerPlace, inputs: &LayerInputs<'_, T>) -> Result<(), Violation> {
        let captured = self.groups.get(place.group).and_then(|group| group.mask(place.layer));
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
        let own = self.captured_sink(layer);
        check_captured(("learnable_sink", format_args!("layer {layer}")), Some(given), own, SINKS_FIX)
    }

    /// The sinks that a layer of the model was captured with.
    fn captured_sink(&self, layer: usize) -> Option<&'a AnyTensor> {
        self.sinks.get(layer)?.as_ref()
    }

    /// Copies the tensors of a layer of linear attention into those of its graph, unless they are the first rows of
    /// these, and launches it.
    pub(super) fn queue_linear(
        &mut self,
        stream: &Stream,
        (layer, place): (usize, LayerPlace),
        inputs: &DeltaTensors<'_, T>,
        into: Option<&Tensor<T>>,
        (queued, leased): (&mut QueuedLayers, &mut LeasedStates<'_>),
    ) -> Result<Tensor<T>> {
        let own = &self.linear(place)?.tensors;
        self.lent(place).check_lent(layer, queued)?;
        let captured = own.inputs();
        let copies = by_name(inputs).into_iter().zip(by_name(&captured));
        let copies = copies.map(|((name, given), (_, captured))| (name, given, captured));
        let of_layer = format_args!("layer {layer} of linear attention");
        let overwritten = own.y.as_ref().filter(|_| self.convolved != Some(place.layer));
        for (name, given, captured) in copies.clone() {
            if let (Some(rows), Some(given)) = (overwritten, given)
                && given.overlaps(rows)
            {
                let text =
                    format_args!("{name} in layer {layer}, in rows that the convolution of another has overwritten");
                return Err(Error::shared("memory", text, "rows of the layer's own convolution, or a copy").fix(
                    "queue each layer behind its own convolution, or copy the rows before the next one; a part of them \
                     that is contiguous already is no copy, whatever `contiguous` and `reshape` return",
                ));
            }
            if let (Some(given), Some(captured)) = (given, captured) {
                self.lent(place).check_taken(layer, std::iter::once((name, given, captured)))?;
                self.check_rows((name, given, captured), of_layer, LINEAR_HEADS_FIX)?;
            }
        }
        if let Some(output) = into {
            let read = copies.clone().flat_map(|(name, given, own)| [(name, given), ("that of the graph", own)]);
            let read = read.filter_map(|(name, tensor)| Some((name, tensor?)));
            let rows = own.x.iter().chain(&own.y).chain([&own.output]);
            let others = read.chain(rows.map(|rows| ("that of the graph", &**rows)));
            check_output("output", output, (stream.device(), own.output.shape()), others)?;
        }
        copy_rows(stream, copies.filter_map(|(name, from, to)| Some((name, from?, to?))))?;
        leased.note_call(self.replays.launch(layer, queued))?;
        leased.end_write();
        output_of(stream, &own.output, into)
    }

    /// Copies what a layer convolves into its tensor, unless it is the first rows of that, and launches the graph of
    /// its convolution.
    pub(super) fn convolve(
        &mut self,
        stream: &Stream,
        (layer, place): (usize, LayerPlace),
        inputs: &ConvolutionInputs<'_, T>,
        (queued, leased): (&mut QueuedLayers, &mut LeasedStates<'_>),
    ) -> Result<Tensor<T>> {
        let (LinearGraphTensors { x: Some(x), y: Some(y), .. }, Some((weight, bias))) =
            (&self.linear(place)?.tensors, self.convolutions.get(place.layer))
        else {
            return Err(self.missing(place));
        };
        self.lent(place).check_lent(layer, queued)?;
        for (name, given, own) in [("weight", Some(inputs.weight), Some(weight)), ("bias", inputs.bias, bias.as_ref())]
        {
            let of_layer = format_args!("the convolution of layer {layer}");
            let [given, own] = [given, own].map(|tensor| tensor.map(|tensor| &**tensor));
            check_captured((name, of_layer), given, own, WEIGHTS_FIX)?;
        }
        let fix = "bring the channels of the convolution in the `StateShape`";
        self.lent(place).check_taken(layer, std::iter::once(("x", &**inputs.x, &**x)))?;
        self.check_rows(("x", inputs.x, x), format_args!("layer {layer} of linear attention"), fix)?;
        copy_rows(stream, std::iter::once(("x", &**inputs.x, &**x)))?;
        leased.note_call(self.replays.launch(self.layers + place.layer, queued))?;
        self.convolved = Some(place.layer);
        Ok(y.clone())
    }

    /// Refuses a tensor that does not fit the graph's own, of which it may leave out rows of padding.
    fn check_rows(
        &self,
        (name, given, captured): (&'static str, &AnyTensor, &AnyTensor),
        place: fmt::Arguments<'_>,
        heads_fix: &'static str,
    ) -> Result<()> {
        let of_row = captured.shape().get(1..).unwrap_or_default();
        StepRows { heads_fix, ..self.rows }.check(name, place, given, of_row)
    }
}

/// The output of a graph, or that of the caller, into which it is copied.
fn output_of<T: Element>(stream: &Stream, own: &Tensor<T>, into: Option<&Tensor<T>>) -> Result<Tensor<T>> {
    let Some(output) = into else {
        return Ok(own.clone());
    };
    output.copy_from(stream, own)?;
    Ok(output.clone())
}
