//! What every mask formula can answer: which keys a row sees, and which blocks are full, partial or empty.

use super::tile_row::{Events, RunJoiner, block, tiles_of_regions, whole};
use super::{Runs, Tile, TileVisitor};
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

/// Visits the blocks of `width` keys of some rows, calling [`Visibility::tile`] for each block.
pub fn tiles_one_by_one<V: Visibility + ?Sized>(mask: &V, rows: Range<u64>, width: NonZeroU64, visit: TileVisitor<'_>) {
    let mut joined = RunJoiner::new(visit);
    for column in 0..mask.kv_len().div_ceil(width.get()) {
        let tile = mask.tile(rows.clone(), block(column, width));
        joined.push(column..column + 1, tile);
    }
    joined.end();
}

/// Visits the blocks of `width` keys of some rows, as [`tiles_one_by_one`], but examines each row once, however many
/// blocks there are.
pub fn tiles_by_rows<V: Visibility + ?Sized>(mask: &V, rows: Range<u64>, width: NonZeroU64, visit: TileVisitor<'_>) {
    let keys = mask.kv_len();
    let rows = rows.start..rows.end.min(mask.q_len());
    let blocks = keys.div_ceil(width.get());
    let mut events = Events::default();
    let seeing = if keys == 0 { 0..0 } else { rows.clone() };
    for i in seeing {
        mask.each_run(i, &mut |run| {
            let run = run.start..run.end.min(keys);
            let Some(last) = run.end.checked_sub(1).filter(|last| run.start <= *last) else {
                return;
            };
            let (first, last) = (run.start / width, last / width);
            let part = |column: u64| {
                let own = block(column, width);
                u128::from(run.end.min(own.end) - run.start.max(own.start))
            };
            events.add(first, part(first), 0);
            if last > first {
                events.add(first + 1, 0, 1);
                events.add(last, part(last), -1);
            }
        });
    }
    events.compact();
    let events = events.blocks;
    let height = u128::from(rows.end.saturating_sub(rows.start));
    let mut joined = RunJoiner::new(visit);
    let (mut column, mut through) = (0, 0i128);
    for (place, parts, more) in events {
        joined.push(column..place, Tile::of(whole(through), height));
        through += more;
        let own = block(place, width);
        let cells = u128::from(own.end.min(keys) - own.start);
        let seen = parts.saturating_add(whole(through).saturating_mul(cells));
        joined.push(place..place + 1, Tile::of(seen, height.saturating_mul(cells)));
        column = place + 1;
    }
    joined.push(column..blocks, Tile::of(whole(through), height));
    joined.end();
}

/// The kind of a block, found by looking at each of its rows.
pub fn tile_by_rows<V: Visibility + ?Sized>(mask: &V, rows: Range<u64>, keys: Range<u64>) -> Tile {
    let rows = rows.start..rows.end.min(mask.q_len());
    let keys = keys.start..keys.end.min(mask.kv_len());
    if keys.is_empty() {
        return Tile::None;
    }
    let mut seen = 0u128;
    for i in rows.clone() {
        mask.each_run(i, &mut |run| {
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
