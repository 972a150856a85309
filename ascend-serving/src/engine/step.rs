//! A step in progress, layer by layer.

use std::fmt;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::{Element, Stream, Tensor};

use crate::backends::{AnyLayerInputs, LayerInputs, SelectedBackend, apart, check_deterministic};
use crate::batch::AttentionMetadata;
use crate::error::{Error, Result};
use crate::graphs::CapturedGroup;
use crate::kv::{CopiesIn, QueuedLayers, STEP_AGAIN, StepLease, check_outside_caches, no_layer};
use crate::rules;
use crate::sharing::lock;

use super::attention::Attention;
use super::convolution_step::ConvolutionInputs;
use super::layer_check::StepRows;
use super::layer_group::{LayerGroup, LayerPlace};
use super::leased_states::{LeasedStates, STATES_AGAIN};
use super::linear_step::LinearStep;
use super::planned_layers::{GroupStep, PlannedLayers};
use super::range_check::{
    CheckedStep, CheckedTensor, LayerTensor, SharedChecker, latent_tensors, packed_inputs, packed_tensors,
};
use super::replayed_layers::ReplayedLayers;

impl<T: Element> Attention<T> {
    /// Begins a step on a stream: copies the block table to the device, and queues copies of blocks that another
    /// cache of the pool has copied ([`PagedKvCache::with_pool`](crate::kv::PagedKvCache::with_pool)). Blocks given
    /// back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// Of the metadata:
    /// - [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY): it has no requests;
    /// - [`SETTINGS_CACHE`](crate::rules::SETTINGS_CACHE): its settings were made from another cache;
    /// - [`TABLE_POOL`](crate::rules::TABLE_POOL): it has blocks of another pool;
    /// - [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY), [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS): it is of other
    ///   groups of layers;
    /// - [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED): in a cache of MXFP8 tokens are computed once more in front
    ///   of others.
    ///
    /// Of its sequences:
    /// - [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED): one has changed since the metadata was made;
    /// - [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED): a step has computed the tokens, and the request does
    ///   not say [`BatchRequest::recompute`](crate::BatchRequest::recompute);
    /// - [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS): another step of one is in progress;
    /// - [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP): no step has computed tokens in front of the step;
    /// - [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING): a step left these without some layers;
    /// - [`BLOCK_GIVEN_BACK`](crate::rules::BLOCK_GIVEN_BACK): blocks went back to the pool since the metadata was
    ///   made;
    /// - [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED): copies of blocks were not queued;
    /// - [`TABLE_SHARED`](crate::rules::TABLE_SHARED): another sequence holds a block that the step writes.
    ///
    /// Of the states of their requests, with layers of linear attention:
    /// - [`STATE_REQUESTS`](crate::rules::STATE_REQUESTS): a request has no state;
    /// - [`STATE_TOKENS`](crate::rules::STATE_TOKENS): its state has not taken the tokens in front of the step, or has
    ///   taken some of the step;
    /// - [`STATE_TORN`](crate::rules::STATE_TORN): a step has written its state in some layers alone;
    /// - [`STATE_DRAFTS`](crate::rules::STATE_DRAFTS): no state could be kept behind some draft;
    /// - [`STATE_POOL`](crate::rules::STATE_POOL), [`STATE_STREAM`](crate::rules::STATE_STREAM): it is of another pool,
    ///   or the stream is not the pool's;
    /// - [`STATE_EXHAUSTED`](crate::rules::STATE_EXHAUSTED): it was forked after its growth, and there is no slot for a
    ///   copy;
    /// - [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY): the step is not causal.
    ///
    /// Of the attention and its device:
    /// - [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE): the stream is of another device;
    /// - [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE): the [`AttentionShape`](crate::AttentionShape) has a scale
    ///   that is not finite and above 0, query heads that are no multiple of its key heads, or other key heads than the
    ///   cache;
    /// - [`BACKEND_LAYERS`](crate::rules::BACKEND_LAYERS): a backend is [preferred](crate::Backends::prefer) for a
    ///   layer that the cache does not have;
    /// - [`DEVICE_DETERMINISTIC`](crate::rules::DEVICE_DETERMINISTIC): the device was asked otherwise since
    ///   [`Attention::deterministic`];
    /// - as for [`PagedKvCache::block_table`](crate::kv::PagedKvCache::block_table).
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a AttentionMetadata) -> Result<Step<'a, T>> {
        metadata.check_groups(self.groups.len())?;
        check_deterministic(self.deterministic, stream.device())?;
        if let Some(states) = &self.states {
            // Before the caches, which would take the tokens of a step that left layers out once more.
            states.check_stream(stream)?;
            LeasedStates::check(states, metadata)?;
        }
        let (mut groups, mut leases, mut progress) = (Vec::new(), Vec::new(), Vec::new());
        for (group, metadata) in self.groups.iter_mut().zip(metadata.groups()) {
            group.admits(stream, metadata)?;
            let cache = &mut group.cache;
            // Blocks that go back from here on wait for the step; those that went back before are found by the check.
            leases.push(cache.pool().begin_step(stream));
            progress.push(metadata.begin_progress(cache.entry())?);
            // After `begin_progress`, which checks that this cache has computed the tokens that are copied.
            cache.queue_copies_to(stream, metadata.sequence_blocks())?;
            metadata.check_copies_queued(cache.pool(), CopiesIn::Cache(cache.entry()))?;
            let block_table = cache.block_table(stream, metadata.table())?;
            groups.push(GroupStep::new(group, metadata, block_table));
        }
        let leased = self.states.as_deref().map(|states| LeasedStates::begin(states, stream, metadata)).transpose()?;
        let linear = LinearStep::new(leased.as_ref(), StepRows::of_step(stream, metadata, None));
        let checked = lock(&self.range_checker).as_mut().and_then(|checker| checker.begin(metadata));
        Ok(Step {
            stream,
            places: &self.places,
            tokens: metadata.tokens(),
            calls: StepCalls::Planned(PlannedLayers { groups, linear }),
            leased,
            _leases: leases,
            layers: QueuedLayers::new(self.places.len(), progress, STEP_AGAIN),
            range_checker: &self.range_checker,
            checked,
            output: None,
        })
    }
}

