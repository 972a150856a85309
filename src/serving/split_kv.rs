//! Into how many parts a decode kernel that splits keys over cores should split each request's.

use crate::kv::{Refused, Rule, refused};

use super::lengths::PerRequest;

/// What the number of parts depends on besides the lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitLimits {
    /// Most parts of a request.
    pub max_splits: u32,
    /// Cores that run the parts.
    pub cores: u32,
    /// Query heads.
    pub heads: u32,
    /// Key heads.
    pub kv_heads: u32,
}

impl SplitLimits {
    /// The parts of each request, such that the whole batch fills the cores and the parts of long and short requests are
    /// about as long. Requests without keys get none.
    ///
    /// The rule is SGLang's for its Triton decode kernels. The fused operators of CANN split on their own.
    ///
    /// # Errors
    /// [`Rule::SplitLimits`] for a limit of 0, or query heads that are no multiple of the key heads.
    pub fn balanced(&self, lengths: &PerRequest) -> Result<Vec<u32>, Refused> {
        let grouped = self.heads.checked_rem(self.kv_heads) == Some(0);
        if self.max_splits == 0 || self.cores == 0 || self.heads == 0 || !grouped {
            return Err(refused(
                Rule::SplitLimits,
                format_args!("{self:?}"),
                "1 or more of each, heads a multiple of kv_heads",
                "give the device's cores and the model's heads",
            ));
        }
        let lengths = lengths.lengths();
        let max = lengths.iter().copied().max().unwrap_or(0);
        if max <= 0 {
            return Ok(vec![0; lengths.len()]);
        }
        let cap = i64::from(self.max_splits);
        let mut min = lengths.iter().copied().min().unwrap_or(0).max(1);
        // Less than a quarter longer.
        if i128::from(max).saturating_mul(8) < i128::from(min).saturating_mul(10) {
            min = max;
        }
        let by_length = parts_of(max, min).min(cap);
        let chunk = parts_of(max, by_length);

        let group = self.heads.checked_div(self.kv_heads).unwrap_or(1);
        let head_groups = match group {
            1 => self.heads,
            _ => self.heads.div_ceil(group.min(16)),
        };
        let grid = lengths.len() as f64 * f64::from(head_groups);
        // Cores are counted whole, as the kernels do: the rest of one is no core.
        let cores = (f64::from(self.cores) * (max as f64 / 64.0).log2().max(1.0)).floor();
        // At least 1, since neither is 0; at most the cap.
        let by_cores = ((cores / grid).ceil() as i64).clamp(1, cap);
        let core_chunk = parts_of(max, by_cores);
        let parts = |len: i64| parts_of(len, chunk).max(parts_of(len, core_chunk));
        Ok(lengths
            .iter()
            .map(|len| u32::try_from(parts(*len)).unwrap_or(self.max_splits))
            .collect())
    }

    /// The parts of each request where a request's result must not depend on the others: `ceil(length / tile)`.
    ///
    /// # Errors
    /// [`Rule::SplitLimits`] for a tile of 0.
    pub fn deterministic(lengths: &PerRequest, tile: u32) -> Result<Vec<u32>, Refused> {
        if tile == 0 {
            return Err(refused(
                Rule::SplitLimits,
                "a tile of 0 keys",
                "1 or more",
                "256 is usual",
            ));
        }
        let parts = |len: &i64| u32::try_from(parts_of(*len, i64::from(tile))).unwrap_or(u32::MAX);
        Ok(lengths.lengths().iter().map(parts).collect())
    }
}

/// `a / b` rounded up, for lengths: `a` is not negative, and `b` at least 1.
fn parts_of(a: i64, b: i64) -> i64 {
    let b = b.max(1);
    let rest = a.checked_rem(b).unwrap_or(0);
    let whole = a.checked_div(b).unwrap_or(0);
    whole.saturating_add(i64::from(rest > 0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn per(lengths: &[i64]) -> PerRequest {
        PerRequest::new(lengths.to_vec()).unwrap()
    }

    #[test]
    fn one_long_request_is_split_and_short_ones_are_not() {
        let limits = SplitLimits {
            max_splits: 8,
            cores: 20,
            heads: 32,
            kv_heads: 8,
        };
        // 2 requests in 8 head groups; 20 * log2(64) cores stand for 120, and 120 / 16 gives 8 parts of 512.
        assert_eq!(limits.balanced(&per(&[4096, 16])).unwrap(), [8, 1]);
        // As long as each other to a quarter: one part by length, ceil(20 * 1 / (64 * 8)) by cores.
        let same = vec![120i64; 64];
        assert_eq!(limits.balanced(&per(&same)).unwrap(), [1; 64]);
        assert_eq!(limits.balanced(&per(&[0, 0])).unwrap(), [0, 0]);
        let none = SplitLimits { cores: 0, ..limits };
        assert_eq!(
            none.balanced(&per(&[1])).unwrap_err().rule,
            Rule::SplitLimits
        );
        let odd = SplitLimits {
            kv_heads: 5,
            ..limits
        };
        assert_eq!(
            odd.balanced(&per(&[1])).unwrap_err().rule,
            Rule::SplitLimits
        );
        assert_eq!(
            SplitLimits::deterministic(&per(&[1]), 0).unwrap_err().rule,
            Rule::SplitLimits
        );
    }

    /// 130 keys make 20.4 cores out of 20, and 5 requests in 4 head groups take 20: one part each.
    #[test]
    fn scaled_cores_are_counted_whole() {
        let limits = SplitLimits {
            max_splits: 8,
            cores: 20,
            heads: 16,
            kv_heads: 4,
        };
        assert_eq!(limits.balanced(&per(&[130; 5])).unwrap(), [1; 5]);
        assert_eq!(limits.balanced(&per(&[130; 4])).unwrap(), [2; 4]);
    }

    proptest! {
        #[test]
        fn parts_are_within_the_cap_and_cover(lengths in prop::collection::vec(0i64..=i64::MAX, 1..9), max_splits in 1u32..20, cores in 1u32..200, kv_heads in 1u32..9, group in 1u32..40) {
            let limits = SplitLimits { max_splits, cores, heads: kv_heads * group, kv_heads };
            let splits = limits.balanced(&per(&lengths)).unwrap();
            for (len, parts) in lengths.iter().zip(&splits) {
                prop_assert!(*parts <= max_splits);
                prop_assert_eq!(*parts == 0, *len == 0);
            }
        }

        #[test]
        fn deterministic_parts_depend_on_the_request_alone(lengths in prop::collection::vec(0i64..100_000, 1..9), tile in 1u32..600) {
            let all = SplitLimits::deterministic(&per(&lengths), tile).unwrap();
            for (len, parts) in lengths.iter().zip(all) {
                prop_assert_eq!(vec![parts], SplitLimits::deterministic(&per(&[*len]), tile).unwrap());
            }
        }
    }
}
