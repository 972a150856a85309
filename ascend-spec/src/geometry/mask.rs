//! The geometry of the sparse modes: a union of bands, and the runs of keys that a row sees.

use super::Tile;
use super::region::Region;
use super::sparse_mode::{FAR, clamp_len, lower, upper};
use crate::SparseMode;
use std::ops::Range;

/// The visible keys of each query row of one sequence, before a full mask tensor hides some of them.
///
/// Rows count from 0 to the sequence's actual query length, keys from 0 to its actual key length (a shared prefix comes
/// first). In modes 0 to 4, 7 and 8 a row sees one run of keys, in modes 5 and 6 up to two, in the regions of
/// [`TriangleMix`](super::TriangleMix) up to [`Runs::MAX`].
///
/// Source: aclnnFusedInferAttentionScore and aclnnFlashAttentionScore, `sparseMode`, `preTokens`, `nextTokens`,
/// `prefix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskGeometry {
    q_len: i64,
    kv_len: i64,
    /// Disjoint regions, of which the first `count` are used.
    regions: [Region; Runs::MAX],
    count: u8,
}

impl MaskGeometry {
    /// The geometry of `mode` for one sequence of `q_len` rows and `kv_len` keys.
    ///
    /// `has_tensor` says whether a mask tensor is given: mode 0 uses `pre_tokens` and `next_tokens` only then. Modes
    /// 5 and 6 come without their prefix; see [`MaskGeometry::prefix`]. Modes 7 and 8 are those of the sequence that
    /// was cut; see [`Sparsity`](super::Sparsity). Lengths beyond 2^59 count as 2^59.
    pub fn new(mode: SparseMode, has_tensor: bool, q_len: u64, kv_len: u64, pre_tokens: i64, next_tokens: i64) -> Self {
        let shift = clamp_len(kv_len) - clamp_len(q_len);
        let (low, high) = match mode {
            SparseMode::DefaultMask if has_tensor => (lower(pre_tokens), upper(next_tokens)),
            SparseMode::DefaultMask | SparseMode::AllMask | SparseMode::Tree => (-FAR, FAR),
            SparseMode::LeftUpCausal => (-FAR, 0),
            SparseMode::RightDownCausal | SparseMode::Prefix | SparseMode::PrefixCompress => (-FAR, shift),
            SparseMode::Band | SparseMode::RightDownCausalBand | SparseMode::BandLeftUpCausal => {
                (lower(pre_tokens).saturating_add(shift).max(-FAR), upper(next_tokens).saturating_add(shift).min(FAR))
            }
        };
        Self::of(q_len, kv_len, |all| [Region { low, high, ..all }, Region::NOTHING, Region::NOTHING])
    }

    /// Every row sees every key.
    pub fn full(q_len: u64, kv_len: u64) -> Self {
        Self::of(q_len, kv_len, |all| [all, Region::NOTHING, Region::NOTHING])
    }

    /// A union of the disjoint regions that `regions` makes from the region of all cells. Empty regions are dropped.
    pub(super) fn of(q_len: u64, kv_len: u64, regions: impl FnOnce(Region) -> [Region; Runs::MAX]) -> Self {
        let (q_len, kv_len) = (clamp_len(q_len), clamp_len(kv_len));
        let all = Region::all(q_len, kv_len);
        let mut geometry = MaskGeometry { q_len, kv_len, regions: [Region::NOTHING; Runs::MAX], count: 0 };
        for mut region in regions(all) {
            region.rows = (region.rows.0.max(0), region.rows.1.min(q_len));
            region.keys = (region.keys.0.max(0), region.keys.1.min(kv_len));
            if !region.is_empty()
                && let Some(place) = geometry.regions.get_mut(usize::from(geometry.count))
            {
                *place = region;
                geometry.count += 1;
            }
        }
        geometry
    }

    /// Every row sees the keys `j <= i + Skv - Sq` and the first `prefix` keys (modes 5 and 6).
    pub fn prefix(q_len: u64, kv_len: u64, prefix: u64) -> Self {
        let shift = clamp_len(kv_len) - clamp_len(q_len);
        Self::of(q_len, kv_len, |all| {
            let causal = Region { high: shift, ..all };
            let ahead = Region { keys: (0, clamp_len(prefix)), low: shift + 1, ..all };
            [causal, ahead, Region::NOTHING]
        })
    }

    pub(super) fn regions(&self) -> &[Region] {
        self.regions.get(..usize::from(self.count)).unwrap_or_default()
    }

    /// Number of query rows.
    pub fn q_len(&self) -> u64 {
        self.q_len as u64
    }

    /// Number of keys.
    pub fn kv_len(&self) -> u64 {
        self.kv_len as u64
    }

