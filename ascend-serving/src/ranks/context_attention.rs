//! The attention of one rank of several that divide the contexts of requests among them.

use std::sync::Arc;

use ascend_attention::attention::BlockTable;
use ascend_attention::comm::Communicator;
use ascend_attention::{Element, Event, Stream, Tensor, Violation};

use crate::backends::AttentionShape;
use crate::batch::BatchRequest;
use crate::engine::{QueuedLayers, STEP_AGAIN, STEP_HEADS_FIX, StepRows};
use crate::error::{Error, Result};
use crate::kv::{
    BlockPool, CacheEntry, CacheWrite, CopiesIn, Interleave, PagedKvCache, Sequence, StepLease, StepProgress, no_layer,
    uncopied,
};
use crate::rules;

use super::context_exchange::{ContextExchange, ContextLayer, ContextPart};
use super::context_parallel::{ContextParallel, ContextSplit};

/// One rank of an attention whose contexts are divided over ranks (decode context parallelism, DCP): each rank has a
/// part of every request's keys, and some of the query heads, and gets the attention of its own heads over all keys.
///
/// In each layer the ranks gather each other's queries, attend to the keys that they have with the heads of all,
/// exchange the results and their log-sum-exps, and merge what belongs to their own heads. The new tokens of prompts,
/// chunks and drafts attend to each other on the rank of their heads, without an exchange. [`ContextParallel`] says
/// which rank holds which key.
///
/// The [`AttentionShape`] is that of the rank: its query heads over the key heads of its cache. All ranks have as many
/// heads, and the same key heads. With heads divided by [`TensorParallel`](crate::TensorParallel), the ranks of one
/// communicator are those that would have [copies](crate::TensorParallel::replicas) of the same key heads. All ranks
/// bring the keys and values of every new token; each writes those that it holds.
///
/// **Every rank makes the same steps**, with requests of the same lengths and rows, and queues the layers in order, on a
/// thread of its own. A rank may have a pool of its own, whose sequences grow alike, or share that of another rank of
/// the process ([`with_pool`](Self::with_pool)).
///
/// A refusal leaves rank and step as they were, and the other ranks waiting until the call is repeated or the rank is
/// dropped. Where a layer fails half queued, or a step ends without some layers, the rank leaves its communicator: the
/// other ranks fail with an error of their own, on the emulation at once, on hardware after the limit of HCCL, and
/// every later step is refused ([`RANKS_LEFT`](crate::rules::RANKS_LEFT)).
///
/// It needs ScatterPaKvCache, AttentionUpdate and HCCL: Atlas A2, A3 or Ascend 950, a release after CANN 8.1.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::comm::Communicator;
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
/// use ascend_serving::{AttentionShape, BatchRequest, ContextAttention};
///
/// // One rank; more come of `Communicator::all` or `Communicator::join`, each on a thread of its own.
/// let device = Runtime::emulated()?.device(0)?;
/// for communicator in Communicator::all(&[device])? {
///     let stream = communicator.device().stream()?;
///     let shape = CacheShape::new(2, 1, 64);
///     let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PadPolicy::SkipNegative)?;
///     // Four heads of the rank; runs of 16 tokens go to one rank after the other.
///     let mut attention = ContextAttention::new(communicator, AttentionShape::new(4, 1, 64), cache, 16)?;
///     let mut sequence = attention.sequence();
///     for tokens in [3, 1] {
///         attention.grow(&stream, &mut sequence, tokens)?;
///         let mut step = attention.begin(&stream, &[BatchRequest::of(&sequence, tokens)])?;
///         for layer in 0..2 {
///             let query = stream.upload(&vec![bf16::ONE; tokens * 4 * 64], [tokens, 4, 64])?;
///             let key = stream.upload(&vec![bf16::ONE; tokens * 64], [tokens, 1, 64])?;
///             let output = step.forward(layer, (&query, &key, &key))?;
///             assert_eq!(output.shape(), [tokens, 4, 64]);
///         }
///         step.end()?;
///     }
/// }
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ContextAttention<T: Element> {
    /// `None` once the rank has left.
    communicator: Option<Communicator>,
    rank: usize,
    shape: AttentionShape,
    cache: PagedKvCache<T>,
    division: ContextParallel,
    /// The pool of the sequences, an entry of which means a block of each rank's cache.
    pool: BlockPool,
    /// What this rank has computed of the sequences.
    entry: Arc<CacheEntry>,
}

