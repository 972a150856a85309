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

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{AttentionShape, LayerTensors, StepContext, check_single_tokens, merges_sinks};

/// How [`Backend::SplitDecode`](crate::Backend::SplitDecode) cuts the keys of each request into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitDecode {
    /// Parts that fill the cores, such that those of long and short requests are about equally long. The rule is
    /// SGLang's for its Triton decode kernels.
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
    /// Tiles of this number of keys, a whole number of blocks: `ceil(length / keys)` parts of a request, by its own
    /// length alone.
    Tiles(NonZeroUsize),
}

impl SplitDecode {
    /// Most parts of a request, which is the most that a merge takes.
    pub const MAX_PARTS: usize = UpdateCall::MAX_PARTS;

    /// How to cut keys by the sizes in text, `KEYS` or `KEYS:PARTS`.
    pub(super) fn of_sizes(sizes: &str) -> Option<Self> {
        // A number is written in one way: without a sign, and without zeros in front.
        let number = |text: &str| text.starts_with(|first| ('1'..='9').contains(&first)).then(|| text.parse().ok())?;
        Some(match sizes.split_once(':') {
            None => Self::Tiles(number(sizes)?),
            Some((keys, most)) => Self::Capped { keys: number(keys)?, max_splits: number(most)? },
        })
    }

    /// The number of parts of each request of a batch; none for requests without keys. A step refuses tiles that make
    /// more than [`MAX_PARTS`](Self::MAX_PARTS) parts.
    ///
    /// # Errors
    /// [`SPLIT_LIMITS`](crate::rules::SPLIT_LIMITS) for balanced parts with a limit of 0, or with query heads that are
    /// no multiple of the key heads.
    pub fn parts(&self, lengths: &PerRequest, shape: AttentionShape) -> Result<Vec<usize>, Violation> {
        let (each, most) = match *self {
            Self::Balanced { max_splits, cores } => return balanced(lengths, max_splits, cores, shape),
            Self::Capped { keys, max_splits } => (keys.get(), max_splits.get().min(Self::MAX_PARTS)),
            Self::Tiles(tile) => (tile.get(), usize::MAX),
        };
        Ok(lengths.lengths().iter().map(|len| len.div_ceil(each).min(most)).collect())
    }

    /// The ranges of keys of each request.
    fn ranges(&self, step: &StepContext<'_>) -> Result<Vec<Vec<Range<usize>>>, Violation> {
        let block_size = step.block_table.block_size();
        let lengths = step.metadata.kv_lengths();
        if let Self::Tiles(tile) = self
            && !tile.get().is_multiple_of(block_size.max(1))
        {
            return Err(rules::SPLIT_TILE.broken(
                format_args!("tiles of {tile} keys in blocks of {block_size}"),
                format_args!("a multiple of {block_size}"),
            ));
        }
        let parts = self.parts(lengths, step.shape)?;
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

/// Parts that fill the cores and are about equally long in the whole batch.
fn balanced(
    lengths: &PerRequest,
    max_splits: usize,
    cores: usize,
    shape: AttentionShape,
) -> Result<Vec<usize>, Violation> {
    let AttentionShape { heads, kv_heads, .. } = shape;
    if max_splits == 0 || cores == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(rules::SPLIT_LIMITS.broken(
            format_args!("{max_splits} parts, {cores} cores, {heads} query heads, {kv_heads} key heads"),
            "1 or more of each, query heads a multiple of the key heads",
        ));
    }
    let most = max_splits.min(SplitDecode::MAX_PARTS);
    let lengths = lengths.lengths();
    let max = lengths.iter().copied().fold(0, usize::max);
    if max == 0 {
        return Ok(vec![0; lengths.len()]);
    }
    let mut min = lengths.iter().copied().fold(max, usize::min).max(1);
    // Lengths that differ by less than a quarter count as equal.
    if max - min < min.div_ceil(4) {
        min = max;
    }
    let by_length = max.div_ceil(min).min(most);
    let chunk = max.div_ceil(by_length);

    let group = heads / kv_heads;
    let head_groups = match group {
        1 => heads,
        _ => heads.div_ceil(group.min(16)),
    };
    let grid = lengths.len() as f64 * head_groups as f64;
    // Cores are counted whole, as the kernels do: a fraction of one is dropped.
    let cores = (cores as f64 * (max as f64 / 64.0).log2().max(1.0)).floor();
    // At least 1, since neither `cores` nor `grid` is 0; at most `most`.
    let by_cores = ((cores / grid).ceil() as usize).clamp(1, most);
    let core_chunk = max.div_ceil(by_cores);
    let parts = |len: &usize| len.div_ceil(chunk).max(len.div_ceil(core_chunk));
    Ok(lengths.iter().map(parts).collect())
}

/// The keys `0..len` of a request in ranges of `size`, rounded up to whole blocks.
fn key_ranges(len: usize, size: usize, block_size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = size.clamp(1, len.max(1)).next_multiple_of(block_size);
    (0..len).step_by(size).map(move |first| first..(first + size).min(len))
}

/// A call for each part of the keys, and their merge.
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parts(lengths: &[usize], [max_splits, cores]: [usize; 2], [heads, kv_heads]: [usize; 2]) -> Vec<usize> {
        let split = SplitDecode::Balanced { max_splits, cores };
        split.parts(&per(lengths), AttentionShape::new(heads, kv_heads, 64)).unwrap()
    }

