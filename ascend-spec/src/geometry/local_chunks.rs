//! Local attention: a row sees the keys of its own chunk.

use super::tile_row::{TileVisitor, tiles_of_spans};
use super::visibility::run;
use super::{Tile, Visibility};
use std::num::NonZeroU64;
use std::ops::Range;

/// Causal attention within chunks of fixed size, as in Llama 4: a row at position `p` sees the keys `p / chunk *
/// chunk ..= p`. The last row is at the position of the last key.
///
/// ```
/// use ascend_spec::Visibility;
/// use ascend_spec::geometry::LocalChunks;
/// use std::num::NonZeroU64;
///
/// let local = LocalChunks::new(NonZeroU64::new(4).unwrap(), 4, 6); // four rows, at places 2 to 5
/// let mut runs = Vec::new();
/// (0..4).for_each(|i| local.each_run(i, &mut |keys| runs.push(keys)));
/// assert_eq!(runs, [0..3, 0..4, 4..5, 4..6]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalChunks {
    chunk: NonZeroU64,
    q_len: u64,
    kv_len: u64,
}

/// The rows of a sequence that are in one chunk, as a sequence of their own for an operator without chunks: its mask
/// is causal from the lower right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VirtualSequence {
    /// Rows.
    pub q_len: u64,
    /// Keys.
    pub kv_len: u64,
    /// First key, counted in the whole sequence: a multiple of the chunk size.
    pub kv_start: u64,
}

impl LocalChunks {
    /// Chunks for `q_len` rows, the last of which is at the position of the last of `kv_len` keys. Rows before the
    /// first key see nothing.
    pub const fn new(chunk: NonZeroU64, q_len: u64, kv_len: u64) -> Self {
        LocalChunks { chunk, q_len, kv_len }
    }

    /// Position of row `i` among the keys, if it has one.
    fn place(&self, i: u64) -> Option<u64> {
        // Positions count back from the last row, which avoids a sign.
        let from_last = self.q_len.checked_sub(i)?;
        if from_last == 0 {
            return None;
        }
        self.kv_len.checked_sub(from_last)
    }

    fn chunk_start(&self, place: u64) -> u64 {
        place - place % self.chunk
    }

    /// The sequence cut at the chunk boundaries, first rows first.
    pub fn virtual_sequences(&self) -> impl Iterator<Item = VirtualSequence> + use<> {
        let chunks = *self;
        let mut next = chunks.kv_len.saturating_sub(chunks.q_len);
        std::iter::from_fn(move || {
            if next >= chunks.kv_len {
                return None;
            }
            let kv_start = chunks.chunk_start(next);
            let end = kv_start.saturating_add(chunks.chunk.get()).min(chunks.kv_len);
            let sequence = VirtualSequence { q_len: end - next, kv_len: end - kv_start, kv_start };
            next = end;
            Some(sequence)
        })
    }
}

/// `1 + 2 + ... + n`.
fn steps(n: u64) -> u128 {
    let n = u128::from(n);
    n * (n + 1) / 2
}

impl Visibility for LocalChunks {
    fn q_len(&self) -> u64 {
        self.q_len
    }

