//! The calls of a rank in a layer whose contexts are divided, and what goes from rank to rank between them.

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::comm::Communicator;
use ascend_attention::graph::Capturing;
use ascend_attention::merge::{MergeState, Part, PartsOfRows, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::{Device, Element, Output, Plan, Queue, Stream, Tensor};

use crate::backends::{AttentionShape, size};
use crate::error::Result;
use crate::kv::LayerCache;

use super::context_parallel::ContextSplit;
use super::paged_rows::{PagedPlan, Queries, over_keys, record_single_rows};
use super::row_order::{RowOrder, lse_bits, lse_of};

/// The tensors of one layer.
pub(super) struct ContextLayer<'a, T: Element> {
    pub(super) queries: Queries<'a, T>,
    pub(super) key: &'a Tensor<T>,
    pub(super) value: &'a Tensor<T>,
    pub(super) cache: LayerCache<T>,
    pub(super) block_table: &'a BlockTable,
}

/// The calls of a step, prepared once for all layers, with the tensors between them, which one layer after the other
/// uses.
///
/// Heads of all ranks over one key head are one group: a rank's call has the heads `[tokens, Nkv, ranks, N / Nkv]`. The
/// ranks' queries arrive as `[ranks, tokens, Nkv, N / Nkv]` and the results leave so, which [`RowOrder`] transposes.
#[derive(Debug)]
pub(super) struct ContextExchange<T: Element> {
    size: usize,
    query: QueryGather<T>,
    /// Of latents the rotary parts of the queries.
    query_rope: Option<QueryGather<T>>,
    /// The rank's call over its keys, if it has any.
    call: Option<PagedPlan>,
    /// Results over the rank's keys, of the heads of all ranks.
    local: Output<T>,
    scatter: RowOrder,
    /// The results by the rank that they go to, `[ranks, tokens, N, D]`.
    sent: Output<T>,
    /// In graphs, where rows without keys are not known: `sent`, and behind it a place for each row that is withheld
    /// from it; and results of rows without keys, of the shape of those that are sent.
    withheld: Option<[Output<T>; 2]>,
    /// The results of the rank's own heads, by the rank that they come from.
    received: Output<T>,
    /// The call of the new tokens among themselves, of the rank's own heads.
    new: Option<(Plan, Output<T>)>,
    merge: RowMergePlan,
    /// The merged log-sum-exps, which are not read.
    merged_lse: Tensor<f32>,
}

/// The queries of all ranks.
#[derive(Debug)]
struct QueryGather<T: Element> {
    /// As they arrive, `[ranks, tokens, N, D]`; without tensors of their own for a single rank.
    gathered: Option<Tensor<T>>,
    order: RowOrder,
    /// As the rank's call reads them, `[tokens, ranks * N, D]`.
    query: Tensor<T>,
}

impl<T: Element> QueryGather<T> {
    fn of(stream: &Stream, ranks: usize, kv_heads: usize, own: &Tensor<T>) -> Result<Self> {
        let [tokens, heads, dim] = [0, 1, 2].map(|axis| size(own, axis));
        let (query, gathered) = match ranks {
            1 => (own.clone(), None),
            _ => {
                let gathered = Tensor::empty(stream.device(), [ranks * tokens, heads, dim])?;
                (Tensor::empty(stream.device(), [tokens, heads * ranks, dim])?, Some(gathered))
            }
        };
        let sizes = [ranks, tokens * kv_heads];
        let order = RowOrder::of_rows(stream, sizes, gathered.as_ref().unwrap_or(&query), &query)?;
        Ok(Self { gathered, order, query })
    }

    /// Queues the exchange, and returns the queries as the rank's call reads them.
    fn queue(&self, communicator: &mut Communicator, queue: &impl Queue, own: &Tensor<T>) -> Result<Tensor<T>> {
        let Some(gathered) = &self.gathered else {
            return Ok(own.clone());
        };
        communicator.all_gather(queue, own, gathered)?;
        self.order.move_rows(queue, gathered, &self.query)?;
        self.order.moved(gathered, &self.query)
    }
}

/// The log-sum-exp of a row without keys in a merge of all parts, whose weight is 0 beside any other: a finite number,
/// since the operator says nothing of others.
const NO_KEYS: f32 = -1e30;

