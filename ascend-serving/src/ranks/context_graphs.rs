//! Decode steps over divided contexts, replayed from graphs that hold the exchanges of the ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_attention::attention::{BlockTable, PerRequest};
use ascend_attention::graph::{Capturing, Update};
use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::batch::BatchRequest;
use crate::error::Result;
use crate::graphs::{GraphPool, GraphTensors, zeros};
use crate::kv::{BlockPool, CacheEntry, WriteViews, check_blocks_of, scattered_slots, slot_mapping};
use crate::rules;

use super::context_attention::{ContextAttention, joined};
use super::context_exchange::ContextExchange;
use super::context_step::{ContextBuffers, ContextStep, StepCalls};
use super::paged_rows::Queries;

/// Decode steps of one rank of a [`ContextAttention`], replayed from graphs that were captured for some numbers of
/// requests, one graph for each layer: its write to the cache, both calls of attention and merge, and the exchanges
/// with the other ranks between them. From [`ContextAttention::capture`].
///
/// **All ranks capture the same sizes, and replay alike**: a step that one rank replays every rank replays. The step is
/// compared before its first layer, as without graphs, with the size that it is replayed in. A step without a graph,
/// such as a prompt, may come between.
///
/// Where a rank has left, or its attention is dropped, its graphs replay no more. On hardware drop them before, since
/// HCCL wants graphs destroyed before their communicators.
///
/// A graph has the call over the rank's keys with lengths that vary, and the same merge in every step: rows for which a
/// rank has no keys, which vary too, are withheld from what it sends, and weigh nothing there.
pub struct ContextGraphs<T: Element> {
    graphs: GraphPool<ContextBuffers<T>>,
    /// Most keys of a request, on all ranks together.
    keys: usize,
    /// The cache that the graphs write.
    entry: Arc<CacheEntry>,
}

impl<T: Element> ContextAttention<T> {
    /// Captures decode steps of up to each of these numbers of requests, with at most `keys` keys each, those of the
    /// step included and all ranks' together. No rank waits for another, but on hardware a collective's first call
    /// does: make a step without a graph before.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) and [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) as for
    /// [`GraphPool::capture_layers`]; [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for 0 keys;
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for planning the calls
    /// and for [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture(&mut self, stream: &Stream, sizes: impl AsRef<[usize]>, keys: usize) -> Result<ContextGraphs<T>> {
        self.joined()?;
        self.cache.admits(stream)?;
        let output_dim = self.output_dim();
        let (division, shape, entry) = (self.division(), self.shape, Arc::clone(self.entry()));
        let block_size = self.cache.pool().block_size();
        let most = self.cache.pool().blocks() * division.pool_block_size();
        if keys == 0 {
            return Err(rules::GRAPH_LENGTHS
                .broken("graphs of requests without keys", format_args!("1 to {most}"))
                .into());
        }
        let keys = keys.min(most);
        let columns = keys.div_ceil(division.pool_block_size());
        // No rank has more keys of a request than the first.
        let longest = division.local_len(keys, 0);
        let Self { communicator, rank, cache, .. } = self;
        let (cache, rank) = (&*cache, *rank);
        let communicator = joined(communicator, rank)?;
        let ranks = division.ranks();
        let graphs = GraphPool::capture_layers(
            stream.device(),
            sizes.as_ref(),
            cache.shape().layers,
            |rows| {
                let device = stream.device();
                let (own, pool) = (cache.shape(), cache.pool());
                let (query_dim, rope_dim) = match own.is_latent() {
                    true => (own.key_dim, Some(own.value_dim)),
                    false => (shape.head_dim, None),
                };
                let query = zeros(device, [rows, shape.heads, query_dim])?;
                let query_rope = rope_dim.map(|dim| zeros(device, [rows, shape.heads, dim])).transpose()?;
                let queries = Queries { query: &query, rope: query_rope.as_ref() };
                let [key, value] = [own.key_dim, own.value_dim].map(|dim| zeros(device, [rows, own.kv_heads, dim]));
                let (key, value) = (key?, value?);
                let slots = padding_slots(pool, 0..rows)?;
                let slots = slot_mapping(stream, (pool, &own), slots.into_iter())?;
                let write = WriteViews::of(&own, cache.layer(0)?, rows, [&key, &value])?.scatter(&own, &slots)?;
                let exchange = ContextExchange::in_graph(stream, shape, ranks, queries, output_dim)?;
                let output = Tensor::empty(device, [rows, shape.heads, output_dim])?;
                Ok(ContextBuffers {
                    block_table: BlockTable::zeroed(device, rows, columns, block_size)?,
                    slots,
                    write,
                    tensors: GraphTensors { query, query_rope, quantised_query: None, key, value, output },
                    exchange,
                })
            },
            |capture: &Capturing<'_>, rows, layer, buffers| {
                let ContextBuffers { block_table, slots, write, tensors, exchange } = buffers;
                let GraphTensors { query, query_rope, key, value, output, .. } = tensors;
                let queries = Queries { query, rope: query_rope.as_ref() };
                let own = cache.layer(layer)?;
                WriteViews::of(&cache.shape(), own, rows, [key, value])?.launch(capture, write, slots)?;
                let longest = PerRequest::new(vec![longest; rows])?;
                exchange.record(communicator, capture, shape, (queries, own, block_table), (&longest, output))
            },
        )?;
        Ok(ContextGraphs { graphs, keys, entry })
    }
}

