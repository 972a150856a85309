//! A step in progress on one rank of an attention whose contexts are divided.

use std::iter;
use std::ops::Range;

use ascend_attention::attention::BlockTable;
use ascend_attention::scatter::{ScatterPlan, SlotMapping};
use ascend_attention::{AnyTensor, Element, Event, Stream, Tensor};

use crate::backends::{AttentionShape, LayerInputs, size};
use crate::batch::BatchRequest;
use crate::engine::{STEP_HEADS_FIX, StepRows, check_output};
use crate::error::{Error, Result};
use crate::graphs::{GraphTensors, Replays};
use crate::kv::{CacheWrite, QueuedLayers, STEP_AGAIN, StepLease, check_blocks_of, check_outside_caches};

use super::context_attention::{ContextAttention, PreparedStep, joined};
use super::context_exchange::{ContextExchange, ContextLayer};
use super::context_parallel::ContextSplit;
use super::paged_rows::Queries;
use super::row_exchange::RowExchange;
use super::row_split::RowSplit;
use super::step_agreement::{BY_HEADS, BY_ROWS, StepOrder};

impl<T: Element> ContextAttention<T> {
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
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) by what this rank has computed of a sequence;
    /// as for [`ContextParallel::split`](crate::ContextParallel::split). The other ranks hear nothing of a refusal, as
    /// the [attention](ContextAttention) says.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, requests: &[BatchRequest<'_>]) -> Result<ContextStep<'a, T>> {
        let step = self.prepare(stream, requests, BY_HEADS)?;
        let block_table = self.cache.block_table(stream, step.split.table())?;
        Ok(ContextStep::new(self, stream, step, StepCalls::Heads(Box::new(block_table), None)))
    }

    /// Begins a step whose rows are divided over the ranks, with the heads of all (prefill context parallelism, PCP):
    /// for prompts and their chunks, behind cached tokens too. The rank passes the [rows](ContextStep::rows) that it
    /// has, with `P * N` query heads, and the keys and values of these rows alone. A layer gathers the keys and values
    /// of all ranks, and those in front of the step too; each rank keeps those that its cache holds, and attends with
    /// its rows, each of which sees every key up to its own, so that nothing is merged. A step of
    /// [`begin`](Self::begin) may follow over the same sequences.
    ///
    /// The step has the keys and values of its requests in one layer, those of all ranks, twice in memory of its own:
    /// as they arrive, and by request.
    ///
    /// Of the heads of all ranks those over one key head are behind each other, rank after rank: where a rank has `g`
    /// query heads over each key head, head `k g + j` of rank `r` is head `(k P + r) g + j` of the query here.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::comm::Communicator;
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
    /// use ascend_serving::{AttentionShape, BatchRequest, ContextAttention, Result};
    ///
    /// /// A prompt of 33 tokens by rows, then a token of it by heads; a rank has 2 of 4 heads.
    /// fn rank(communicator: Communicator) -> Result<()> {
    ///     let stream = communicator.device().stream()?;
    ///     let cache = PagedKvCache::<bf16>::new(
    ///         stream.device(),
    ///         8,
    ///         128,
    ///         CacheShape::new(1, 1, 64),
    ///         PadPolicy::SkipNegative,
    ///     )?;
    ///     let mut attention = ContextAttention::new(communicator, AttentionShape::new(2, 1, 64), cache, 16)?;
    ///     let ones =
    ///         |rows: usize, heads: usize| stream.upload(&vec![bf16::ONE; rows * heads * 64], [rows, heads, 64]);
    ///     let mut sequence = attention.sequence();
    ///     attention.grow(&stream, &mut sequence, 33)?;
    ///     let mut step = attention.begin_rows(&stream, &[BatchRequest::of(&sequence, 33)])?;
    ///     // The rank's tokens by their numbers in the step, in the order of their rows. These are positions too,
    ///     // since the step has one request, and nothing of it is cached.
    ///     let own: Vec<usize> = step.rows().iter().cloned().flatten().collect();
    ///     let (query, key) = (ones(own.len(), 4)?, ones(own.len(), 1)?);
    ///     assert_eq!(step.forward(0, (&query, &key, &key))?.shape(), [own.len(), 4, 64]);
    ///     step.end()?;
    ///
    ///     attention.grow(&stream, &mut sequence, 1)?;
    ///     let mut step = attention.begin(&stream, &[BatchRequest::of(&sequence, 1)])?;
    ///     let (query, key) = (ones(1, 2)?, ones(1, 1)?);
    ///     assert_eq!(step.forward(0, (&query, &key, &key))?.shape(), [1, 2, 64]);
    ///     step.end()?;
    ///     Ok(stream.synchronize()?)
    /// }
    ///
    /// let runtime = Runtime::emulated()?;
    /// let ranks = Communicator::all(&[runtime.device(0)?, runtime.device(1)?])?;
    /// std::thread::scope(|scope| {
    ///     let threads: Vec<_> = ranks.into_iter().map(|communicator| scope.spawn(|| rank(communicator))).collect();
    ///     threads.into_iter().try_for_each(|thread| thread.join().expect("a rank panicked"))
    /// })?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`begin`](Self::begin); [`POOL_SIZE`](crate::rules::POOL_SIZE) for more keys than have slots, and
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) where a token's row in the cache is not contiguous, since later
    /// chunks could not be gathered.
    pub fn begin_rows<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &[BatchRequest<'_>],
    ) -> Result<ContextStep<'a, T>> {
        let (pool, by_row) = (self.cache.pool(), self.cache.shape().is_latent());
        self.cache.layer(0)?.check_contiguous(pool.block_size())?;
        let (blocks, pool) = (pool.blocks(), pool.clone());
        let step = self.prepare(stream, requests, BY_ROWS)?;
        for (request, row) in step.split.table().rows().enumerate() {
            check_blocks_of(request, row, blocks)?;
        }
        let rows = RowSplit::new(&step.split, self.division(), requests, (self.rank, &pool), by_row)?;
        Ok(ContextStep::new(self, stream, step, StepCalls::Rows(Box::new(rows), None)))
    }
}

