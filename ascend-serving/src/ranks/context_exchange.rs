//! The calls of a rank in a layer whose contexts are divided, and what goes from rank to rank between them.

use ascend_attention::attention::BlockTable;
use ascend_attention::comm::Communicator;
use ascend_attention::merge::{Part, RowMergePlan};
use ascend_attention::{Device, Element, Output, Plan, Stream, Tensor};

use crate::backends::AttentionShape;
use crate::error::Result;
use crate::kv::LayerCache;

use super::context_parallel::{ContextSplit, RankPlan};
use super::row_order::{RowOrder, lse_bits};

/// A part of a layer, by what a [mark](crate::ContextStep::marks) of the time stands behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ContextPart {
    /// Nothing: the layer begins.
    Start,
    /// Keys and values are in the cache.
    Write,
    /// The queries of all ranks are here, in order.
    Gather,
    /// The calls over the rank's keys and of the new tokens are over.
    Attention,
    /// The results for the rank's heads are here.
    Exchange,
    /// The results are merged.
    Merge,
}

/// The tensors of one layer.
pub(super) struct ContextLayer<'a, T: Element> {
    pub(super) query: &'a Tensor<T>,
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
    /// The queries of all ranks, `[ranks, tokens, N, D]`; without tensors of their own for a single rank.
    gathered: Option<Tensor<T>>,
    gather: RowOrder,
    /// The queries as the rank's call reads them, `[tokens, ranks * N, D]`.
    query: Tensor<T>,
    /// The rank's call over its keys, if it has any.
    call: Option<RankPlan>,
    /// Results over the rank's keys, of the heads of all ranks.
    local: Output<T>,
    scatter: RowOrder,
    /// The results by the rank that they go to, `[ranks, tokens, N, D]`.
    sent: Output<T>,
    /// The results of the rank's own heads, by the rank that they come from.
    received: Output<T>,
    /// The call of the new tokens among themselves, of the rank's own heads.
    new: Option<(Plan, Output<T>)>,
    merge: RowMergePlan,
    /// The merged log-sum-exps, which are not read.
    merged_lse: Tensor<f32>,
}

impl<T: Element> ContextExchange<T> {
    /// Prepares the calls of `rank` for layers like this one. Nothing is exchanged.
    pub(super) fn plan(
        stream: &Stream,
        shape: AttentionShape,
        split: &ContextSplit,
        rank: usize,
        layer: &ContextLayer<'_, T>,
    ) -> Result<Self> {
        let (size, tokens, device) = (split.ranks().len(), split.tokens(), stream.device());
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let all = AttentionShape { heads: heads * size, ..shape };
        let value_dim = layer.value.shape().last().copied().unwrap_or(0);
        let (query, gathered) = match size {
            1 => (layer.query.clone(), None),
            _ => {
                let gathered = Tensor::empty(device, [size * tokens, heads, head_dim])?;
                (Tensor::empty(device, [tokens, all.heads, head_dim])?, Some(gathered))
            }
        };
        let sizes = [size, tokens * kv_heads];
        let gather = RowOrder::of_rows(stream, sizes, gathered.as_ref().unwrap_or(&query), &query)?;
        let call = match split.ranks().get(rank) {
            Some(rank) => rank.plan(all, &query, &layer.cache, layer.block_table)?,
            None => None,
        };
        let by_rank = || output(device, [size * tokens, heads, value_dim]);
        let local = output(device, [tokens, all.heads, value_dim])?;
        let (sent, received) = match size {
            1 => (local.clone(), local.clone()),
            _ => (by_rank()?, by_rank()?),
        };
        if call.is_none() {
            // No row of these is taken, but they are sent.
            sent.attention.clear(stream)?;
            sent.softmax_lse.as_ref().map_or(Ok(()), |lse| lse.clear(stream))?;
        }
        let scatter = RowOrder::of_outputs(stream, [sizes[1], sizes[0]], &local, &sent)?;
        let new = match split.new_tokens() {
            None => None,
            Some(new) => {
                let plan = new.plan(stream, shape, (layer.query, layer.key, layer.value))?;
                Some((plan, output(device, [tokens, heads, value_dim])?))
            }
        };
        let merge = {
            let own = parts_of_ranks(&received, size, tokens)?;
            split.merge(&parts(&own, new.as_ref())?)?
        };
        let merged_lse = Tensor::empty(device, [tokens, heads, 1])?;
        Ok(Self { size, gathered, gather, query, call, local, scatter, sent, received, new, merge, merged_lse })
    }

