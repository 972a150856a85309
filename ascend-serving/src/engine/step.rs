//! A step in progress, layer by layer.

use ascend_attention::attention::BlockTable;
use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::{
    LatentForm, LayerTensors, PreferredPlan, SelectedBackend, StepContext, StepPlan, check_deterministic,
};
use crate::batch::{AttentionMetadata, AttentionState, LayerMask};
use crate::error::{Error, Result};
use crate::kv::{CacheWrite, CopiesIn, StepLease, no_layer};
use crate::rules;

use super::attention::Attention;
use super::convolution_step::ConvolutionInputs;
use super::layer_check::{InputKinds, check_layer};
use super::layer_group::LayerGroup;
use super::layer_inputs::{AnyLayerInputs, LayerInputs};
use super::leased_states::{LeasedStates, STATES_AGAIN};
use super::linear_step::LinearStep;
use super::queued_layers::{QueuedLayers, STEP_AGAIN};
use super::range_check::{CheckedTensor, LayerTensor, latent_tensors, packed_inputs, packed_tensors};

impl<T: Element> Attention<T> {
    /// Begins a step on a stream: copies the block table to the device, and queues copies of blocks that another
    /// cache of the pool has copied ([`PagedKvCache::with_pool`](crate::kv::PagedKvCache::with_pool)). Blocks given
    /// back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// stream of another device, or an [`AttentionShape`](crate::AttentionShape) whose scale is not finite and above 0,
    /// whose query heads are no multiple of its key heads, or whose key heads are not those of the cache;
    /// [`SETTINGS_CACHE`](crate::rules::SETTINGS_CACHE) for metadata whose settings were made from another cache,
    /// [`TABLE_POOL`](crate::rules::TABLE_POOL) for blocks of another pool,
    /// [`BLOCK_GIVEN_BACK`](crate::rules::BLOCK_GIVEN_BACK) for blocks that went back to the pool since the metadata
    /// was made, [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED) for a sequence that changed since then,
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED) for tokens that a step has computed, unless the request
    /// says [`BatchRequest::recompute`](crate::BatchRequest::recompute),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) while another step of a sequence is in progress,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) for blocks whose copies were not queued,
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) for metadata without requests,
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for tokens that are computed once more in front of others in
    /// a cache of MXFP8,
    /// [`TABLE_SHARED`](crate::rules::TABLE_SHARED) for tokens in a block that another sequence holds,
    /// [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP) for a sequence with tokens before the step that no step has
    /// computed, [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) where a step left them without some
    /// layers; [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) and [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for
    /// metadata of other groups of layers; [`BACKEND_LAYERS`](crate::rules::BACKEND_LAYERS) for a backend that is
    /// [preferred](crate::Backends::prefer) for a layer which the cache does not have;
    /// [`DEVICE_DETERMINISTIC`](crate::rules::DEVICE_DETERMINISTIC) where the device was asked otherwise since
    /// [`Attention::deterministic`]; as for
    /// [`PagedKvCache::block_table`](crate::kv::PagedKvCache::block_table).
    ///
    /// With layers of linear attention [`STATE_REQUESTS`](crate::rules::STATE_REQUESTS) for a request without a state,
    /// [`STATE_TOKENS`](crate::rules::STATE_TOKENS) for tokens in front of the step that its state has not taken, or
    /// tokens that it has taken, [`STATE_TORN`](crate::rules::STATE_TORN) for a state that a step has written in some
    /// layers alone, [`STATE_DRAFTS`](crate::rules::STATE_DRAFTS) for drafts behind which no state could be kept,
    /// [`STATE_POOL`](crate::rules::STATE_POOL) for a state of another pool,
    /// [`STATE_EXHAUSTED`](crate::rules::STATE_EXHAUSTED) where a state was forked after its growth and there is no
    /// slot for a copy, [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for a step that is not causal,
    /// [`STATE_STREAM`](crate::rules::STATE_STREAM) for another stream than the pool's.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a AttentionMetadata) -> Result<Step<'a, T>> {
        metadata.check_groups(self.groups.len())?;
        check_deterministic(self.deterministic, stream.device())?;
        if let Some(states) = &self.states {
            // Before the caches, which would take the tokens of a step that left layers out once more.
            LeasedStates::check(states, stream, metadata)?;
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
            let layers = cache.shape().layers;
            groups.push(GroupStep {
                metadata,
                cached: None,
                block_table,
                write: None,
                planned: Vec::new(),
                plan_of: vec![None; layers],
                keys_of: vec![None; layers],
            });
        }
        let linear = self.states.as_ref().map(|states| LinearStep::begin(states, stream, metadata)).transpose()?;
        if let Some(checker) = &mut self.range_checker {
            checker.begin(metadata);
        }
        let layers = QueuedLayers::new(self.places.len(), progress, STEP_AGAIN);
        Ok(Step { attention: self, stream, groups, linear, _leases: leases, layers })
    }
}