    fn per(lengths: &[usize]) -> PerRequest {
        PerRequest::new(lengths.to_vec()).unwrap()
    }

    #[test]
    fn one_long_request_is_split_and_short_ones_are_not() {
        // 2 requests in 8 head groups; 20 * log2(64) cores stand for 120, and 120 / 16 gives 8 parts of 512.
        assert_eq!(parts(&[4096, 16], [8, 20], [32, 8]), [8, 1]);
        // As long as each other to a quarter: one part by length, ceil(20 * 1 / (64 * 8)) by cores.
        assert_eq!(parts(&[120; 64], [8, 20], [32, 8]), [1; 64]);
        assert_eq!(parts(&[0, 0], [8, 20], [32, 8]), [0, 0]);
        for (max_splits, cores, heads, kv_heads) in [(8, 0, 32, 8), (0, 20, 32, 8), (8, 20, 32, 5), (8, 20, 0, 0)] {
            let split = SplitDecode::Balanced { max_splits, cores };
            let refused = split.parts(&per(&[1]), AttentionShape::new(heads, kv_heads, 64)).unwrap_err();
            assert_eq!(refused.rule, &rules::SPLIT_LIMITS, "{refused}");
        }
    }

    /// 130 keys make 20.4 cores out of 20, and 5 requests in 4 head groups take 20: one part each.
    #[test]
    fn scaled_cores_are_counted_whole() {
        assert_eq!(parts(&[130; 5], [8, 20], [16, 4]), [1; 5]);
        assert_eq!(parts(&[130; 4], [8, 20], [16, 4]), [2; 4]);
    }

    #[test]
    fn ranges_are_whole_blocks_and_cover_all_keys() {
        let ranges = |len, size, block| key_ranges(len, size, block).collect::<Vec<_>>();
        assert_eq!(ranges(300, 100, 128), [0..128, 128..256, 256..300]);
        assert_eq!(ranges(300, 129, 128), [0..256, 256..300]);
        assert!(ranges(0, 5, 16).is_empty());
        assert_eq!(ranges(5, 0, 1).len(), 5);
        assert_eq!(ranges(7, usize::MAX, 16), [0..7; 1]);
    }

    proptest! {
        #[test]
        fn parts_are_within_the_cap_and_cover(
            lengths in prop::collection::vec(0usize..=i64::MAX as usize, 1..9),
            max_splits in 1usize..20,
            cores in 1usize..200,
            kv_heads in 1usize..9,
            group in 1usize..40,
        ) {
            let splits = parts(&lengths, [max_splits, cores], [kv_heads * group, kv_heads]);
            for (len, parts) in lengths.iter().zip(&splits) {
                prop_assert!(*parts <= max_splits.min(SplitDecode::MAX_PARTS));
                prop_assert_eq!(*parts == 0, *len == 0);
            }
        }

        #[test]
        fn deterministic_parts_depend_on_the_request_alone(
            lengths in prop::collection::vec(0usize..100_000, 1..9),
            tile in 1usize..600,
        ) {
            let size = |size: usize| NonZeroUsize::new(size).unwrap();
            let (keys, most) = (size(tile), 1 + tile % 20);
            for split in [SplitDecode::Tiles(keys), SplitDecode::Capped { keys, max_splits: size(most) }] {
                let parts = |lengths: &[usize]| split.parts(&per(lengths), AttentionShape::new(1, 1, 64)).unwrap();
                let cap = if let SplitDecode::Tiles(_) = split { usize::MAX } else { most.min(16) };
                for (len, all) in lengths.iter().zip(parts(&lengths)) {
                    prop_assert_eq!(vec![all], parts(&[*len]));
                    prop_assert_eq!(all, len.div_ceil(tile).min(cap));
                }
            }
        }
    }
}