impl<T: Element> ContextGraphs<T> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes()
    }

    /// Begins a step of these requests, the same ones on every rank, of one new token each: puts its blocks, slots and
    /// lengths into the buffers of the smallest size that holds it, which waits for the stream.
    ///
    /// # Errors
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator, by which the graphs are gone;
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for more requests than the largest size, and more new tokens;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for more keys than were declared;
    /// [`SETTINGS_CACHE`](crate::rules::SETTINGS_CACHE) for another attention than that of the capture;
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a block outside of the cache; as for
    /// [`ContextAttention::begin`] and [`GraphPool::begin`].
    pub fn begin<'a>(
        &'a mut self,
        attention: &'a mut ContextAttention<T>,
        stream: &'a Stream,
        requests: &[BatchRequest<'_>],
    ) -> Result<ContextStep<'a, T>> {
        if !Arc::ptr_eq(&self.entry, attention.entry()) {
            return Err(Violation::new(
                &rules::SETTINGS_CACHE,
                format_args!("graphs of another cache than that of rank {}", attention.rank()),
                "its own",
                "begin the step with the `ContextAttention` that was captured, or capture this one",
            )
            .into());
        }
        if let Err(left) = attention.joined() {
            self.graphs.clear();
            return Err(left.into());
        }
        self.graphs.admits(stream)?;
        let rows = self.graphs.fitting(requests.len())?;
        for (index, request) in requests.iter().enumerate() {
            self.check(index, request)?;
        }
        let blocks = attention.cache.pool().blocks();
        let prepared = attention.prepare(stream, requests, rows as i64)?;
        let (split, rank) = (&prepared.split, attention.rank());
        let more = rows.saturating_sub(requests.len());
        let table: Vec<&[usize]> = (0..rows).map(|request| split.table().row(request).unwrap_or(&[])).collect();
        for (request, row) in table.iter().enumerate() {
            check_blocks_of(request, row, blocks)?;
        }
        let lengths: Vec<usize> = split.kv_lengths(rank).iter().copied().chain(std::iter::repeat_n(0, more)).collect();
        let pool = attention.cache.pool();
        let mut slots = split.slots(rank).to_vec();
        // Tokens that other ranks hold are padding here, too.
        let padded = slots.iter().filter(|slot| pool.pad_policy().is_padding(**slot, pool.block_size())).count();
        slots.extend(padding_slots(pool, padded..padded + more)?);
        let slots = scattered_slots((pool, &attention.cache.shape()), slots.into_iter())?;
        self.graphs.follow(stream)?;
        let kv = PerRequest::new(lengths.clone())?;
        let update = |_, update: Update| Ok(update.all(ContextExchange::<T>::lengths(&kv))?);
        let replays = self.graphs.start(stream, rows, update, |buffers| {
            buffers.block_table.overwrite(stream, &table)?;
            buffers.slots.overwrite(stream, &slots)?;
            buffers.exchange.withhold(stream, &lengths)
        })?;
        Ok(ContextStep::new(attention, stream, prepared, StepCalls::Replayed(replays)))
    }

    /// Refuses a request that the graphs cannot hold.
    fn check(&self, index: usize, request: &BatchRequest<'_>) -> Result<(), Violation> {
        if request.new != 1 {
            return Err(Violation::new(
                &rules::GRAPH_SIZE,
                format_args!("{} new tokens of request {index}", request.new),
                "1 a request, as was captured",
                "compute the step by `ContextAttention::begin`, on every rank",
            ));
        }
        let keys = request.cached.saturating_add(1);
        match keys <= self.keys {
            true => Ok(()),
            false => Err(rules::GRAPH_LENGTHS.broken(
                format_args!("{keys} keys of request {index}"),
                format_args!("at most {}, as declared at the capture", self.keys),
            )),
        }
    }
}

/// The slots of padding tokens of these numbers.
fn padding_slots(pool: &BlockPool, numbers: Range<usize>) -> Result<Vec<i32>, Violation> {
    let (pad, block_size) = (pool.pad_policy(), pool.block_size());
    numbers.map(|number| pad.slot_of(number, block_size)).collect()
}

impl<T: Element> fmt::Debug for ContextGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextGraphs").field("graphs", &self.graphs).field("keys", &self.keys).finish_non_exhaustive()
    }
}