impl<T: Element> LayerGroup<T> {
    /// Refuses a stream, heads or metadata that do not fit the layers and their cache.
    pub(super) fn admits(&self, stream: &Stream, metadata: &AttentionMetadata) -> Result<()> {
        self.check(stream)?;
        metadata.check_requests()?;
        metadata.check_pool(self.cache.pool())?;
        metadata.check_causality(self.causality)?;
        Ok(self.cache.check_recomputed(metadata.step_tokens())?)
    }
}

/// A step in progress. From [`Attention::begin`], or replayed from graphs, from
/// [`AttentionGraphs::begin`](crate::AttentionGraphs::begin); end it when the last layer is queued, by [`Step::end`] or
/// by dropping it. Where some of its layers are missing, its tokens do not count as computed: [`Step::end`] returns an
/// error, and the next step of its sequences is refused.
/// A step that is neither ended nor dropped, as after `std::mem::forget`, leaves its sequences in progress for ever.
///
/// A step from graphs takes the same calls as one without, in the same order. A step that is replayed copies the inputs
/// of a layer into the tensors of its graph, unless they are the first rows of these, and takes a row for each token of
/// the step, with all of the padding, without any of it, or without what the graphs have added to the metadata's own.
/// Inputs that were filled [in place](Self::tensors) are not copied.
pub struct Step<'a, T: Element> {
    pub(super) stream: &'a Stream,
    /// The place of each layer of the model.
    pub(super) places: &'a [LayerPlace],
    pub(super) tokens: usize,
    pub(super) calls: StepCalls<'a, T>,
    /// The states that layers of linear attention write, if there are any.
    pub(super) leased: Option<LeasedStates<'a>>,
    pub(super) _leases: Vec<StepLease<'a>>,
    pub(super) layers: QueuedLayers,
    pub(super) range_checker: &'a SharedChecker<T>,
    /// What is known of the step where it is checked.
    pub(super) checked: Option<CheckedStep>,
    /// The output that is lent.
    pub(super) output: Option<Tensor<T>>,
}

