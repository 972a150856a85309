//! The attention of one rank of several that divide the contexts of requests among them.

use std::sync::Arc;

use ascend_attention::comm::Communicator;
use ascend_attention::{Element, Stream, Violation};

use crate::backends::{AttentionShape, LatentFormKind, LayerInputs, names_of_keys};
use crate::batch::BatchRequest;
use crate::engine::StepRows;
use crate::error::{Error, Result};
use crate::kv::{BlockPool, CacheEntry, CopiesIn, PagedKvCache, Sequence, StepLease, StepProgress, no_layer, uncopied};
use crate::rules;

use super::context_parallel::{ContextParallel, ContextSplit};
use super::paged_rows::Queries;
use super::step_agreement::{BY_ROWS, SequenceNames, StepOrder, refuse};

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
/// pass the keys and values of every new token; each writes those that it holds.
///
/// **Every rank makes the same steps**: the same sequences in the same order, with the same numbers of cached and new
/// tokens, and the layers in order, on a thread of its own. A rank may have a pool of its own, whose sequences grow
/// alike, or share that of another rank of the process ([`with_pool`](Self::with_pool)).
///
/// The first layer of a step compares what the ranks compute, before it writes or computes anything: lengths, order of
/// the sequences, runs, layers, heads, element type, scale, and whether the step is divided by heads, by rows or
/// replayed from a graph of some size. Where a rank has another step, all ranks refuse the layer with the first
/// difference and the ranks that have it ([`RANKS_BATCH`](crate::rules::RANKS_BATCH)), and nothing has changed: the
/// wrong ones begin the step again, the others repeat the layer. A sequence goes by the step and request that had it
/// first, so that two new ones of equal lengths may change places unseen. That costs an exchange of 8 bytes of each
/// rank in each step, for which the host waits until the stream has come to the step;
/// [`trust_steps`](Self::trust_steps) leaves it out.
///
/// A refusal leaves rank and step as they were, and so does a step that ends before its first layer: nothing of it goes
/// to the other ranks. They wait in their first layer until the rank comes to one, as long as HCCL lets them: with the
/// same step all go on, with another one all are refused. A rank that comes to none calls
/// [`refuse_step`](Self::refuse_step), by which the others are refused, or is dropped.
///
/// Behind the comparison, or without it, the other ranks wait until a refused layer is repeated or the rank is dropped.
/// Where a layer fails half queued, or a step ends without some layers, the rank leaves its communicator: the other
/// ranks fail with an error of their own, on the emulation at once, on hardware after the limit of HCCL, and every
/// later step is refused ([`RANKS_LEFT`](crate::rules::RANKS_LEFT)). A rank that has left counts no token
/// as computed.
///
/// **A step counts before the other ranks are known to have made it**: once this rank has queued every layer. A rank
/// that leaves behind layer 0 is noticed where its calls are waited for: when this rank's stream is synchronised,
/// which fails, or by the first layer of its next step, which fails and makes this rank leave too; until then
/// [`computed_tokens`](Self::computed_tokens) counts tokens whose keys may lack what that rank did not send.
/// Synchronise the stream before something outside of the attention relies on a step, such as tokens that are
/// returned, keys that are copied elsewhere, and prefixes that are shared. Where that fails
/// [`leave`](Self::leave) on all ranks, or drop the attentions, make communicators and attentions anew, and compute the
/// sequences again. With [`trust_steps`](Self::trust_steps) the synchronisation alone tells.
///
/// Prompts may be computed with their rows divided in the place of the heads ([`begin_rows`](Self::begin_rows)), over
/// the same sequences and caches.
///
/// Over a cache of latents ([`CacheShape::latent`](crate::kv::CacheShape::latent)) a layer has
/// [absorbed](crate::LatentForm::Absorbed) queries, whose rotary parts are gathered too, and an output
/// `[tokens, N, 512]`, which the caller projects. Each new token sees its keys in a row of its own there, of prompts
/// and drafts as well. Steps of divided heads need CANN 8.5: before, the operator gives no log-sum-exps of latents.
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
    pub(super) communicator: Option<Communicator>,
    pub(super) rank: usize,
    pub(super) shape: AttentionShape,
    pub(super) cache: PagedKvCache<T>,
    division: ContextParallel,
    /// The pool of the sequences, an entry of which means a block of each rank's cache.
    pool: BlockPool,
    /// What this rank has computed of the sequences.
    entry: Arc<CacheEntry>,
    /// That of the cache in its own pool, by which another cache in its place is known.
    cache_entry: Arc<CacheEntry>,
    /// What the ranks call the sequences.
    pub(super) names: SequenceNames,
    /// Whether steps begin without a comparison of the ranks.
    trusts: bool,
}

