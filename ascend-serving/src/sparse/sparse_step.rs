//! A step of sparse attention in progress: its indexers and its layers.

use std::fmt;

use ascend_attention::sparse::SparseSequences;
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::batch::AttentionMetadata;
use crate::engine::{StepRows, check_output};
use crate::error::{Error, Result};
use crate::graphs::{Replays, copy_rows};
use crate::kv::{
    CacheWrite, MAX_INT32, PagedKvCache, QueuedLayers, StepLease, StepProgress, check_outside_caches, no_layer,
};
use crate::rules;

use super::key_choice::KeyChoice;
use super::sparse_buffers::SparseBuffers;
use super::sparse_calls::{AttendCall, IndexCall};
use super::sparse_inputs::{IndexerKind, IndexerTensors, SparseTensors, lengths_and_blocks};
use super::sparse_latent::SparseLatent;
use super::step_indexers::StepIndexers;
use super::two_caches;

impl<T: Element> SparseLatent<T> {
    /// Begins a step on a stream: copies lengths and block table to the device, and queues copies of blocks that wait
    /// for them. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for a step that is not causal,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for sequences that gave tokens back,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for tokens that read no key, or more than INT32 counts, by
    /// `sparse_flash.heads` or `quant_sparse_flash.heads` for heads that no call has; as for
    /// [`Attention::begin`](crate::Attention::begin), for each of both caches.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a AttentionMetadata) -> Result<SparseStep<'a, T>> {
        self.check()?;
        AttendCall::check_heads(&self.latents, self.shape.heads)?;
        // What is left is for the operator to say, whose indices are INT32.
        if !(1..=MAX_INT32).contains(&self.sparse_count) {
            let allowed = format_args!("1 to {MAX_INT32} keys for each token");
            return Err(Error::invalid("sparse_count", self.sparse_count, allowed)
                .fix("give the number of keys that the model was trained with, such as 2048"));
        }
        let caches = [(&mut self.latents, "latents"), (&mut self.index_keys, "index keys")];
        let begun = two_caches::begin(stream, metadata, caches)?;
        let (new, keys, rows) = lengths_and_blocks(metadata);
        let sequences = SparseSequences::packed(stream, &new, keys)?.paged(stream, &rows)?;
        Ok(SparseStep::new(self, (stream, metadata), begun, sequences, None))
    }
}

/// A step of sparse attention in progress. From [`SparseLatent::begin`], or replayed from graphs, from
/// [`SparseGraphs::begin`](crate::SparseGraphs::begin); end it when the last layer is queued, by [`SparseStep::end`] or
/// by dropping it. Where some of its layers are missing, its tokens do not count as computed: [`SparseStep::end`]
/// returns an error, and the next step of its sequences is refused.
pub struct SparseStep<'a, T: Element> {
    sparse: &'a mut SparseLatent<T>,
    stream: &'a Stream,
    metadata: &'a AttentionMetadata,
    sequences: SparseSequences,
    /// The choice of every key, in a step whose requests have no more keys than a token reads.
    all_keys: Option<KeyChoice>,
    /// What the first indexer has prepared for all indexers.
    chooses: Option<(IndexerKind, CallAndWrite<IndexCall>)>,
    /// What the first layer has prepared for all layers.
    attends: Option<CallAndWrite<AttendCall>>,
    /// What is replayed in the place of these calls.
    graphs: Option<ReplayedSparse<'a, T>>,
    indexers: StepIndexers,
    layers: QueuedLayers,
    /// The output of the layer that was queued last.
    output: Option<Tensor<T>>,
    _lease: StepLease<'a>,
}

/// The graphs of a step: those of its layers, and behind them those of its indexers.
pub(super) struct ReplayedSparse<'a, T: Element> {
    pub(super) replays: Replays<'a, SparseBuffers<T>>,
    /// The rows that the metadata had before it was padded to the captured size.
    pub(super) unfilled: usize,
    /// The indexer that was queued last: what the others have chosen is overwritten.
    pub(super) latest: Option<usize>,
}

/// How to do a step again that ended without some layers.
const SPARSE_AGAIN: &str = "begin the step again with the same metadata, choose by every indexer, and queue \
    every layer: its tokens do not count as computed until then";

/// Elements of a latent, and of a head's attention.
const LATENT: usize = 512;

/// A call, and the writes of new tokens that come before it.
#[derive(Debug)]
struct CallAndWrite<P> {
    call: P,
    write: CacheWrite,
}

