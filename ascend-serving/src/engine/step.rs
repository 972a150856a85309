//! A step in progress, layer by layer.

use ascend_attention::attention::BlockTable;
use ascend_attention::{AnyTensor, Element, Output, Stream, Tensor};

use crate::backends::{
    LatentTensors, LayerTensors, Selected, StepContext, StepPlan, no_backend, without_lse,
};
use crate::batch::{AttentionMetadata, MaskKind};
use crate::error::Result;
use crate::kv::{CacheWrite, StepLease};
use crate::refusal::Rule;

use super::attention::Attention;
use super::layer_check::{Brought, check_layer, check_outputs};
use super::queued_layers::QueuedLayers;
use super::range_check::{CheckedTensor, latent_tensors, packed_inputs, packed_tensors};

impl<T: Element> Attention<T> {
    /// Begins a step on a stream: copies the block table to the device, and queues copies of blocks that another
    /// cache of the pool has copied ([`PagedKvCache::with_pool`](crate::kv::PagedKvCache::with_pool)). Blocks given
    /// back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a stream of another device, or an
    /// [`AttentionShape`](crate::AttentionShape) whose scale is 0 or not finite, whose query heads are no multiple of
    /// its key heads, or whose key heads are not those of the cache; [`Rule::SettingsCache`] for metadata whose
    /// settings were made from another cache, [`Rule::TableGroup`] for blocks of another pool,
    /// [`Rule::BlockGivenBack`] for blocks that went back to the pool since the metadata was made,
    /// [`Rule::SequenceChanged`] for a sequence that changed since then, [`Rule::SequenceGap`] for a sequence with
    /// tokens before the step that no step has computed, [`Rule::StepLayersMissing`] where a step left them without
    /// some layers; as for [`PagedKvCache::block_table`](crate::kv::PagedKvCache::block_table).
    ///
    /// [`Rule::SettingsCache`]: crate::Rule::SettingsCache
    /// [`Rule::TableGroup`]: crate::Rule::TableGroup
    /// [`Rule::BlockGivenBack`]: crate::Rule::BlockGivenBack
    /// [`Rule::SequenceChanged`]: crate::Rule::SequenceChanged
    /// [`Rule::SequenceGap`]: crate::Rule::SequenceGap
    /// [`Rule::StepLayersMissing`]: crate::Rule::StepLayersMissing
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &'a AttentionMetadata,
    ) -> Result<Step<'a, T>> {
        self.cache.admits(stream)?;
        self.shape.check_cache(&self.cache.shape())?;
        metadata.goes_with(self.cache.pool())?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = self.cache.pool().begin_step(stream);
        metadata.check_blocks_held(self.cache.pool())?;
        let progress = metadata.begin_progress(self.cache.entry())?;
        // After `begin_progress`, which checks that this cache has computed the tokens that are copied.
        let blocks = metadata.sequence_blocks();
        self.cache.queue_pending_copies(stream, blocks)?;
        metadata.check_copies_queued(self.cache.entry())?;
        let block_table = self.cache.block_table(stream, metadata.table())?;
        if let Some(checker) = &mut self.range_checker {
            checker.begin(metadata);
        }
        Ok(Step {
            block_table,
            lease,
            layers: QueuedLayers::new(self.cache.shape().layers, vec![progress]),
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
#[derive(Debug)]
pub struct Step<'a, T: Element> {
    attention: &'a mut Attention<T>,
    stream: &'a Stream,
    metadata: &'a AttentionMetadata,
    block_table: BlockTable,
    lease: StepLease<'a, Stream>,
    /// The write that the first layer of the step has prepared for all layers.
    write: Option<CacheWrite>,
    planned: Vec<Planned<T>>,
    pub(crate) layers: QueuedLayers,
}

/// The plan that the first layer with a mask has made for all layers with it.
#[derive(Debug)]
struct Planned<T: Element> {
    mask: MaskKind,
    selected: Selected<T>,
    brought: Brought,
}

/// The inputs and settings of a layer besides query, key and value.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct LayerOptions<'a> {
    /// Which keys its tokens see, if another mask than the step's ([`AttentionMetadata::mask`]): full and windowed
    /// layers of one cache are layers of one step.
    pub mask: Option<&'a MaskKind>,
    /// One more logit for each head, `[N]`: of BF16, and of FLOAT16 for a FLOAT16 query from CANN 9.0 on and on
    /// Ascend 950.
    pub learnable_sink: Option<&'a AnyTensor>,
}