impl<T: Element> ContextAttention<T> {
    /// The attention of the communicator's rank over its own cache: runs of `run` tokens go to one rank after the
    /// other. All ranks have caches of the same blocks.
    ///
    /// # Errors
    /// [`RANKS_PARTS`](crate::rules::RANKS_PARTS), [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) as for
    /// [`ContextParallel::new`]; [`RANKS_DEVICE`](crate::rules::RANKS_DEVICE) for a cache on another device than the
    /// communicator's; [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised cache;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for heads that are not those of the cache, as for
    /// [`AttentionShape::check`]; [`POOL_SIZE`](crate::rules::POOL_SIZE) for more tokens than slots are counted.
    pub fn new(communicator: Communicator, shape: AttentionShape, cache: PagedKvCache<T>, run: usize) -> Result<Self> {
        if cache.is_quantised() {
            return Err(Violation::new(
                &rules::CACHE_QUANTISED,
                "a quantised cache for divided contexts",
                format_args!("a cache of {}", T::DTYPE),
                "make the cache by `PagedKvCache::new`",
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
        let division = ContextParallel::new(communicator.size(), run, own.block_size())?;
        let pool = BlockPool::new(own.blocks(), division.pool_block_size(), own.pad_policy())?;
        let rank = communicator.rank();
        let (entry, cache_entry) = (CacheEntry::new(&pool), Arc::clone(cache.entry()));
        let names = SequenceNames::default();
        let communicator = Some(communicator);
        Ok(Self { communicator, rank, shape, cache, division, pool, entry, cache_entry, names, trusts: false })
    }

    /// Leaves out the comparison of steps, for an engine which makes sure that the ranks' steps are equal by itself:
    /// where they are not, hardware computes wrong numbers or waits for half an hour. It saves an exchange of 8 bytes
    /// of each rank, and one wait for the stream, in each step. Either all ranks do this or none.
    pub fn trust_steps(mut self) -> Self {
        self.trusts = true;
        self
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
        self.names.forget();
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
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator; as for
    /// [`PagedKvCache::mark_computed`].
    pub fn mark_computed(&self, sequence: &Sequence, tokens: usize) -> Result<(), Violation> {
        self.joined()?;
        self.holds(sequence)?;
        self.entry.check_marked(sequence, tokens)?;
        self.entry.mark_computed(sequence.stamp(), tokens);
        Ok(())
    }

    /// Elements of a head of the output.
    pub(super) fn output_dim(&self) -> usize {
        let cache = self.cache.shape();
        if cache.is_latent() { cache.key_dim } else { cache.value_dim }
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

    /// Refuses the step that the other ranks make or come to, and waits for them: their first layer of it is refused
    /// with the name of this rank, and nothing has changed. For a rank that cannot make the step, was refused for
    /// example, and has no other one to make: nothing else tells the others of a refusal while the rank lives. One call
    /// refuses one comparison.
    ///
    /// # Errors
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) where [steps are not compared](Self::trust_steps);
    /// [`Error::Capturing`](ascend_attention::Error::Capturing) on a thread that captures a graph. Errors of HCCL, also
    /// where the others come to no step in time: the rank has left.
    pub fn refuse_step(&mut self, stream: &Stream) -> Result<()> {
        self.joined()?;
        self.cache.admits(stream)?;
        if self.trusts {
            return Err(Error::invalid("self", "ranks that trust each other", "ranks that compare their steps")
                .fix("drop the attention of this rank, by which the others fail"));
        }
        self.exchange(|communicator, exchanged| refuse(communicator, stream, exchanged))
    }

    /// The number of a sequence's first tokens that this rank has computed, as
    /// [`PagedKvCache::computed_tokens`] counts them: those whose layers it has queued, whatever the other ranks did
    /// ([above](ContextAttention)). None once the rank has left.
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

    /// Checks a step of these requests and begins it, in a form in which the ranks agree.
    pub(super) fn prepare<'a>(
        &mut self,
        stream: &'a Stream,
        requests: &[BatchRequest<'_>],
        form: i64,
    ) -> Result<PreparedStep<'a>> {
        self.joined()?;
        if !Arc::ptr_eq(&self.cache_entry, self.cache.entry()) {
            return Err(Violation::new(
                &rules::SETTINGS_CACHE,
                format_args!("another cache in the place of that of rank {}", self.rank),
                "its own",
                "make a `ContextAttention` of the other cache",
            )
            .into());
        }
        self.cache.admits(stream)?;
        for sequence in requests.iter().filter_map(|request| request.sequence) {
            self.holds(sequence)?;
        }
        // Latents have no call of the new tokens among themselves; a step by rows has calls of its own.
        let by_row = self.cache.shape().is_latent() && form != BY_ROWS;
        let split = self.division.divide(requests, self.cache.pool().pad_policy(), by_row)?;
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
        let compared = !self.trusts && self.division.ranks() > 1;
        let settings = (self.shape, self.cache.shape(), T::DTYPE);
        let terms = compared.then(|| self.names.terms(settings, self.division.tokens_in_run(), requests, form));
        Ok(PreparedStep { split, order: StepOrder::new(terms), progress, lease })
    }

    /// Refuses a layer out of order, or inputs of other shapes and kinds; returns the queries.
    pub(super) fn check_layer<'i>(
        &self,
        (layer, order): (usize, &StepOrder),
        (heads, rows): (usize, StepRows<'_>),
        inputs: &LayerInputs<'i, T>,
    ) -> Result<Queries<'i, T>> {
        self.joined()?;
        let cache = self.cache.shape();
        if layer >= cache.layers {
            return Err(no_layer(layer, cache.layers));
        }
        order.check(layer)?;
        if inputs.mask.is_some() || inputs.learnable_sink.is_some() {
            return Err(Error::invalid("inputs", "a mask or sinks", "neither: a token sees every key before it")
                .fix("compute layers with masks or sinks of their own on each rank, by `Attention`"));
        }
        let form = cache.is_latent().then_some(LatentFormKind::Absorbed);
        let rope = inputs.absorbed_rope(layer, form, &rules::BACKEND_LATENT)?;
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        let query_dim = if rope.is_some() { cache.key_dim } else { head_dim };
        let [key, value] = names_of_keys(rope.is_some());
        let tensors = [
            Some(("query", inputs.query, heads, query_dim)),
            Some((key, inputs.key, kv_heads, cache.key_dim)),
            Some((value, inputs.value, kv_heads, cache.value_dim)),
            rope.map(|rope| ("query_rope", rope, heads, cache.value_dim)),
        ];
        for (name, tensor, heads, dim) in tensors.into_iter().flatten() {
            rows.check(name, format_args!("layer {layer}"), tensor, &[heads, dim])?;
        }
        Ok(Queries { query: inputs.query, rope })
    }

    /// Leaves at the end of a step of which the other ranks wait for layers.
    pub(super) fn end_step(&mut self, order: &StepOrder) {
        if self.is_torn(order) {
            self.leave();
        }
    }

    /// The outcome of a step's end, which says how to go on where the rank leaves, or has left.
    pub(super) fn advise(&self, order: &StepOrder, ended: Result<()>) -> Result<()> {
        match self.is_torn(order) || self.communicator.is_none() {
            true => ended.map_err(|why| why.fix(rules::RANKS_LEFT.fix)),
            false => ended,
        }
    }

    /// Whether there are other ranks, which wait for layers of a step.
    fn is_torn(&self, order: &StepOrder) -> bool {
        self.division.ranks() > 1 && order.is_torn(self.cache.shape().layers)
    }

    /// Compares a step with those of the other ranks, unless they trust each other or have agreed in it.
    pub(super) fn agree(&mut self, stream: &Stream, order: &mut StepOrder) -> Result<()> {
        let Some(terms) = &order.terms else {
            return Ok(());
        };
        let difference = self.exchange(|communicator, exchanged| terms.difference(communicator, stream, exchanged))?;
        if let Some(difference) = difference {
            return Err(difference.into());
        }
        self.names.agreed(terms);
        order.begin();
        Ok(())
    }

    /// Makes calls between the ranks, and leaves if they fail after some have come to the others, as `exchange` says.
    fn exchange<R>(&mut self, exchange: impl FnOnce(&mut Communicator, &mut bool) -> Result<R>) -> Result<R> {
        let mut exchanged = false;
        let outcome = exchange(joined(&mut self.communicator, self.rank)?, &mut exchanged);
        if outcome.is_err() && exchanged {
            self.leave();
        }
        outcome
    }

    /// What this rank has computed of the sequences.
    pub(super) fn entry(&self) -> &Arc<CacheEntry> {
        &self.entry
    }

    pub(super) fn joined(&self) -> Result<(), Violation> {
        match self.communicator {
            Some(_) => Ok(()),
            None => Err(left(self.rank)),
        }
    }

    /// Leaves the communicator, as behind a failure of the stream. The other ranks do not wait for calls that do not
    /// come, and fail too; later steps are refused ([`RANKS_LEFT`](crate::rules::RANKS_LEFT)); no token counts as
    /// computed, since the last ones may lack what a rank that has left did not send. Its
    /// [graphs](crate::ContextGraphs) replay no more; on hardware drop them first, since HCCL wants graphs destroyed
    /// before their communicators. The attention of a single rank stays as it is.
    pub fn leave(&mut self) {
        if self.division.ranks() == 1 {
            return;
        }
        self.entry.lose_all();
        if let Some(communicator) = self.communicator.take() {
            // A rank that cannot leave now does when its last graph is dropped.
            drop(communicator.leave());
        }
    }
}

impl<T: Element> Drop for ContextAttention<T> {
    /// Leaves, also where graphs are there yet.
    fn drop(&mut self) {
        self.leave();
    }
}

/// A step that was checked and begun.
pub(super) struct PreparedStep<'a> {
    pub(super) split: ContextSplit,
    pub(super) order: StepOrder,
    pub(super) progress: StepProgress,
    pub(super) lease: StepLease<'a>,
}

/// The communicator of a rank.
///
/// # Errors
/// [`RANKS_LEFT`](rules::RANKS_LEFT) once the rank has left it.
pub(super) fn joined(communicator: &mut Option<Communicator>, rank: usize) -> Result<&mut Communicator, Violation> {
    communicator.as_mut().ok_or_else(|| left(rank))
}

#[cold]
pub(super) fn left(rank: usize) -> Violation {
    rules::RANKS_LEFT.broken(format_args!("rank {rank}, which has left its communicator"), "a rank that has not")
}
