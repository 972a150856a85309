//! Steps of sparse attention replayed from graphs, indexer by indexer and layer by layer.

use std::fmt;
use std::sync::Arc;

use ascend_attention::graph::Capturing;
use ascend_attention::indexer::{ChosenKeys, IndexerPlan, LightningIndexer};
use ascend_attention::scatter::{ScatterPlan, SlotMapping};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::sparse_flash::{SparseAttention, SparseFlashAttention, SparseFlashPlan};
use ascend_attention::{Device, Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::batch::{AttentionMetadata, Causality};
use crate::engine::{
    IndexerTensors, KeyChoice, SPARSE_AGAIN, SparseLatent, SparseRows, SparseTensors, StepIndexers, paged,
};
use crate::error::{Error, Result};
use crate::kv::{CacheEntry, CopiesIn, MAX_INT32, StepLease, WriteViews, no_layer, scattered_slots, slot_mapping};
use crate::rules;

use super::captured_group::{CapturedGroup, fitting_rows};
use super::graph_limits::{GraphLimits, RowsEach};
use super::graph_pool::{GraphPool, GraphStep, not_while_capturing};
use super::graph_tensors::{CapturedProgram, copy_rows};

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
/// let mut step = graphs.begin(&stream, &mut metadata)?;
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
pub struct SparseGraphs<T: Element, W: Element = T> {
    graphs: GraphPool<SparseBuffers<T, W>>,
    group: CapturedGroup,
    index_keys: Arc<CacheEntry>,
    layers: usize,
    indexers: usize,
    each: RowsEach,
}

impl<T: Element> SparseLatent<T> {
    /// Captures steps of all indexers, each of `index_heads` heads with weights of the type `W`, and of all layers. The
    /// stream uploads the initial contents of the graphs' buffers.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for limits without sizes, or with one of 0 tokens;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for limits of 0 keys or blocks;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for sinks, which these layers do not have;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`LightningIndexer::plan`], [`SparseFlashAttention::plan`] and
    /// [`Graph::capture`](ascend_attention::Graph::capture), by which a number of heads, a type of weights and a number
    /// of keys for each token are refused that the operators do not take.
    pub fn capture<W: Element>(
        &self,
        stream: &Stream,
        index_heads: usize,
        limits: &GraphLimits,
    ) -> Result<SparseGraphs<T, W>> {
        self.check()?;
        self.latents().admits(stream)?;
        limits.check()?;
        let sinks = limits.learnable_sinks.iter().flatten().count();
        if sinks > 0 {
            let given = format_args!("sinks of {sinks} layers");
            return Err(Error::invalid("learnable_sinks", given, "none: sparse attention has no sinks")
                .fix("capture with limits without sinks"));
        }
        if index_heads > MAX_INT32 {
            return Err(Error::invalid("index_heads", index_heads, format_args!("at most {MAX_INT32}"))
                .fix("give the heads of the model's indexers, such as 64"));
        }
        let (layers, indexers) = (self.latents().shape().layers, self.index_keys().shape().layers);
        let mask = vec![Causality::Causal.into()];
        let group = CapturedGroup::new(self.latents(), self.shape(), mask, false, limits);
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &limits.rows(),
            layers.saturating_add(indexers),
            |rows| SparseBuffers::new(self, stream, index_heads, (rows, limits.each), group.columns()),
            |capture, _, at, buffers: &SparseBuffers<T, W>| match at.checked_sub(layers) {
                None => buffers.record_layer(self, capture, at),
                Some(indexer) => buffers.record_indexer(self, capture, indexer),
            },
        )?;
        let index_keys = Arc::clone(self.index_keys().entry());
        Ok(SparseGraphs { graphs, group, index_keys, layers, indexers, each: limits.each })
    }
}

