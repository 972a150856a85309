//! Which keys a query row sees, before any mask tensor is looked at.

use crate::SparseMode;
use std::ops::Range;

/// The value above which CANN's tiling clamps `preTokens` and `nextTokens` (214748647, not `i32::MAX`).
///
/// Sequences are shorter than this, so a clamped token count means "no bound".
pub const TOKENS_UNBOUNDED: i64 = 214_748_647;

/// No bound on the diagonal at all; far beyond every length, far from overflow.
const FAR: i64 = 1 << 60;

/// The visible keys of each query row of one batch entry: row `i` sees the keys of `[i + low, i + high]` that exist.
///
/// Rows count from 0 to the entry's actual query length, keys from 0 to its actual key length (a shared prefix comes
/// first). A mask tensor, where the mode takes a full one, hides keys on top of this.
///
/// Source: aclnnFusedInferAttentionScore, `sparseMode`, `preTokens`, `nextTokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskGeometry {
    q_len: i64,
    kv_len: i64,
    low: i64,
    high: i64,
}

/// What [`MaskGeometry`] says about a block of rows and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No row sees any of the keys.
    None,
    /// Every row sees every key.
    All,
    /// Some rows see some keys.
    Mixed,
}

impl MaskGeometry {
    /// The geometry of `mode` for one batch entry of `q_len` rows and `kv_len` keys.
    ///
    /// `has_tensor` says whether a mask tensor is given: mode 0 uses `pre_tokens` and `next_tokens` only then. Lengths
    /// beyond 2^59 count as 2^59.
    pub fn new(
        mode: SparseMode,
        has_tensor: bool,
        q_len: u64,
        kv_len: u64,
        pre_tokens: i64,
        next_tokens: i64,
    ) -> Self {
        let mut geometry = Self::full(q_len, kv_len);
        let shift = geometry.kv_len - geometry.q_len;
        let (low, high) = match mode {
            SparseMode::DefaultMask if has_tensor => (lower(pre_tokens), upper(next_tokens)),
            SparseMode::DefaultMask | SparseMode::AllMask => (-FAR, FAR),
            SparseMode::LeftUpCausal => (-FAR, 0),
            SparseMode::RightDownCausal => (-FAR, shift),
            SparseMode::Band => (
                lower(pre_tokens).saturating_add(shift).max(-FAR),
                upper(next_tokens).saturating_add(shift).min(FAR),
            ),
        };
        geometry.low = low;
        geometry.high = high;
        geometry
    }

    /// Every row sees every key.
    pub fn full(q_len: u64, kv_len: u64) -> Self {
        let clamp = |len: u64| i64::try_from(len).unwrap_or(i64::MAX).min(FAR / 2);
        MaskGeometry {
            q_len: clamp(q_len),
            kv_len: clamp(kv_len),
            low: -FAR,
            high: FAR,
        }
    }

    /// Number of query rows.
    pub fn q_len(&self) -> u64 {
        self.q_len as u64
    }

    /// Number of keys.
    pub fn kv_len(&self) -> u64 {
        self.kv_len as u64
    }

    /// The keys that row `i` sees; empty for rows that see none and for rows past the query length.
    pub fn row(&self, i: u64) -> Range<u64> {
        match i64::try_from(i) {
            Ok(i) if i < self.q_len => self.keys_between(i, i),
            _ => 0..0,
        }
    }

    /// Whether row `i` sees key `j`.
    pub fn sees(&self, i: u64, j: u64) -> bool {
        self.row(i).contains(&j)
    }

    /// The smallest range that holds every key that any of `rows` sees.
    pub fn span(&self, rows: Range<u64>) -> Range<u64> {
        match self.clip(rows, self.q_len) {
            Some((first, last)) => self.keys_between(first, last),
            None => 0..0,
        }
    }

