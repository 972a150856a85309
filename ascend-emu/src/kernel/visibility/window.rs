//! A window of the mask tensor: the bits of several KV tiles, read together.
//!
//! The rows of a mask are far apart, often at a distance that is a power of two. Reading a whole window of each row
//! uses the cache lines that it loads; reading one KV tile at a time would evict them before the next tile.

use crate::kernel::attention::Attention;
use crate::kernel::mask::summary::Coverage;
use crate::kernel::sequence::Sequence;
use crate::kernel::tile::TILE_KEYS;
use crate::kernel::visibility::Lanes;
use std::ops::Range;

/// Largest number of keys of a window.
pub(crate) const WINDOW_KEYS: usize = 8 * TILE_KEYS;

/// The keys that the mask tensor hides from the queries of a lane group.
#[derive(Debug)]
pub(crate) struct MaskWindow<'s> {
    /// The keys of the window, at most [`WINDOW_KEYS`].
    keys: Range<usize>,
    /// For each of them, a bit set for every lane that does not see it.
    hidden: &'s mut [u16],
}

impl<'s> MaskWindow<'s> {
    /// An empty window. `hidden` has room for [`WINDOW_KEYS`] keys, or for none if there is no mask tensor.
    pub(crate) fn new(hidden: &'s mut [u16]) -> Self {
        MaskWindow { keys: 0..0, hidden }
    }

    /// For each key of `tile`, the lanes that the tensor hides it from. Lanes that belong to no row of `rows` are not
    /// set. Unless the window contains `tile`, it is moved to the tile and those after it, before key `end`, whose
    /// coverage in the summary is mixed.
    #[inline(always)]
    pub(crate) fn of_tile(
        &mut self,
        attention: &Attention,
        sequence: &Sequence,
        rows: Range<u64>,
        (tile, end): (&Range<usize>, usize),
        lanes: &Lanes,
    ) -> &[u16] {
        let known = self.keys.start <= tile.start && tile.end <= self.keys.end;
        let mask = attention.mask.as_ref().zip(sequence.mask.as_ref());
        if let Some((mask, at)) = mask.filter(|_| !known) {
            self.keys = tile.start..reach(sequence, &rows, tile, end);
            let hidden = &mut self.hidden[..self.keys.len()];
            hidden.fill(0);
            // Rows past the last one have no queries.
            for row in rows.start..rows.end.min(sequence.geometry.q_len()) {
                if at.differs_by_head() {
                    for (head, lane) in lanes.heads_of(row) {
                        mask.hide(&at.of_head(head), row as usize, tile.start, lane, hidden);
                    }
                } else {
                    mask.hide(at, row as usize, tile.start, lanes.of_row(row), hidden);
                }
            }
        }
        &self.hidden[tile.start - self.keys.start..][..tile.len()]
    }
}

/// The end of the KV tiles that are to be read together with `tile`.
#[inline(always)]
fn reach(sequence: &Sequence, rows: &Range<u64>, tile: &Range<usize>, end: usize) -> usize {
    let end = end.min(tile.start + WINDOW_KEYS);
    let Some(summary) = &sequence.mask_summary else {
        return end.max(tile.end);
    };
    let mut reached = tile.end;
    while reached < end {
        let next = reached..end.min(reached + TILE_KEYS);
        let visible = sequence.span(rows.clone(), &next);
        if visible.is_empty() || summary.coverage(rows.clone(), visible) != Coverage::Mixed {
            break;
        }
        reached = next.end;
    }
    reached
}
