//! Calls of a rank over paged keys: rows of requests behind each other, or rows that each see keys of their own.

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, FusedInferAttention, Inputs, PerRequest};
use ascend_attention::graph::Capturing;
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Mask, Output, Plan, Queue, Tensor};

use crate::backends::{AttentionShape, size};
use crate::error::Result;
use crate::kv::LayerCache;

/// The queries of a layer; over latents with their rotary parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries<'a, T: Element> {
    pub(super) query: &'a Tensor<T>,
    pub(super) rope: Option<&'a Tensor<T>>,
}

/// The query rows of a call, by the row of the block table whose keys they see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PagedRows {
    /// Where the query rows of each row of the table end, unless each has a single one.
    pub(super) q_ends: Cumulative,
    /// The keys of each row of the table.
    pub(super) kv_lengths: PerRequest,
    /// Whether each row of the table has a single query row, so that the call is batched.
    pub(super) single: bool,
}

/// A prepared call over paged keys. From [`PagedRows::plan`].
#[derive(Debug)]
pub(super) struct PagedPlan {
    call: Plan,
    /// Whether each row of the table has a single query row.
    single: bool,
}

impl PagedRows {
    /// Prepares the call of a layout. Single rows are in BNSD, which every release takes in FLOAT16 too, other rows in
    /// TND. Query `[rows, N, D]`. One plan serves all layers; none is needed without keys, where there is nothing to
    /// compute.
    pub(super) fn plan<T: Element>(
        &self,
        call: impl FnOnce(Layout) -> FusedInferAttention,
        queries: Queries<'_, T>,
        cache: &LayerCache<T>,
        block_table: &BlockTable,
    ) -> Result<Option<PagedPlan>> {
        if self.kv_lengths.lengths().iter().all(|len| *len == 0) {
            return Ok(None);
        }
        let (q, kv) = (&self.q_ends, &self.kv_lengths);
        let call = match self.single {
            true => {
                let single = SingleQueries::of(queries)?;
                let lengths = CallLengths::Batched { q: None, kv };
                lengths.apply(call(Layout::Bnsd)).plan(paged(single.queries(), cache, block_table))?
            }
            false => {
                let lengths = CallLengths::PackedPaged { q, kv };
                lengths.apply(call(Layout::Tnd)).plan(paged(queries, cache, block_table))?
            }
        };
        Ok(Some(PagedPlan { call, single: self.single }))
    }
}

/// The call of single rows over a rank's keys, with the heads of all ranks, recorded into a graph: the call of
/// [`PagedRows::plan`], of lengths up to the longest.
pub(super) fn record_single_rows<T: Element>(
    capture: &Capturing<'_>,
    shape: AttentionShape,
    longest: CallLengths<'_>,
    (queries, cache, block_table): (Queries<'_, T>, &LayerCache<T>, &BlockTable),
    output: &Output<T>,
) -> Result<()> {
    let single = SingleQueries::of(queries)?;
    let inputs = paged(single.queries(), cache, block_table);
    let call = capture.attention(&over_keys(shape, Layout::Bnsd), longest, inputs)?;
    Ok(capture.launch_into(call, inputs, &mut single_output(output)?)?)
}

/// The call over a rank's keys, in sparse mode 0 without a mask, with log-sum-exps.
pub(super) fn over_keys(shape: AttentionShape, layout: Layout) -> FusedInferAttention {
    shape.call(layout).mask(Mask::none()).softmax_lse(true)
}

fn paged<'a, T: Element>(queries: Queries<'a, T>, cache: &'a LayerCache<T>, table: &'a BlockTable) -> Inputs<'a, T> {
    cache.inputs(queries.query, queries.rope).paged(table)
}

/// Queries of single rows, in the shapes of [`single_rows`].
struct SingleQueries<T: Element>(Tensor<T>, Option<Tensor<T>>);

impl<T: Element> SingleQueries<T> {
    fn of(queries: Queries<'_, T>) -> Result<Self> {
        Ok(Self(single_rows(queries.query)?, queries.rope.map(single_rows).transpose()?))
    }

    fn queries(&self) -> Queries<'_, T> {
        Queries { query: &self.0, rope: self.1.as_ref() }
    }
}

/// Single rows, `[B, N, D]`, as `[B, N, 1, D]`: the same elements in the same order.
fn single_rows<T: Element>(tensor: &Tensor<T>) -> Result<Tensor<T>> {
    let [rows, heads, dim] = [0, 1, 2].map(|axis| size(tensor, axis));
    Ok(tensor.reshape([rows, heads, 1, dim])?)
}

/// Results of single rows in the shapes of [`single_rows`].
fn single_output<T: Element>(output: &Output<T>) -> Result<Output<T>> {
    let softmax_lse = output.softmax_lse.as_ref().map(single_rows).transpose()?;
    Ok(Output { attention: single_rows(&output.attention)?, softmax_lse })
}

impl PagedPlan {
    /// Queues the call: attention `[rows, N, D]`, and log-sum-exps `[rows, N, 1]` if they were asked for. Rows without
    /// keys mean nothing.
    pub(super) fn launch_into<T: Element>(
        &self,
        queue: &impl Queue,
        (queries, cache, block_table): (Queries<'_, T>, &LayerCache<T>, &BlockTable),
        output: &mut Output<T>,
    ) -> Result<()> {
        if !self.single {
            return Ok(self.call.launch_into(queue, paged(queries, cache, block_table), output)?);
        }
        let single = SingleQueries::of(queries)?;
        Ok(self.call.launch_into(queue, paged(single.queries(), cache, block_table), &mut single_output(output)?)?)
    }
}
