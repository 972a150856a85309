//! A step of sparse attention in progress: its indexers and its layers.

use std::fmt;
use std::sync::Arc;

use ascend_attention::indexer::{IndexerPlan, LightningIndexer};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::sparse_flash::{SparseFlashAttention, SparseFlashPlan};
use ascend_attention::spec::ops::sparse_flash_attention::SparseFlashCall;
use ascend_attention::{AnyTensor, DType, Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::kv::{CacheWrite, CopiesIn, MAX_INT32, PagedKvCache, StepLease, StepProgress};
use crate::rules;

use super::key_choice::KeyChoice;
use super::queued_layers::QueuedLayers;
use super::sparse_latent::SparseLatent;

/// What an indexer gets in a step: its queries, a weight for each of its heads, and the keys of the new tokens. All are
/// packed, with the padding of the metadata.
#[derive(Clone, Copy, Debug)]
pub struct IndexerTensors<'a, T: Element, W: Element = T> {
    /// Queries, `[tokens, heads of the indexer, 128]`.
    pub query: &'a Tensor<T>,
    /// Weights, `[tokens, heads of the indexer]`, of the query's type; from CANN 9.0 on Atlas A2 and A3 also FLOAT.
    pub weights: &'a Tensor<W>,
    /// Keys of the new tokens, `[tokens, 1, 128]`.
    pub key: &'a Tensor<T>,
}

/// What a layer of sparse attention gets in a step. Tensors are packed, with the padding of the metadata.
#[derive(Clone, Copy, Debug)]
pub struct SparseTensors<'a, T: Element> {
    /// Absorbed queries, `[tokens, N, 512]`: the caller has multiplied `W_UK` into them.
    pub query: &'a Tensor<T>,
    /// Rotary part of the queries, `[tokens, N, 64]`.
    pub query_rope: &'a Tensor<T>,
    /// Latents of the new tokens, `[tokens, 1, 512]`.
    pub latent: &'a Tensor<T>,
    /// Rotary keys of the new tokens, `[tokens, 1, 64]`.
    pub key_rope: &'a Tensor<T>,
    /// The keys that the tokens read, chosen in the same step.
    pub choice: &'a KeyChoice,
}

impl<T: Element> SparseLatent<T> {
    /// Begins a step on a stream: copies lengths and block table to the device, and queues copies of blocks that wait
    /// for them. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for a step that is not causal,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for sequences that gave tokens back,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for tokens that read no key, or more than INT32 counts; as for
    /// [`Attention::begin`](crate::Attention::begin), for each of both caches.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a AttentionMetadata) -> Result<SparseStep<'a, T>> {
        self.check()?;
        self.latents.admits(stream)?;
        metadata.check_groups(1)?;
        metadata.check_requests()?;
        metadata.check_pool(self.latents.pool())?;
        check_causal(metadata)?;
        // What is left is for the operator to say, whose indices are INT32.
        if !(1..=MAX_INT32).contains(&self.sparse_count) {
            let allowed = format_args!("1 to {MAX_INT32} keys for each token");
            return Err(Error::invalid("sparse_count", self.sparse_count, allowed)
                .fix("give the number of keys that the model was trained with, such as 2048"));
        }
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = self.latents.pool().begin_step(stream);
        let progress = vec![
            begin_in(&mut self.latents, "the cache of latents", stream, metadata)?,
            begin_in(&mut self.index_keys, "the cache of index keys", stream, metadata)?,
        ];
        let new = metadata.new_and_cached().map(|(new, _)| new);
        let new: Vec<usize> = new.collect();
        let rows: Vec<&[usize]> = metadata.table().rows().collect();
        let lengths = metadata.kv_lengths().lengths();
        Ok(SparseStep {
            sequences: SparseSequences::packed(stream, &new, lengths)?.paged(stream, &rows)?,
            lease,
            layers: QueuedLayers::new(self.latents.shape().layers, progress, SPARSE_AGAIN),
            indexers: vec![Indexer::Missing; self.index_keys.shape().layers],
            sparse: self,
            stream,
            metadata,
            id: Arc::new(()),
            all_keys: None,
            chooses: None,
            attends: None,
        })
    }
}

