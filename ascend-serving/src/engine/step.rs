//! A step in progress, layer by layer.

use ascend_attention::attention::BlockTable;
use ascend_attention::{Element, Stream, Tensor};

use crate::backends::{LayerTensors, SelectedBackend, StepContext, StepPlan};
use crate::batch::{AttentionMetadata, LayerMask};
use crate::error::Result;
use crate::kv::{CacheWrite, CopiesIn, StepLease};
use crate::rules;

use super::attention::Attention;
use super::layer_check::{InputKinds, check_layer};
use super::layer_inputs::LayerInputs;
use super::queued_layers::{QueuedLayers, STEP_AGAIN};
use super::range_check::{latent_tensors, packed_inputs, packed_tensors};

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
    /// layers; as for [`PagedKvCache::block_table`](crate::kv::PagedKvCache::block_table).
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a AttentionMetadata) -> Result<Step<'a, T>> {
        self.cache.admits(stream)?;
        self.shape.check_cache(&self.cache.shape())?;
        metadata.check_requests()?;
        metadata.check_pool(self.cache.pool())?;
        self.cache.check_recomputed(metadata.step_tokens())?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = self.cache.pool().begin_step(stream);
        let progress = metadata.begin_progress(self.cache.entry())?;
        // After `begin_progress`, which checks that this cache has computed the tokens that are copied.
        let blocks = metadata.sequence_blocks();
        self.cache.queue_copies_to(stream, blocks)?;
        let copies = CopiesIn::Cache(self.cache.entry());
        metadata.check_copies_queued(self.cache.pool(), copies)?;
        let block_table = self.cache.block_table(stream, metadata.table())?;
        if let Some(checker) = &mut self.range_checker {
            checker.begin(metadata);
        }
        Ok(Step {
            block_table,
            lease,
            layers: QueuedLayers::new(self.cache.shape().layers, vec![progress], STEP_AGAIN),
            attention: self,
            stream,
            metadata,
            write: None,
            planned: Vec::new(),
        })
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
    metadata: &'a AttentionMetadata,
    block_table: BlockTable,
    lease: StepLease<'a, Stream>,
    /// The write that the first layer of the step has prepared for all layers.
    write: Option<CacheWrite>,
    planned: Vec<MaskPlan<T>>,
    pub(crate) layers: QueuedLayers,
}

/// The plan that the first layer with a mask has made for all layers with it.
#[derive(Debug)]
struct MaskPlan<T: Element> {
    mask: LayerMask,
    selected: SelectedBackend<T>,
    input_kinds: InputKinds,
}