impl<T: Element, W: Element> SparseGraphs<T, W> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes().map(|rows| self.each.requests(rows))
    }

    /// Whether a step can be replayed: it is causal and of the captured caches, its requests add no more tokens than
    /// were declared, there is a size that holds it, and its keys and blocks, including those of the padding, are no
    /// more than were declared. Compute other steps by [`SparseLatent::begin`].
    pub fn serves(&self, metadata: &AttentionMetadata) -> bool {
        self.check(metadata).is_ok()
    }

    /// The query rows that a step is padded to, or why it cannot be replayed.
    fn check(&self, metadata: &AttentionMetadata) -> Result<usize> {
        let no_programs = |_, _| &[] as &[CapturedProgram<T>];
        Ok(fitting_rows(self.graphs.sizes(), &[(&self.group, metadata)], no_programs)?)
    }

    /// Begins a step: pads it to the smallest size that holds it with its padding, and puts its lengths, table and
    /// slots into that size's buffers, which waits for the stream. Blocks given back from now on are handed out again
    /// when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for a step larger than all sizes, or with a request of more tokens than
    /// were declared; [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for more keys or blocks than were declared;
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY), [`TABLE_POOL`](crate::rules::TABLE_POOL),
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) and the refusals of sequences, in either of both caches, as for
    /// [`AttentionGraphs::begin`](crate::AttentionGraphs::begin);
    /// [`Capturing`](ascend_attention::Error::Capturing) on a thread that captures. The metadata is unchanged then.
    /// Errors of the device while the buffers are filled leave it padded: it can be begun again, and computed without a
    /// graph.
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &mut AttentionMetadata,
    ) -> Result<SparseGraphStep<'a, T, W>> {
        self.graphs.admits(stream)?;
        let rows = self.check(metadata)?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = self.group.pool().begin_step(stream);
        let mut progress = Vec::new();
        for (cache, name) in [(self.group.cache_entry(), "latents"), (&self.index_keys, "index keys")] {
            let begun = metadata.begin_progress(cache).map_err(|mut why| {
                why.given.push_str(&format!(", in the cache of {name}"));
                why
            });
            progress.push(begun?);
            metadata.check_copies_queued(self.group.pool(), CopiesIn::Cache(cache))?;
        }
        not_while_capturing("filling the buffers of a step")?;
        self.graphs.follow(stream)?;
        metadata.pad_to_requests(self.each.requests(rows), rows)?;
        let (actual, metadata) = (metadata.actual_tokens(), &*metadata);
        let (group, queued) = (&self.group, (self.layers, progress, SPARSE_AGAIN));
        let lengths = |_, update| Ok(update);
        let step = self.graphs.start(stream, rows, queued, lengths, |buffers| buffers.fill(group, stream, metadata))?;
        Ok(SparseGraphStep {
            indexers: StepIndexers::new(self.indexers),
            layers: self.layers,
            latest: None,
            step,
            stream,
            rows: [actual, rows],
            lease,
        })
    }
}

impl<T: Element, W: Element> fmt::Debug for SparseGraphs<T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseGraphs").field("graphs", &self.graphs).finish_non_exhaustive()
    }
}

/// The buffers of the graphs of a size, and the calls that they record.
struct SparseBuffers<T: Element, W: Element> {
    sequences: SparseSequences,
    slots: SlotMapping,
    /// Writes of latents and rotary keys, and of index keys: the same call in every layer, or every indexer.
    writes: [ScatterPlan; 2],
    chooses: IndexerPlan,
    attends: SparseFlashPlan,
    index_query: Tensor<T>,
    index_weights: Tensor<W>,
    index_key: Tensor<T>,
    /// What stands for the values of the cache of index keys, which has none.
    no_values: Tensor<T>,
    chosen: ChosenKeys<T>,
    query: Tensor<T>,
    query_rope: Tensor<T>,
    latent: Tensor<T>,
    key_rope: Tensor<T>,
    attention: SparseAttention<T>,
}