impl<'a> LayerOptions<'a> {
    /// Sets a mask of the layer's own.
    pub fn mask(mut self, mask: &'a MaskKind) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Sets one more logit for each head.
    pub fn learnable_sink(mut self, sink: &'a AnyTensor) -> Self {
        self.learnable_sink = Some(sink);
        self
    }
}

impl<T: Element> Step<'_, T> {
    /// Queues one layer: writes its keys and values to the step's slots, then attends. Query `[tokens, N, D]`, key
    /// and value `[tokens, Nkv, D]`, packed, with the padding of the metadata. Returns at once. The first layer plans
    /// for all layers.
    ///
    /// # Errors
    /// [`Rule::StepTokens`] and [`Rule::StepHeads`] for tensors of other shapes, [`Rule::StepLayers`] for sinks or
    /// latents where the first layer of the step had none, or none where it had, [`Rule::StepLayerRepeated`] for a
    /// layer that was queued before; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for tensors of
    /// another device; [`Error::NoBackend`](crate::Error::NoBackend) if no backend serves the step; as for
    /// [`PagedKvCache::plan_write`](crate::kv::PagedKvCache::plan_write) and
    /// [`PagedKvCache::write`](crate::kv::PagedKvCache::write). Nothing is written unless attention could be planned
    /// too. With a [range check](Attention::set_range_check) also the errors of its copies; the layer is queued then.
    ///
    /// [`Rule::StepTokens`]: crate::Rule::StepTokens
    /// [`Rule::StepHeads`]: crate::Rule::StepHeads
    /// [`Rule::StepLayers`]: crate::Rule::StepLayers
    /// [`Rule::StepLayerRepeated`]: crate::Rule::StepLayerRepeated
    pub fn forward(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<Output<T>> {
        self.forward_with_sink(layer, query, key, value, None)
    }

    /// As [`forward`](Self::forward), with one more logit for each head, `[N]`: of BF16, and of FLOAT16 for a FLOAT16
    /// query from CANN 9.0 on and on Ascend 950.
    ///
    /// # Errors
    /// As for [`Step::forward`].
    pub fn forward_with_sink(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
        learnable_sink: Option<&AnyTensor>,
    ) -> Result<Output<T>> {
        let options = LayerOptions {
            learnable_sink,
            ..LayerOptions::default()
        };
        self.forward_with(layer, query, key, value, options)
    }

    /// As [`forward`](Self::forward), for a layer with a mask of its own or with sinks. The first layer with a mask
    /// plans for all layers with it.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use std::num::NonZeroUsize;
    ///
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
    /// use ascend_serving::{
    ///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, Fused, LayerOptions,
    ///     Masked, MaskKind, NamedMask,
    /// };
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let shape = CacheShape::new(3, 1, 64);
    /// let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative)?;
    /// let backends = Backends::none().with(Masked).with(Fused);
    /// let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
    /// let mut sequence = Sequence::new(attention.cache().pool());
    /// attention.grow(&stream, &mut sequence, 200)?;
    ///
    /// let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    /// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 200)], settings)?;
    /// let rows = stream.upload(&vec![bf16::ONE; 200 * 64], [200, 1, 64])?;
    /// let chunks = NamedMask::new("chunks of 64", |_, token, key| key <= token && key / 64 == token / 64);
    /// let masks = [
    ///     Causality::Causal.into(),
    ///     NonZeroUsize::new(50).map_or(Causality::Causal, Causality::Window).into(),
    ///     MaskKind::from(chunks),
    /// ];
    /// let mut step = attention.begin(&stream, &metadata)?;
    /// for (layer, mask) in masks.iter().enumerate() {
    ///     let options = LayerOptions::default().mask(mask);
    ///     step.forward_with(layer, &rows, &rows, &rows, options)?;
    /// }
    /// assert_eq!(step.selected_for(&masks[2]).map(|selected| selected.name), Some("masked"));
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Step::forward`]; [`Rule::BlockWindow`] for a mask that shows tokens which sequences gave back.
    ///
    /// [`Rule::BlockWindow`]: crate::Rule::BlockWindow
    pub fn forward_with(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
        options: LayerOptions<'_>,
    ) -> Result<Output<T>> {
        let tensors = [query, key, value];
        let output = self.queue(layer, tensors, options, None, None, |plan, step, layer| {
            plan.run(step, layer)
        })?;
        self.check_range(layer, packed_tensors(tensors, &output.attention))?;
        Ok(output)
    }

    /// As [`forward_with`](Self::forward_with), with an output tensor of the caller: [`Step::forward_into`].
    ///
    /// # Errors
    /// As for [`Step::forward_with`] and [`Step::forward_into`].
    pub fn forward_with_into(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
        options: LayerOptions<'_>,
        output: &mut Output<T>,
    ) -> Result<()> {
        without_lse(output)?;
        let tensors = [query, key, value];
        let into = output.attention.clone();
        self.queue(
            layer,
            tensors,
            options,
            None,
            Some(&into),
            |plan, step, layer| plan.run_into(step, layer, output),
        )?;
        self.check_range(layer, packed_tensors(tensors, &output.attention))
    }

    /// As [`Step::forward_with_sink`], with an output tensor of the caller, of the query's shape. Allocates nothing
    /// on the host from the second layer on, if the backend does not.
    ///
    /// # Errors
    /// As for [`Step::forward`]; [`NotAsPlanned`](ascend_attention::Error::NotAsPlanned) for an output of another
    /// shape, [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for one with log-sum-exps, which no step
    /// computes, and for one that shares memory with what the layer reads.
    pub fn forward_into(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
        learnable_sink: Option<&AnyTensor>,
        output: &mut Output<T>,
    ) -> Result<()> {
        let options = LayerOptions {
            learnable_sink,
            ..LayerOptions::default()
        };
        self.forward_with_into(layer, query, key, value, options, output)
    }

    /// Queues one layer of multi-head latent attention: writes its latents `[tokens, 1, 512]` and rotary keys
    /// `[tokens, 1, 64]` to the step's slots, then attends. The [`LatentForm`](crate::LatentForm) defines the query
    /// and the output, and who projects what. All layers of a step have the form of the first.
    ///
    /// # Errors
    /// As for [`Step::forward`].
    pub fn forward_latent(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        latent: &Tensor<T>,
        key_rope: &Tensor<T>,
        tensors: LatentTensors<'_, T>,
    ) -> Result<Output<T>> {
        let latent = [query, latent, key_rope];
        let options = LayerOptions::default();
        let output = self.queue(
            layer,
            latent,
            options,
            Some(tensors),
            None,
            |plan, step, layer| plan.run(step, layer),
        )?;
        let checked = latent_tensors(latent, &tensors, &output.attention);
        self.check_range(layer, checked)?;
        Ok(output)
    }

    /// As [`forward_latent`](Self::forward_latent), with an output tensor of the caller, of the shape that the form
    /// defines.
    ///
    /// # Errors
    /// As for [`Step::forward_into`].
    pub fn forward_latent_into(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        latent: &Tensor<T>,
        key_rope: &Tensor<T>,
        tensors: LatentTensors<'_, T>,
        output: &mut Output<T>,
    ) -> Result<()> {
        without_lse(output)?;
        let latent = [query, latent, key_rope];
        let options = LayerOptions::default();
        let into = output.attention.clone();
        self.queue(
            layer,
            latent,
            options,
            Some(tensors),
            Some(&into),
            |plan, step, layer| plan.run_into(step, layer, output),
        )?;
        let checked = latent_tensors(latent, &tensors, &output.attention);
        self.check_range(layer, checked)
    }

    /// Passes the tensors of a queued layer to the range check, if there is one.
    fn check_range<'t>(
        &mut self,
        layer: usize,
        tensors: impl IntoIterator<Item = CheckedTensor<'t, T>>,
    ) -> Result<()> {
        match &mut self.attention.range_checker {
            Some(checker) => checker.check(self.stream, layer, tensors),
            None => Ok(()),
        }
    }

    fn queue<R>(
        &mut self,
        layer: usize,
        tensors: [&Tensor<T>; 3],
        options: LayerOptions<'_>,
        latent: Option<LatentTensors<'_, T>>,
        into: Option<&Tensor<T>>,
        run: impl FnOnce(&dyn StepPlan<T>, &StepContext<'_>, &LayerTensors<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let outcome = self.queue_layer(layer, tensors, options, latent, into, run);
        let refused = outcome.as_ref().err();
        if refused.is_some_and(|why| why.breaks(Rule::QuantisedFinite)) {
            // The refusal names the first row that cannot be quantised; the check reports more.
            if let Err(other) = self.check_range(layer, packed_inputs(tensors)) {
                tracing::warn!("no range check of layer {layer}, which is refused: {other}");
            }
        }
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer<R>(
        &mut self,
        layer: usize,
        [query, key, value]: [&Tensor<T>; 3],
        options: LayerOptions<'_>,
        latent: Option<LatentTensors<'_, T>>,
        into: Option<&Tensor<T>>,
        run: impl FnOnce(&dyn StepPlan<T>, &StepContext<'_>, &LayerTensors<'_, T>) -> Result<R>,
    ) -> Result<R> {
        self.layers.check_not_repeated(layer)?;
        let mask = options.mask.unwrap_or(self.metadata.mask());
        let context = StepContext {
            stream: self.stream,
            shape: self.attention.shape,
            metadata: self.metadata,
            mask,
            block_table: &self.block_table,
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
            learnable_sink: options.learnable_sink,
            latent,
        };
        check_layer(&context, &tensors)?;
        check_outputs(&tensors, into)?;
        let known = self.planned.iter().position(|of| of.mask == *mask);
        if known.is_none() {
            self.metadata.keeps_for(mask)?;
            let selected = self.attention.backends.plan(&context, &tensors)?;
            self.planned.push(Planned {
                mask: mask.clone(),
                selected,
                brought: Brought::by(&tensors),
            });
        }
        let planned = match known {
            Some(at) => self.planned.get(at),
            None => self.planned.last(),
        };
        // There is a plan: it was found or added.
        let planned = planned.ok_or_else(|| no_backend(&[], None))?;
        planned.brought.again(&tensors)?;
        let cache = &mut self.attention.cache;
        let write = match &self.write {
            Some(write) => write,
            None => {
                let slots = self.metadata.slots();
                let write = cache.plan_write(self.stream, slots, key, value)?;
                &*self.write.insert(write)
            }
        };
        self.layers.begin_write();
        cache.write(self.stream, write, layer, key, value)?;
        run(&*planned.selected.plan, &context, &tensors)
    }

    /// The backend and plan that serve the step's layers, once a layer is planned; of several masks those of the
    /// first.
    pub fn selected(&self) -> Option<&Selected<T>> {
        self.planned.first().map(|planned| &planned.selected)
    }

    /// The backend and plan that serve the layers with a mask, once the first of them is planned.
    pub fn selected_for(&self, mask: &MaskKind) -> Option<&Selected<T>> {
        let mut planned = self.planned.iter();
        let of = planned.find(|planned| planned.mask == *mask);
        of.map(|planned| &planned.selected)
    }

    /// Ends the step, and checks that all its layers were queued. Dropping it ends it without this check, which the
    /// next step of its sequences then makes.
    ///
    /// # Errors
    /// [`Rule::StepLayersMissing`](crate::Rule::StepLayersMissing): the tokens of the step do not count as computed.
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'_, Stream> {
        &self.lease
    }
}
