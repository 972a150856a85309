//! The kinds of all blocks in one row of blocks, with neighbours of the same kind as one run.

use super::region::Region;
use super::{MaskGeometry, Tile};
use std::num::NonZeroU64;
use std::ops::Range;

/// Is called with a run of blocks, counted from the first key on, and the kind of each of them.
pub type TileVisitor<'a> = &'a mut dyn FnMut(Range<u64>, Tile);

/// Passes runs of blocks on, joining neighbours of the same kind.
pub(super) struct RunJoiner<'a> {
    last: Option<(Range<u64>, Tile)>,
    visit: TileVisitor<'a>,
}

impl<'a> RunJoiner<'a> {
    pub(super) fn new(visit: TileVisitor<'a>) -> Self {
        RunJoiner { last: None, visit }
    }

    pub(super) fn push(&mut self, run: Range<u64>, tile: Tile) {
        if run.is_empty() {
            return;
        }
        match &mut self.last {
            Some((last, kind)) if *kind == tile && last.end == run.start => last.end = run.end,
            _ => {
                if let Some((last, kind)) = self.last.replace((run, tile)) {
                    (self.visit)(last, kind);
                }
            }
        }
    }

    pub(super) fn end(self) {
        if let Some((last, kind)) = self.last {
            (self.visit)(last, kind);
        }
    }
}

/// The keys of block `at` of blocks of `width` keys.
pub(super) fn block(index: u64, width: NonZeroU64) -> Range<u64> {
    let end = index.saturating_add(1).saturating_mul(width.get());
    index.saturating_mul(width.get())..end
}

/// For each block: how many of its cells are seen by runs that begin or end in it, and the change from the block
/// before in the number of rows that see the whole block.
#[derive(Default)]
pub(super) struct Events {
    pub(super) blocks: Vec<(u64, u128, i128)>,
    /// Number of events when each block last had at most one.
    distinct: usize,
}

impl Events {
    /// Up to this number events are kept without compacting.
    const FEW: usize = 1 << 10;

    /// Adds to a block's event. The runs of a row come in order, so usually it is the last event again.
    pub(super) fn add(&mut self, column: u64, seen: u128, more: i128) {
        if let Some(last) = self.blocks.last_mut().filter(|last| last.0 == column) {
            last.1 = last.1.saturating_add(seen);
            last.2 += more;
            return;
        }
        if self.blocks.len() >= self.distinct.saturating_mul(2).max(Self::FEW) {
            self.compact();
        }
        self.blocks.push((column, seen, more));
    }

    /// Leaves one event for each block, in order.
    pub(super) fn compact(&mut self) {
        self.blocks.sort_unstable_by_key(|event| event.0);
        self.blocks.dedup_by(|event, before| {
            let same = event.0 == before.0;
            if same {
                before.1 = before.1.saturating_add(event.1);
                before.2 += event.2;
            }
            same
        });
        self.distinct = self.blocks.len();
    }
}

/// Visits the blocks of some rows, where those that some row sees a key of (`touched`) and those that all rows see
/// entirely (`full`) are known.
pub(super) fn tiles_of_spans(blocks: u64, touched: Range<u64>, full: Range<u64>, visit: TileVisitor<'_>) {
    let mut joined = RunJoiner::new(visit);
    let within = |key: u64| key.clamp(touched.start, touched.end);
    // Full blocks are touched, so `full` is cut to `touched`.
    let start = within(full.start);
    let end = within(full.end).max(start);
    joined.push(0..touched.start, Tile::None);
    joined.push(touched.start..start, Tile::Mixed);
    joined.push(start..end, Tile::All);
    joined.push(end..touched.end, Tile::Mixed);
    joined.push(touched.end..blocks, Tile::None);
    joined.end();
}

/// Number of rows that see whole blocks.
pub(super) fn whole(through: i128) -> u128 {
    u128::try_from(through).unwrap_or(0)
}