/// The calls of a step, which its first layer prepares for all layers, with their tensors, by what is divided over the
/// ranks.
#[derive(Debug)]
pub(super) enum StepCalls<'a, T: Element> {
    /// The heads, whose rows are all on the rank, over the keys of a block table.
    Heads(Box<BlockTable>, Option<Box<(CacheWrite, ContextExchange<T>)>>),
    Rows(Box<RowSplit>, Option<Box<RowExchange<T>>>),
    /// The heads, by graphs.
    Replayed(Replays<'a, ContextBuffers<T>>),
}

/// What the graphs of a size read and write.
pub(super) struct ContextBuffers<T: Element> {
    pub(super) block_table: BlockTable,
    pub(super) slots: SlotMapping,
    pub(super) write: ScatterPlan,
    pub(super) tensors: GraphTensors<T>,
    pub(super) exchange: ContextExchange<T>,
}

impl<T: Element> ContextBuffers<T> {
    /// The output of a step of these rows.
    fn output(&self, rows: usize) -> Result<Tensor<T>> {
        Ok(self.tensors.output.narrow(0, 0..rows)?)
    }
}

/// The calls of a layer.
enum LayerCalls<'s, 'a, T: Element> {
    Heads(&'s (CacheWrite, ContextExchange<T>), &'s BlockTable),
    Rows(&'s mut RowExchange<T>),
    Replayed(&'s mut Replays<'a, ContextBuffers<T>>),
}

impl<'a, T: Element> StepCalls<'a, T> {
    /// The calls of a layer, prepared if it is the first; of graphs with the layer's inputs in place.
    fn of_layer<'s>(
        &'s mut self,
        attention: &ContextAttention<T>,
        (stream, split, layer): (&Stream, &ContextSplit, usize),
        (queries, key, value): RankInputs<'_, T>,
    ) -> Result<LayerCalls<'s, 'a, T>> {
        let (rank, cache) = (attention.rank, &attention.cache);
        match self {
            Self::Heads(block_table, calls) => {
                let calls = match calls {
                    Some(calls) => calls,
                    None => {
                        let cache = cache.layer(layer)?.clone();
                        let tensors = ContextLayer { queries, key, value, cache, block_table };
                        let exchange = ContextExchange::plan(stream, attention.shape, split, rank, &tensors)?;
                        let slots = split.slots(rank);
                        calls.insert(Box::new((
                            CacheWrite::plan(&attention.cache, stream, slots, key, value)?,
                            exchange,
                        )))
                    }
                };
                Ok(LayerCalls::Heads(calls, block_table))
            }
            Self::Rows(rows, calls) => {
                let calls = match calls {
                    Some(calls) => calls,
                    None => {
                        let ranks = split.ranks();
                        let (shape, inputs) = (attention.shape.of_ranks(ranks), (queries, [key, value]));
                        calls.insert(Box::new(RowExchange::plan(stream, shape, (rows, ranks), cache, inputs)?))
                    }
                };
                Ok(LayerCalls::Rows(calls))
            }
            Self::Replayed(replays) => {
                let inputs = LayerInputs::from((queries.query, key, value));
                replays.buffers().tensors.copy_in(stream, &inputs, queries.rope)?;
                Ok(LayerCalls::Replayed(replays))
            }
        }
    }
}