/// A step of sparse attention in progress. From [`SparseLatent::begin`]; end it when the last layer is queued, by
/// [`SparseStep::end`] or by dropping it. Where some of its layers are missing, its tokens do not count as computed:
/// [`SparseStep::end`] returns an error, and the next step of its sequences is refused.
pub struct SparseStep<'a, T: Element> {
    sparse: &'a mut SparseLatent<T>,
    stream: &'a Stream,
    metadata: &'a AttentionMetadata,
    sequences: SparseSequences,
    /// Identifies the step in its choices.
    id: Arc<()>,
    /// The choice of every key, in a step whose requests have no more keys than a token reads.
    all_keys: Option<KeyChoice>,
    /// What the first indexer has prepared for all indexers.
    chooses: Option<(IndexerKind, Planned<IndexerPlan>)>,
    /// What the first layer has prepared for all layers.
    attends: Option<Planned<SparseFlashPlan>>,
    indexers: Vec<Indexer>,
    layers: QueuedLayers,
    lease: StepLease<'a, Stream>,
}

/// What has become of an indexer in a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Indexer {
    Missing,
    /// It is queued, and no layer has read its choice.
    Queued,
    Read,
}

/// How to do a step again that ended without some layers.
const SPARSE_AGAIN: &str = "begin the step again with the same metadata, choose by every indexer, and queue every \
    layer: its tokens do not count as computed until then";

/// A call, and the writes of new tokens that come before it.
#[derive(Debug)]
struct Planned<P> {
    call: P,
    write: CacheWrite,
}

/// The heads of an indexer, and the type of their weights.
#[derive(Clone, Copy, PartialEq, Eq)]
struct IndexerKind {
    heads: usize,
    weights: DType,
}

impl fmt::Display for IndexerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} heads with weights of {}", self.heads, self.weights)
    }
}

