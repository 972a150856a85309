//! Steps of sparse attention replayed from graphs, indexer by indexer and layer by layer.

use std::fmt;
use std::sync::Arc;

use ascend_attention::{Element, Stream, Violation};

use crate::batch::AttentionMetadata;
use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::graphs::{CapturedGroup, CapturedProgram, GraphLimits, GraphPool, fitting_rows, not_while_capturing};
use crate::kv::{CacheEntry, MAX_INT32};
use crate::rules;

use super::sparse_buffers::SparseBuffers;
use super::sparse_latent::SparseLatent;
use super::sparse_step::{ReplayedSparse, SparseStep};
use super::two_caches::named;

/// Steps of sparse attention of any number of requests, replayed from graphs that were captured for a few sizes: one
/// graph for each indexer and one for each layer. From [`SparseLatent::capture`].
///
/// A graph writes its keys of the new tokens, then chooses or attends. It calls LightningIndexer for contexts of every
/// length, also where a step without graphs chooses every key without it: such a choice has the same keys, in another
/// order. What the indexers choose is one tensor for all of them: queue the layers that read a choice before the next
/// indexer.
///
/// ```
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{
///     AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, GraphLimits, IndexerTensors,
///     SparseLatent, SparseTensors,
/// };
/// use ascend_attention::{Runtime, bf16};
///
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let cache = |shape| PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PadPolicy::SkipNegative);
/// let latents = cache(CacheShape::latent(2))?;
/// let index_keys = cache(CacheShape::index_keys(1))?.with_pool(latents.pool())?;
/// let mut sparse = SparseLatent::new(AttentionShape::latent(2), latents, index_keys)?.sparse_count(16);
/// // Decodes of up to 4 requests of up to 512 keys, with an indexer of 4 heads.
/// let mut graphs = sparse.capture::<bf16>(&stream, 4, &GraphLimits::new([1, 4], 512))?;
///
/// let mut sequence = Sequence::new(sparse.latents().pool());
/// sparse.grow(&stream, &mut sequence, 1)?;
/// let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
/// let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings)?;
/// let rows = |heads: usize, dim: usize| stream.upload(&vec![bf16::ONE; heads * dim], [1, heads, dim]);
/// let weights = stream.upload(&[bf16::ONE; 4], [1, 4])?;
///
/// let mut step = graphs.begin(&mut sparse, &stream, &mut metadata)?;
/// let choice = step.choose(0, IndexerTensors { query: &rows(4, 128)?, weights: &weights, key: &rows(1, 128)? })?;
/// for layer in 0..2 {
///     let output = step.forward(layer, SparseTensors {
///         query: &rows(2, 512)?,
///         query_rope: &rows(2, 64)?,
///         latent: &rows(1, 512)?,
///         key_rope: &rows(1, 64)?,
///         choice: &choice,
///     })?;
///     assert_eq!(output.download(&stream)?, [bf16::ONE; 2 * 512]);
/// }
/// step.end()?;
/// # }
/// # Ok(())
/// # }
/// ```
pub struct SparseGraphs<T: Element> {
    graphs: GraphPool<SparseBuffers<T>>,
    group: CapturedGroup,
    index_keys: Arc<CacheEntry>,
}

impl<T: Element> SparseLatent<T> {
    /// Captures steps of all indexers, each of `index_heads` heads with weights of the type `W`, and of all layers. The
    /// stream uploads the initial contents of the graphs' buffers.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for limits without sizes, or with one of 0 tokens;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for limits of 0 keys or blocks, and if the cache does not have a
    /// block for each request of the largest size, or a request has fewer keys than tokens;
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs, one for each size and each layer and indexer, take
    /// too many streams;
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for quantised caches, whose rows the host makes;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for sinks and [drafting](GraphLimits::drafting), which these
    /// layers do not have; [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for layers of linear attention;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`LightningIndexer::plan`](ascend_attention::indexer::LightningIndexer::plan),
    /// [`SparseFlashAttention::plan`](ascend_attention::sparse_flash::SparseFlashAttention::plan) and
    /// [`Graph::capture`](ascend_attention::Graph::capture), by which a number of heads, a type of weights and a number
    /// of keys for each token are refused that the operators do not take.
    pub fn capture<W: Element>(
        &self,
        stream: &Stream,
        index_heads: usize,
        limits: &GraphLimits,
    ) -> Result<SparseGraphs<T>> {
        self.check()?;
        self.latents().admits(stream)?;
        for (name, cache) in [("latents", self.latents()), ("index keys", self.index_keys())] {
            if cache.is_quantised() {
                return Err(Violation::new(
                    &rules::CACHE_QUANTISED,
                    format_args!("graphs over quantised {name}, which the host quantises in each step"),
                    format_args!("caches of {}", T::DTYPE),
                    "compute the steps by `SparseLatent::begin`, or make both caches by `PagedKvCache::new`",
                )
                .into());
            }
        }
        limits.check_of_other_layers("leave `GraphLimits::learnable_sinks` out: sparse attention has no sinks")?;
        if index_heads > MAX_INT32 {
            return Err(Error::invalid("index_heads", index_heads, format_args!("at most {MAX_INT32}"))
                .fix("give the heads of the model's indexers, such as 64"));
        }
        let (layers, indexers) = (self.latents().shape().layers, self.index_keys().shape().layers);
        let mask = std::iter::once((Causality::Causal.into(), None, self.shape()));
        let group = CapturedGroup::new(self.latents(), self.shape(), None, mask, limits);
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &limits.rows(),
            layers + indexers,
            |rows| {
                let requests = limits.each.requests(rows);
                group.check_size(requests)?;
                SparseBuffers::new::<W>(self, stream, index_heads, (rows, requests), group.columns())
            },
            |capture, _, at, buffers: &SparseBuffers<T>| match at.checked_sub(layers) {
                None => buffers.record_layer(self, capture, at),
                Some(indexer) => buffers.record_indexer::<W>(self, capture, indexer),
            },
        )?;
        let index_keys = Arc::clone(self.index_keys().entry());
        Ok(SparseGraphs { graphs, group, index_keys })
    }
}