    /// The runs of keys that row `i` sees; none for rows past the query length.
    pub fn runs(&self, i: u64) -> Runs {
        let Some((first, end)) = self.clip(i..i.saturating_add(1), self.q_len) else {
            return Runs::default();
        };
        if let [only] = self.regions() {
            let (start, end) = only.span((first, end));
            return Runs::of([start as u64..end as u64, 0..0, 0..0]);
        }
        Runs::of(self.regions.map(|region| {
            let (start, end) = region.span((first, end));
            start as u64..end as u64
        }))
    }

    /// The keys from the first to the last that row `i` sees; empty for rows that see none and for rows past the query
    /// length. It may not see all keys of this range, with a prefix or sinks: [`runs`](Self::runs) says which.
    pub fn row(&self, i: u64) -> Range<u64> {
        self.span(i..i.saturating_add(1))
    }

    /// Whether row `i` sees key `j`.
    pub fn sees(&self, i: u64, j: u64) -> bool {
        self.tile(i..i.saturating_add(1), j..j.saturating_add(1)) == Tile::All
    }

    /// The smallest range that holds every key that any of `rows` sees.
    pub fn span(&self, rows: Range<u64>) -> Range<u64> {
        let Some(rows) = self.clip(rows, self.q_len) else {
            return 0..0;
        };
        if let [only] = self.regions() {
            let (start, end) = only.span(rows);
            return start as u64..end as u64;
        }
        let spans = self.regions().iter().map(|region| region.span(rows));
        let (start, end) =
            spans.filter(|(start, end)| start < end).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0));
        start as u64..end as u64
    }

    /// The kind of a block of rows and keys. Rows and keys that do not exist are ignored; a block of only such ones
    /// is [`Tile::None`]. Exact, in constant time.
    pub fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        let (Some(rows), Some(keys)) = (self.clip(rows, self.q_len), self.clip(keys, self.kv_len)) else {
            return Tile::None;
        };
        if let [only] = self.regions() {
            return only.tile(rows, keys);
        }
        let cells = (rows.1 - rows.0) as u128 * (keys.1 - keys.0) as u128;
        let counts = self.regions().iter().map(|region| region.count(rows, keys));
        Tile::of(counts.sum(), cells)
    }

    /// How many keys the rows see, all together. In constant time.
    pub fn visible(&self) -> u128 {
        let (rows, keys) = ((0, self.q_len), (0, self.kv_len));
        let counts = self.regions().iter().map(|region| region.count(rows, keys));
        counts.sum()
    }

    /// First and end of a range cut to `len`, or `None` if nothing is left.
    #[inline]
    fn clip(&self, range: Range<u64>, len: i64) -> Option<(i64, i64)> {
        let first = i64::try_from(range.start).ok()?;
        let end = i64::try_from(range.end).unwrap_or(i64::MAX).min(len);
        (first < end).then_some((first, end))
    }
}

/// Runs of keys that a row of a [`MaskGeometry`](super::MaskGeometry) sees: ascending, not empty, and with a hidden key
/// between any two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    runs: [Range<u64>; Runs::MAX],
    first: usize,
    end: usize,
}

impl Runs {
    /// Most runs of a row.
    pub const MAX: usize = 3;

    /// Adds a run that does not begin before the last one, and joins the two if no key is between them.
    fn push(&mut self, run: Range<u64>) {
        if run.is_empty() {
            return;
        }
        if let Some(last) = self.runs[..self.end].last_mut()
            && run.start <= last.end
        {
            last.end = last.end.max(run.end);
        } else if let Some(place) = self.runs.get_mut(self.end) {
            *place = run;
            self.end += 1;
        }
    }

    /// This list from runs in any order, some of which may be empty.
    pub(super) fn of(mut runs: [Range<u64>; Runs::MAX]) -> Self {
        runs.sort_unstable_by_key(|run| run.start);
        let mut sorted = Runs::default();
        for run in runs {
            sorted.push(run);
        }
        sorted
    }
}