/// Visits the blocks of some rows of a union of bands, in time that grows with the number of blocks along the bands'
/// edges, not with the number of all blocks.
pub(super) fn tiles_of_regions(
    mask: &MaskGeometry,
    regions: &[Region],
    rows: Range<u64>,
    width: NonZeroU64,
    visit: TileVisitor<'_>,
) {
    let keys = mask.kv_len();
    let blocks = keys.div_ceil(width.get());
    let first = i64::try_from(rows.start).unwrap_or(i64::MAX);
    let end = i64::try_from(rows.end.min(mask.q_len())).unwrap_or(i64::MAX);
    let mut joined = RunJoiner::new(visit);
    if first >= end {
        joined.push(0..blocks, Tile::None);
        joined.end();
        return;
    }
    // Blocks that a region overlaps, and those that it contains.
    let bounds = |region: &Region| {
        let (start, stop) = region.span((first, end));
        let touched = start as u64 / width..(stop as u64).div_ceil(width.get());
        let (start, stop) = region.core((first, end));
        let last = if stop as u64 == keys { blocks } else { stop as u64 / width };
        (touched, (start as u64).div_ceil(width.get())..last)
    };
    let bounds: Vec<(Range<u64>, Range<u64>)> = regions.iter().map(bounds).collect();
    let mut cuts: Vec<u64> = vec![0, blocks];
    for (touched, full) in &bounds {
        cuts.extend([touched.start, touched.end, full.start, full.end]);
    }
    cuts.retain(|cut| *cut <= blocks);
    cuts.sort_unstable();
    cuts.dedup();
    for cut in cuts.windows(2) {
        let &[start, stop] = cut else { continue };
        let touching = bounds.iter().filter(|(mask, _)| mask.contains(&start)).count();
        if bounds.iter().any(|(_, full)| full.contains(&start)) {
            joined.push(start..stop, Tile::All);
        } else if touching < 2 {
            let tile = [Tile::None, Tile::Mixed][touching];
            joined.push(start..stop, tile);
        } else {
            // Adjacent regions may cover a block together.
            for column in start..stop {
                joined.push(column..column + 1, mask.tile(rows.clone(), block(column, width)));
            }
        }
    }
    joined.end();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Visibility;
    use proptest::prelude::*;

    /// Every row sees every other key.
    struct Dotted(u64);

    impl Visibility for Dotted {
        fn q_len(&self) -> u64 {
            3
        }
        fn kv_len(&self) -> u64 {
            self.0
        }
        fn each_run(&self, _: u64, visit: &mut dyn FnMut(Range<u64>)) {
            (0..self.0).step_by(2).for_each(|j| visit(j..j + 1));
        }
    }

    #[test]
    fn many_runs_take_the_memory_of_their_blocks() {
        let mut runs = Vec::new();
        let width = NonZeroU64::MIN.saturating_add(999);
        let dotted = Dotted(1 << 20);
        dotted.each_tile(0..3, width, &mut |run, tile| runs.push((run, tile)));
        assert_eq!(runs, [(0..1049, Tile::Mixed)]);
        let mut events = Events::default();
        for _ in 0..3 {
            for column in 0..5000 {
                events.add(column / 50, 1, 0);
            }
        }
        assert!(events.blocks.len() <= Events::FEW);
        assert!(events.blocks.capacity() <= 4 * Events::FEW);
    }

    proptest! {
        #[test]
        fn events_of_blocks_add_up(added in prop::collection::vec((0u64..3000, 0u128..5, -2i128..3), 0..6000)) {
            let mut events = Events::default();
            let mut want = std::collections::BTreeMap::new();
            for (column, seen, more) in added {
                events.add(column, seen, more);
                let sum: &mut (u128, i128) = want.entry(column).or_default();
                *sum = (sum.0 + seen, sum.1 + more);
            }
            events.compact();
            let want: Vec<_> = want.into_iter().map(|(column, (seen, more))| (column, seen, more)).collect();
            prop_assert_eq!(events.blocks, want);
        }
    }

    /// Runs that overlap, end before they begin, or pass the last key.
    struct Foreign;

    impl Visibility for Foreign {
        fn q_len(&self) -> u64 {
            2
        }
        fn kv_len(&self) -> u64 {
            u64::MAX
        }
        fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
            let (start, end) = if i == 0 { (5, 3) } else { (1, u64::MAX) };
            visit(start..end);
        }
    }

    #[test]
    fn rows_of_any_number_of_blocks_take_no_time() {
        let mut runs = Vec::new();
        let width = NonZeroU64::MIN.saturating_add(3);
        Foreign.each_tile(0..9, width, &mut |run, tile| runs.push((run, tile)));
        assert_eq!(runs, [(0..u64::MAX.div_ceil(4), Tile::Mixed)]);
        runs.clear();
        let causal = MaskGeometry::prefix(1 << 58, 1 << 58, 7);
        let rows = 1 << 40..(1 << 40) + 4;
        causal.each_tile(rows, width, &mut |run, tile| runs.push((run, tile)));
        assert_eq!(
            runs,
            [(0..1 << 38, Tile::All), (1 << 38..(1 << 38) + 1, Tile::Mixed), ((1 << 38) + 1..1 << 56, Tile::None),]
        );
    }
}