/// The queries, keys and values that a rank passes to a layer.
type RankInputs<'a, T> = (Queries<'a, T>, &'a Tensor<T>, &'a Tensor<T>);

/// The advice on rows and heads of a layer whose heads are divided.
const HEADS_FIXES: [&str; 2] =
    ["bring a row for each new token of the step's requests, in their order", STEP_HEADS_FIX];

/// The advice on rows and heads of a layer whose rows are divided.
const ROWS_FIXES: [&str; 2] = [
    "bring query, key and value of this rank's own rows alone, those that `ContextStep::rows` names, behind each other",
    "bring query, key and value in this order, the query with the heads of all ranks: as many times those of the \
     `AttentionShape`",
];

/// A step in progress on one rank. From [`ContextAttention::begin`], or replayed from graphs, from
/// [`ContextGraphs::begin`](crate::ContextGraphs::begin); end it when the last layer is queued, by
/// [`ContextStep::end`] or by dropping it. Where some of its layers are missing then, the rank leaves its communicator,
/// unless the ranks have not agreed in the step yet.
#[derive(Debug)]
pub struct ContextStep<'a, T: Element> {
    attention: &'a mut ContextAttention<T>,
    stream: &'a Stream,
    split: ContextSplit,
    calls: StepCalls<'a, T>,
    /// The step's tokens whose rows the rank passes.
    rows: Vec<Range<usize>>,
    order: StepOrder,
    /// Marks of the time, if they are asked for.
    marks: Option<Vec<(&'static str, Event)>>,
    layers: QueuedLayers,
    /// The output that is lent.
    output: Option<Tensor<T>>,
    _lease: StepLease<'a>,
}

impl<'a, T: Element> ContextStep<'a, T> {
    pub(super) fn new(
        attention: &'a mut ContextAttention<T>,
        stream: &'a Stream,
        PreparedStep { split, order, progress, lease }: PreparedStep<'a>,
        calls: StepCalls<'a, T>,
    ) -> Self {
        let layers = QueuedLayers::new(attention.cache.shape().layers, vec![progress], STEP_AGAIN);
        let rows = match &calls {
            StepCalls::Rows(..) => split.rows(attention.rank),
            StepCalls::Heads(..) | StepCalls::Replayed(_) => iter::once(0..split.tokens()).collect(),
        };
        Self { attention, stream, split, calls, rows, order, marks: None, layers, output: None, _lease: lease }
    }
}