impl<'a, T: Element> SparseStep<'a, T> {
    pub(super) fn new(
        sparse: &'a mut SparseLatent<T>,
        (stream, metadata): (&'a Stream, &'a AttentionMetadata),
        (lease, progress): (StepLease<'a>, Vec<StepProgress>),
        sequences: SparseSequences,
        graphs: Option<ReplayedSparse<'a, T>>,
    ) -> Self {
        Self {
            layers: QueuedLayers::new(sparse.latents.shape().layers, progress, SPARSE_AGAIN),
            indexers: StepIndexers::new(sparse.index_keys.shape().layers),
            sparse,
            stream,
            metadata,
            sequences,
            all_keys: None,
            chooses: None,
            attends: None,
            graphs,
            output: None,
            _lease: lease,
        }
    }

    /// Query tokens, padding included; of a step that is replayed those of the captured size.
    pub fn tokens(&self) -> usize {
        self.metadata.tokens()
    }

    /// Queues an indexer: writes its keys of the new tokens to the step's slots, and chooses the keys that the tokens
    /// read. Indexers are numbered as the cache of their keys numbers its layers; in each step every indexer is queued
    /// once, since later steps choose among its keys. The first one plans for all.
    ///
    /// In a step that is replayed the inputs have the rows of the step, with all of the padding, without any of it, or
    /// without what the graphs have added to the metadata's own. They are copied into the tensors of the graph. All
    /// indexers write their choice to one tensor there, so that a layer has to read it before the next indexer.
    ///
    /// Returns at once, with two exceptions. In a step of short contexts the first indexer waits until its list is on
    /// the device. Over [quantised keys](PagedKvCache::quantised_index_keys) each waits for its new keys, and for its
    /// queries unless all contexts are short, because the host quantises them.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes or strides,
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for another number of heads, or another type of weights, than the
    /// first indexer of the step had, or the graphs were captured with,
    /// [`SPARSE_CHOICE`](crate::rules::SPARSE_CHOICE) while no layer has read the choice that a replay would overwrite,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for an indexer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device; as for
    /// [`LightningIndexer::plan`] and [`CacheWrite::plan`]; over quantised keys as for [`QuantLightningIndexer::plan`],
    /// and [`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE) for queries and keys that are not finite. Nothing is
    /// written then.
    ///
    /// [`LightningIndexer::plan`]: ascend_attention::indexer::LightningIndexer::plan
    /// [`QuantLightningIndexer::plan`]: ascend_attention::quant_indexer::QuantLightningIndexer::plan
    pub fn choose<W: Element>(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        let outcome = self.queue_indexer(indexer, inputs);
        match &outcome {
            Ok(_) => self.indexers.note_queued(indexer),
            Err(_) => self.layers.silence(),
        }
        outcome
    }

    fn queue_indexer<W: Element>(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        self.indexers.check_missing(indexer)?;
        let rows = self.rows();
        if let Some(graphs) = &mut self.graphs {
            let step = (self.stream, rows, &mut self.indexers, &mut self.layers);
            return graphs.choose(step, self.sparse.latents.shape().layers, indexer, inputs);
        }
        let IndexerTensors { query, key, .. } = inputs;
        let kind = IndexerKind { heads: size(query, 1), weights: W::DTYPE };
        inputs.check(rows, indexer, kind.heads)?;
        let SparseLatent { latents, index_keys, sparse_count, .. } = &mut *self.sparse;
        let no_values = Tensor::empty(self.stream.device(), [self.metadata.tokens(), 1, 0])?;
        let (_, planned) = match &self.chooses {
            Some(planned) => {
                planned.0.check(indexer, kind, "of the first indexer of the step")?;
                planned
            }
            None => {
                let call = IndexCall::plan(*sparse_count, &self.sequences, index_keys, indexer, inputs)?;
                let slots = self.metadata.slots();
                let write = CacheWrite::plan(index_keys, self.stream, slots, key, &no_values)?;
                self.chooses.insert((kind, CallAndWrite { call, write }))
            }
        };
        if self.metadata.longest() <= *sparse_count && self.all_keys.is_none() {
            let keys = AttendCall::most_keys_per_index(latents)?;
            let all = KeyChoice::all(self.indexers.step(), self.stream, self.metadata, keys)?;
            self.all_keys = Some(all);
        }
        let mut write = |index_keys: &mut PagedKvCache<T>| {
            self.layers.begin_write();
            index_keys.write(self.stream, &planned.write, indexer, key, &no_values)
        };
        if let Some(all) = &self.all_keys {
            write(index_keys)?;
            return Ok(all.by(indexer));
        }
        // What it prepares it may refuse, before anything is written.
        let rows = self.metadata.actual_tokens();
        let launch = planned.call.prepare(self.stream, index_keys, indexer, inputs, rows)?;
        write(index_keys)?;
        Ok(KeyChoice::new(self.indexers.step(), indexer, launch.queue(self.stream)?))
    }

    /// Queues a layer: writes its latents and rotary keys of the new tokens to the step's slots, then attends to the
    /// chosen keys. Returns at once, with attention `[tokens, N, 512]`, into which the caller multiplies `W_UV`. Over
    /// [quantised latents](PagedKvCache::quantised_sparse_latents) it waits for those of the layer, which the host
    /// quantises. The first layer plans for all.
    ///
    /// The output has the padding, and is lent until the next call of this step; a clone of the tensor is the same
    /// memory. In a step that is replayed all layers write the same output: queue work that reads it on the step's
    /// stream before the next layer, or copy it there. The inputs may leave the padding out then, as those of
    /// [`choose`](Self::choose).
    ///
    /// # Errors
    /// [`SPARSE_CHOICE`](crate::rules::SPARSE_CHOICE) for a choice of another step, for one that a later indexer has
    /// overwritten in a replay, and for the last layer that is
    /// missing while no layer has read what some indexer chose,
    /// [`SPARSE_INDEX_KEYS`](crate::rules::SPARSE_INDEX_KEYS) for the last layer that is missing while an indexer is
    /// missing too; as for [`choose`](Self::choose), with layers in place of indexers, and for
    /// [`SparseFlashAttention::plan`], over quantised latents [`KvQuantSparseFlashAttention::plan`]. Nothing is written
    /// then.
    ///
    /// [`SparseFlashAttention::plan`]: ascend_attention::sparse_flash::SparseFlashAttention::plan
    /// [`KvQuantSparseFlashAttention::plan`]: ascend_attention::quant_sparse_flash::KvQuantSparseFlashAttention::plan
    pub fn forward(&mut self, layer: usize, inputs: SparseTensors<'_, T>) -> Result<&Tensor<T>> {
        let output = self.queue(layer, inputs, None)?;
        Ok(self.output.insert(output))
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller.
    ///
    /// # Errors
    /// As for [`SparseStep::forward`]; [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with what the layer reads or
    /// writes, or with a cache of any layer. Nothing is written then.
    pub fn forward_into(&mut self, layer: usize, inputs: SparseTensors<'_, T>, output: &mut Tensor<T>) -> Result<()> {
        self.queue(layer, inputs, Some(output)).map(drop)
    }

    fn queue(&mut self, layer: usize, inputs: SparseTensors<'_, T>, into: Option<&Tensor<T>>) -> Result<Tensor<T>> {
        let outcome = self.queue_layer(layer, inputs, into);
        if outcome.is_ok() {
            self.indexers.note_read(inputs.choice);
        }
        self.layers.note_outcome(layer, outcome)
    }

    /// Queues a layer, into a tensor of the caller or of the step, and returns it.
    fn queue_layer(
        &mut self,
        layer: usize,
        inputs: SparseTensors<'_, T>,
        into: Option<&Tensor<T>>,
    ) -> Result<Tensor<T>> {
        let SparseTensors { query, query_rope, latent, key_rope, choice } = inputs;
        self.layers.check_not_repeated(layer)?;
        let layers = self.sparse.latents.shape().layers;
        if layer >= layers {
            return Err(no_layer(layer, layers));
        }
        let latest = self.graphs.as_ref().map(|graphs| graphs.latest);
        let overwriting = latest.filter(|latest| *latest != Some(choice.indexer()));
        let is_last = overwriting.is_none() && self.layers.is_last(layer);
        self.indexers.check_choice(choice, layer, is_last)?;
        if let Some(latest) = overwriting {
            return Err(overwritten(layer, choice, latest).into());
        }
        let rows = self.rows();
        inputs.check(rows, layer, self.sparse.layer_queries())?;
        let shape = [rows.padded, self.sparse.shape.heads, LATENT];
        let mut target = match into {
            Some(output) => output.clone(),
            None => {
                // Its memory may serve this layer.
                self.output = None;
                match &self.graphs {
                    Some(graphs) => graphs.replays.buffers().attention.out.clone(),
                    None => Tensor::empty(self.stream.device(), shape)?,
                }
            }
        };
        if into.is_some() {
            check_outside_caches("output", &target, [self.sparse.latents.stored(), self.sparse.index_keys.stored()])?;
            let own: [(_, &AnyTensor); 5] = [
                ("query", query),
                ("query_rope", query_rope),
                ("latent", latent),
                ("key_rope", key_rope),
                ("the choice", choice.indices()),
            ];
            // A caller is lent no other tensor of the graph.
            let graph =
                self.graphs.iter().map(|graphs| ("that of the graph", &*graphs.replays.buffers().attention.out));
            check_output("output", &target, (rows.device, &shape), own.into_iter().chain(graph))?;
        }
        if let Some(ReplayedSparse { replays, .. }) = &mut self.graphs {
            let buffers = replays.buffers();
            let copies = [
                ("query", &**query, &*buffers.query),
                ("query_rope", query_rope, &buffers.query_rope),
                ("latent", latent, &buffers.latent),
                ("key_rope", key_rope, &buffers.key_rope),
            ];
            copy_rows(self.stream, copies.into_iter())?;
            replays.launch(layer, &mut self.layers)?;
            if into.is_some() {
                target.copy_from(self.stream, &buffers.attention.out)?;
            }
            return Ok(target);
        }
        let SparseLatent { latents, shape, .. } = &mut *self.sparse;
        let planned = match &self.attends {
            Some(planned) => planned,
            None => {
                let call = AttendCall::plan(shape.scale, &self.sequences, latents, layer, inputs)?;
                let slots = self.metadata.slots();
                let write = CacheWrite::plan(latents, self.stream, slots, latent, key_rope)?;
                self.attends.insert(CallAndWrite { call, write })
            }
        };
        self.layers.begin_write();
        latents.write(self.stream, &planned.write, layer, latent, key_rope)?;
        planned.call.launch_into(self.stream, latents, layer, inputs, &mut target)?;
        Ok(target)
    }

    fn rows(&self) -> StepRows<'a> {
        let unfilled = self.graphs.as_ref().map(|graphs| graphs.unfilled);
        StepRows::of_step(self.stream, self.metadata, unfilled)
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

impl<T: Element> fmt::Debug for SparseStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseStep")
            .field("shape", &self.sparse.shape)
            .field("tokens", &self.metadata.tokens())
            .finish_non_exhaustive()
    }
}

impl<T: Element> ReplayedSparse<'_, T> {
    /// Copies the tensors of an indexer into those of its graph, which comes after the `graphs_of_layers`, and replays
    /// it.
    fn choose<W: Element>(
        &mut self,
        (stream, rows, indexers, layers): (&Stream, StepRows<'_>, &mut StepIndexers, &mut QueuedLayers),
        graphs_of_layers: usize,
        indexer: usize,
        inputs: IndexerTensors<'_, T, W>,
    ) -> Result<KeyChoice> {
        if let Some(unread) = indexers.unread() {
            return Err(Violation::new(
                &rules::SPARSE_CHOICE,
                format_args!("indexer {indexer} while no layer has read what indexer {unread} chose"),
                "a layer or more for each choice, before the next indexer overwrites it",
                "queue a layer with that choice first",
            )
            .into());
        }
        let IndexerTensors { query, weights, key } = inputs;
        let (buffers, kind) = (self.replays.buffers(), self.replays.buffers().indexer);
        inputs.check(rows, indexer, kind.heads)?;
        kind.check(indexer, IndexerKind { weights: W::DTYPE, ..kind }, "the graphs were captured with")?;
        let copies = [
            ("index query", &**query, &*buffers.index_query),
            ("index weights", weights, &buffers.index_weights),
            ("index key", key, &buffers.index_key),
        ];
        copy_rows(stream, copies.into_iter())?;
        let launched = self.replays.launch(graphs_of_layers + indexer, layers);
        // Unless it is refused, the choice of the indexer before may be overwritten.
        match &launched {
            Ok(()) => self.latest = Some(indexer),
            Err(why) if why.is_refusal() => {}
            Err(_) => {
                self.latest = None;
                indexers.note_failed(indexer);
            }
        }
        launched?;
        Ok(KeyChoice::new(indexers.step(), indexer, buffers.chosen.indices.clone()))
    }
}

/// The refusal of a choice whose tensor holds that of another indexer.
#[cold]
fn overwritten(layer: usize, choice: &KeyChoice, latest: Option<usize>) -> Violation {
    let given = format_args!("the choice of indexer {} in layer {layer}", choice.indexer());
    match latest {
        Some(latest) => Violation::new(
            &rules::SPARSE_CHOICE,
            format_args!("{given}, which indexer {latest} has overwritten"),
            "the choice of the indexer that was queued last, where graphs are replayed",
            "queue the layers that read a choice before the next indexer, or compute the step by \
             `SparseLatent::begin`",
        ),
        None => Violation::new(
            &rules::SPARSE_CHOICE,
            format_args!("{given}, after an indexer that could not be queued"),
            "a choice that no other indexer has overwritten",
            "begin the step again",
        ),
    }
}
