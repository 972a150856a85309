//! A mask as a map of blocks: which ones a kernel computes whole, computes with a mask, or leaves out.

use super::{Tile, Visibility, tile_row};
use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;

/// A mask cut into blocks of `height` rows and `width` keys, each [full](Tile::All), [partial](Tile::Mixed) or
/// [empty](Tile::None).
///
/// The map is computed from the mask's formula, one row of blocks at a time: the mask itself is never stored. The
/// last blocks have the rows and keys that are left.
///
/// ```
/// use ascend_spec::geometry::{BlockMap, TriangleMix, TrianglePart, TriangleRows};
/// use std::num::NonZeroU64;
///
/// let sizes = TriangleMix::new(64, 256, 128);
/// let triangle = sizes.geometry(TrianglePart::Triangle, TriangleRows::whole(640));
/// let map = BlockMap::new(&triangle, NonZeroU64::new(128).unwrap());
/// let text = map.to_string();
/// let lines: Vec<&str> = text.lines().collect();
/// assert_eq!(lines, ["+....", "#+...", "+#+..", "++#+.", "####+"]);
/// let counts = map.counts();
/// assert_eq!((counts.full, counts.partial, counts.empty), (7, 8, 10));
/// assert_eq!(map.rows_without_full(), 1);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BlockMap<'a, V: ?Sized> {
    mask: &'a V,
    height: NonZeroU64,
    width: NonZeroU64,
}

/// How many blocks of a mask there are of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockCounts {
    /// Blocks in which every row sees every key: computed without a mask.
    pub full: u128,
    /// Blocks in which some rows see some keys: computed with a mask.
    pub partial: u128,
    /// Blocks in which no row sees a key: left out.
    pub empty: u128,
}

impl BlockCounts {
    /// All blocks.
    pub fn total(&self) -> u128 {
        self.computed().saturating_add(self.empty)
    }

    /// The blocks that a kernel computes: full and partial ones.
    pub fn computed(&self) -> u128 {
        self.full.saturating_add(self.partial)
    }

    fn add(&mut self, tile: Tile, count: u64) {
        let kind = match tile {
            Tile::All => &mut self.full,
            Tile::Mixed => &mut self.partial,
            Tile::None => &mut self.empty,
        };
        *kind = kind.saturating_add(u128::from(count));
    }
}

/// Neighbouring blocks of the same kind in one row of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// Index of the row of blocks.
    pub row: u64,
    /// The blocks in this row of blocks, from the first to the one after the last.
    pub blocks: Range<u64>,
    /// The kind of each of these blocks.
    pub tile: Tile,
}

impl<'a, V: Visibility + ?Sized> BlockMap<'a, V> {
    /// Cuts `of` into blocks of `side` rows and keys.
    pub const fn new(mask: &'a V, side: NonZeroU64) -> Self {
        Self::of_sides(mask, side, side)
    }

    /// Cuts `of` into blocks of `height` rows and `width` keys.
    pub const fn of_sides(mask: &'a V, height: NonZeroU64, width: NonZeroU64) -> Self {
        Self { mask, height, width }
    }

    /// Rows and keys of a block.
    pub const fn sides(&self) -> [NonZeroU64; 2] {
        [self.height, self.width]
    }

    /// Number of rows of blocks.
    pub fn rows(&self) -> u64 {
        self.mask.q_len().div_ceil(self.height.get())
    }

    /// Number of blocks in each row of blocks.
    pub fn columns(&self) -> u64 {
        self.mask.kv_len().div_ceil(self.width.get())
    }

    /// The kind of a block; [`Tile::None`] for one that does not exist.
    pub fn tile(&self, row: u64, column: u64) -> Tile {
        if row >= self.rows() || column >= self.columns() {
            return Tile::None;
        }
        let rows = tile_row::block(row, self.height);
        self.mask.tile(rows, tile_row::block(column, self.width))
    }

    /// The blocks of one row of blocks, from the first key on, with neighbours of the same kind as one run.
    pub fn row(&self, row: u64) -> Vec<BlockRun> {
        let mut runs = Vec::new();
        if row < self.rows() {
            self.each_run(row, &mut |blocks, tile| {
                runs.push(BlockRun { row, blocks, tile });
            });
        }
        runs
    }