    fn kv_len(&self) -> u64 {
        self.kv_len
    }

    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
        if let Some(place) = self.place(i) {
            run(self.chunk_start(place), place + 1, self.kv_len, visit);
        }
    }

    /// In constant time.
    fn visible(&self) -> u128 {
        // A row at position `p` sees `p % chunk + 1` keys: `below` sums this over all positions below `end`.
        let below = |end: u64| {
            let (whole, rest) = (end / self.chunk, end % self.chunk);
            steps(self.chunk.get()) * u128::from(whole) + steps(rest)
        };
        below(self.kv_len) - below(self.kv_len.saturating_sub(self.q_len))
    }

    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        let before_keys = self.q_len.saturating_sub(self.kv_len);
        let rows = rows.start..rows.end.min(self.q_len);
        let keys = keys.start..keys.end.min(self.kv_len);
        if rows.is_empty() || keys.is_empty() {
            return Tile::None;
        }
        let (first, last) = (rows.start.max(before_keys), rows.end - 1);
        let (Some(first_place), Some(last_place)) = (self.place(first), self.place(last)) else {
            return Tile::None;
        };
        // Both ends of the range that a row sees rise with the row.
        if last_place < keys.start || self.chunk_start(first_place) > keys.end - 1 {
            return Tile::None;
        }
        // Of the rows that reach the first key, the earliest has the earliest chunk.
        if self.chunk_start(first_place.max(keys.start)) > keys.end - 1 {
            return Tile::None;
        }
        let all =
            rows.start >= before_keys && self.chunk_start(last_place) <= keys.start && first_place >= keys.end - 1;
        if all { Tile::All } else { Tile::Mixed }
    }

    /// In constant time.
    fn each_tile(&self, rows: Range<u64>, width: NonZeroU64, visit: TileVisitor<'_>) {
        let blocks = self.kv_len.div_ceil(width.get());
        let rows = rows.start..rows.end.min(self.q_len);
        let first = rows.start.max(self.q_len.saturating_sub(self.kv_len));
        let places = match rows.end.checked_sub(1).filter(|last| first <= *last) {
            Some(last) => self.place(first).zip(self.place(last)),
            None => None,
        };
        let Some((first_place, last_place)) = places else {
            return tiles_of_spans(blocks, 0..0, 0..0, visit);
        };
        // Each key from the first chunk's start to the last row's position is seen by the row at its position, or, if
        // it is before the first row, by that row.
        let touched = self.chunk_start(first_place) / width..(last_place + 1).div_ceil(width.get());
        let full = match first == rows.start {
            // Every row has a position, and sees the last row's chunk up to the first row's position.
            true => {
                let start = self.chunk_start(last_place).div_ceil(width.get());
                let end = match first_place + 1 == self.kv_len {
                    true => blocks,
                    false => (first_place + 1) / width,
                };
                start..end
            }
            false => 0..0,
        };
        tiles_of_spans(blocks, touched, full, visit);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tile_by_rows;
    use super::*;
    use proptest::prelude::*;

    fn local(chunk: u64, q_len: u64, kv_len: u64) -> LocalChunks {
        LocalChunks::new(NonZeroU64::new(chunk).unwrap(), q_len, kv_len)
    }

    #[test]
    fn virtual_sequences_of_three_requests() {
        let mut all = Vec::new();
        for (q, kv) in [(4, 6), (10, 17), (5, 9)] {
            all.extend(local(4, q, kv).virtual_sequences());
        }
        let column = |field: fn(&VirtualSequence) -> u64| all.iter().map(field).collect::<Vec<_>>();
        assert_eq!(column(|s| s.q_len), [2, 2, 1, 4, 4, 1, 4, 1]);
        assert_eq!(column(|s| s.kv_len), [4, 2, 4, 4, 4, 1, 4, 1]);
        assert_eq!(column(|s| s.kv_start), [0, 4, 4, 8, 12, 16, 4, 8]);
    }

    proptest! {
        #[test]
        fn rows_and_tiles_follow_the_definition(
            chunk in 1u64..9, q in 0u64..14, kv in 0u64..14, rows in (0u64..15, 0u64..15), keys in (0u64..15, 0u64..15),
        ) {
            let local = local(chunk, q, kv);
            for i in 0..15u64 {
                for j in 0..15u64 {
                    // The row's position; negative for rows before the first key.
                    let p = i as i64 + kv as i64 - q as i64;
                    let want = i < q && j < kv && j as i64 <= p && j / chunk == p as u64 / chunk;
                    prop_assert_eq!(local.sees(i, j), want, "{} {}", i, j);
                }
            }
            let mut visible = 0;
            (0..q).for_each(|i| local.each_run(i, &mut |run| visible += u128::from(run.end - run.start)));
            prop_assert_eq!(local.visible(), visible);
            let (rows, keys) = (rows.0..rows.1, keys.0..keys.1);
            prop_assert_eq!(local.tile(rows.clone(), keys.clone()), tile_by_rows(&local, rows, keys));
        }

        #[test]
        fn virtual_sequences_see_the_same(chunk in 1u64..9, q in 0u64..14, more in 0u64..14) {
            let kv = q + more;
            let local = local(chunk, q, kv);
            let mut row = 0;
            for part in local.virtual_sequences() {
                prop_assert_eq!(part.kv_start % chunk, 0);
                for i in 0..part.q_len {
                    // Causal from the lower right.
                    let end = part.kv_start + i + 1 + part.kv_len - part.q_len;
                    let mut runs = Vec::new();
                    local.each_run(row, &mut |keys| runs.push(keys));
                    prop_assert_eq!((runs.len(), &runs[0]), (1, &(part.kv_start..end)));
                    row += 1;
                }
            }
            prop_assert_eq!(row, q);
        }

        #[test]
        fn any_numbers_are_safe(chunk in 1u64.., q: u64, kv: u64, i: u64, j: u64) {
            let local = local(chunk, q, kv);
            let _ = (local.sees(i, j), local.tile(0..i, 0..j), local.virtual_sequences().next(), local.visible());
        }
    }
}