    /// How a block of rows and keys stands. Rows and keys that do not exist are left out of the question; a block
    /// without any that do is [`Tile::None`].
    pub fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        let (Some((i0, i1)), Some((j0, j1))) =
            (self.clip(rows, self.q_len), self.clip(keys, self.kv_len))
        else {
            return Tile::None;
        };
        // Both bounds of the band rise with the row.
        if j1 < i0 + self.low || j0 > i1 + self.high || self.low > self.high {
            Tile::None
        } else if j0 >= i1 + self.low && j1 <= i0 + self.high {
            Tile::All
        } else {
            Tile::Mixed
        }
    }

    /// Whether some row of the entry sees no key.
    pub fn has_blind_row(&self) -> bool {
        // The band moves one key a row, so the first and the last row see the least.
        self.q_len > 0 && (self.row(0).is_empty() || self.row(self.q_len as u64 - 1).is_empty())
    }

    /// First and last index of a range cut to `len`, or `None` if nothing is left.
    fn clip(&self, range: Range<u64>, len: i64) -> Option<(i64, i64)> {
        let first = i64::try_from(range.start).ok()?;
        let end = i64::try_from(range.end).unwrap_or(i64::MAX).min(len);
        (first < end).then_some((first, end - 1))
    }

    /// Keys from the first that row `first` sees to the last that row `last` sees.
    fn keys_between(&self, first: i64, last: i64) -> Range<u64> {
        let start = (first + self.low).max(0);
        let end = (last + self.high).saturating_add(1).min(self.kv_len);
        if start < end && self.low <= self.high {
            start as u64..end as u64
        } else {
            0..0
        }
    }
}

/// `preTokens` as the distance of the band's first key.
fn lower(pre_tokens: i64) -> i64 {
    if pre_tokens >= TOKENS_UNBOUNDED {
        -FAR
    } else {
        pre_tokens.max(-FAR).saturating_neg()
    }
}

/// `nextTokens` as the distance of the band's last key.
fn upper(next_tokens: i64) -> i64 {
    if next_tokens >= TOKENS_UNBOUNDED {
        FAR
    } else {
        next_tokens.max(-FAR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition of each mode, one line a mode; `shift` is key length less query length.
    fn sees(
        mode: SparseMode,
        tensor: bool,
        shift: i64,
        (pre, next): (i64, i64),
        i: i64,
        j: i64,
    ) -> bool {
        match mode {
            SparseMode::DefaultMask => !tensor || (i - pre <= j && j <= i + next),
            SparseMode::AllMask => true,
            SparseMode::LeftUpCausal => j <= i,
            SparseMode::RightDownCausal => j <= i + shift,
            SparseMode::Band => i + shift - pre <= j && j <= i + shift + next,
        }
    }

    fn modes() -> impl Strategy<Value = SparseMode> {
        proptest::sample::select(SparseMode::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn rows_and_tiles_follow_the_definition(
            mode in modes(), tensor: bool, sq in 0i64..12, skv in 0i64..12, pre in -14i64..14, next in -14i64..14,
            rows in (0u64..13, 0u64..13), keys in (0u64..13, 0u64..13),
        ) {
            let geometry = MaskGeometry::new(mode, tensor, sq as u64, skv as u64, pre, next);
            let visible = |i: i64, j: i64| i < sq && j < skv && sees(mode, tensor, skv - sq, (pre, next), i, j);
            for i in 0..13 {
                for j in 0..13 {
                    prop_assert_eq!(geometry.sees(i as u64, j as u64), visible(i, j), "{} {}", i, j);
                }
            }
            let (rows, keys) = (rows.0..rows.1, keys.0..keys.1);
            let mut seen = Vec::new();
            for i in rows.clone().filter(|&i| (i as i64) < sq) {
                for j in keys.clone().filter(|&j| (j as i64) < skv) {
                    seen.push(visible(i as i64, j as i64));
                }
            }
            match geometry.tile(rows.clone(), keys) {
                Tile::None => prop_assert!(!seen.contains(&true)),
                Tile::All => prop_assert!(!seen.contains(&false)),
                Tile::Mixed => prop_assert!(!seen.is_empty()),
            }
            let span = geometry.span(rows.clone());
            for i in rows {
                let row = geometry.row(i);
                prop_assert!(row.is_empty() || (span.start <= row.start && row.end <= span.end));
            }
            let blind = (0..sq).any(|i| !(0..skv).any(|j| visible(i, j)));
            prop_assert_eq!(geometry.has_blind_row(), blind);
        }

        #[test]
        fn any_numbers_are_safe(
            mode in modes(), tensor: bool, sq: u64, skv: u64, pre: i64, next: i64, i: u64, j: u64, a: u64, b: u64,
        ) {
            let geometry = MaskGeometry::new(mode, tensor, sq, skv, pre, next);
            let _ = (geometry.row(i), geometry.sees(i, j), geometry.span(a..b), geometry.has_blind_row());
            let _ = geometry.tile(a..b, i..j);
        }
    }

    #[test]
    fn token_counts_above_the_constant_are_unbounded() {
        let geometry = MaskGeometry::new(SparseMode::Band, true, 4, 4, i64::MAX, 0);
        assert_eq!(
            geometry,
            MaskGeometry::new(SparseMode::RightDownCausal, true, 4, 4, 0, 0)
        );
    }
}