    fn each_run(&self, row: u64, visit: tile_row::TileVisitor<'_>) {
        let rows = tile_row::block(row, self.height);
        self.mask.each_tile(rows, self.width, visit);
    }

    /// All blocks, one row of blocks after another, with neighbours of the same kind as one run.
    pub fn runs(&self) -> impl Iterator<Item = BlockRun> + '_ {
        (0..self.rows()).flat_map(|row| self.row(row))
    }

    /// Number of rows of blocks that have no full block.
    pub fn rows_without_full(&self) -> u64 {
        let has_full = |row: &u64| {
            let mut has_full = false;
            self.each_run(*row, &mut |_, tile| has_full |= tile == Tile::All);
            has_full
        };
        let without = (0..self.rows()).filter(|row| !has_full(row));
        without.count() as u64
    }

    /// Counts the blocks. Takes a step for each row of blocks, and for sparse modes and TriangleMix no more than that.
    pub fn counts(&self) -> BlockCounts {
        let mut counts = BlockCounts::default();
        let rows = if self.columns() == 0 { 0 } else { self.rows() };
        for row in 0..rows {
            self.each_run(row, &mut |blocks, tile| {
                counts.add(tile, blocks.end - blocks.start);
            });
        }
        counts
    }
}

impl<V: Visibility + ?Sized> fmt::Display for BlockMap<'_, V> {
    /// A line for each row of blocks: `#` is a full block, `+` a partial one, `.` an empty one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        for row in 0..self.rows() {
            for run in self.row(row) {
                let letter = match run.tile {
                    Tile::All => '#',
                    Tile::Mixed => '+',
                    Tile::None => '.',
                };
                run.blocks.into_iter().try_for_each(|_| f.write_char(letter))?;
            }
            f.write_char('\n')?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SparseMode;
    use crate::geometry::{LocalChunks, MaskGeometry, TokenTree, TriangleMix, TrianglePart, TriangleRows};
    use proptest::prelude::*;

    fn nonzero(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    /// Compares every answer of a map with the predicate, cell by cell.
    fn follows<V: Visibility>(mask: &V, (height, width): (u64, u64)) -> Result<(), TestCaseError> {
        let map = BlockMap::of_sides(mask, nonzero(height), nonzero(width));
        let (rows, keys) = (mask.q_len(), mask.kv_len());
        let mut counts = BlockCounts::default();
        let mut text = String::new();
        for row in 0..rows.div_ceil(height) {
            let runs = map.row(row);
            prop_assert!(runs.windows(2).all(|pair| pair[0].tile != pair[1].tile));
            for column in 0..keys.div_ceil(width) {
                let (i, j) = (row * height, column * width);
                let (end_i, end_j) = ((i + height).min(rows), (j + width).min(keys));
                let cells = || (i..end_i).flat_map(|i| (j..end_j).map(move |j| (i, j)));
                let seen = cells().filter(|&(i, j)| mask.sees(i, j)).count();
                let (want, letter) = match seen {
                    0 => (Tile::None, '.'),
                    seen if seen == cells().count() => (Tile::All, '#'),
                    _ => (Tile::Mixed, '+'),
                };
                counts.add(want, 1);
                text.push(letter);
                prop_assert_eq!(map.tile(row, column), want, "{} {}", row, column);
                let runs = runs.iter().filter(|run| run.blocks.contains(&column));
                prop_assert_eq!(runs.map(|run| run.tile).collect::<Vec<_>>(), [want]);
            }
            text.push('\n');
        }
        prop_assert_eq!(map.counts(), counts);
        let without = text.lines().filter(|line| !line.contains('#')).count();
        prop_assert_eq!(map.rows_without_full(), without as u64);
        prop_assert_eq!(map.to_string(), text);
        let total: u64 = map.runs().map(|run| run.blocks.end - run.blocks.start).sum();
        prop_assert_eq!(u128::from(total), counts.total());
        Ok(())
    }

    fn sides() -> impl Strategy<Value = (u64, u64)> {
        prop_oneof![(1u64..9, 1u64..9), (1u64..9).prop_map(|side| (side, side))]
    }

    proptest! {
        #[test]
        fn maps_of_sparse_modes_follow_the_predicate(
            mode in proptest::sample::select(SparseMode::ALL.to_vec()), tensor: bool,
            sq in 0u64..30, skv in 0u64..30, pre in -14i64..14, next in -14i64..14, prefix in 0u64..34,
            sides in sides(),
        ) {
            follows(&MaskGeometry::new(mode, tensor, sq, skv, pre, next), sides)?;
            follows(&MaskGeometry::prefix(sq, skv, prefix), sides)?;
        }

        #[test]
        fn maps_of_every_part_of_the_triangle_follow_the_predicate(
            numbers in (0u64..9, 0u64..9, 0u64..12), n in 0u64..48, cuts in (0u64..48, 0u64..48), sides in sides(),
        ) {
            let sizes = TriangleMix::new(numbers.0, numbers.1, numbers.2);
            let (first_row, end) = (cuts.0.min(cuts.1).min(n), cuts.0.max(cuts.1).min(n));
            let rows = TriangleRows { first_row, rows: end - first_row, prompt_len: n };
            for part in TrianglePart::ALL {
                follows(&sizes.geometry(part, rows), sides)?;
            }
        }

        #[test]
        fn maps_of_what_is_no_band_follow_the_predicate(
            context in 0u64..20, parents in proptest::collection::vec(-1i64..8, 1..12), sides in sides(),
            q in 0u64..20, more in 0u64..20, chunk in 1u64..9,
        ) {
            let before = |(index, &parent): (usize, &i64)| parent.min(index as i64 - 1);
            let parents: Vec<i64> = parents.iter().enumerate().map(before).collect();
            follows(&TokenTree::new(&parents).unwrap().behind(context), sides)?;
            follows(&LocalChunks::new(nonzero(chunk), q, q + more), sides)?;
            follows(&LocalChunks::new(nonzero(chunk), q + more, q), sides)?;
        }

        #[test]
        fn any_blocks_are_safe(sq: u64, skv: u64, pre: i64, next: i64, sides: (u64, u64), row: u64, column: u64) {
            let band = MaskGeometry::new(SparseMode::Band, true, sq, skv, pre, next);
            let map = BlockMap::of_sides(&band, nonzero(sides.0.max(1)), nonzero(sides.1.max(1)));
            let _ = (map.rows(), map.columns(), map.tile(row, column), map.row(row));
        }
    }

    #[test]
    fn chunks_are_counted_in_blocks_of_any_size() {
        let local = LocalChunks::new(nonzero(1 << 20), 1 << 62, 1 << 62);
        let counts = BlockMap::new(&local, nonzero(1 << 41)).counts();
        assert_eq!((counts.full, counts.partial), (0, 1 << 21));
        assert_eq!(counts.total(), 1 << 42);
        let map = BlockMap::of_sides(&local, nonzero(1 << 61), nonzero(1));
        assert_eq!(map.row(1).len(), 2);
    }

    /// 131072 tokens in blocks of 64 are 2048 x 2048 blocks, of a mask of 16 GiB.
    #[test]
    fn a_long_prompt_is_counted_without_its_mask() {
        let n = 1 << 17;
        let geometry = |part| TriangleMix::PAPER.geometry(part, TriangleRows::whole(n));
        let counts = |part| BlockMap::new(&geometry(part), nonzero(64)).counts();
        let (dense, triangle) = (counts(TrianglePart::Dense), counts(TrianglePart::Triangle));
        assert_eq!((dense.full, dense.partial), (2048 * 2047 / 2, 2048));
        assert_eq!(dense.total(), 1 << 22);
        // Per row of blocks from row 8 on: the diagonal, the seven full ones before it, the one where the window ends;
        // the block of the sinks from row 9 on; the last two rows of blocks are dense.
        let sparse = 2048 - 2 - 9;
        let first: u128 = (0..9).map(|row| row + 1).sum();
        let last = 2047 + 2048;
        assert_eq!(triangle.computed(), first + sparse * (1 + 7 + 1 + 1) + last);
        assert_eq!(triangle.total(), 1 << 22);
    }
}