impl<T: Element> ContextAttention<T> {
    /// The attention of the communicator's rank over its own cache: runs of `run` tokens go to one rank after the
    /// other. All ranks have caches of the same blocks.
    ///
    /// # Errors
    /// [`RANKS_PARTS`](crate::rules::RANKS_PARTS), [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) as for
    /// [`ContextParallel::new`]; [`RANKS_DEVICE`](crate::rules::RANKS_DEVICE) for a cache on another device than the
    /// communicator's; [`BACKEND_QUANTISED`](crate::rules::BACKEND_QUANTISED) for a quantised cache,
    /// [`BACKEND_LATENT`](crate::rules::BACKEND_LATENT) for one of latents;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for heads that are not those of the cache, as for
    /// [`AttentionShape::check`]; [`POOL_SIZE`](crate::rules::POOL_SIZE) for more tokens than slots are counted.
    pub fn new(communicator: Communicator, shape: AttentionShape, cache: PagedKvCache<T>, run: usize) -> Result<Self> {
        if cache.is_quantised() {
            return Err(Violation::new(
                &rules::BACKEND_QUANTISED,
                "a quantised cache for divided contexts",
                format_args!("a cache of {}", T::DTYPE),
                "make the cache by `PagedKvCache::new`",
            )
            .into());
        }
        if cache.shape().is_latent() {
            return Err(Violation::new(
                &rules::BACKEND_LATENT,
                "a cache of latents for divided contexts",
                "a cache of keys and values",
                "keep the whole contexts of latent attention on each rank, which has some of the heads",
            )
            .into());
        }
        shape.check_cache(&cache.shape())?;
        if cache.device() != communicator.device() {
            return Err(rules::RANKS_DEVICE
                .broken(
                    format_args!("a cache on device {}", cache.device().id()),
                    format_args!("device {}, that of rank {}", communicator.device().id(), communicator.rank()),
                )
                .into());
        }
        let own = cache.pool();
        let division = ContextParallel::new(Interleave::new(communicator.size(), run)?, own.block_size())?;
        let pool = BlockPool::new(own.blocks(), division.pool_block_size(), own.pad_policy())?;
        let rank = communicator.rank();
        let entry = CacheEntry::new(&pool);
        Ok(Self { communicator: Some(communicator), rank, shape, cache, division, pool, entry })
    }