impl<T: Element> SparseGraphs<T> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes().map(|rows| self.group.requests(rows))
    }

    /// Whether a step can be replayed now: it is causal and of the captured caches, its requests add no more tokens
    /// than were declared, there is a size that holds it, its keys and blocks, including those of the padding, are no
    /// more than were declared, and its sequences can take the step. Compute other steps by [`SparseLatent::begin`].
    pub fn serves(&self, metadata: &AttentionMetadata) -> bool {
        self.check(metadata).is_ok()
    }

    /// The query rows that a step is padded to, or why it cannot be replayed.
    fn check(&self, metadata: &AttentionMetadata) -> Result<usize> {
        let no_programs = |_, _| &[] as &[CapturedProgram<T>];
        metadata.check_groups(1)?;
        let sizes: Vec<usize> = self.graphs.sizes().collect();
        let rows = fitting_rows(&sizes, &[(&self.group, metadata)], no_programs)?;
        for (cache, name) in self.caches() {
            metadata.check_begins(cache).map_err(|why| named(why, name))?;
        }
        Ok(rows)
    }

    /// The caches that a step writes, each with its name.
    fn caches(&self) -> [(&Arc<CacheEntry>, &'static str); 2] {
        [(self.group.cache_entry(), "latents"), (&self.index_keys, "index keys")]
    }

    /// Begins a step of the `SparseLatent` that was captured: pads it to the smallest captured size that fits, and
    /// copies its lengths, table and slots into the buffers of that size. The copy waits for the stream. Blocks given
    /// back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for a step larger than all sizes, or with a request of more tokens than
    /// were declared; [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for more keys or blocks than were declared;
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY), [`TABLE_POOL`](crate::rules::TABLE_POOL),
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) and the refusals of sequences, in either of both caches, as for
    /// [`AttentionGraphs::begin`](crate::AttentionGraphs::begin);
    /// [`SETTINGS_CACHE`](crate::rules::SETTINGS_CACHE) for another `SparseLatent` than that of the capture;
    /// [`Capturing`](ascend_attention::Error::Capturing) on a thread that captures. The metadata is unchanged then.
    /// A step that is begun has padded it to the captured size, also where the step is given up or errors of the device
    /// end it while the buffers are filled: it can be begun again, and computed without a graph, whose step then takes
    /// the padding's rows too ([`AttentionMetadata::tokens`]).
    pub fn begin<'a>(
        &'a mut self,
        sparse: &'a mut SparseLatent<T>,
        stream: &'a Stream,
        metadata: &'a mut AttentionMetadata,
    ) -> Result<SparseStep<'a, T>> {
        let captured =
            [(self.group.cache_entry(), sparse.latents.entry()), (&self.index_keys, sparse.index_keys.entry())];
        if !captured.iter().all(|(captured, given)| Arc::ptr_eq(captured, given)) {
            return Err(Violation::new(
                &rules::SETTINGS_CACHE,
                "a `SparseLatent` with other caches than those that the graphs write",
                "that of the capture",
                "begin the step with the `SparseLatent` that was captured, or capture this one",
            )
            .into());
        }
        self.graphs.admits(stream)?;
        let rows = self.check(metadata)?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = self.group.pool().begin_step(stream);
        let progress = self.caches().into_iter().map(|(cache, _)| metadata.begin_progress(cache));
        let progress = progress.collect::<Result<Vec<_>, _>>()?;
        not_while_capturing("filling the buffers of a step")?;
        self.graphs.follow(stream)?;
        let unfilled = metadata.tokens();
        metadata.pad_to_requests(self.group.requests(rows), rows)?;
        let (group, metadata) = (&self.group, &*metadata);
        let lengths = |_, update| Ok(update);
        let replays = self.graphs.start(stream, rows, lengths, |buffers| buffers.fill(group, stream, metadata))?;
        let sequences = replays.buffers().sequences.clone();
        let graphs = Some(ReplayedSparse { replays, unfilled, latest: None });
        Ok(SparseStep::new(sparse, (stream, metadata), (lease, progress), sequences, graphs))
    }
}

impl<T: Element> fmt::Debug for SparseGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseGraphs").field("graphs", &self.graphs).finish_non_exhaustive()
    }
}
