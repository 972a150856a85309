//! Split-KV decoding: a call for each range of keys, combined by log-sum-exp.

use std::num::NonZeroUsize;
use std::ops::Range;

use ascend_attention::attention::PerRequest;
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::ops::attention_update::UpdateCall;
use ascend_attention::{Element, Violation};

use crate::batch::AttentionState;
use crate::causality::Causality;
use crate::error::Result;
use crate::rules;
use crate::split_kv::{SplitLimits, key_ranges};

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext, check_single_tokens, merges_sinks};

/// How [`Backend::SplitDecode`](crate::Backend::SplitDecode) cuts the keys of each request into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitDecode {
    /// Parts that fill the cores and are about equally long in the whole batch, by [`SplitLimits::balanced`].
    Balanced {
        /// Most parts of a request, at most [`SplitDecode::MAX_PARTS`].
        max_splits: usize,
        /// Cores that run the parts.
        cores: usize,
    },
    /// A part for each `keys` keys, at most `max_splits` of a request: `min(ceil(length / keys), max_splits)`, by its
    /// own length alone. 512 keys and 8 parts are usual.
    Capped {
        /// Keys of a part, unless there are more parts than `max_splits`.
        keys: NonZeroUsize,
        /// Most parts of a request, at most [`SplitDecode::MAX_PARTS`].
        max_splits: NonZeroUsize,
    },
    /// Tiles of this number of keys, a whole number of blocks: the parts of a request depend on its own length alone
    /// ([`SplitLimits::by_tiles`]).
    Tiles(NonZeroUsize),
}

impl SplitDecode {
    /// Most parts of a request, which is the most that a merge takes.
    pub const MAX_PARTS: usize = UpdateCall::MAX_PARTS;

    /// How to cut keys by the sizes in text, `KEYS` or `KEYS:PARTS`.
    pub(super) fn of_sizes(sizes: &str) -> Option<Self> {
        Some(match sizes.split_once(':') {
            None => Self::Tiles(sizes.parse().ok()?),
            Some((keys, most)) => Self::Capped { keys: keys.parse().ok()?, max_splits: most.parse().ok()? },
        })
    }

    /// The ranges of keys of each request.
    fn ranges(&self, step: &StepContext<'_>) -> Result<Vec<Vec<Range<usize>>>, Violation> {
        let block_size = step.block_table.block_size();
        let lengths = step.metadata.kv_lengths();
        let parts = match *self {
            Self::Balanced { max_splits, cores } => SplitLimits {
                max_splits: max_splits.min(Self::MAX_PARTS),
                cores,
                heads: step.shape.heads,
                kv_heads: step.shape.kv_heads,
            }
            .balanced(lengths)?,
            Self::Capped { keys, max_splits } => {
                let most = max_splits.get().min(Self::MAX_PARTS);
                SplitLimits::by_tiles(lengths, keys.get())?.into_iter().map(|parts| parts.min(most)).collect()
            }
            Self::Tiles(tile) => {
                if !tile.get().is_multiple_of(block_size.max(1)) {
                    return Err(rules::SPLIT_TILE.broken(
                        format_args!("tiles of {tile} keys in blocks of {block_size}"),
                        format_args!("a multiple of {block_size}"),
                    ));
                }
                SplitLimits::by_tiles(lengths, tile.get())?
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
            let size = match *self {
                Self::Balanced { .. } | Self::Capped { .. } => len.div_ceil(parts.max(1)),
                Self::Tiles(tile) => tile.get(),
            };
            Ok(key_ranges(len, size, block_size).collect())
        })
        .collect()
    }
}

pub(super) fn program<T: Element>(
    split: &SplitDecode,
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
) -> Result<StepProgram<T>> {
    let metadata = step.metadata;
    let causality = step.mask.causality()?.over(metadata.longest());
    let takes =
        metadata.state() == AttentionState::DecodeOnly && causality == Causality::Causal && merges_sinks(step, first)?;
    let allowed = "one token a request, causal, no window that hides keys, and sinks on Ascend 950 alone";
    let fix = rules::BACKEND_SPLIT.fix;
    check_single_tokens(step, first, takes, &rules::BACKEND_SPLIT, [allowed, fix])?;
    let ranges = split.ranges(step)?;
    let most = ranges.iter().map(Vec::len).max().unwrap_or(0);
    let parts = (0..most).map(|part| part_call(step, &ranges, part));
    let program = StepProgram::new(parts.collect::<Result<Vec<_>>>()?);
    // The lowest `parts` bits set; there are at most 16 parts.
    let bits = |parts: usize| u16::MAX.unbounded_shr(16u32.saturating_sub(parts as u32));
    let rows = ranges.iter().map(|ranges| PartsOfRows { rows: 1, parts: bits(ranges.len()) });
    Ok(match most {
        0 | 1 => program,
        _ => program.merged(rows.collect()),
    })
}

/// The call of part number `part` of every request; a request without that part has no keys in the call.
fn part_call(step: &StepContext<'_>, ranges: &[Vec<Range<usize>>], part: usize) -> Result<StepCall> {
    let block_size = step.block_table.block_size();
    let table = step.metadata.table();
    let mut lengths = PerRequest::default();
    let mut rows = Vec::with_capacity(ranges.len());
    for (request, ranges) in ranges.iter().enumerate() {
        let keys = ranges.get(part).cloned().unwrap_or(0..0);
        lengths.push(keys.len())?;
        let used = table.used(request, keys.end, block_size)?;
        let before = keys.start.checked_div(block_size).unwrap_or(0);
        rows.push(used.get(before..).unwrap_or_default().to_vec());
    }
    // A single row sees all keys up to its own. The first part of every request has keys, and counts the sinks.
    let call = StepCall::packed(step.metadata.q_ends().clone(), lengths).blocks(rows);
    Ok(match part {
        0 => call,
        _ => call.without_sinks(),
    })
}