impl<T: Element> ContextExchange<T> {
    /// Prepares the calls of `rank` for layers like this one. Nothing is exchanged.
    pub(super) fn plan(
        stream: &Stream,
        shape: AttentionShape,
        split: &ContextSplit,
        rank: usize,
        layer: &ContextLayer<'_, T>,
    ) -> Result<Self> {
        let (size, tokens) = (split.ranks(), split.tokens());
        // Attention to latents is as wide as they are.
        let widest = if layer.queries.rope.is_some() { layer.key } else { layer.value };
        let value_dim = widest.shape().last().copied().unwrap_or(0);
        let new = split.plan_new_tokens(stream, shape, (layer.queries.query, layer.key, layer.value))?;
        let new = match new {
            None => None,
            Some(plan) => Some((plan, output(stream.device(), [tokens, shape.heads, value_dim])?)),
        };
        let mut exchange = Self::of(stream, shape, size, (layer.queries, value_dim), new, false, split.parts())?;
        if let Some(rows) = split.paged_rows(rank) {
            let call = |layout| over_keys(shape.of_ranks(size), layout);
            exchange.call = rows.plan(call, exchange.queries(), &layer.cache, layer.block_table)?;
        }
        if exchange.call.is_none() {
            // No row of these is taken, but they are sent.
            exchange.sent.attention.clear(stream)?;
            exchange.sent.softmax_lse.as_ref().map_or(Ok(()), |lse| lse.clear(stream))?;
        }
        Ok(exchange)
    }

    /// Prepares what graphs of steps of one row a request have between the calls, for any lengths.
    pub(super) fn in_graph(
        stream: &Stream,
        shape: AttentionShape,
        size: usize,
        queries: Queries<'_, T>,
        value_dim: usize,
    ) -> Result<Self> {
        let all =
            [PartsOfRows { rows: queries.query.shape().first().copied().unwrap_or(0), parts: u16::MAX >> (16 - size) }];
        Self::of(stream, shape, size, (queries, value_dim), None, true, &all)
    }

    fn of(
        stream: &Stream,
        shape: AttentionShape,
        size: usize,
        (queries, value_dim): (Queries<'_, T>, usize),
        new: Option<(Plan, Output<T>)>,
        in_graph: bool,
        rows: &[PartsOfRows],
    ) -> Result<Self> {
        let device = stream.device();
        let tokens = queries.query.shape().first().copied().unwrap_or(0);
        let AttentionShape { heads, kv_heads, .. } = shape;
        let query = QueryGather::of(stream, size, kv_heads, queries.query)?;
        let query_rope = queries.rope.map(|rope| QueryGather::of(stream, size, kv_heads, rope)).transpose()?;
        let sizes = [size, tokens * kv_heads];
        let local = output(device, [tokens, heads * size, value_dim])?;
        let by_rank = |rows: usize| output(device, [rows, heads, value_dim]);
        let (withheld, sent, received) = match size {
            1 => (None, local.clone(), local.clone()),
            _ if in_graph => {
                let (both, mut none) = (by_rank(2 * size * tokens)?, by_rank(size * tokens)?);
                none.attention.clear(stream)?;
                none.softmax_lse =
                    Some(stream.upload(&vec![NO_KEYS; size * tokens * heads], [size * tokens, heads, 1])?);
                let sent = rows_of(&both, 0..size * tokens)?;
                (Some([both, none]), sent, by_rank(size * tokens)?)
            }
            _ => (None, by_rank(size * tokens)?, by_rank(size * tokens)?),
        };
        let to = withheld.as_ref().map_or(&sent, |[both, _]| both);
        let scatter = RowOrder::of_outputs(stream, [sizes[1], sizes[0]], &local, (to, withheld.is_some()))?;
        let merge = {
            let own = parts_of_ranks(&received, size, tokens)?;
            MergeState::new(Layout::Tnd).rows(rows).plan(&parts(&own, new.as_ref())?)?
        };
        let merged_lse = Tensor::empty(device, [tokens, heads, 1])?;
        let call = None;
        Ok(Self { size, query, query_rope, call, local, scatter, sent, withheld, received, new, merge, merged_lse })
    }

    /// The queries as the rank's call reads them.
    fn queries(&self) -> Queries<'_, T> {
        Queries { query: &self.query.query, rope: self.query_rope.as_ref().map(|rope| &rope.query) }
    }

