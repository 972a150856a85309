//! A step of native sparse attention in progress, layer by layer.

use std::fmt;

use ascend_attention::{AnyTensor, Element, Stream, Tensor};

use crate::batch::AttentionMetadata;
use crate::causality::Causality;
use crate::engine::{StepRows, check_output};
use crate::error::{Error, Result};
use crate::kv::{CacheWrite, QueuedLayers, STEP_AGAIN, StepLease, check_outside_caches};

use super::native_plan::{NativeBranches, NativePlan, NativeTensors};
use super::native_sparse::NativeSparse;
use super::two_caches;

/// Elements of a value, and of a head's attention.
const VALUE: usize = 128;

impl<T: Element> NativeSparse<T> {
    /// Begins a step on a stream, and queues copies of blocks that wait for them. Blocks given back from now on are
    /// handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// By the rules of NsaCompressAttentionInfer and NsaSelectedAttentionInfer for products, heads and selections that
    /// these do not take; [`MASK_WINDOW`](crate::rules::MASK_WINDOW) for a window of no token;
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for a step that is not causal,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for sequences that gave tokens back; as for
    /// [`Attention::begin`](crate::Attention::begin), for each of both caches.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a AttentionMetadata) -> Result<NativeStep<'a, T>> {
        self.check_operators()?;
        Causality::from_flags(true, Some(self.window))?;
        let caches = [(&mut self.cache, "tokens"), (&mut self.compressed, "compressed tokens")];
        let (lease, progress) = two_caches::begin(stream, metadata, caches)?;
        Ok(NativeStep {
            _lease: lease,
            layers: QueuedLayers::new(self.cache.shape().layers, progress, STEP_AGAIN),
            native: self,
            stream,
            metadata,
            planned: None,
        })
    }
}

/// A step of native sparse attention in progress. From [`NativeSparse::begin`]; end it when the last layer is queued,
/// by [`NativeStep::end`] or by dropping it. Where some of its layers are missing, its tokens do not count as computed:
/// [`NativeStep::end`] returns an error, and the next step of its sequences is refused.
pub struct NativeStep<'a, T: Element> {
    native: &'a mut NativeSparse<T>,
    stream: &'a Stream,
    metadata: &'a AttentionMetadata,
    /// What the first layer has planned for all layers.
    planned: Option<(CacheWrite, NativePlan<T>)>,
    layers: QueuedLayers,
    _lease: StepLease<'a>,
}