impl<T: Element> Step<'_, T> {
    /// Queues one layer: writes its keys and values to the step's slots, then attends. Returns at once. The first
    /// layer with a mask plans for all layers with it. The attention is `[tokens, N, D]`; of latent attention the
    /// [`LatentForm`](crate::LatentForm) defines it, and all layers of a step have the form of the first.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of other
    /// shapes, [`STEP_LAYERS`](crate::rules::STEP_LAYERS) for sinks or latents where the first layer of the step had
    /// none, or none where it had, and for queries over latents in another form,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for a mask that shows tokens which sequences gave back;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device;
    /// [`Error::NoBackend`](crate::Error::NoBackend) if no backend serves the step; as for [`CacheWrite::plan`] and
    /// [`PagedKvCache::write`](crate::kv::PagedKvCache::write). Nothing is written unless attention could be planned
    /// too. With a [range check](Attention::set_range_check) also the errors of its copies; the layer is queued
    /// then.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<Tensor<T>> {
        let inputs = inputs.into();
        let output = self.queue(layer, &inputs, None, |plan, stream, layer| plan.launch(stream, layer))?;
        self.check_range(layer, &inputs, &output)?;
        Ok(output)
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller, of the shape that `forward` gives. Allocates
    /// nothing on the host from the second layer on, if the backend does not.
    ///
    /// # Errors
    /// As for [`Step::forward`]; [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with what the layer reads.
    pub fn forward_into<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<LayerInputs<'i, T>>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = inputs.into();
        let into = output.clone();
        self.queue(layer, &inputs, Some(&into), |plan, stream, layer| plan.launch_into(stream, layer, output))?;
        self.check_range(layer, &inputs, output)
    }

    /// Passes the tensors of a queued layer to the range check, if there is one.
    fn check_range(&mut self, layer: usize, inputs: &LayerInputs<'_, T>, output: &Tensor<T>) -> Result<()> {
        let Some(checker) = &mut self.attention.range_checker else {
            return Ok(());
        };
        let tensors = [inputs.query, inputs.key, inputs.value];
        match &inputs.latent {
            Some(latent) => checker.check(self.stream, layer, latent_tensors(tensors, latent, output)),
            None => checker.check(self.stream, layer, packed_tensors(tensors, output)),
        }
    }

    fn queue<R>(
        &mut self,
        layer: usize,
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        launch: impl FnOnce(&StepPlan<T>, &Stream, &LayerTensors<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let outcome = self.queue_layer(layer, inputs, into, launch);
        let refused = outcome.as_ref().err();
        if refused.is_some_and(|why| why.breaks(&rules::QUANTISED_FINITE))
            && let Some(checker) = &mut self.attention.range_checker
        {
            // The refusal names the first row that cannot be quantised; the check reports more.
            let tensors = packed_inputs([inputs.query, inputs.key, inputs.value]);
            if let Err(other) = checker.check(self.stream, layer, tensors) {
                tracing::warn!("no range check of layer {layer}, which is refused: {other}");
            }
        }
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer<R>(
        &mut self,
        layer: usize,
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        launch: impl FnOnce(&StepPlan<T>, &Stream, &LayerTensors<'_, T>) -> Result<R>,
    ) -> Result<R> {
        self.layers.check_not_repeated(layer)?;
        let &LayerInputs { query, key, value, learnable_sink, latent, .. } = inputs;
        let mask = inputs.mask.unwrap_or(self.metadata.mask());
        let context = StepContext {
            stream: self.stream,
            shape: self.attention.shape,
            metadata: self.metadata,
            mask,
            block_table: &self.block_table,
            recorded: false,
        };
        // Clones of the handles, since writing borrows the cache mutably.
        let (layer_cache, quantised) = self.attention.cache.tensors(layer)?;
        let tensors = LayerTensors {
            layer,
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
        let mut planned = self.planned.iter();
        let known = planned.position(|planned| planned.mask == *mask);
        let at = match known {
            Some(at) => at,
            None => {
                self.metadata.check_mask(mask)?;
                let selected = self.attention.backends.plan(&context, &tensors)?;
                self.planned.push(MaskPlan { mask: mask.clone(), selected, input_kinds: InputKinds::of(&tensors) });
                self.planned.len() - 1
            }
        };
        let planned = &self.planned[at];
        planned.input_kinds.check_same(&tensors)?;
        let cache = &mut self.attention.cache;
        let write = match &self.write {
            Some(write) => write,
            None => {
                let slots = self.metadata.slots();
                let write = CacheWrite::plan(cache, self.stream, slots, key, value)?;
                &*self.write.insert(write)
            }
        };
        self.layers.begin_write();
        let mut torn = false;
        let written = cache.write_layer(self.stream, write, layer, [key, value], &mut torn);
        if torn {
            self.layers.lose_group();
        }
        written?;
        launch(&planned.selected.plan, self.stream, &tensors)
    }

    /// The backend and plan that serve the step's layers, once a layer is planned; of several masks those of the
    /// first.
    pub fn selected(&self) -> Option<&SelectedBackend<T>> {
        self.planned.first().map(|planned| &planned.selected)
    }

    /// The backend and plan that serve the layers with a mask, once the first of them is planned.
    pub fn selected_for(&self, mask: &LayerMask) -> Option<&SelectedBackend<T>> {
        let mut planned = self.planned.iter();
        let found = planned.find(|planned| planned.mask == *mask);
        found.map(|planned| &planned.selected)
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
        Ok(self.layers.end()?)
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'_, Stream> {
        &self.lease
    }
}
