//! A step in progress on one rank of an attention whose contexts are divided.

use ascend_attention::attention::BlockTable;
use ascend_attention::{Element, Event, Stream, Tensor};

use crate::batch::BatchRequest;
use crate::engine::{LayerInputs, QueuedLayers, STEP_AGAIN};
use crate::error::{Error, Result};
use crate::kv::{CacheWrite, StepLease};

use super::context_attention::{ContextAttention, PreparedStep, joined, no_rank};
use super::context_exchange::{ContextExchange, ContextLayer, ContextPart};
use super::context_parallel::{ContextSplit, Queries};
use super::step_agreement::StepOrder;

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
    /// [`BACKEND_LATENT`](crate::rules::BACKEND_LATENT) for more than one new token of a request over latents; as for
    /// [`ContextParallel::split`](crate::ContextParallel::split).
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, requests: &[BatchRequest<'_>]) -> Result<ContextStep<'a, T>> {
        let PreparedStep { split, order, progress, lease } = self.prepare(stream, requests, 0)?;
        let own = split.ranks().get(self.rank).ok_or_else(|| no_rank(self.rank, split.ranks().len()))?;
        let block_table = self.cache.block_table(stream, own.table())?;
        let layers = QueuedLayers::new(self.cache.shape().layers, vec![progress], STEP_AGAIN);
        Ok(ContextStep::new(self, stream, (split, block_table), order, (layers, lease)))
    }
}

/// A step in progress on one rank. From [`ContextAttention::begin`]; end it when the last layer is queued, by
/// [`ContextStep::end`] or by dropping it. Where some of its layers are missing then, the rank leaves its communicator,
/// unless the ranks have not agreed in the step yet.
#[derive(Debug)]
pub struct ContextStep<'a, T: Element> {
    attention: &'a mut ContextAttention<T>,
    stream: &'a Stream,
    split: ContextSplit,
    block_table: BlockTable,
    order: StepOrder,
    /// The write that the first layer has prepared for all layers.
    write: Option<CacheWrite>,
    /// The calls that the first layer has prepared for all layers, and their tensors.
    exchange: Option<ContextExchange<T>>,
    /// Marks of the time, if they are asked for.
    marks: Option<Vec<(ContextPart, Event)>>,
    layers: QueuedLayers,
    _lease: StepLease<'a, Stream>,
}

impl<'a, T: Element> ContextStep<'a, T> {
    pub(super) fn new(
        attention: &'a mut ContextAttention<T>,
        stream: &'a Stream,
        (split, block_table): (ContextSplit, BlockTable),
        order: StepOrder,
        (layers, lease): (QueuedLayers, StepLease<'a, Stream>),
    ) -> Self {
        Self {
            attention,
            stream,
            split,
            block_table,
            order,
            write: None,
            exchange: None,
            marks: None,
            layers,
            _lease: lease,
        }
    }
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
    /// rank's heads, key and value `[tokens, Nkv, D]`, the same on every rank, or
    /// [inputs of latents](LayerInputs::latent); the attention of the rank's heads over
    /// all keys, `[tokens, N, D]`. The first layer plans for all, and compares the ranks' steps, for which it waits for
    /// the stream and the other ranks; the others return at once.
    ///
    /// # Errors
    /// [`RANKS_BATCH`](crate::rules::RANKS_BATCH) of the first layer, on all ranks, where they bring different steps:
    /// nothing was written or computed, and no rank has left;
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) and [`RANKS_ORDER`](crate::rules::RANKS_ORDER) for
    /// another layer than the next, [`BACKEND_LATENT`](crate::rules::BACKEND_LATENT) for inputs of another kind than
    /// the cache's, [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a mask or sinks,
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator; as for [`CacheWrite::plan`],
    /// and as for planning the calls and the merge: nothing was exchanged then, and the layer can be repeated.
    /// [`Hccl`](ascend_attention::Error::Hccl) and errors of launches: the rank has left.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<Tensor<T>> {
        let inputs = inputs.into();
        let outcome = self.check(layer, &inputs).and_then(|queries| {
            let output = Tensor::empty(self.stream.device(), queries.query.shape())?;
            Ok((queries, output))
        });
        let (queries, mut output) = self.layers.note_refusal(outcome)?;
        self.queue(layer, (queries, inputs.key, inputs.value), &mut output)?;
        Ok(output)
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward); [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape
    /// than the query's.
    pub fn forward_into<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<LayerInputs<'i, T>>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = inputs.into();
        let outcome = self.check(layer, &inputs).and_then(|queries| {
            output.check_device("output", self.stream.device())?;
            let shape = queries.query.shape();
            match output.shape() == shape && output.is_contiguous() {
                true => Ok(queries),
                false => Err(Error::not_as_planned("output", output.desc(), format!("{shape:?}"))),
            }
        });
        let queries = self.layers.note_refusal(outcome)?;
        self.queue(layer, (queries, inputs.key, inputs.value), output)
    }

    /// Refuses a layer out of order, or inputs of other shapes and kinds.
    fn check<'i>(&self, layer: usize, inputs: &LayerInputs<'i, T>) -> Result<Queries<'i, T>> {
        self.layers.check_not_repeated(layer)?;
        self.attention.check_layer(self.stream, (layer, &self.order), self.split.tokens(), inputs)
    }

    /// Queues a layer that was checked.
    fn queue(
        &mut self,
        layer: usize,
        inputs: (Queries<'_, T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
    ) -> Result<()> {
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
        (queries, key, value): (Queries<'_, T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
        exchanges: &mut bool,
    ) -> Result<()> {
        let Self { attention, stream, split, block_table, order, write, exchange, layers, marks, .. } = self;
        let (shape, rank, cache) = (attention.shape, attention.rank, &attention.cache);
        let tensors = ContextLayer { queries, key, value, cache: cache.layer(layer)?.clone(), block_table };
        let exchange = match exchange {
            Some(exchange) => exchange,
            None => exchange.insert(ContextExchange::plan(stream, shape, split, rank, &tensors)?),
        };
        let write = match write {
            Some(write) => write,
            None => write.insert(CacheWrite::plan(cache, stream, own_slots(split, rank), key, value)?),
        };
        attention.agree(stream, order)?;
        let ContextAttention { communicator, cache, .. } = &mut **attention;
        let communicator = joined(communicator, rank)?;
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
        if self.order.is_torn(self.attention.cache.shape().layers) {
            self.attention.leave();
        }
    }
}

fn own_slots(split: &ContextSplit, rank: usize) -> &[i32] {
    split.ranks().get(rank).map_or(&[], |rank| rank.slots())
}
