//! Split-KV decoding: a call for each range of keys, combined by log-sum-exp.

use std::num::NonZeroUsize;
use std::ops::Range;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::merge::{MergeState, Part, PartsOfRows, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::spec::ops::attention_update::UpdateCall;
use ascend_attention::{Element, Output, Plan, Tensor, Violation};

use crate::batch::{AttentionState, Causality};
use crate::error::Result;
use crate::rules;
use crate::split_kv::{SplitLimits, key_ranges};

use super::backend::{
    AttentionBackend, LayerTensors, StepContext, StepPlan, check_single_tokens, empty_output,
    merge_parts, merges_sinks,
};
use super::step_memory::{StepMemory, output_bytes, table_bytes};

/// How [`SplitDecode`] divides the keys of a request into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeySplit {
    /// Parts that fill the cores and are about equally long in the whole batch, by [`SplitLimits::balanced`].
    Balanced {
        /// Most parts of a request, at most [`SplitDecode::MAX_PARTS`].
        max_splits: usize,
        /// Cores that run the parts.
        cores: usize,
    },
    /// Tiles of this number of keys, a whole number of blocks: the parts of a request depend on its own length alone
    /// ([`SplitLimits::deterministic`]).
    Tiles(NonZeroUsize),
}

/// Split-KV decoding, for layers without a window that hides keys: the keys of each request are cut into ranges. One
/// packed call (TND) computes the first range of every request, one the second, and so on; the device combines them
/// by their log-sum-exps.
///
/// The fused operators of CANN split long contexts on their own, so that this is not for speed where they do. It is
/// for steps whose parts the caller has to choose: with [`KeySplit::Tiles`] no request's result depends on the
/// lengths of the others, as long as the operator computes a row over one tile alike in every batch.
///
/// Sinks are counted by the first part on Ascend 950, where its log-sum-exps are known to include them, and refused
/// elsewhere. Parts are rounded to the query's type before they are merged. [`Fused`](crate::Fused) lists what packed
/// calls take in each release.
#[derive(Clone, Copy, Debug)]
pub struct SplitDecode {
    /// How to divide.
    pub split: KeySplit,
}

#[derive(Debug)]
struct SplitStep {
    parts: Vec<(Plan, BlockTable)>,
    /// The merge of the parts; `None` for a single part.
    merge: Option<RowMergePlan>,
    /// Bytes of the outputs of all parts and of the merged output.
    parts_bytes: usize,
}

impl SplitDecode {
    /// Most parts of a request, which is the most that a merge takes.
    pub const MAX_PARTS: usize = UpdateCall::MAX_PARTS;

    /// The ranges of keys of each request.
    fn ranges(&self, step: &StepContext<'_>) -> Result<Vec<Vec<Range<usize>>>, Violation> {
        let block_size = step.block_table.block_size();
        let lengths = step.metadata.kv_lengths();
        let parts = match self.split {
            KeySplit::Balanced { max_splits, cores } => SplitLimits {
                max_splits: max_splits.min(Self::MAX_PARTS),
                cores,
                heads: step.shape.heads,
                kv_heads: step.shape.kv_heads,
            }
            .balanced(lengths)?,
            KeySplit::Tiles(tile) => {
                if !tile.get().is_multiple_of(block_size.max(1)) {
                    return Err(Violation::new(
                        &rules::SPLIT_TILE,
                        format_args!("tiles of {tile} keys in blocks of {block_size}"),
                        format_args!("a multiple of {block_size}"),
                        "choose a tile of whole blocks",
                    ));
                }
                SplitLimits::deterministic(lengths, tile.get())?
            }
        };
        let each = lengths.lengths().iter().zip(parts).enumerate();
        each.map(|(request, (&len, parts))| {
            if parts > Self::MAX_PARTS {
                return Err(Violation::new(
                    &rules::SPLIT_LIMITS,
                    format_args!("{parts} parts of the {len} keys of request {request}"),
                    format_args!("at most {}, what a merge takes", Self::MAX_PARTS),
                    "choose longer tiles",
                ));
            }
            let size = match self.split {
                KeySplit::Balanced { .. } => len.div_ceil(parts.max(1)),
                KeySplit::Tiles(tile) => tile.get(),
            };
            Ok(key_ranges(len, size, block_size).collect())
        })
        .collect()
    }
}