    /// Queues a layer: gathers the queries, attends, exchanges the results, and merges.
    pub(super) fn launch(
        &self,
        communicator: &mut Communicator,
        stream: &Stream,
        layer: &ContextLayer<'_, T>,
        output: &Tensor<T>,
        mark: &mut impl FnMut(ContextPart) -> Result<()>,
    ) -> Result<()> {
        let tokens = layer.query.shape().first().copied().unwrap_or(0);
        let query = match &self.gathered {
            None => layer.query,
            Some(gathered) => {
                communicator.all_gather(stream, layer.query, gathered)?;
                self.gather.move_rows(stream, gathered, &self.query)?;
                &self.gather.moved(gathered, &self.query)?
            }
        };
        mark(ContextPart::Gather)?;
        if let Some(call) = &self.call {
            call.launch_into(stream, (query, &layer.cache, layer.block_table), &mut self.local.clone())?;
            self.scatter.move_outputs(stream, &self.local, &self.sent)?;
        }
        if let Some((plan, output)) = &self.new {
            plan.launch_into(stream, (layer.query, layer.key, layer.value), &mut output.clone())?;
        }
        mark(ContextPart::Attention)?;
        if self.size > 1 {
            let sent = match self.call.is_some() && self.scatter.is_same() {
                true => &self.local,
                false => &self.sent,
            };
            communicator.all_to_all(stream, &sent.attention, &self.received.attention)?;
            communicator.all_to_all(stream, &lse_bits(sent)?, &lse_bits(&self.received)?)?;
        }
        mark(ContextPart::Exchange)?;
        let own = parts_of_ranks(&self.received, self.size, tokens)?;
        let parts = parts(&own, self.new.as_ref())?;
        let mut merged = Output { attention: output.clone(), softmax_lse: Some(self.merged_lse.clone()) };
        self.merge.launch_into(stream, &parts, &mut merged)?;
        mark(ContextPart::Merge)
    }
}

/// An output with log-sum-exps, with unspecified content.
fn output<T: Element>(device: &Device, [rows, heads, dim]: [usize; 3]) -> Result<Output<T>> {
    let softmax_lse = Some(Tensor::empty(device, [rows, heads, 1])?);
    Ok(Output { attention: Tensor::empty(device, [rows, heads, dim])?, softmax_lse })
}

/// The results of each rank.
fn parts_of_ranks<T: Element>(received: &Output<T>, size: usize, tokens: usize) -> Result<Vec<Output<T>>> {
    let of_rank = |rank: usize| {
        let rows = rank * tokens..(rank + 1) * tokens;
        let softmax_lse = received.softmax_lse.as_ref().map(|lse| lse.narrow(0, rows.clone())).transpose()?;
        Ok(Output { attention: received.attention.narrow(0, rows)?, softmax_lse })
    };
    (0..size).map(of_rank).collect()
}

/// The results of each rank, and behind them those of the new tokens.
fn parts<'a, T: Element>(ranks: &'a [Output<T>], new: Option<&'a (Plan, Output<T>)>) -> Result<Vec<Part<'a, T>>> {
    let all = ranks.iter().chain(new.map(|(_, output)| output));
    Ok(all.map(Part::of).collect::<ascend_attention::Result<_>>()?)
}