/// The calls of a step.
pub(super) enum StepCalls<'a, T: Element> {
    Planned(PlannedLayers<'a, T>),
    Replayed(ReplayedLayers<'a, T>),
}

/// What a layer of attention is given.
pub(super) const QUERY_KEY_VALUE: &str = "query, key and value";

/// What a layer of linear attention is given.
pub(super) const DELTA_TENSORS: &str = "tensors of the delta rule";

impl<'a, T: Element> Step<'a, T> {
    /// Query tokens, padding included; of a step that is replayed those of the captured size.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the step is replayed from graphs, so that its layers lend the [tensors](Self::tensors) of their graphs.
    pub fn is_replayed(&self) -> bool {
        matches!(self.calls, StepCalls::Replayed(_))
    }

    /// Queues one layer, numbered as the model does: writes its keys and values to the step's slots, unless it
    /// [shares](LayerInputs::shared_keys) those of another layer, then attends. Returns at once. The first layer of a
    /// group with a mask and scale plans for all its layers with both, and the first one that shares keys for the
    /// others that do, where the plan of the layers with keys does not serve them. The attention is `[tokens, N, D]`;
    /// of latent attention the [`LatentForm`](crate::LatentForm) defines it, and all layers of a step have the form of
    /// the first.
    ///
    /// A layer of linear attention gets its [`DeltaTensors`], packed, with the padding of the metadata: its states take
    /// the new tokens, and it returns what these read, `[tokens, Nv, Dv]`, with zeros for the padding in a step without
    /// graphs. The first one plans for all.
    ///
    /// The output is lent until the next call of this step; a clone of the tensor is the same memory. In a step that is
    /// replayed all layers of a group write the same output, and all of linear attention: queue work that reads it on
    /// the step's stream before the next layer, or copy it there. It has the padding of the captured size, whose rows
    /// hold anything. A mask and sinks may be left out there, since the graph has those of the capture, and over a
    /// cache of latents the queries are absorbed, over latents of one byte quantised
    /// ([`LatentForm::Quantised`](crate::LatentForm::Quantised)).
    ///
    /// # Errors
    /// [`STEP_KIND`](crate::rules::STEP_KIND) for the inputs of a layer of the other kind;
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of other
    /// shapes, [`STEP_LAYERS`](crate::rules::STEP_LAYERS) for sinks or latents where the first layer of the step with
    /// the same mask and scale had none, or none where it had, for queries over latents in another form, and for other
    /// decays than those of the [`StateShape`](crate::kv::StateShape),
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before,
    /// [`STEP_SHARED_KEYS`](crate::rules::STEP_SHARED_KEYS) for [shared keys](LayerInputs::shared_keys) of one that was
    /// not, and for shared latents whose queries are not absorbed,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for a mask that shows tokens which sequences gave back,
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for one that shows more than the causality of the layer's
    /// group; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device;
    /// [`Error::NoBackend`](crate::Error::NoBackend) if no backend serves the step; as for [`CacheWrite::plan`] and
    /// [`PagedKvCache::write`](crate::kv::PagedKvCache::write). Nothing is written unless attention could be planned
    /// too; a layer that shares keys is planned when it is queued, behind the one that wrote them. With a [range
    /// check](Attention::set_range_check) also the errors of its copies; the layer is queued then. For a layer of
    /// linear attention as for
    /// [`RecurrentGatedDeltaRule::plan`](ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule::plan),
    /// [`STEP_CONVOLUTION`](crate::rules::STEP_CONVOLUTION) before its convolution, and
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch has failed between others of its layer.
    ///
    /// Of replays also [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for another mask than that of the capture and
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for shared keys, for other sinks, for queries over latents in
    /// another form, for a query beside quantised ones, for inputs without latents over a cache that has them, and for
    /// latents over another; [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an input that shares memory with an
    /// input or the output of the graph and is not in its own place, or of linear attention for rows that the
    /// convolution of another layer has overwritten; [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) also for inputs
    /// of linear attention with gaps; [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) while the tensors of the group are
    /// lent for another layer ([`tensors`](Self::tensors), [`linear_tensors`](Self::linear_tensors));
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch of linear attention has failed; as for
    /// [`GraphStep::launch`](crate::GraphStep::launch).
    ///
    /// [`CacheWrite::plan`]: crate::kv::CacheWrite::plan
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<AnyLayerInputs<'i, T>>) -> Result<&Tensor<T>> {
        // Its memory may serve this layer.
        self.output = None;
        let output = self.queue(layer, &inputs.into(), None)?;
        Ok(self.output.insert(output))
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller, of the shape that `forward` gives, into
    /// which a replay copies that of its graph. A step without graphs allocates nothing on the host from the second
    /// layer of a kind on, if the backend does not.
    ///
    /// # Errors
    /// As for [`Step::forward`]; [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape or with
    /// gaps, [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with what the layer reads,
    /// with a tensor of its graph, or with the cache or the states of any layer. Nothing is written then.
    pub fn forward_into<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<AnyLayerInputs<'i, T>>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        self.queue(layer, &inputs.into(), Some(output)).map(drop)
    }

    /// Queues the causal convolution in front of a layer of linear attention, once in a step and before the layer's
    /// [`forward`](Self::forward): the rows `[tokens, channels]` that the model projects, with the padding of the
    /// metadata. The windows of the requests take the new tokens, as their states do: in the same slots, taken back
    /// with rejected drafts. Gives rows of the same shape, with zeros for the padding, of which the model makes
    /// queries, keys and values. The first one plans for all layers.
    ///
    /// The rows are lent as the output of [`forward`](Self::forward) is. Those of a replay have the padding of the
    /// captured size, which holds anything; views of them are the same memory, also where `contiguous` or `reshape` has
    /// made them of rows that were contiguous already: the next convolution overwrites them, and `forward` refuses them
    /// then.
    ///
    /// # Errors
    /// [`STEP_CONVOLUTION`](crate::rules::STEP_CONVOLUTION) for a layer twice, and where the
    /// [`StateShape`](crate::kv::StateShape) has no convolution; [`STEP_KIND`](crate::rules::STEP_KIND) for a layer of
    /// attention; [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for another number of rows;
    /// [`STEP_LAYERS`](crate::rules::STEP_LAYERS) for rows, weights or a bias that do not lie as the first layer's;
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for rows with gaps, such as columns of a fused projection,
    /// where a request has several tokens and keeps the state behind each (`StateShape::drafts`), or that are replayed;
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for tensors that share memory with the pool's windows;
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch has failed between others of its layer; as for
    /// [`CausalConv1d::plan`](ascend_attention::causal_conv::CausalConv1d::plan). Nothing is written where the tensors
    /// are refused.
    ///
    /// Of replays also [`STEP_HEADS`](crate::rules::STEP_HEADS) for rows of other channels,
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for other weights or another bias than those of the capture
    /// ([`GraphLimits::convolutions`](crate::GraphLimits::convolutions)), also where other numbers are in them;
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY), [`STATE_TORN`](crate::rules::STATE_TORN) and launches as for
    /// [`forward`](Self::forward).
    pub fn convolve<'i>(&mut self, layer: usize, inputs: impl Into<ConvolutionInputs<'i, T>>) -> Result<&Tensor<T>> {
        self.output = None;
        let outcome = self.queue_convolution(layer, &inputs.into());
        let rows = self.layers.note_refusal(outcome)?;
        Ok(self.output.insert(rows))
    }

    pub(super) fn place(&self, layer: usize) -> Result<LayerPlace> {
        self.places.get(layer).copied().ok_or_else(|| no_layer(layer, self.places.len()))
    }

    /// The place of a layer, of linear attention or not; a layer of the other kind, which is `given` something else, is
    /// refused.
    pub(super) fn place_of_kind(&self, layer: usize, is_linear: bool, given: &str) -> Result<LayerPlace> {
        let place = self.place(layer)?;
        let groups = match &self.calls {
            StepCalls::Planned(planned) => planned.groups.len(),
            StepCalls::Replayed(replayed) => replayed.groups.len(),
        };
        if (place.group == groups) == is_linear {
            return Ok(place);
        }
        let allowed = if is_linear { QUERY_KEY_VALUE } else { DELTA_TENSORS };
        Err(rules::STEP_KIND.broken(format_args!("{given} for layer {layer}"), allowed).into())
    }

    /// The place of a layer that can be convolved.
    pub(super) fn convolution_place(&self, layer: usize) -> Result<LayerPlace> {
        let place = self.place_of_kind(layer, true, "a convolution")?;
        self.layers.check_not_repeated(layer)?;
        let leased = self.leased.as_ref();
        leased.map_or(Ok(()), |leased| leased.check_convolution(layer, place.layer))?;
        Ok(place)
    }

    fn queue_convolution(&mut self, layer: usize, inputs: &ConvolutionInputs<'_, T>) -> Result<Tensor<T>> {
        let place = self.convolution_place(layer)?;
        let Self { stream, calls, leased: Some(leased), layers, .. } = self else {
            return Err(no_layer(layer, 0));
        };
        let rows = match calls {
            StepCalls::Planned(planned) => planned.linear.convolve(stream, (layer, place), inputs, leased),
            StepCalls::Replayed(replayed) => replayed.convolve(stream, (layer, place), inputs, (layers, leased)),
        };
        if leased.has_written() {
            layers.begin_write();
        }
        let rows = rows?;
        leased.end_convolution(place.layer);
        Ok(rows)
    }

    /// Queues a layer, into a tensor of the caller or of the step, and returns it.
    fn queue(&mut self, layer: usize, inputs: &AnyLayerInputs<'_, T>, into: Option<&Tensor<T>>) -> Result<Tensor<T>> {
        let decoded = match inputs {
            AnyLayerInputs::Attention(inputs) => inputs.latent.as_ref().and_then(|latent| latent.form.mixed()),
            AnyLayerInputs::Linear(_) => None,
        };
        let outside = self
            .check_outside("output", into)
            .and_then(|()| self.check_outside("decoded", decoded.map(|(_, decoded)| decoded)));
        let outcome = outside.and_then(|()| match inputs {
            AnyLayerInputs::Attention(inputs) => self.queue_attention(layer, inputs, into),
            AnyLayerInputs::Linear(tensors) => self.queue_linear(layer, tensors, into),
        });
        if let Err(why) = &outcome
            && why.breaks(&rules::QUANTISED_FINITE)
            && let AnyLayerInputs::Attention(inputs) = inputs
        {
            // The refusal names the first row that cannot be quantised; the check reports more.
            let tensors = packed_inputs([inputs.query, inputs.key, inputs.value]).into_iter();
            if let Err(other) = self.check_tensors(layer, tensors) {
                tracing::warn!("no range check of layer {layer}, which is refused: {other}");
            }
        }
        let output = self.layers.note_outcome(layer, outcome)?;
        if let Some(leased) = self.leased.as_mut().filter(|_| self.layers.is_complete()) {
            leased.advance();
        }
        self.check_range(layer, inputs, &output)?;
        Ok(output)
    }

    /// Refuses an output of the caller over a cache or the states of any layer, which others read.
    fn check_outside(&self, name: &'static str, output: Option<&Tensor<T>>) -> Result<()> {
        let Some(output) = output else {
            return Ok(());
        };
        match &self.calls {
            StepCalls::Planned(planned) => {
                let caches = planned.groups.iter().map(|group| group.layers.cache.stored());
                check_outside_caches(name, output, caches)?;
            }
            StepCalls::Replayed(replayed) => {
                check_outside_caches(name, output, replayed.groups.iter().map(CapturedGroup::stored))?;
            }
        }
        let states = self.leased.iter().flat_map(LeasedStates::stored);
        apart(name, output, states.map(|states| ("the states", states)))
    }

    fn queue_attention(
        &mut self,
        layer: usize,
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
    ) -> Result<Tensor<T>> {
        let place = (layer, self.place_of_kind(layer, false, QUERY_KEY_VALUE)?);
        let Self { stream, calls, layers, .. } = self;
        if let StepCalls::Replayed(_) = calls {
            inputs.check_own_keys(layer, &rules::GRAPH_INPUTS)?;
        }
        match inputs.shares_keys {
            true => layers.check_written(layer)?,
            false => layers.check_not_repeated(layer)?,
        }
        match calls {
            StepCalls::Planned(planned) => planned.queue_attention(stream, place, inputs, into, layers),
            StepCalls::Replayed(replayed) => replayed.queue_attention(stream, place, inputs, into, layers),
        }
    }

    fn queue_linear(
        &mut self,
        layer: usize,
        tensors: &DeltaTensors<'_, T>,
        into: Option<&Tensor<T>>,
    ) -> Result<Tensor<T>> {
        let place = self.place_of_kind(layer, true, DELTA_TENSORS)?;
        let Self { stream, calls, leased: Some(leased), layers, .. } = self else {
            return Err(no_layer(layer, 0));
        };
        layers.check_not_repeated(layer)?;
        leased.check_layer(layer, place.layer)?;
        leased.pool().shape().check_tensors(layer, tensors)?;
        let output = match calls {
            StepCalls::Planned(planned) => planned.linear.queue_layer(stream, (layer, place), tensors, into, leased),
            StepCalls::Replayed(replayed) => {
                replayed.queue_linear(stream, (layer, place), tensors, into, (layers, leased))
            }
        };
        if leased.has_written() {
            layers.begin_write();
        }
        output
    }

    /// Passes the tensors of a queued layer to the range check, if the step is checked.
    fn check_range(&self, layer: usize, inputs: &AnyLayerInputs<'_, T>, output: &Tensor<T>) -> Result<()> {
        let inputs = match inputs {
            AnyLayerInputs::Attention(inputs) => *inputs,
            AnyLayerInputs::Linear(tensors) => LayerInputs::from((tensors.query, tensors.key, tensors.value)),
        };
        let tensors = [inputs.query, inputs.key, inputs.value];
        // Shared keys were checked when they were written, and their tensors may hold something else by now.
        let is_checked = |checked: &CheckedTensor<'_, T>| {
            !(inputs.shares_keys && matches!(checked.tensor, LayerTensor::Key | LayerTensor::Value))
        };
        match &inputs.latent {
            Some(latent) => self.check_tensors(layer, latent_tensors(tensors, latent, output).filter(is_checked)),
            None => self.check_tensors(layer, packed_tensors(tensors, output).into_iter().filter(is_checked)),
        }
    }

    fn check_tensors<'t>(&self, layer: usize, tensors: impl Iterator<Item = CheckedTensor<'t, T>>) -> Result<()>
    where
        T: 't,
    {
        let Some(step) = &self.checked else {
            return Ok(());
        };
        lock(self.range_checker).as_mut().map_or(Ok(()), |checker| checker.check(self.stream, (step, layer), tensors))
    }

    /// The backend and plan that serve a layer of the model, once it is planned, and not those of layers that share its
    /// keys. `None` in a step that is replayed, whose layers have the [backend](crate::AttentionGraphs::backend) of the
    /// capture.
    pub fn selected(&self, layer: usize) -> Option<&SelectedBackend<T>> {
        match &self.calls {
            StepCalls::Planned(planned) => Some(&planned.plan(*self.places.get(layer)?)?.selected),
            StepCalls::Replayed(_) => None,
        }
    }

    /// Ends the step, and checks that all its layers were queued. Dropping it ends it without this check, which the
    /// next step of its sequences then makes.
    ///
    /// The tokens count as computed once they are queued. After a wait, such as `download` or `synchronize`, that
    /// returns an error of the device, trust nothing that was queued on that stream since the last wait without one:
    /// [truncate](crate::kv::Sequence::truncate) the sequences to the tokens that they had computed then, or to 0, and
    /// compute the others again, or start the process again.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING): the tokens of the step do not count as computed.
    pub fn end(mut self) -> Result<()> {
        let ended = self.layers.end().map_err(Error::from);
        match self.leased.as_ref().is_some_and(LeasedStates::has_written) {
            true => ended.map_err(|why| why.fix(STATES_AGAIN)),
            false => ended,
        }
    }
}

impl<T: Element> fmt::Debug for Step<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step").field("tokens", &self.tokens).field("layers", &self.layers).finish_non_exhaustive()
    }
}