    /// Replaces the pool of the sequences by that of another rank of this process: one sequence serves both. Fork
    /// sequences, and share prefixes, when all ranks have queued the tokens.
    ///
    /// # Errors
    /// [`POOL_SHARED`](crate::rules::POOL_SHARED) for a pool of another number of blocks, block size or padding, and
    /// while a block of either pool is held.
    pub fn with_pool(mut self, pool: &BlockPool) -> Result<Self, Violation> {
        self.pool.check_replaced(pool)?;
        self.entry = CacheEntry::new(pool);
        self.pool = pool.clone();
        Ok(self)
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The heads of this rank.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The cache of this rank. Its own pool names no block of the sequences.
    pub fn cache(&self) -> &PagedKvCache<T> {
        &self.cache
    }

    /// The cache of this rank, to write keys that no step of this attention computes: to the slots of
    /// [`ContextParallel::split`], in every layer, and then [`mark_computed`](Self::mark_computed).
    pub fn cache_mut(&mut self) -> &mut PagedKvCache<T> {
        &mut self.cache
    }

    /// Marks the first `tokens` tokens of a sequence as computed, as [`PagedKvCache::mark_computed`] does: the rank's
    /// keys and values among them are in every layer of its cache, or queued to be, although no step wrote them.
    ///
    /// # Errors
    /// As for [`PagedKvCache::mark_computed`].
    pub fn mark_computed(&self, sequence: &Sequence, tokens: usize) -> Result<(), Violation> {
        self.holds(sequence)?;
        self.entry.check_marked(sequence, tokens)?;
        self.entry.mark_computed(sequence.stamp(), tokens);
        Ok(())
    }

    /// The bytes that this rank sends to others in a layer of a step of `tokens` tokens: queries, and results with
    /// their log-sum-exps. It receives as many.
    pub fn sent_bytes(&self, tokens: usize) -> u64 {
        let AttentionShape { heads, head_dim, .. } = self.shape;
        let elements = head_dim as u64 + self.cache.shape().value_dim as u64;
        let bytes = elements * size_of::<T>() as u64 + size_of::<f32>() as u64;
        let others = self.division.share().ranks() as u64 - 1;
        [tokens as u64, heads as u64, bytes].into_iter().fold(others, u64::saturating_mul)
    }

    /// How contexts are divided over the ranks.
    pub fn division(&self) -> ContextParallel {
        self.division
    }

    /// The pool of the sequences, whose blocks have [`ContextParallel::pool_block_size`] tokens.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The communicator, for other calls between the ranks, which all of them make alike; `None` once the rank has
    /// left it.
    pub fn communicator_mut(&mut self) -> Option<&mut Communicator> {
        self.communicator.as_mut()
    }

    /// A sequence without tokens.
    pub fn sequence(&self) -> Sequence {
        Sequence::new(&self.pool)
    }

    /// Makes room for `tokens` more tokens of a sequence, and queues the copies of blocks that it shared. After an
    /// error the sequence is unchanged. Before it reports that there are no blocks, it waits for blocks that steps in
    /// flight may still read. Where ranks share a pool, one of them grows the sequence.
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool; as for
    /// [`PagedKvCache::grow`].
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        self.cache.admits(stream)?;
        self.holds(sequence)?;
        let room = sequence.reserve_in_time(tokens)?;
        self.cache.copy_blocks_in(stream, &room.copies, &self.entry)?;
        // The slots are those of the pool; a step has those of the rank.
        let _ = sequence.settle(room)?;
        Ok(())
    }

    /// The number of a sequence's first tokens that this rank has computed, as
    /// [`PagedKvCache::computed_tokens`] counts them.
    ///
    /// # Errors
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool.
    pub fn computed_tokens(&self, sequence: &Sequence) -> Result<usize, Violation> {
        self.holds(sequence)?;
        Ok(self.entry.computed_tokens(sequence.stamp()))
    }

    fn holds(&self, sequence: &Sequence) -> Result<(), Violation> {
        sequence.check_groups(1)?;
        self.pool.check_same(
            sequence.pool(),
            "a sequence",
            "make each sequence with `ContextAttention::sequence`, or the pool that the ranks share",
        )
    }