impl<T: Element, W: Element> SparseBuffers<T, W> {
    fn new(
        sparse: &SparseLatent<T>,
        stream: &Stream,
        index_heads: usize,
        (rows, each): (usize, RowsEach),
        columns: usize,
    ) -> Result<Self> {
        let device = stream.device();
        let (latents, index_keys) = (sparse.latents(), sparse.index_keys());
        let (pool, requests, heads) = (latents.pool(), each.requests(rows), sparse.shape().heads);
        let sequences = SparseSequences::packed(stream, &vec![each.0; requests], &vec![each.0; requests])?
            .paged(stream, &vec![vec![0; columns]; requests])?;
        let padding = std::iter::repeat_n(pool.pad_policy().slot()?, rows);
        let slots = slot_mapping(stream, (pool, &latents.shape()), padding)?;
        let [index_query, index_key] = [zeros(device, [rows, index_heads, 128])?, zeros(device, [rows, 1, 128])?];
        let index_weights = zeros::<W>(device, [rows, index_heads, 1])?.reshape([rows, index_heads])?;
        let [query, query_rope] = [zeros(device, [rows, heads, 512])?, zeros(device, [rows, heads, 64])?];
        let [latent, key_rope] = [zeros(device, [rows, 1, 512])?, zeros(device, [rows, 1, 64])?];
        let no_values = Tensor::empty(device, [rows, 1, 0])?;

        let cache = index_keys.layer(0)?;
        let index_write = WriteViews::of(&index_keys.shape(), cache, rows, [&index_key, &no_values])?;
        let keys = paged(&cache.key, index_keys)?;
        let indexer = LightningIndexer::new(sparse.sparse_count);
        let chooses = indexer.plan(&sequences, (&index_query, &keys, &index_weights))?;
        let chosen: ChosenKeys<T> = chooses.output()?;

        let cache = latents.layer(0)?;
        let write = WriteViews::of(&latents.shape(), cache, rows, [&latent, &key_rope])?;
        let [keys, key_ropes] = [paged(&cache.key, latents)?, paged(&cache.value, latents)?];
        let inputs = ((&query, &query_rope), (&keys, &key_ropes), &chosen.indices);
        let attends = SparseFlashAttention::new(sparse.shape().scale).plan(&sequences, inputs)?;
        Ok(Self {
            writes: [write.scatter(&latents.shape(), &slots)?, index_write.scatter(&index_keys.shape(), &slots)?],
            attention: attends.output()?,
            sequences,
            slots,
            chooses,
            attends,
            index_query,
            index_weights,
            index_key,
            no_values,
            chosen,
            query,
            query_rope,
            latent,
            key_rope,
        })
    }

    /// Records an indexer: it writes its keys of the new tokens, then chooses.
    fn record_indexer(&self, sparse: &SparseLatent<T>, capture: &Capturing<'_>, indexer: usize) -> Result<()> {
        let (index_keys, new) = (sparse.index_keys(), [&self.index_key, &self.no_values]);
        let cache = index_keys.layer(indexer)?;
        let views = WriteViews::of(&index_keys.shape(), cache, self.slots.len(), new)?;
        views.launch(capture, &self.writes[1], &self.slots)?;
        let inputs = (&self.index_query, &paged(&cache.key, index_keys)?, &self.index_weights);
        Ok(self.chooses.launch_into(capture, inputs, &mut self.chosen.clone())?)
    }

    /// Records a layer: it writes its latents and rotary keys of the new tokens, then attends to what was chosen.
    fn record_layer(&self, sparse: &SparseLatent<T>, capture: &Capturing<'_>, layer: usize) -> Result<()> {
        let (latents, new) = (sparse.latents(), [&self.latent, &self.key_rope]);
        let cache = latents.layer(layer)?;
        let views = WriteViews::of(&latents.shape(), cache, self.slots.len(), new)?;
        views.launch(capture, &self.writes[0], &self.slots)?;
        let keys = (&paged(&cache.key, latents)?, &paged(&cache.value, latents)?);
        let inputs = ((&self.query, &self.query_rope), keys, &self.chosen.indices);
        Ok(self.attends.launch_into(capture, inputs, &mut self.attention.clone())?)
    }

    /// Puts the lengths, table and slots of a padded step into the buffers.
    fn fill(&self, group: &CapturedGroup, stream: &Stream, metadata: &AttentionMetadata) -> Result<()> {
        let new = metadata.new_and_cached().map(|(new, _)| new);
        let rows: Vec<&[usize]> = metadata.table().rows().collect();
        let lengths = metadata.kv_lengths().lengths();
        self.sequences.overwrite(stream, &new.collect::<Vec<_>>(), lengths, &rows)?;
        let slots = scattered_slots(group.blocks(), metadata.slots().iter().copied())?;
        Ok(self.slots.overwrite(stream, &slots)?)
    }
}

/// A tensor of zeros: rows of padding are read as well.
fn zeros<E: Element>(device: &Device, shape: [usize; 3]) -> Result<Tensor<E>> {
    let elements = shape.iter().fold(1usize, |product, axis| product.saturating_mul(*axis));
    Ok(Tensor::from_buffer(&device.alloc_zeroed::<E>(elements)?, shape)?)
}

/// A step of sparse attention that is replayed from graphs. From [`SparseGraphs::begin`]; end it when the last layer is
/// queued, as a [`SparseStep`](crate::SparseStep).
pub struct SparseGraphStep<'a, T: Element, W: Element = T> {
    step: GraphStep<'a, SparseBuffers<T, W>>,
    indexers: StepIndexers,
    layers: usize,
    /// The indexer that was queued last: what the others have chosen is overwritten.
    latest: Option<usize>,
    stream: &'a Stream,
    /// Rows of the requests, and rows including the padding.
    rows: [usize; 2],
    lease: StepLease<'a, Stream>,
}

