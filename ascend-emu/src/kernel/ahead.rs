//! The mask tensor, read for several tiles at once.
//!
//! Rows of a mask lie far apart, often a power of two: read tile by tile, 96 bytes of each row of a block, its cache lines
//! had left the cache before the next tile came to them, and `mask_2048_h8_d128` waited for them for a tenth of its time.

use super::attention::{Attention, Sequence};
use super::cells::Cover;
use super::tile::KEYS;
use std::ops::Range;

/// Keys that are read at once.
pub(super) const AHEAD: usize = 8 * KEYS;

/// What the mask tensor hides from the queries of a panel.
#[derive(Debug)]
pub(super) struct Ahead<'s> {
    /// The keys that were read, at most [`AHEAD`].
    keys: Range<usize>,
    /// Of each of them, the lanes that do not see it, a bit each.
    hidden: &'s mut [u16],
}

impl<'s> Ahead<'s> {
    /// Of no keys yet. `hidden` has room for [`AHEAD`] keys, or for none where no mask will be read.
    pub(super) fn new(hidden: &'s mut [u16]) -> Self {
        Ahead { keys: 0..0, hidden }
    }

    /// Which lanes the tensor hides the keys of `tile` from. Lanes that no row of `rows` has are not hidden. Reads the tile,
    /// and those behind it of which the tensor hides a part and that lie before `end`, unless that is done.
    #[inline(always)]
    pub(super) fn of_tile(
        &mut self,
        attention: &Attention,
        sequence: &Sequence,
        rows: Range<u64>,
        (tile, end): (&Range<usize>, usize),
        lanes: impl Fn(u64) -> u16,
    ) -> &[u16] {
        let known = self.keys.start <= tile.start && tile.end <= self.keys.end;
        let mask = attention.mask.as_ref().zip(sequence.mask.as_ref());
        if let Some((mask, at)) = mask.filter(|_| !known) {
            self.keys = tile.start..reach(sequence, &rows, tile, end);
            let hidden = &mut self.hidden[..self.keys.len()];
            hidden.fill(0);
            // Nobody looks at a row that does not exist.
            for row in rows.start..rows.end.min(sequence.geometry.q_len()) {
                mask.hide(at, row as usize, tile.start, lanes(row), hidden);
            }
        }
        &self.hidden[tile.start - self.keys.start..][..tile.len()]
    }
}

/// Where the tiles end that are worth reading together with this one.
#[inline(always)]
fn reach(sequence: &Sequence, rows: &Range<u64>, tile: &Range<usize>, end: usize) -> usize {
    let end = end.min(tile.start + AHEAD);
    let Some(cells) = &sequence.cells else {
        return end.max(tile.end);
    };
    let mut reached = tile.end;
    while reached < end {
        let next = reached..end.min(reached + KEYS);
        let seen = sequence.span(rows.clone(), &next);
        if seen.is_empty() || cells.cover(rows.clone(), seen) != Cover::Part {
            break;
        }
        reached = next.end;
    }
    reached
}