    /// Begins a step of these requests on a stream, of the same ones on every rank: copies the block table to the
    /// device. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for a sequence of another pool;
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a block outside of the cache;
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED), [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) and
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) by what this rank has computed of a sequence; as for
    /// [`ContextParallel::split`].
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, requests: &[BatchRequest<'_>]) -> Result<ContextStep<'a, T>> {
        self.joined()?;
        self.cache.admits(stream)?;
        for sequence in requests.iter().filter_map(|request| request.sequence) {
            self.holds(sequence)?;
        }
        let split = self.division.divide(requests, self.cache.pool().pad_policy())?;
        // Blocks that go back from here on wait for the step.
        let lease = self.pool.begin_step(stream);
        let tokens = requests.iter().enumerate();
        let tokens = tokens.filter_map(|(index, request)| Some((index, request.step_tokens(request.sequence?))));
        let progress = StepProgress::begin(&self.pool, Some(&self.entry), tokens)?;
        let blocks =
            || requests.iter().filter_map(|request| request.sequence).flat_map(|all| all.row().iter().copied());
        self.cache.queue_copies_in(stream, blocks(), &self.entry)?;
        if let Some(block) = self.pool.first_uncopied(blocks(), CopiesIn::Cache(&self.entry)) {
            return Err(uncopied(format_args!("block {block} of the step")).into());
        }
        let own = split.ranks().get(self.rank).ok_or_else(|| no_rank(self.rank, split.ranks().len()))?;
        let block_table = self.cache.block_table(stream, own.table())?;
        let layers = QueuedLayers::new(self.cache.shape().layers, vec![progress], STEP_AGAIN);
        Ok(ContextStep {
            attention: self,
            stream,
            split,
            block_table,
            write: None,
            exchange: None,
            next: 0,
            marks: None,
            layers,
            _lease: lease,
        })
    }

    fn joined(&self) -> Result<(), Violation> {
        match self.communicator {
            Some(_) => Ok(()),
            None => Err(rules::RANKS_LEFT
                .broken(format_args!("rank {}, which has left its communicator", self.rank), "a rank that has not")),
        }
    }

    /// Leaves the communicator, so that the other ranks do not wait for calls that do not come.
    fn leave(&mut self) {
        if self.division.share().ranks() > 1 {
            self.communicator = None;
        }
    }
}

#[cold]
fn no_rank(rank: usize, ranks: usize) -> Error {
    Error::invalid("rank", rank, format_args!("below {ranks}")).fix("divide the contexts over the communicator's ranks")
}

/// A step in progress on one rank. From [`ContextAttention::begin`]; end it when the last layer is queued, by
/// [`ContextStep::end`] or by dropping it. Where some of its layers are missing then, the rank leaves its communicator,
/// unless none was queued.
#[derive(Debug)]
pub struct ContextStep<'a, T: Element> {
    attention: &'a mut ContextAttention<T>,
    stream: &'a Stream,
    split: ContextSplit,
    block_table: BlockTable,
    /// The write that the first layer has prepared for all layers.
    write: Option<CacheWrite>,
    /// The calls that the first layer has prepared for all layers, and their tensors.
    exchange: Option<ContextExchange<T>>,
    /// The layer that comes next.
    next: usize,
    /// Marks of the time, if they are asked for.
    marks: Option<Vec<(ContextPart, Event)>>,
    layers: QueuedLayers,
    _lease: StepLease<'a, Stream>,
}

