//! A band within a rectangle, and how many of its cells are in a block.

use super::sparse_mode::FAR;

/// The cells with a row in `rows`, a key in `keys` (first and end) and `low <= key - row <= high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Region {
    pub(super) rows: (i64, i64),
    pub(super) keys: (i64, i64),
    pub(super) low: i64,
    pub(super) high: i64,
}

impl Region {
    pub(super) const NOTHING: Region = Region { rows: (0, 0), keys: (0, 0), low: 0, high: 0 };

    /// Every cell of `q_len` rows and `kv_len` keys.
    pub(super) const fn all(q_len: i64, kv_len: i64) -> Self {
        Region { rows: (0, q_len), keys: (0, kv_len), low: -FAR, high: FAR }
    }

    /// The keys, first and end, from the first to the last that any row of `first..=last` sees; empty is `(0, 0)`.
    /// The rows are within the region's rows.
    fn hull(&self, first: i64, last: i64) -> (i64, i64) {
        let start = (first + self.low).max(self.keys.0);
        let end = (last + self.high).saturating_add(1).min(self.keys.1);
        if self.low <= self.high && start < end { (start, end) } else { (0, 0) }
    }

    /// The keys, first and end, from the first to the last that any row of `rows` sees; empty is `(0, 0)`. The rows
    /// may exceed the region's.
    #[inline]
    pub(super) fn span(&self, rows: (i64, i64)) -> (i64, i64) {
        let (first, end) = (rows.0.max(self.rows.0), rows.1.min(self.rows.1));
        if first < end { self.hull(first, end - 1) } else { (0, 0) }
    }

    /// The keys, first and end, that every row of `first..end` sees; empty is `(0, 0)`. The rows are not empty.
    pub(super) fn core(&self, rows: (i64, i64)) -> (i64, i64) {
        if rows.0 < self.rows.0 || rows.1 > self.rows.1 {
            return (0, 0);
        }
        let start = (rows.1 - 1 + self.low).max(self.keys.0);
        let end = (rows.0 + self.high).saturating_add(1).min(self.keys.1);
        if start < end { (start, end) } else { (0, 0) }
    }

    /// The kind of a block that is not empty.
    #[inline]
    pub(super) fn tile(&self, rows: (i64, i64), keys: (i64, i64)) -> Tile {
        let (i0, i1) = (rows.0.max(self.rows.0), rows.1.min(self.rows.1) - 1);
        let (j0, j1) = (keys.0.max(self.keys.0), keys.1.min(self.keys.1) - 1);
        if i0 > i1 || j0 > j1 {
            return Tile::None;
        }
        // Both bounds of the band rise with the row.
        if j1 < i0 + self.low || j0 > i1 + self.high || self.low > self.high {
            return Tile::None;
        }
        let whole = (i0, i1 + 1) == rows && (j0, j1 + 1) == keys;
        if whole && j0 >= i1 + self.low && j1 <= i0 + self.high { Tile::All } else { Tile::Mixed }
    }

    /// Number of cells that a block and the region share.
    pub(super) fn count(&self, rows: (i64, i64), keys: (i64, i64)) -> u128 {
        let (i0, i1) = (rows.0.max(self.rows.0), rows.1.min(self.rows.1));
        let (j0, j1) = (keys.0.max(self.keys.0), keys.1.min(self.keys.1));
        if i0 >= i1 || j0 >= j1 || self.low > self.high {
            return 0;
        }
        let (rows, keys) = (i128::from(i1 - i0), i128::from(j1 - j0));
        // Number of cells with `key - row <= bound`: row `i0 + t` has `first + t` of them, clamped to 0 and `keys`.
        let upto = |bound: i64| {
            let first = i128::from(i0 + bound - j0 + 1);
            ramp(first + rows - 1, keys) - ramp(first - 1, keys)
        };
        let count = upto(self.high) - upto(self.low - 1);
        u128::try_from(count).unwrap_or(0)
    }

    /// Whether no row sees any key.
    pub(super) fn is_empty(&self) -> bool {
        let Region { rows, keys, low, high } = *self;
        keys.0 >= keys.1 || low > high || (keys.0 - high).max(rows.0) >= (keys.1 - low).min(rows.1)
    }
}

/// Sum over all `v <= x` of `v` clamped to 0 and `most`.
fn ramp(x: i128, most: i128) -> i128 {
    if x <= 0 {
        0
    } else if x <= most {
        x * (x + 1) / 2
    } else {
        most * (most + 1) / 2 + (x - most) * most
    }
}

/// Which scores of a block of rows and keys are visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No row sees any of the keys.
    None,
    /// Every row sees every key.
    All,
    /// Some rows see some keys.
    Mixed,
}

impl Tile {
    /// The kind of a block with `cells` cells of which `seen` are visible. Without cells it is [`Tile::None`].
    pub(super) const fn of(seen: u128, cells: u128) -> Self {
        if seen == 0 {
            Tile::None
        } else if seen == cells {
            Tile::All
        } else {
            Tile::Mixed
        }
    }
}