impl<T: Element> AttentionBackend<T> for SplitDecode {
    fn name(&self) -> &'static str {
        "split_decode"
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let metadata = step.metadata;
        let causality = step.mask.causality()?.over(metadata.longest());
        let takes = metadata.state() == AttentionState::DecodeOnly
            && causality == Causality::Causal
            && merges_sinks(step, first)?;
        let allowed =
            "one token a request, causal, no window that hides keys, and sinks on Ascend 950 alone";
        let fix = "register a backend for packed queries behind this one";
        check_single_tokens(step, first, takes, &rules::BACKEND_SPLIT, [allowed, fix])?;
        let ranges = self.ranges(step)?;
        let most = ranges.iter().map(Vec::len).max().unwrap_or(0);
        let mut parts = Vec::with_capacity(most);
        for part in 0..most {
            parts.push(plan_part(step, first, &ranges, part)?);
        }
        let outputs: Vec<Output<T>> = (parts.iter())
            .map(|(plan, _)| Ok(plan.output()?))
            .collect::<Result<_>>()?;
        let each = outputs.first().map_or(0, output_bytes);
        let (merge, outputs) = match most {
            0 | 1 => (None, most),
            _ => (Some(plan_merge(&outputs, &ranges)?), most.saturating_add(1)),
        };
        Ok(Box::new(SplitStep {
            parts,
            merge,
            parts_bytes: each.saturating_mul(outputs),
        }))
    }
}

/// Prepares the call of part number `part` of every request; a request without that part has no keys in the call.
fn plan_part<T: Element>(
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
    ranges: &[Vec<Range<usize>>],
    part: usize,
) -> Result<(Plan, BlockTable)> {
    let block_size = step.block_table.block_size();
    let table = step.metadata.table();
    let mut lengths = PerRequest::default();
    let mut rows: Vec<&[usize]> = Vec::with_capacity(ranges.len());
    for (request, ranges) in ranges.iter().enumerate() {
        let keys = ranges.get(part).cloned().unwrap_or(0..0);
        lengths.push(keys.len())?;
        let used = table.used(request, keys.end, block_size)?;
        let before = keys.start.checked_div(block_size).unwrap_or(0);
        rows.push(used.get(before..).unwrap_or_default());
    }
    let block_table = BlockTable::from_rows(step.stream, &rows, block_size)?;
    let lengths = CallLengths::PackedPaged {
        q: step.metadata.q_ends(),
        kv: &lengths,
    };
    // A single row sees all keys up to its own.
    let call = step.shape.call(Layout::Tnd).softmax_lse(true);
    let plan = lengths
        .apply(call)
        .plan(inputs(first, &block_table, part))?;
    Ok((plan, block_table))
}

fn plan_merge<T: Element>(
    outputs: &[Output<T>],
    ranges: &[Vec<Range<usize>>],
) -> Result<RowMergePlan> {
    let named: Vec<Part<'_, T>> = (outputs.iter())
        .map(|output| Ok(Part::of(output)?))
        .collect::<Result<_>>()?;
    // The lowest `parts` bits set; there are at most 16 parts.
    let bits = |parts: usize| u16::MAX.unbounded_shr(16u32.saturating_sub(parts as u32));
    let rows: Vec<PartsOfRows> = (ranges.iter())
        .map(|ranges| PartsOfRows {
            rows: 1,
            parts: bits(ranges.len()),
        })
        .collect();
    Ok(MergeState::new(Layout::Tnd).rows(&rows).plan(&named)?)
}

fn inputs<'a, T: Element>(
    layer: &LayerTensors<'a, T>,
    table: &'a BlockTable,
    part: usize,
) -> Inputs<'a, T> {
    let inputs = layer.cached_keys(layer.query, table);
    match part {
        // The first part of every request has keys.
        0 => layer.with_sink(inputs),
        _ => inputs,
    }
}

impl<T: Element> StepPlan<T> for SplitStep {
    fn memory(&self) -> StepMemory {
        let parts = || self.parts.iter();
        let merge = self.merge.as_ref().map(RowMergePlan::workspace_bytes);
        StepMemory::of_calls(parts().map(|(plan, _)| plan.workspace_bytes()).chain(merge))
            .holding(parts().map(|(_, table)| table_bytes(table)))
            .taking([self.parts_bytes])
    }

    fn launch(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        let mut outputs: Vec<Output<T>> = Vec::with_capacity(self.parts.len());
        for (part, (plan, table)) in self.parts.iter().enumerate() {
            outputs.push(plan.launch(step.stream, inputs(layer, table, part))?);
        }
        match &self.merge {
            Some(merge) => merge_parts(merge, step, &outputs),
            // There is one part: each request has a key, its own.
            None => match outputs.pop() {
                Some(output) => Ok(output.attention),
                None => empty_output(step, layer),
            },
        }
    }
}