    /// The lengths of a graph's call over the rank's keys.
    pub(super) fn lengths(kv: &PerRequest) -> CallLengths<'_> {
        CallLengths::Batched { q: None, kv }
    }

    /// Lets the next replays send the rows of those requests alone that have keys here; `lengths` has the keys of each.
    pub(super) fn withhold(&self, stream: &Stream, lengths: &[usize]) -> Result<()> {
        let rows = self.local.attention.shape().first().copied().unwrap_or(0).max(1);
        match self.withheld {
            None => Ok(()),
            // A row of each key head belongs to a request.
            Some(_) => self.scatter.withhold(stream, |row, outer| lengths.get(row / (outer / rows).max(1)) == Some(&0)),
        }
    }

    /// Queues a layer: gathers the queries, attends, exchanges the results, and merges.
    pub(super) fn launch(
        &self,
        communicator: &mut Communicator,
        stream: &Stream,
        layer: &ContextLayer<'_, T>,
        output: &Tensor<T>,
        mark: &mut impl FnMut(&'static str) -> Result<()>,
    ) -> Result<()> {
        let attend = self.call.as_ref().map(|call| {
            |queries: Queries<'_, T>, local: &mut Output<T>| {
                call.launch_into(stream, (queries, &layer.cache, layer.block_table), local)
            }
        });
        let new = |(plan, output): &(Plan, Output<T>)| {
            Ok(plan.launch_into(stream, (layer.queries.query, layer.key, layer.value), &mut output.clone())?)
        };
        self.queue((communicator, stream), layer.queries, (attend, new), output, mark)
    }

    /// Records a layer of a graph, whose call over the rank's keys has at most the longest lengths.
    pub(super) fn record(
        &self,
        communicator: &mut Communicator,
        capture: &Capturing<'_>,
        shape: AttentionShape,
        (queries, cache, block_table): (Queries<'_, T>, &LayerCache<T>, &BlockTable),
        (longest, output): (&PerRequest, &Tensor<T>),
    ) -> Result<()> {
        let all = shape.of_ranks(self.size);
        let attend = |gathered: Queries<'_, T>, local: &mut Output<T>| {
            record_single_rows(capture, all, Self::lengths(longest), (gathered, cache, block_table), local)
        };
        self.queue((communicator, capture), queries, (Some(attend), |_| Ok(())), output, &mut |_| Ok(()))
    }

    fn queue<Q: Queue>(
        &self,
        (communicator, queue): (&mut Communicator, &Q),
        own: Queries<'_, T>,
        (attend, new): (
            Option<impl FnOnce(Queries<'_, T>, &mut Output<T>) -> Result<()>>,
            impl FnOnce(&(Plan, Output<T>)) -> Result<()>,
        ),
        output: &Tensor<T>,
        mark: &mut impl FnMut(&'static str) -> Result<()>,
    ) -> Result<()> {
        let tokens = own.query.shape().first().copied().unwrap_or(0);
        let query = self.query.queue(communicator, queue, own.query)?;
        let rope = match self.query_rope.as_ref().zip(own.rope) {
            Some((gather, rope)) => Some(gather.queue(communicator, queue, rope)?),
            None => None,
        };
        mark("gather")?;
        let attends = attend.is_some();
        if let Some(attend) = attend {
            attend(Queries { query: &query, rope: rope.as_ref() }, &mut self.local.clone())?;
            match &self.withheld {
                None => self.scatter.move_outputs(queue, &self.local, &self.sent)?,
                Some([both, none]) => {
                    // What an earlier replay has left there may be no number.
                    self.sent.attention.copy_from(queue, &none.attention)?;
                    lse_of(&self.sent)?.copy_from(queue, lse_of(none)?)?;
                    self.scatter.move_outputs(queue, &self.local, both)?;
                }
            }
        }
        self.new.as_ref().map_or(Ok(()), new)?;
        mark("attention")?;
        if self.size > 1 {
            let sent = match attends && self.scatter.is_same() {
                true => &self.local,
                false => &self.sent,
            };
            communicator.all_to_all(queue, &sent.attention, &self.received.attention)?;
            communicator.all_to_all(queue, &lse_bits(sent)?, &lse_bits(&self.received)?)?;
        }
        mark("exchange")?;
        let own = parts_of_ranks(&self.received, self.size, tokens)?;
        let parts = parts(&own, self.new.as_ref())?;
        let mut merged = Output { attention: output.clone(), softmax_lse: Some(self.merged_lse.clone()) };
        self.merge.launch_into(queue, &parts, &mut merged)?;
        mark("merge")
    }
}

/// An output with log-sum-exps, with unspecified content.
fn output<T: Element>(device: &Device, [rows, heads, dim]: [usize; 3]) -> Result<Output<T>> {
    let softmax_lse = Some(Tensor::empty(device, [rows, heads, 1])?);
    Ok(Output { attention: Tensor::empty(device, [rows, heads, dim])?, softmax_lse })
}

/// The results of each rank.
fn parts_of_ranks<T: Element>(received: &Output<T>, size: usize, tokens: usize) -> Result<Vec<Output<T>>> {
    (0..size).map(|rank| rows_of(received, rank * tokens..(rank + 1) * tokens)).collect()
}

/// Some rows of an output, in the same memory.
fn rows_of<T: Element>(output: &Output<T>, rows: std::ops::Range<usize>) -> Result<Output<T>> {
    let softmax_lse = output.softmax_lse.as_ref().map(|lse| lse.narrow(0, rows.clone())).transpose()?;
    Ok(Output { attention: output.attention.narrow(0, rows)?, softmax_lse })
}

/// The results of each rank, and behind them those of the new tokens.
fn parts<'a, T: Element>(ranks: &'a [Output<T>], new: Option<&'a (Plan, Output<T>)>) -> Result<Vec<Part<'a, T>>> {
    let all = ranks.iter().chain(new.map(|(_, output)| output));
    Ok(all.map(Part::of).collect::<ascend_attention::Result<_>>()?)
}
