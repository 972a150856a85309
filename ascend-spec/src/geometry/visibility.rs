//! What every mask formula can answer: which keys a row sees, and which blocks are full, partial or empty.

use super::tile_row::tiles_of_regions;
use super::{Runs, Tile, TileVisitor, tiles_by_rows};
use std::num::NonZeroU64;
use std::ops::Range;

/// Which keys the rows of one mask see. Keys and rows that do not exist are never seen.
pub trait Visibility {
    /// Number of query rows.
    fn q_len(&self) -> u64;

    /// Number of keys.
    fn kv_len(&self) -> u64;

    /// Calls `visit` with each run of keys that row `i` sees: ascending, not empty, with a hidden key between any
    /// two.
    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>));

    /// Whether row `i` sees key `j`.
    fn sees(&self, i: u64, j: u64) -> bool {
        let mut seen = false;
        self.each_run(i, &mut |run| seen |= run.contains(&j));
        seen
    }

    /// How many keys the rows see, summed over the rows.
    fn visible(&self) -> u128 {
        let mut visible = 0u128;
        // Without keys the rows are not visited: there may be any number of them.
        let rows = if self.kv_len() == 0 { 0 } else { self.q_len() };
        for i in 0..rows {
            self.each_run(i, &mut |run| {
                let keys = run.end.saturating_sub(run.start);
                visible = visible.saturating_add(u128::from(keys));
            });
        }
        visible
    }

    /// The kind of a block of rows and keys; [`Tile::None`] for a block without rows or keys that exist.
    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        tile_by_rows(self, rows, keys)
    }

    /// Calls `visit` with the kinds of the blocks of `width` keys of some rows: from the first key on, each block
    /// once, neighbours of the same kind as one run. See [`BlockMap`](super::BlockMap).
    fn each_tile(&self, rows: Range<u64>, width: NonZeroU64, visit: TileVisitor<'_>) {
        tiles_by_rows(self, rows, width, visit);
    }
}

/// The kind of a block, found by looking at each of its rows.
pub fn tile_by_rows<V: Visibility + ?Sized>(of: &V, rows: Range<u64>, keys: Range<u64>) -> Tile {
    let rows = rows.start..rows.end.min(of.q_len());
    let keys = keys.start..keys.end.min(of.kv_len());
    if keys.is_empty() {
        return Tile::None;
    }
    let mut seen = 0u128;
    for i in rows.clone() {
        of.each_run(i, &mut |run| {
            let (start, end) = (run.start.max(keys.start), run.end.min(keys.end));
            seen = seen.saturating_add(u128::from(end.saturating_sub(start)));
        });
    }
    let len = |range: &Range<u64>| u128::from(range.end.saturating_sub(range.start));
    Tile::of(seen, len(&rows) * len(&keys))
}

/// Calls `visit` with the keys from `first` to `end` that exist among `kv_len` keys, if there are any.
pub(super) fn run(first: u64, end: u64, kv_len: u64, visit: &mut dyn FnMut(Range<u64>)) {
    let end = end.min(kv_len);
    if first < end {
        visit(first..end);
    }
}

impl Visibility for super::MaskGeometry {
    fn q_len(&self) -> u64 {
        self.q_len()
    }

    fn kv_len(&self) -> u64 {
        self.kv_len()
    }

    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
        let runs: Runs = self.runs(i);
        runs.for_each(visit);
    }

    fn sees(&self, i: u64, j: u64) -> bool {
        self.sees(i, j)
    }

    fn visible(&self) -> u128 {
        self.visible()
    }

    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        self.tile(rows, keys)
    }

    fn each_tile(&self, rows: Range<u64>, width: NonZeroU64, visit: TileVisitor<'_>) {
        tiles_of_regions(self, self.regions(), rows, width, visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_end_before_they_begin_count_nothing() {
        struct Foreign;
        impl Visibility for Foreign {
            fn q_len(&self) -> u64 {
                2
            }
            fn kv_len(&self) -> u64 {
                u64::MAX
            }
            fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
                let (start, end) = if i == 0 { (5, 3) } else { (1, 4) };
                visit(start..end);
            }
        }
        assert_eq!(Foreign.visible(), 3);
        assert_eq!(Foreign.tile(0..2, 0..9), Tile::Mixed);
    }
}