impl<T: Element> ContextStep<'_, T> {
    /// How the step is divided.
    pub fn split(&self) -> &ContextSplit {
        &self.split
    }

    /// Marks the time on the stream in front of each layer that is queued from now on, and behind each part of it.
    pub fn mark_parts(&mut self) {
        self.marks.get_or_insert_default();
    }

    /// The marks so far, in order: the time of a part is that [since](Event::elapsed_since) the mark before it. None
    /// unless [asked for](Self::mark_parts).
    pub fn marks(&self) -> &[(ContextPart, Event)] {
        self.marks.as_deref().unwrap_or_default()
    }

    /// Queues one layer: writes the keys and values that the rank holds, then attends. Query `[tokens, N, D]` of the
    /// rank's heads, key and value `[tokens, Nkv, D]`, the same on every rank; the attention of the rank's heads over
    /// all keys, `[tokens, N, D]`. Returns at once, but on hardware the first layer of a communicator waits for the
    /// other ranks. The first layer plans for all.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) and [`RANKS_ORDER`](crate::rules::RANKS_ORDER) for
    /// another layer than the next, [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator;
    /// as for [`CacheWrite::plan`], and as for planning the calls and the merge: nothing was exchanged then, and the
    /// layer can be repeated. [`Hccl`](ascend_attention::Error::Hccl) and errors of launches: the rank has left.
    pub fn forward(&mut self, layer: usize, inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>)) -> Result<Tensor<T>> {
        let shape = inputs.0.shape().to_vec();
        let outcome = self.check(layer, inputs).and_then(|()| Ok(Tensor::empty(self.stream.device(), &shape)?));
        let mut output = self.layers.note_refusal(outcome)?;
        self.queue(layer, inputs, &mut output)?;
        Ok(output)
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape
    /// than the query's.
    pub fn forward_into(
        &mut self,
        layer: usize,
        inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let outcome = self.check(layer, inputs).and_then(|()| {
            output.check_device("output", self.stream.device())?;
            match output.shape() == inputs.0.shape() && output.is_contiguous() {
                true => Ok(()),
                false => Err(Error::not_as_planned("output", output.desc(), format!("{:?}", inputs.0.shape()))),
            }
        });
        self.layers.note_refusal(outcome)?;
        self.queue(layer, inputs, output)
    }

    /// Refuses a layer out of order, or tensors of other shapes.
    fn check(&self, layer: usize, (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>)) -> Result<()> {
        self.attention.joined()?;
        self.layers.check_not_repeated(layer)?;
        let count = self.attention.cache.shape().layers;
        if layer >= count {
            return Err(no_layer(layer, count));
        }
        if layer != self.next {
            return Err(rules::RANKS_ORDER
                .broken(format_args!("layer {layer} of a step"), format_args!("layer {}, the next one", self.next))
                .into());
        }
        let tokens = self.split.tokens();
        let rows =
            StepRows { actual: tokens, padded: tokens, padding: true, fixes: [rules::STEP_TOKENS.fix, STEP_HEADS_FIX] };
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.attention.shape;
        let value_dim = self.attention.cache.shape().value_dim;
        for (name, tensor, heads, dim) in
            [("query", query, heads, head_dim), ("key", key, kv_heads, head_dim), ("value", value, kv_heads, value_dim)]
        {
            tensor.check_device(name, self.stream.device())?;
            rows.check(name, tensor, Some(layer), heads, Some(dim))?;
        }
        Ok(())
    }

    /// Queues a layer that was checked.
    fn queue(
        &mut self,
        layer: usize,
        inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let mut exchanges = false;
        let outcome = self.queue_layer(layer, inputs, output, &mut exchanges);
        if outcome.is_err() && exchanges {
            self.attention.leave();
        }
        self.next += usize::from(outcome.is_ok());
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer(
        &mut self,
        layer: usize,
        (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
        exchanges: &mut bool,
    ) -> Result<()> {
        let Self { attention, stream, split, block_table, write, exchange, layers, marks, .. } = self;
        let ContextAttention { communicator, cache, shape, rank, .. } = &mut **attention;
        let communicator =
            communicator.as_mut().ok_or_else(|| rules::RANKS_LEFT.broken("a rank", "a rank that has not"))?;
        let tensors = ContextLayer { query, key, value, cache: cache.layer(layer)?.clone(), block_table };
        let exchange = match exchange {
            Some(exchange) => exchange,
            None => exchange.insert(ContextExchange::plan(stream, *shape, split, *rank, &tensors)?),
        };
        let write = match write {
            Some(write) => write,
            None => write.insert(CacheWrite::plan(cache, stream, own_slots(split, *rank), key, value)?),
        };
        let mut mark = |part| {
            if let Some(marks) = marks {
                marks.push((part, stream.record_timing_event()?));
            }
            Ok(())
        };
        mark(ContextPart::Start)?;
        layers.begin_write();
        cache.write(stream, write, layer, key, value)?;
        mark(ContextPart::Write)?;
        *exchanges = true;
        exchange.launch(communicator, stream, &tensors, output, &mut mark)
    }

    /// Ends the step, and checks that all its layers were queued.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING): the tokens of the step do not count as computed.
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }
}

impl<T: Element> Drop for ContextStep<'_, T> {
    fn drop(&mut self) {
        if self.next > 0 && !self.layers.is_complete() {
            self.attention.leave();
        }
    }
}

fn own_slots(split: &ContextSplit, rank: usize) -> &[i32] {
    split.ranks().get(rank).map_or(&[], |rank| rank.slots())
}
