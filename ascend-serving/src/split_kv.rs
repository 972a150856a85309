//! The number of parts into which a decode kernel that splits keys over cores should split each request.

use std::ops::Range;

use ascend_attention::Violation;
use ascend_attention::attention::PerRequest;

use crate::rules;

/// The limits, besides the lengths, that decide the number of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitLimits {
    /// Most parts of a request.
    pub max_splits: usize,
    /// Cores that run the parts.
    pub cores: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
}

impl SplitLimits {
    /// The number of parts of each request, such that the whole batch fills the cores and the parts of long and short
    /// requests are about equally long. Requests without keys get none.
    ///
    /// The rule is SGLang's for its Triton decode kernels. The fused operators of CANN split on their own;
    /// [`SplitDecode`](crate::SplitDecode) splits by calls.
    ///
    /// # Errors
    /// [`SPLIT_LIMITS`](crate::rules::SPLIT_LIMITS) for a limit of 0, or query heads that are no multiple of the key
    /// heads.
    pub fn balanced(&self, lengths: &PerRequest) -> Result<Vec<usize>, Violation> {
        let grouped = self.heads.is_multiple_of(self.kv_heads);
        if self.max_splits == 0 || self.cores == 0 || self.heads == 0 || !grouped {
            return Err(
                rules::SPLIT_LIMITS.broken(format_args!("{self:?}"), "1 or more of each, heads a multiple of kv_heads")
            );
        }
        let lengths = lengths.lengths();
        let max = lengths.iter().copied().fold(0, usize::max);
        if max == 0 {
            return Ok(vec![0; lengths.len()]);
        }
        let cap = self.max_splits;
        let mut min = lengths.iter().copied().fold(max, usize::min).max(1);
        // Lengths that differ by less than a quarter count as equal.
        if max - min < min.div_ceil(4) {
            min = max;
        }
        let by_length = max.div_ceil(min).min(cap);
        let chunk = max.div_ceil(by_length);

        let group = self.heads / self.kv_heads;
        let head_groups = match group {
            1 => self.heads,
            _ => self.heads.div_ceil(group.min(16)),
        };
        let grid = lengths.len() as f64 * head_groups as f64;
        // Cores are counted whole, as the kernels do: a fraction of one is dropped.
        let cores = (self.cores as f64 * (max as f64 / 64.0).log2().max(1.0)).floor();
        // At least 1, since neither `cores` nor `grid` is 0; at most the cap.
        let by_cores = ((cores / grid).ceil() as usize).clamp(1, cap);
        let core_chunk = max.div_ceil(by_cores);
        let parts = |len: &usize| len.div_ceil(chunk).max(len.div_ceil(core_chunk));
        Ok(lengths.iter().map(parts).collect())
    }

    /// The number of parts of each request where its result must not depend on the others: `ceil(length / tile)`.
    ///
    /// # Errors
    /// [`SPLIT_LIMITS`](crate::rules::SPLIT_LIMITS) for a tile of 0.
    pub fn by_tiles(lengths: &PerRequest, tile: usize) -> Result<Vec<usize>, Violation> {
        if tile == 0 {
            return Err(Violation::new(&rules::SPLIT_LIMITS, "a tile of 0 keys", "1 or more", "256 is usual"));
        }
        let lengths = lengths.lengths().iter();
        Ok(lengths.map(|len| len.div_ceil(tile)).collect())
    }
}

/// The keys `0..len` of a request in ranges of `size`, rounded up to whole blocks.
pub(crate) fn key_ranges(len: usize, size: usize, block_size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = size.clamp(1, len.max(1)).next_multiple_of(block_size);
    (0..len).step_by(size).map(move |first| first..(first + size).min(len))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn per(lengths: &[usize]) -> PerRequest {
        PerRequest::new(lengths.to_vec()).unwrap()
    }

    #[test]
    fn one_long_request_is_split_and_short_ones_are_not() {
        let limits = SplitLimits { max_splits: 8, cores: 20, heads: 32, kv_heads: 8 };
        // 2 requests in 8 head groups; 20 * log2(64) cores stand for 120, and 120 / 16 gives 8 parts of 512.
        assert_eq!(limits.balanced(&per(&[4096, 16])).unwrap(), [8, 1]);
        // As long as each other to a quarter: one part by length, ceil(20 * 1 / (64 * 8)) by cores.
        let same = vec![120usize; 64];
        assert_eq!(limits.balanced(&per(&same)).unwrap(), [1; 64]);
        assert_eq!(limits.balanced(&per(&[0, 0])).unwrap(), [0, 0]);
        let none = SplitLimits { cores: 0, ..limits };
        assert_eq!(none.balanced(&per(&[1])).unwrap_err().rule, &rules::SPLIT_LIMITS);
        let odd = SplitLimits { kv_heads: 5, ..limits };
        assert_eq!(odd.balanced(&per(&[1])).unwrap_err().rule, &rules::SPLIT_LIMITS);
        assert_eq!(SplitLimits::by_tiles(&per(&[1]), 0).unwrap_err().rule, &rules::SPLIT_LIMITS);
    }

    /// 130 keys make 20.4 cores out of 20, and 5 requests in 4 head groups take 20: one part each.
    #[test]
    fn scaled_cores_are_counted_whole() {
        let limits = SplitLimits { max_splits: 8, cores: 20, heads: 16, kv_heads: 4 };
        assert_eq!(limits.balanced(&per(&[130; 5])).unwrap(), [1; 5]);
        assert_eq!(limits.balanced(&per(&[130; 4])).unwrap(), [2; 4]);
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
            let limits = SplitLimits { max_splits, cores, heads: kv_heads * group, kv_heads };
            let splits = limits.balanced(&per(&lengths)).unwrap();
            for (len, parts) in lengths.iter().zip(&splits) {
                prop_assert!(*parts <= max_splits);
                prop_assert_eq!(*parts == 0, *len == 0);
            }
        }

        #[test]
        fn deterministic_parts_depend_on_the_request_alone(
            lengths in prop::collection::vec(0usize..100_000, 1..9),
            tile in 1usize..600,
        ) {
            let all = SplitLimits::by_tiles(&per(&lengths), tile).unwrap();
            for (len, parts) in lengths.iter().zip(all) {
                prop_assert_eq!(vec![parts], SplitLimits::by_tiles(&per(&[*len]), tile).unwrap());
            }
        }
    }
}