impl<T: Element> NativeStep<'_, T> {
    /// Queues a layer: writes its keys and values of the new tokens to the step's slots, compresses the blocks of
    /// tokens that they complete, and attends. Returns at once. The first layer plans for all.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes or strides,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have, and for weights of
    /// another shape, [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device; by the rules of
    /// the operators for what they do not take, such as sequences of more than 8192 compressed tokens. Nothing is
    /// written then.
    pub fn forward(&mut self, layer: usize, tensors: NativeTensors<'_, T>) -> Result<NativeBranches<T>> {
        let outcome = self.queue_layer(layer, tensors, None);
        self.layers.note_outcome(layer, outcome)
    }

    /// As [`forward`](Self::forward), with output tensors of the caller, such as those of an earlier step of as many
    /// tokens.
    ///
    /// # Errors
    /// As for [`NativeStep::forward`]; [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with another, with what the
    /// layer reads or writes, or with a cache of any layer. Nothing is written then.
    pub fn forward_into(
        &mut self,
        layer: usize,
        tensors: NativeTensors<'_, T>,
        branches: &mut NativeBranches<T>,
    ) -> Result<()> {
        let outcome = self.queue_layer(layer, tensors, Some(branches));
        self.layers.note_outcome(layer, outcome).map(drop)
    }

    /// Queues a layer with branches of the caller, or with new ones, which are made behind all checks.
    fn queue_layer(
        &mut self,
        layer: usize,
        tensors: NativeTensors<'_, T>,
        into: Option<&NativeBranches<T>>,
    ) -> Result<NativeBranches<T>> {
        self.layers.check_not_repeated(layer)?;
        self.check(layer, tensors)?;
        let views = self.native.views(layer)?;
        into.map_or(Ok(()), |branches| self.check_branches(branches, tensors))?;
        let Self { native, stream, metadata, .. } = self;
        let NativeTensors { query, key, value, .. } = tensors;
        let (write, plan) = match &self.planned {
            Some(planned) => planned,
            None => {
                let write = CacheWrite::plan(&native.cache, stream, metadata.slots(), key, value)?;
                let plan = NativePlan::new(native, stream, metadata, &views, tensors)?;
                self.planned.insert((write, plan))
            }
        };
        let branch = || Tensor::empty(stream.device(), [metadata.tokens(), native.shape.heads, VALUE]);
        let branches = match into {
            Some(branches) => branches.clone(),
            None => NativeBranches::from((branch()?, branch()?, branch()?)),
        };
        self.layers.begin_write();
        native.cache.write(stream, write, layer, key, value)?;
        plan.compress(stream, &views, tensors)?;
        plan.attend(stream, &views, query, &branches)?;
        Ok(branches)
    }

    /// Refuses outputs of the caller that do not have the step's rows, or that share memory with each other, with
    /// what the layer reads and writes, or with a cache of any layer.
    fn check_branches(&self, branches: &NativeBranches<T>, tensors: NativeTensors<'_, T>) -> Result<()> {
        let expected = (self.stream.device(), &[self.metadata.tokens(), self.native.shape.heads, VALUE][..]);
        let NativeTensors { query, key, value, key_weight, value_weight } = tensors;
        let read: [(_, &AnyTensor); 5] = [
            ("query", query),
            ("key", key),
            ("value", value),
            ("key_weight", key_weight),
            ("value_weight", value_weight),
        ];
        let caches = [self.native.cache.stored(), self.native.compressed.stored()];
        for (at, (name, branch)) in branches.each().into_iter().enumerate() {
            let others = branches.each().into_iter().take(at);
            check_outside_caches(name, branch, caches)?;
            check_output(name, branch, expected, read.into_iter().chain(others))?;
        }
        Ok(())
    }

    /// Refuses tensors of a layer that do not have the step's rows, or the heads of the attention.
    fn check(&self, layer: usize, tensors: NativeTensors<'_, T>) -> Result<()> {
        let NativeTensors { query, key, value, key_weight, value_weight } = tensors;
        let heads_fix = "bring queries and keys of 192 and values of 128 with the heads of the `AttentionShape`, each \
                         in its place of `NativeTensors`";
        let rows = StepRows { heads_fix, ..StepRows::of_step(self.stream, self.metadata, None) };
        let (shape, layer) = (self.native.shape, format_args!("layer {layer}"));
        rows.check("query", layer, query, &[shape.heads, 192])?;
        rows.check("key", layer, key, &[shape.kv_heads, 192])?;
        rows.check("value", layer, value, &[shape.kv_heads, VALUE])?;
        let weights = [("key_weight", key_weight), ("value_weight", value_weight)];
        weights.into_iter().try_for_each(|(name, weight)| self.check_weight(name, weight))
    }

    fn check_weight(&self, name: &'static str, weight: &AnyTensor) -> Result<()> {
        weight.check_device(name, self.stream.device())?;
        let wanted = [self.native.compression.block, self.native.shape.kv_heads];
        if *weight.shape() == wanted && weight.is_contiguous() {
            return Ok(());
        }
        let given = format_args!("{} strides {:?}", weight.desc(), weight.strides());
        Err(Error::invalid(name, given, format_args!("{wanted:?}, contiguous"))
            .fix("bring a weight for each token of a compressed block and each key head"))
    }

    /// Ends the step, and checks that all its layers were queued. Dropping it ends it without this check, which the
    /// next step of its sequences then makes.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING): the tokens of the step do not count as computed.
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }
}

impl<T: Element> fmt::Debug for NativeStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NativeStep")
            .field("shape", &self.native.shape)
            .field("tokens", &self.metadata.tokens())
            .finish_non_exhaustive()
    }
}