impl<T: Element> LayerGroup<T> {
    /// Refuses a stream, heads or metadata that do not fit the layers and their cache.
    fn admits(&self, stream: &Stream, metadata: &AttentionMetadata) -> Result<()> {
        self.check(stream)?;
        metadata.check_requests()?;
        metadata.check_pool(self.cache.pool())?;
        metadata.check_causality(self.causality)?;
        Ok(self.cache.check_recomputed(metadata.step_tokens())?)
    }
}

/// A step in progress. From [`Attention::begin`]; end it when the last layer is queued, by [`Step::end`] or by
/// dropping it. Where some of its layers are missing, its tokens do not count as computed: [`Step::end`] returns an
/// error, and the next step of its sequences is refused.
/// A step that is neither ended nor dropped, as after `std::mem::forget`, leaves its sequences in progress for ever.
#[derive(Debug)]
pub struct Step<'a, T: Element> {
    attention: &'a mut Attention<T>,
    stream: &'a Stream,
    groups: Vec<GroupStep<'a, T>>,
    /// The layers of linear attention, if there are any.
    linear: Option<LinearStep<T>>,
    _leases: Vec<StepLease<'a, Stream>>,
    layers: QueuedLayers,
}

/// What the layers of a group share in a step.
#[derive(Debug)]
struct GroupStep<'a, T: Element> {
    metadata: &'a AttentionMetadata,
    /// The metadata of layers that share keys in a step whose other layers read no cache.
    cached: Option<AttentionMetadata>,
    block_table: BlockTable,
    /// The write that the first layer has prepared for all layers.
    write: Option<CacheWrite>,
    planned: Vec<LayerPlan<T>>,
    /// For each layer of the group the number of its plan.
    plan_of: Vec<Option<usize>>,
    /// For each layer that is queued where its key and value are.
    keys_of: Vec<Option<[usize; 2]>>,
}

/// The plan of the layers that have the same mask and scale, make the step one of the same kind and prefer the same
/// backend.
#[derive(Debug)]
struct LayerPlan<T: Element> {
    mask: LayerMask,
    scale: f64,
    state: AttentionState,
    shares_keys: bool,
    plan: PreferredPlan<T>,
    /// Those of the first layer with the mask.
    input_kinds: InputKinds,
}