impl<T: Element> ContextStep<'_, T> {
    /// How the step's keys are divided over the ranks. A step of [`begin_rows`](ContextAttention::begin_rows) makes
    /// other calls than [`ContextSplit::parts`] and [`ContextSplit::kv_lengths`] say.
    pub fn split(&self) -> &ContextSplit {
        &self.split
    }

    /// The tokens of the step, counted over its requests, whose rows the rank passes to each layer, in order: all, or
    /// of a step of [`begin_rows`](ContextAttention::begin_rows) its chunks of each request
    /// ([`ContextSplit::rows`](crate::ContextSplit::rows)).
    pub fn rows(&self) -> &[Range<usize>] {
        &self.rows
    }

    /// The bytes that this rank sends to others in a layer: queries, and results with their log-sum-exps, or where rows
    /// are divided keys and values, as many as the rank with most of them. It receives as many. Graphs send the rows of
    /// the captured size.
    pub fn sent_bytes(&self) -> u64 {
        let AttentionShape { heads, head_dim, .. } = self.attention.shape;
        let cache = self.attention.cache.shape();
        let both = cache.key_dim + cache.value_dim;
        let query_dim = if cache.is_latent() { both } else { head_dim };
        let of_head = (query_dim + self.attention.output_dim()) * size_of::<T>() + size_of::<f32>();
        let factors = match &self.calls {
            StepCalls::Heads(..) => [self.split.tokens(), heads, of_head],
            StepCalls::Replayed(replays) => [size(&replays.buffers().tensors.query, 0), heads, of_head],
            StepCalls::Rows(rows, _) => [rows.sent_rows(), cache.kv_heads, both * size_of::<T>()],
        };
        let others = self.split.ranks() as u64 - 1;
        factors.into_iter().fold(others, |bytes, factor| bytes.saturating_mul(factor as u64))
    }

    /// Marks the time on the stream in front of each layer that is queued from now on, and behind each part of it; of a
    /// layer that is replayed, whose parts are one graph, behind the last.
    pub fn mark_parts(&mut self) {
        self.marks.get_or_insert_default();
    }

    /// The marks so far, in order, with the part of the layer that each stands behind: the time of a part is that
    /// [since](Event::elapsed_since) the mark before it. None unless [asked for](Self::mark_parts).
    ///
    /// - `start`: the layer begins;
    /// - `write`: keys and values are in the cache;
    /// - `gather`: the queries of all ranks are here, in order; where rows are divided, the keys and values of all, and
    ///   those of the rank are in its cache;
    /// - `attention`: the calls over the rank's keys and of the new tokens are over;
    /// - `exchange`: the results for the rank's heads are here;
    /// - `merge`: the results are merged.
    pub fn marks(&self) -> &[(&'static str, Event)] {
        self.marks.as_deref().unwrap_or_default()
    }

    /// Queues one layer: writes the keys and values that the rank holds, then attends. Query `[tokens, N, D]` of the
    /// rank's heads, key and value `[tokens, Nkv, D]`, the same on every rank, or [inputs of
    /// latents](LayerInputs::latent); the attention of the rank's heads over all keys, `[tokens, N, D]`. In a step of
    /// [`begin_rows`](ContextAttention::begin_rows) all of these have the rank's [rows](Self::rows) in the place of the
    /// tokens, and the query `P * N` heads, those over one key head behind each other. The first layer plans for all,
    /// and compares the ranks' steps, for which it waits for the stream and the other ranks; the others return at once.
    ///
    /// The output is lent until the next call of this step; a clone of the tensor is the same memory. In a step that is
    /// replayed all layers write the same output: queue work that reads it on the step's stream before the next layer,
    /// or the next step of this size, or copy it there.
    ///
    /// # Errors
    /// [`RANKS_BATCH`](crate::rules::RANKS_BATCH) of the first layer, on all ranks, where they begin different steps:
    /// nothing was written or computed, and no rank has left;
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) and [`RANKS_ORDER`](crate::rules::RANKS_ORDER) for
    /// another layer than the next, [`BACKEND_LATENT`](crate::rules::BACKEND_LATENT) for inputs of another kind than
    /// the cache's, [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a mask or sinks,
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator; as for [`CacheWrite::plan`],
    /// and as for planning the calls and the merge; of replays [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for
    /// an input in memory of the graph: nothing was exchanged then, and the layer can be repeated. The others wait for
    /// it meanwhile, unless the error is a [`RANKS_BATCH`](crate::rules::RANKS_BATCH), which they get too.
    /// [`Hccl`](ascend_attention::Error::Hccl) and errors of launches: the rank has left.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<&Tensor<T>> {
        let inputs = inputs.into();
        let outcome = self.check(layer, &inputs).and_then(|queries| {
            // Its memory may serve this layer.
            self.output = None;
            let output = match &self.calls {
                StepCalls::Replayed(replays) => replays.buffers().output(self.split.tokens())?,
                _ => Tensor::empty(self.stream.device(), queries.query.shape())?,
            };
            Ok((queries, output))
        });
        let (queries, output) = self.layers.note_refusal(outcome)?;
        self.queue(layer, (queries, inputs.key, inputs.value), &output)?;
        Ok(self.output.insert(output))
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape
    /// than the query's, [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory
    /// with an input, a cache of any layer or the graph's output.
    pub fn forward_into<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<LayerInputs<'i, T>>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = inputs.into();
        let outcome = self.check(layer, &inputs).and_then(|queries| {
            check_outside_caches("output", output, [self.attention.cache.stored()])?;
            let rope = queries.rope.map(|rope| ("query_rope", &**rope));
            let replayed = match &self.calls {
                StepCalls::Replayed(replays) => Some(("that of the graph", &*replays.buffers().tensors.output)),
                StepCalls::Heads(..) | StepCalls::Rows(..) => None,
            };
            let others: [(_, &AnyTensor); 3] = [("query", queries.query), ("key", inputs.key), ("value", inputs.value)];
            let expected = (self.stream.device(), queries.query.shape());
            check_output("output", output, expected, others.into_iter().chain(rope).chain(replayed))?;
            Ok(queries)
        });
        let queries = self.layers.note_refusal(outcome)?;
        self.queue(layer, (queries, inputs.key, inputs.value), output)
    }

    /// Refuses a layer out of order, or inputs of other shapes and kinds.
    fn check<'i>(&self, layer: usize, inputs: &LayerInputs<'i, T>) -> Result<Queries<'i, T>> {
        self.layers.check_not_repeated(layer)?;
        let (shape, fixes) = match self.calls {
            StepCalls::Rows(..) => (self.attention.shape.of_ranks(self.split.ranks()), ROWS_FIXES),
            StepCalls::Heads(..) | StepCalls::Replayed(_) => (self.attention.shape, HEADS_FIXES),
        };
        let rows = StepRows::without_padding(self.stream, self.rows.iter().map(Range::len).sum(), fixes);
        self.attention.check_layer((layer, &self.order), (shape.heads, rows), inputs)
    }

    /// Queues a layer that was checked.
    fn queue(&mut self, layer: usize, inputs: RankInputs<'_, T>, output: &Tensor<T>) -> Result<()> {
        let mut exchanges = false;
        let outcome = self.queue_layer(layer, inputs, output, &mut exchanges);
        match outcome {
            Ok(()) => self.order.advance(),
            Err(_) if exchanges => self.attention.leave(),
            Err(_) => {}
        }
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer(
        &mut self,
        layer: usize,
        inputs: RankInputs<'_, T>,
        output: &Tensor<T>,
        exchanges: &mut bool,
    ) -> Result<()> {
        let Self { attention, stream, split, calls, order, layers, marks, .. } = self;
        let (queries, key, value) = inputs;
        let calls = calls.of_layer(attention, (stream, split, layer), inputs)?;
        attention.agree(stream, order)?;
        let ContextAttention { communicator, cache, rank, .. } = &mut **attention;
        let communicator = joined(communicator, *rank)?;
        let mut mark = |part| {
            if let Some(marks) = marks {
                marks.push((part, stream.record_timing_event()?));
            }
            Ok(())
        };
        mark("start")?;
        match calls {
            LayerCalls::Heads((write, exchange), block_table) => {
                layers.begin_write();
                let tensors = ContextLayer { queries, key, value, cache: cache.layer(layer)?.clone(), block_table };
                cache.write(stream, write, layer, key, value)?;
                mark("write")?;
                *exchanges = true;
                exchange.launch(communicator, stream, &tensors, output, &mut mark)
            }
            LayerCalls::Rows(exchange) => {
                layers.begin_write();
                *exchanges = true;
                exchange.launch(communicator, stream, (cache, layer), (queries, [key, value]), output, &mut mark)
            }
            LayerCalls::Replayed(replays) => {
                let launched = replays.launch(layer, layers);
                *exchanges = !launched.as_ref().is_err_and(Error::is_refusal);
                launched?;
                let own = replays.buffers().output(size(output, 0))?;
                if own.as_raw() != output.as_raw() {
                    output.copy_from(*stream, &own)?;
                }
                mark("merge")
            }
        }
    }

    /// Ends the step, and checks that all its layers were queued.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING): the tokens of the step do not count as computed.
    /// Behind the first layer the rank leaves, too, if there are others.
    pub fn end(mut self) -> Result<()> {
        let ended = self.layers.end().map_err(Error::from);
        self.attention.advise(&self.order, ended)
    }
}

impl<T: Element> Drop for ContextStep<'_, T> {
    fn drop(&mut self) {
        self.attention.end_step(&self.order);
    }
}