impl Iterator for Runs {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let run = self.runs[..self.end].get(self.first)?.clone();
        self.first += 1;
        Some(run)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end - self.first;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Runs {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition of each mode, one line a mode; `shift` is the key length minus the query length.
    fn sees(mode: SparseMode, tensor: bool, shift: i64, (pre, next): (i64, i64), i: i64, j: i64) -> bool {
        match mode {
            SparseMode::DefaultMask => !tensor || (i - pre <= j && j <= i + next),
            SparseMode::AllMask | SparseMode::Tree => true,
            SparseMode::LeftUpCausal => j <= i,
            SparseMode::RightDownCausal | SparseMode::Prefix | SparseMode::PrefixCompress => j <= i + shift,
            SparseMode::Band | SparseMode::RightDownCausalBand | SparseMode::BandLeftUpCausal => {
                i + shift - pre <= j && j <= i + shift + next
            }
        }
    }

    /// Compares every answer of a geometry about 13 rows and keys with a definition.
    fn follows(
        geometry: MaskGeometry,
        (rows, keys): (Range<u64>, Range<u64>),
        visible: impl Fn(i64, i64) -> bool,
    ) -> Result<(), TestCaseError> {
        let (sq, skv) = (geometry.q_len() as i64, geometry.kv_len() as i64);
        let visible = |i, j| i < sq && j < skv && visible(i, j);
        let mut all = 0;
        for i in 0..13 {
            let mut runs = [false; 13];
            let mut end = 0;
            for run in geometry.runs(i as u64) {
                prop_assert!(run.start < run.end && (end == 0 || end < run.start), "row {}", i);
                end = run.end;
                runs[run.start as usize..run.end as usize].fill(true);
            }
            for j in 0..13 {
                prop_assert_eq!(geometry.sees(i as u64, j as u64), visible(i, j), "{} {}", i, j);
                prop_assert_eq!(runs[j as usize], visible(i, j), "{} {}", i, j);
                all += u128::from(visible(i, j));
            }
        }
        prop_assert_eq!(geometry.visible(), all);
        let cells = || {
            let rows = rows.clone().filter(|&i| (i as i64) < sq);
            rows.flat_map(|i| keys.clone().map(move |j| (i as i64, j as i64))).filter(|&(_, j)| j < skv)
        };
        let seen = cells().filter(|&(i, j)| visible(i, j)).count();
        let tile = Tile::of(seen as u128, cells().count() as u128);
        prop_assert_eq!(geometry.tile(rows.clone(), keys.clone()), tile);
        prop_assert_eq!(super::super::tile_by_rows(&geometry, rows.clone(), keys.clone()), tile);
        let any = |j: i64| rows.clone().any(|i| visible(i as i64, j));
        let first = (0..13).find(|&j| any(j)).map_or(0, |j| j as u64);
        let last = (0..13).rev().find(|&j| any(j)).map_or(0, |j| j as u64 + 1);
        prop_assert_eq!(geometry.span(rows), first..last);
        Ok(())
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
            follows(geometry, (rows.0..rows.1, keys.0..keys.1), |i, j| {
                sees(mode, tensor, skv - sq, (pre, next), i, j)
            })?;
        }

        #[test]
        fn a_prefix_is_seen_by_all(
            sq in 0i64..12, skv in 0i64..12, prefix in 0i64..14,
            rows in (0u64..13, 0u64..13), keys in (0u64..13, 0u64..13),
        ) {
            let geometry = MaskGeometry::prefix(sq as u64, skv as u64, prefix as u64);
            let visible = |i, j| j < prefix || j <= i + skv - sq;
            follows(geometry, (rows.0..rows.1, keys.0..keys.1), visible)?;
        }

        /// Three bands in rectangles side by side, as no mode has them.
        #[test]
        fn unions_of_regions_are_what_their_regions_are(
            sq in 0i64..12, skv in 0i64..12, cuts in (0i64..12, 0i64..12),
            bands in proptest::array::uniform3((-12i64..12, -12i64..12)),
            tail in 0i64..12,
            rows in (0u64..13, 0u64..13), keys in (0u64..13, 0u64..13),
        ) {
            let (first, second) = (cuts.0.min(cuts.1), cuts.0.max(cuts.1));
            let keys_of = [(0, first), (first, second), (second, 12)];
            let geometry = MaskGeometry::of(sq as u64, skv as u64, |all| {
                std::array::from_fn(|r| Region {
                    rows: (if r == 2 { tail } else { 0 }, all.rows.1),
                    keys: keys_of[r],
                    low: bands[r].0,
                    high: bands[r].1,
                })
            });
            follows(geometry, (rows.0..rows.1, keys.0..keys.1), |i, j| {
                (0..3).any(|r| {
                    let (low, high) = bands[r];
                    (r < 2 || i >= tail)
                        && (keys_of[r].0..keys_of[r].1).contains(&j)
                        && (low..=high).contains(&(j - i))
                })
            })?;
        }

        #[test]
        fn any_numbers_are_safe(
            mode in modes(), tensor: bool, sq: u64, skv: u64, pre: i64, next: i64, i: u64, j: u64, a: u64, b: u64,
        ) {
            let geometry = MaskGeometry::new(mode, tensor, sq, skv, pre, next);
            let _ = (geometry.row(i), geometry.sees(i, j), geometry.span(a..b));
            let _ = (geometry.tile(a..b, i..j), geometry.visible(), geometry.runs(i));
            let prefix = MaskGeometry::prefix(sq, skv, a);
            let _ = (prefix.row(i), prefix.tile(a..b, i..j), prefix.visible(), prefix.runs(i));
        }
    }

    #[test]
    fn token_counts_above_the_constant_are_unbounded() {
        let geometry = MaskGeometry::new(SparseMode::Band, true, 4, 4, i64::MAX, 0);
        assert_eq!(geometry, MaskGeometry::new(SparseMode::RightDownCausal, true, 4, 4, 0, 0));
    }
}