impl<'a, T: Element> Step<'a, T> {
    /// Queues one layer, numbered as the model does: writes its keys and values to the step's slots, unless it
    /// [shares](LayerInputs::shared_keys) those of another layer, then attends. Returns at once. The first layer of a
    /// group with a mask plans for all its layers with it, and the first one that shares keys for the others that do,
    /// where the plan of the layers with keys does not serve them. The attention is `[tokens, N, D]`; of latent
    /// attention the [`LatentForm`](crate::LatentForm) defines it, and all layers of a step have the form of the first.
    ///
    /// A layer of linear attention gets its [`DeltaTensors`], packed, with the padding of the metadata: its states take
    /// the new tokens, and it returns what these read, `[tokens, Nv, Dv]`, with zeros for the padding. The first one
    /// plans for all.
    ///
    /// # Errors
    /// [`STEP_KIND`](crate::rules::STEP_KIND) for the inputs of a layer of the other kind;
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of other
    /// shapes, [`STEP_LAYERS`](crate::rules::STEP_LAYERS) for sinks or latents where the first layer of the step had
    /// none, or none where it had, and for queries over latents in another form,
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
    /// [`RecurrentGatedDeltaRule::plan`](ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule::plan), and
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch has failed between others of its layer.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<AnyLayerInputs<'i, T>>) -> Result<Tensor<T>> {
        match inputs.into() {
            AnyLayerInputs::Attention(inputs) => {
                let output = self.queue(layer, &inputs, None, |plan, stream, layer| plan.launch(stream, layer))?;
                self.check_range(layer, &inputs, &output)?;
                Ok(output)
            }
            AnyLayerInputs::Linear(tensors) => self.forward_linear(layer, &tensors, None),
        }
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller, of the shape that `forward` gives. Allocates
    /// nothing on the host from the second layer of a kind on, if the backend does not.
    ///
    /// # Errors
    /// As for [`Step::forward`]; [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with what the layer reads.
    pub fn forward_into<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<AnyLayerInputs<'i, T>>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = match inputs.into() {
            AnyLayerInputs::Attention(inputs) => inputs,
            AnyLayerInputs::Linear(tensors) => {
                if output.shape() != tensors.value.shape() || !output.is_contiguous() {
                    let planned = format!("a contiguous tensor of {:?}", tensors.value.shape());
                    return Err(Error::not_as_planned("output", output.desc(), planned));
                }
                output.check_device("output", self.stream.device())?;
                return self.forward_linear(layer, &tensors, Some(output)).map(drop);
            }
        };
        let into = output.clone();
        self.queue(layer, &inputs, Some(&into), |plan, stream, layer| plan.launch_into(stream, layer, output))?;
        self.check_range(layer, &inputs, output)
    }

    /// Queues a layer of linear attention.
    fn forward_linear(
        &mut self,
        layer: usize,
        tensors: &DeltaTensors<'_, T>,
        into: Option<&Tensor<T>>,
    ) -> Result<Tensor<T>> {
        let outcome = match self.layers.check_not_repeated(layer) {
            Ok(()) => self.queue_linear(layer, tensors, into),
            Err(repeated) => Err(repeated.into()),
        };
        let output = self.note_outcome(layer, outcome)?;
        if let Some(checker) = &mut self.attention.range_checker {
            let inputs = [tensors.query, tensors.key, tensors.value];
            checker.check(self.stream, layer, packed_tensors(inputs, &output))?;
        }
        Ok(output)
    }

    /// Queues the causal convolution in front of a layer of linear attention, once in a step and before the layer's
    /// [`forward`](Self::forward): the rows `[tokens, channels]` that the model projects, with the padding of the
    /// metadata. The windows of the requests take the new tokens, as their states do: in the same slots, taken back
    /// with rejected drafts. Returns rows of the same shape, with zeros for the padding, of which the model makes
    /// queries, keys and values. The first one plans for all layers.
    ///
    /// # Errors
    /// [`STEP_CONVOLUTION`](crate::rules::STEP_CONVOLUTION) for a layer twice, and where the
    /// [`StateShape`](crate::kv::StateShape) has no convolution; [`STEP_KIND`](crate::rules::STEP_KIND) for a layer of
    /// attention; [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for another number of rows;
    /// [`STEP_LAYERS`](crate::rules::STEP_LAYERS) for rows, weights or a bias that do not lie as the first layer's;
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for rows with gaps, such as columns of a fused projection,
    /// where a request has several tokens and keeps the state behind each (`StateShape::drafts`);
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for tensors that share memory with the pool's windows;
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch has failed between others of its layer; as for
    /// [`CausalConv1d::plan`](ascend_attention::causal_conv::CausalConv1d::plan). Nothing is written where the tensors
    /// are refused.
    pub fn convolve<'i>(&mut self, layer: usize, inputs: impl Into<ConvolutionInputs<'i, T>>) -> Result<Tensor<T>> {
        self.layers.check_not_repeated(layer)?;
        let attention = &*self.attention;
        let (Some(states), Some(linear), Some(own)) =
            (&attention.states, &mut self.linear, attention.linear_layer(layer))
        else {
            attention.group_of(layer)?;
            let given = format_args!("a convolution for layer {layer}");
            return Err(rules::STEP_KIND.broken(given, "query, key and value").into());
        };
        let convolved = linear.convolve(states, self.stream, own, &inputs.into());
        if linear.has_written() {
            self.layers.begin_write();
        }
        convolved
    }

    fn queue_linear(
        &mut self,
        layer: usize,
        tensors: &DeltaTensors<'_, T>,
        into: Option<&Tensor<T>>,
    ) -> Result<Tensor<T>> {
        let attention = &*self.attention;
        match (&attention.states, &mut self.linear, attention.linear_layer(layer)) {
            (Some(states), Some(linear), Some(own)) => {
                let queued = linear.queue_layer(states, self.stream, own, tensors, into);
                if linear.has_written() {
                    self.layers.begin_write();
                }
                queued
            }
            _ => {
                attention.group_of(layer)?;
                Err(rules::STEP_KIND
                    .broken(format_args!("tensors of the delta rule for layer {layer}"), "query, key and value")
                    .into())
            }
        }
    }

    /// Notes whether a layer was queued; once all are, the states of the step count its tokens.
    fn note_outcome<R>(&mut self, layer: usize, outcome: Result<R>) -> Result<R> {
        let outcome = self.layers.note_outcome(layer, outcome);
        if let Some(linear) = self.linear.as_mut().filter(|_| self.layers.is_complete()) {
            linear.advance();
        }
        outcome
    }

    /// Passes the tensors of a queued layer to the range check, if there is one.
    fn check_range(&mut self, layer: usize, inputs: &LayerInputs<'_, T>, output: &Tensor<T>) -> Result<()> {
        let Some(checker) = &mut self.attention.range_checker else {
            return Ok(());
        };
        let tensors = [inputs.query, inputs.key, inputs.value];
        // Shared keys were checked when they were written, and their tensors may hold something else by now.
        let is_checked = |checked: &CheckedTensor<'_, T>| {
            !(inputs.shares_keys && matches!(checked.tensor, LayerTensor::Key | LayerTensor::Value))
        };
        match &inputs.latent {
            Some(latent) => {
                let tensors = latent_tensors(tensors, latent, output);
                checker.check(self.stream, layer, tensors.filter(is_checked))
            }
            None => {
                let tensors = packed_tensors(tensors, output).into_iter();
                checker.check(self.stream, layer, tensors.filter(is_checked))
            }
        }
    }

    fn queue<R>(
        &mut self,
        layer: usize,
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        launch: impl FnOnce(&StepPlan<T>, &Stream, &LayerTensors<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let admitted = match inputs.shares_keys {
            true => self.layers.check_written(layer),
            false => self.layers.check_not_repeated(layer),
        };
        let outcome = match admitted {
            Ok(()) => self.queue_layer(layer, inputs, into, launch).map_err(|why| self.named_layer(why, layer)),
            Err(repeated) => Err(repeated.into()),
        };
        if let Err(why) = &outcome
            && why.breaks(&rules::QUANTISED_FINITE)
            && let Some(checker) = &mut self.attention.range_checker
        {
            // The refusal names the first row that cannot be quantised; the check reports more.
            let tensors = packed_inputs([inputs.query, inputs.key, inputs.value]);
            if let Err(other) = checker.check(self.stream, layer, tensors) {
                tracing::warn!("no range check of layer {layer}, which is refused: {other}");
            }
        }
        self.note_outcome(layer, outcome)
    }

    /// A refusal of a layer that is known by its number in the cache, with that in the model.
    fn named_layer(&self, mut why: Error, layer: usize) -> Error {
        if let Error::Violation(violation) = &mut why
            && let Ok((_, local)) = self.attention.group_of(layer)
            && local != layer
        {
            let of_model = format!(", in layer {layer} of the model, number {local} of its group");
            violation.given.push_str(&of_model);
        }
        why
    }

    fn queue_layer<R>(
        &mut self,
        layer: usize,
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        launch: impl FnOnce(&StepPlan<T>, &Stream, &LayerTensors<'_, T>) -> Result<R>,
    ) -> Result<R> {
        if self.attention.linear_layer(layer).is_some() {
            return Err(rules::STEP_KIND
                .broken(format_args!("query, key and value for layer {layer}"), "tensors of the delta rule")
                .into());
        }
        let (layers, places) = (&mut self.attention.groups, &self.attention.places);
        let known = places.get(layer).copied();
        let known = known.and_then(|at| Some((at, layers.get_mut(at.group)?, self.groups.get_mut(at.group)?)));
        let (place, layers, step) = known.ok_or_else(|| no_layer(layer, places.len()))?;
        let GroupStep { metadata, cached, block_table, write, planned, plan_of, keys_of } = step;
        let &LayerInputs { query, key, value, learnable_sink, latent, shares_keys, .. } = inputs;
        let keys = [key, value].map(|tensor| tensor.as_raw().addr());
        let written = keys_of.get(place.layer).copied().flatten();
        if shares_keys && written != Some(keys) {
            let given = format_args!("shared keys of layer {layer} in other tensors than it was queued with");
            return Err(rules::STEP_SHARED_KEYS.broken(given, "the same key and value").into());
        }
        if shares_keys {
            check_cached_latents(layer, latent.map(|latent| latent.form))?;
        }
        let slots = metadata.slots();
        let metadata = match shares_keys {
            false => *metadata,
            true if metadata.state().reads_cache() => *metadata,
            true => cached.get_or_insert_with(|| {
                let mut cached = metadata.clone();
                cached.read_cache();
                cached
            }),
        };
        let mask = inputs.mask.unwrap_or(metadata.mask());
        let shape = layers.shape_of(place.layer);
        let context =
            StepContext { stream: self.stream, shape, metadata, mask, block_table, recorded: false, shares_keys };
        // Clones of the handles, since writing borrows the cache mutably.
        let (layer_cache, quantised) = layers.cache.tensors(place.layer)?;
        let tensors = LayerTensors {
            layer: place.layer,
            query,
            key,
            value,
            cache: &layer_cache,
            quantised: quantised.as_ref(),
            learnable_sink,
            latent,
        };
        check_layer(&context, &tensors)?;
        tensors.check_outputs(into)?;
        let preferred = layers.backends.preferred(place.layer, metadata.state());
        let state = metadata.state();
        let is_own = |known: &LayerPlan<T>| {
            let fits = match shares_keys {
                true => !known.plan.selected.plan.reads_own_keys(),
                false => !known.shares_keys,
            };
            let is_alike = known.mask == *mask && known.scale == shape.scale && known.state == state;
            fits && is_alike && known.plan.preferred == preferred
        };
        let at = match planned.iter().position(is_own) {
            Some(at) => at,
            None => {
                layers.check_mask(mask)?;
                metadata.check_mask(mask)?;
                let at = planned.len();
                let input_kinds = InputKinds::of(&tensors);
                let plans = layers.backends.plan_layers(&context, &tensors, layers.cache.shape().layers)?;
                // That of this layer is the first of them.
                let (mask, scale) = (mask.clone(), shape.scale);
                let of_layers = |plan| LayerPlan { mask: mask.clone(), scale, state, shares_keys, plan, input_kinds };
                planned.extend(plans.into_iter().map(of_layers));
                at
            }
        };
        if let Some(plan) = plan_of.get_mut(place.layer).filter(|_| !shares_keys) {
            *plan = Some(at);
        }
        let planned = &planned[at];
        planned.input_kinds.check_same(&tensors)?;
        let cache = &mut layers.cache;
        if !shares_keys {
            let write = match write {
                Some(write) => write,
                None => write.insert(CacheWrite::plan(cache, self.stream, slots, key, value)?),
            };
            self.layers.begin_write();
            let mut torn = false;
            let written = cache.write_layer(self.stream, write, place.layer, [key, value], &mut torn);
            if torn {
                self.layers.lose_group(place.group);
            }
            written?;
            if let Some(known) = keys_of.get_mut(place.layer) {
                *known = Some(keys);
            }
        }
        launch(&planned.plan.selected.plan, self.stream, &tensors)
    }

    /// The backend and plan that serve a layer of the model, once it is planned, and not those of layers that share its
    /// keys.
    pub fn selected(&self, layer: usize) -> Option<&SelectedBackend<T>> {
        let place = self.attention.places.get(layer)?;
        let step = self.groups.get(place.group)?;
        let planned = (*step.plan_of.get(place.layer)?)?;
        step.planned.get(planned).map(|planned| &planned.plan.selected)
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
        match self.linear.as_ref().is_some_and(LinearStep::has_written) {
            true => ended.map_err(|why| why.fix(STATES_AGAIN)),
            false => ended,
        }
    }
}

/// Refuses shared latents that the queries of a layer read elsewhere than in the cache: plain queries, and those of
/// mixed steps, project the step's own.
fn check_cached_latents<T: Element>(layer: usize, form: Option<LatentForm<'_, T>>) -> Result<(), Violation> {
    match form {
        None | Some(LatentForm::Absorbed | LatentForm::Quantised(_)) => Ok(()),
        Some(form) => Err(Violation::new(
            &rules::STEP_SHARED_KEYS,
            format_args!("shared latents of layer {layer} for queries in the form {:?}", form.kind()),
            "absorbed queries, which read latents from the cache",
            "absorb the queries of layers that share latents (`LatentForm::Absorbed`), or give the layer latents of \
             its own",
        )),
    }
}