impl<T: Element, W: Element> SparseGraphStep<'_, T, W> {
    /// Query tokens of the captured size, padding included.
    pub fn tokens(&self) -> usize {
        self.rows[1]
    }

    fn rows(&self) -> SparseRows<'_> {
        let [actual, padded] = self.rows;
        SparseRows { device: self.stream.device(), actual, padded, padding: false }
    }

    /// Copies the tensors of an indexer into those of its graph and launches it: [`SparseStep::choose`]. They have a
    /// row for each token of the step, with the padding or without it. Returns at once. The tensor of what was chosen
    /// is that of every indexer: it is overwritten by the next one.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes or strides,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for an indexer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an input that shares memory with the graph's tensor of
    /// another input; as for [`GraphStep::launch`].
    ///
    /// [`SparseStep::choose`]: crate::SparseStep::choose
    pub fn choose(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        self.indexers.check_missing(indexer)?;
        let buffers = self.step.buffers();
        let IndexerTensors { query, weights, key } = inputs;
        inputs.check(&self.rows(), indexer, size(&buffers.index_query, 1))?;
        let copies = [
            ("index query", &**query, &*buffers.index_query),
            ("index weights", weights, &buffers.index_weights),
            ("index key", key, &buffers.index_key),
        ];
        copy_rows(self.stream, copies.into_iter())?;
        // From here on the choice of the indexer before may be overwritten.
        self.latest = None;
        self.step.launch(self.layers.saturating_add(indexer))?;
        self.indexers.note_queued(indexer);
        self.latest = Some(indexer);
        Ok(KeyChoice::new(self.indexers.step(), indexer, buffers.chosen.indices.clone()))
    }

    /// Copies the tensors of a layer into those of its graph and launches it: [`SparseStep::forward`]. They have a row
    /// for each token of the step, with the padding or without it; the output, `[tokens, N, 512]`, has the padding. All
    /// layers write the same output, so it is lent until the next call of this step. A clone of the tensor is the same
    /// memory.
    ///
    /// # Errors
    /// [`SPARSE_CHOICE`](crate::rules::SPARSE_CHOICE) for a choice of another step, for one that a later indexer has
    /// overwritten, and for the last layer that is missing while no layer has read what some indexer chose,
    /// [`SPARSE_INDEX_KEYS`](crate::rules::SPARSE_INDEX_KEYS) for the last layer that is missing while an indexer is
    /// missing too; as for [`choose`](Self::choose), with layers in place of indexers. Nothing is written then.
    ///
    /// [`SparseStep::forward`]: crate::SparseStep::forward
    pub fn forward(&mut self, layer: usize, inputs: SparseTensors<'_, T>) -> Result<&Tensor<T>> {
        if layer >= self.layers {
            return Err(no_layer(layer, self.layers));
        }
        self.step.admits(layer)?;
        let SparseTensors { query, query_rope, latent, key_rope, choice } = inputs;
        self.indexers.check_choice(choice, layer, self.step.is_last(layer))?;
        if self.latest != Some(choice.indexer()) {
            return Err(self.overwritten(layer, choice).into());
        }
        let buffers = self.step.buffers();
        inputs.check(&self.rows(), layer, size(&buffers.query, 1))?;
        let copies = [
            ("query", &**query, &*buffers.query),
            ("query_rope", query_rope, &buffers.query_rope),
            ("latent", latent, &buffers.latent),
            ("key_rope", key_rope, &buffers.key_rope),
        ];
        copy_rows(self.stream, copies.into_iter())?;
        self.step.launch(layer)?;
        self.indexers.note_read(choice);
        Ok(&buffers.attention.out)
    }

    /// The refusal of a choice whose tensor holds that of another indexer.
    #[cold]
    fn overwritten(&self, layer: usize, choice: &KeyChoice) -> Violation {
        let given = format_args!("the choice of indexer {} in layer {layer}", choice.indexer());
        match self.latest {
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

    /// Ends the step, and checks that all its layers were queued: [`SparseStep::end`](crate::SparseStep::end).
    ///
    /// # Errors
    /// As for [`SparseStep::end`](crate::SparseStep::end).
    pub fn end(self) -> Result<()> {
        self.step.end()
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'_, Stream> {
        &self.lease
    }
}

impl<T: Element, W: Element> fmt::Debug for SparseGraphStep<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseGraphStep").field("step", &self.step).finish_non_exhaustive()
    }
}