impl<T: Element> SparseStep<'_, T> {
    /// Queues an indexer: writes its keys of the new tokens to the step's slots, and chooses the keys that the tokens
    /// read. Returns at once; in a step of short contexts the first one waits until its list is on the device. Indexers
    /// are numbered as the cache of their keys numbers its layers; in each step every
    /// indexer is queued once, since later steps choose among its keys. The first one plans for all.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes or strides,
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for another number of heads, or another type of weights, than the
    /// first indexer of the step had,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for an indexer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device; as for
    /// [`LightningIndexer::plan`] and [`CacheWrite::plan`]. Nothing is written then.
    pub fn choose<W: Element>(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        let outcome = self.choose_once(indexer, inputs);
        if outcome.is_err() {
            self.layers.silence();
        }
        outcome
    }

    fn choose_once<W: Element>(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        let indexers = self.indexers.len();
        match self.indexers.get(indexer) {
            None => {
                let allowed = format_args!("below {indexers}");
                return Err(Error::invalid("indexer", indexer, allowed)
                    .fix("count the layers of the cache of index keys from 0"));
            }
            Some(Indexer::Missing) => {}
            Some(_) => return Err(repeated_indexer(indexer, indexers).into()),
        }
        let choice = self.queue_indexer(indexer, inputs)?;
        self.indexers[indexer] = Indexer::Queued;
        Ok(choice)
    }

    fn queue_indexer<W: Element>(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        let IndexerTensors { query, weights, key } = inputs;
        let heads = size(query, 1);
        let kind = IndexerKind { heads, weights: W::DTYPE };
        let whose = Whose::Indexer(indexer);
        self.check("index query", whose, query, &[heads, 128])?;
        self.check("index weights", whose, weights, &[heads])?;
        self.check("index key", whose, key, &[1, 128])?;
        let SparseLatent { index_keys, sparse_count, .. } = &mut *self.sparse;
        let keys = paged(&index_keys.layer(indexer)?.key, index_keys)?;
        let no_values = Tensor::empty(self.stream.device(), [self.metadata.tokens(), 1, 0])?;
        let inputs = (query, &keys, weights);
        let (_, planned) = match &self.chooses {
            Some((first, _)) if *first != kind => {
                return Err(other_indexer(indexer, kind, *first));
            }
            Some(planned) => planned,
            None => {
                let call = LightningIndexer::new(*sparse_count).plan(&self.sequences, inputs)?;
                let slots = self.metadata.slots();
                let write = CacheWrite::plan(index_keys, self.stream, slots, key, &no_values)?;
                self.chooses.insert((kind, Planned { call, write }))
            }
        };
        if self.metadata.longest() <= *sparse_count && self.all_keys.is_none() {
            let block_size = index_keys.pool().block_size();
            let target = self.stream.device().target()?;
            let keys = SparseFlashCall::largest_sparse_block_size(target, block_size);
            let all = KeyChoice::all(&self.id, self.stream, self.metadata, keys)?;
            self.all_keys = Some(all);
        }
        self.layers.begin_write();
        index_keys.write(self.stream, &planned.write, indexer, key, &no_values)?;
        match &self.all_keys {
            Some(all) => Ok(all.by(indexer)),
            None => {
                let chosen = planned.call.launch(self.stream, inputs)?;
                Ok(KeyChoice::new(&self.id, indexer, chosen.indices))
            }
        }
    }

    /// Queues a layer: writes its latents and rotary keys of the new tokens to the step's slots, then attends to the
    /// chosen keys. Returns at once, with attention `[tokens, N, 512]`, into which the caller multiplies `W_UV`. The
    /// first layer plans for all.
    ///
    /// # Errors
    /// [`SPARSE_CHOICE`](crate::rules::SPARSE_CHOICE) for a choice of another step, and for the last layer that is
    /// missing while no layer has read what some indexer chose,
    /// [`SPARSE_INDEX_KEYS`](crate::rules::SPARSE_INDEX_KEYS) for the last layer that is missing while an indexer is
    /// missing too; as for [`choose`](Self::choose), with layers in place of indexers, and for
    /// [`SparseFlashAttention::plan`]. Nothing is written then.
    pub fn forward(&mut self, layer: usize, inputs: SparseTensors<'_, T>) -> Result<Tensor<T>> {
        let outcome = self.queue_layer(layer, inputs);
        if outcome.is_ok() {
            self.indexers[inputs.choice.indexer()] = Indexer::Read;
        }
        self.layers.note_outcome(layer, outcome)
    }

    /// Refuses the last layer where the tokens would count as computed without keys that indexers of later steps read,
    /// and where no layer reads what an indexer has chosen: then one has got the choice of another.
    fn check_indexers(&self, layer: usize, choice: &KeyChoice) -> Result<(), Violation> {
        let indexers = self.indexers.len();
        let find = |state| self.indexers.iter().position(|indexer| *indexer == state);
        if let Some(indexer) = find(Indexer::Missing) {
            return Err(missing_index_keys(layer, indexer, indexers));
        }
        let mut unread = self.indexers.iter().enumerate();
        match unread.find(|(at, state)| **state == Indexer::Queued && *at != choice.indexer()) {
            None => Ok(()),
            Some((indexer, _)) => Err(Violation::new(
                &rules::SPARSE_CHOICE,
                format_args!("layer {layer}, the last of the step, and no layer with the choice of indexer {indexer}"),
                "a layer or more for each choice",
                "pass to each layer the choice of its own indexer, and to a layer without one that of an earlier layer",
            )),
        }
    }

    fn queue_layer(&mut self, layer: usize, inputs: SparseTensors<'_, T>) -> Result<Tensor<T>> {
        let SparseTensors { query, query_rope, latent, key_rope, choice } = inputs;
        self.layers.check_not_repeated(layer)?;
        choice.check_step(&self.id, layer)?;
        if self.layers.is_last(layer) {
            self.check_indexers(layer, choice)?;
        }
        let heads = self.sparse.shape.heads;
        let whose = Whose::Layer(layer);
        self.check("query", whose, query, &[heads, 512])?;
        self.check("query_rope", whose, query_rope, &[heads, 64])?;
        self.check("latent", whose, latent, &[1, 512])?;
        self.check("key_rope", whose, key_rope, &[1, 64])?;
        let SparseLatent { latents, shape, .. } = &mut *self.sparse;
        let cache = latents.layer(layer)?;
        let [keys, key_ropes] = [&cache.key, &cache.value].map(|tensor| paged(tensor, latents));
        let (keys, key_ropes) = (keys?, key_ropes?);
        let inputs = ((query, query_rope), (&keys, &key_ropes), &choice.indices().clone());
        let planned = match &self.attends {
            Some(planned) => planned,
            None => {
                let call = SparseFlashAttention::new(shape.scale)
                    .sparse_block_size(choice.keys_per_index())
                    .plan(&self.sequences, inputs)?;
                let slots = self.metadata.slots();
                let write = CacheWrite::plan(latents, self.stream, slots, latent, key_rope)?;
                self.attends.insert(Planned { call, write })
            }
        };
        self.layers.begin_write();
        latents.write(self.stream, &planned.write, layer, latent, key_rope)?;
        Ok(planned.call.launch(self.stream, inputs)?.out)
    }

    /// Refuses a tensor of other rows than the step has tokens, of other sizes, that is not contiguous, or of another
    /// device.
    fn check(&self, name: &'static str, whose: Whose, tensor: &AnyTensor, of_token: &[usize]) -> Result<()> {
        tensor.check_device(name, self.stream.device())?;
        let (actual, tokens) = (self.metadata.actual_tokens(), self.metadata.tokens());
        let (rule, fix) = match tensor.shape().split_first() {
            Some((rows, own)) if own == of_token && *rows == tokens && tensor.is_contiguous() => {
                return Ok(());
            }
            Some((rows, own)) if own == of_token && *rows == tokens => (
                &rules::STEP_CONTIGUOUS,
                "project it into a tensor of its own, or copy it by `Tensor::contiguous`, which waits for the stream",
            ),
            Some((_, own)) if own == of_token => (
                &rules::STEP_TOKENS,
                "bring a row for each token of the batch that the metadata was made of, and for each that `pad_to` \
                 added",
            ),
            _ => (&rules::STEP_HEADS, whose.fix()),
        };
        let given = format_args!("{name} {} in {whose}", tensor.desc());
        let allowed = format_args!(
            "[{tokens}, {}]: {actual} rows of the requests and {} of padding, with row-major strides",
            of_token.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            tokens.saturating_sub(actual)
        );
        Err(Violation::new(rule, given, allowed, fix).into())
    }

    /// Ends the step, and checks that all its layers were queued. Dropping it ends it without this check, which the
    /// next step of its sequences then makes.
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

impl<T: Element> fmt::Debug for SparseStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseStep")
            .field("shape", &self.sparse.shape)
            .field("tokens", &self.metadata.tokens())
            .finish_non_exhaustive()
    }
}

/// Begins to record what a step computes in one of the caches.
fn begin_in<T: Element>(
    cache: &mut PagedKvCache<T>,
    name: &str,
    stream: &Stream,
    metadata: &AttentionMetadata,
) -> Result<StepProgress> {
    let mut progress = metadata.begin_progress(cache.entry());
    if let Err(why) = &mut progress {
        why.given.push_str(&format!(", in {name}"));
    }
    let progress = progress?;
    // After `begin_progress`, which checks that this cache has computed the tokens that are copied.
    cache.queue_copies_to(stream, metadata.sequence_blocks())?;
    metadata.check_copies_queued(cache.pool(), CopiesIn::Cache(cache.entry()))?;
    Ok(progress)
}

/// Refuses a step whose tokens see other keys than those up to their own.
fn check_causal(metadata: &AttentionMetadata) -> Result<(), Violation> {
    match metadata.mask() {
        mask @ LayerMask::Causality(Causality::Causal) => metadata.check_mask(mask),
        other => Err(Violation::new(
            &rules::STEP_CAUSALITY,
            format_args!("{other} with sparse attention"),
            "a causal step",
            "make the settings with `Causality::Causal`, or set that mask in the metadata",
        )),
    }
}

/// A layer of a cache, whose tokens have one head, as the operators read it: `[blocks, block size, 1, D]`.
fn paged<T: Element>(tensor: &Tensor<T>, cache: &PagedKvCache<T>) -> Result<Tensor<T>> {
    let (blocks, block_size) = (cache.pool().blocks(), cache.pool().block_size());
    Ok(tensor.reshape([blocks, block_size, 1, size(tensor, 2)])?)
}

/// Whose tensor is checked.
#[derive(Clone, Copy)]
enum Whose {
    Indexer(usize),
    Layer(usize),
}

impl Whose {
    fn fix(self) -> &'static str {
        match self {
            Self::Indexer(_) => {
                "bring queries of heads of 128, a weight for each head of them, and one key of 128, each in its place \
                 of `IndexerTensors`"
            }
            Self::Layer(_) => {
                "bring absorbed queries of 512 and their rotary parts of 64 with the heads of the `AttentionShape`, \
                 latents of 512 and rotary keys of 64, each in its place of `SparseTensors`"
            }
        }
    }
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Indexer(indexer) => write!(f, "indexer {indexer}"),
            Self::Layer(layer) => write!(f, "layer {layer}"),
        }
    }
}

#[cold]
fn repeated_indexer(indexer: usize, indexers: usize) -> Violation {
    Violation::new(
        &rules::STEP_LAYER_REPEATED,
        format_args!("indexer {indexer} a second time"),
        format_args!("each indexer below {indexers} once"),
        "pass the choice of the first time to each layer that shares it; to compute a step again, begin it again",
    )
}

#[cold]
fn other_indexer(indexer: usize, given: IndexerKind, first: IndexerKind) -> Error {
    let given = format_args!("{given}, of indexer {indexer}");
    let planned = format_args!("{first}, as of the first indexer of the step");
    Error::not_as_planned("index query", given, planned)
        .fix("fill indexers up to one number of heads, with weights of 0, and bring weights of one type")
}

#[cold]
fn missing_index_keys(layer: usize, indexer: usize, indexers: usize) -> Violation {
    rules::SPARSE_INDEX_KEYS.broken(
        format_args!("layer {layer}, the last of the step, without the keys of indexer {indexer}"),
        format_args!("the keys of each indexer below {indexers}"),
    )
}
