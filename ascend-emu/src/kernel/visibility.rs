//! Visibility: which queries see which keys of a KV tile, by the mask geometry and by the mask tensor.

use super::TILE_KEYS;
use super::attention::Attention;
use super::mask::Coverage;
use super::sequence::Sequence;
use ascend_spec::Tile;
use std::ops::Range;

/// For each key of a KV tile, a bit set for every lane whose query does not see it.
pub(crate) type HiddenLanes = [u16; TILE_KEYS];

/// The queries of a lane group, which share a key head: lane `l` is query `start + l`.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    pub(crate) kv_head: usize,
    /// Query heads that share the key head.
    pub(crate) group: usize,
    pub(crate) queries: Range<usize>,
}

impl Lanes {
    /// The queries of a row.
    #[inline(always)]
    fn queries_of(&self, row: u64) -> Range<usize> {
        let first = (row as usize * self.group).max(self.queries.start);
        first..((row as usize + 1) * self.group).min(self.queries.end)
    }

    /// The bits of some of the queries.
    #[inline(always)]
    fn bits(&self, queries: &Range<usize>) -> u16 {
        let (first, end) = (queries.start - self.queries.start, queries.end - self.queries.start);
        ((1u32 << end) - (1u32 << first)) as u16
    }

    /// The bits of a row's queries.
    #[inline(always)]
    pub(crate) fn of_row(&self, row: u64) -> u16 {
        self.bits(&self.queries_of(row))
    }

    /// The head of each of a row's queries, and its bit.
    fn heads_of(&self, row: u64) -> impl Iterator<Item = (usize, u16)> + '_ {
        let before = self.kv_head * self.group;
        self.queries_of(row).map(move |query| (before + query % self.group, self.bits(&(query..query + 1))))
    }
}

/// Finds the keys of the KV tile `tile` that the queries of `rows`, in the lanes `lanes`, see. Returns the smallest
/// range that contains every visible key, counted from the first of the tile, and whether some of its keys are hidden
/// from some queries; if so, `hidden` has these. The task's keys end at `end`.
#[inline(always)]
pub(crate) fn find_visible(
    attention: &Attention,
    sequence: &Sequence,
    rows: Range<u64>,
    (tile, end): (&Range<usize>, usize),
    lanes: &Lanes,
    window: &mut MaskWindow<'_>,
    hidden: &mut HiddenLanes,
) -> (Range<usize>, bool) {
    let keys = tile.start as u64..tile.end as u64;
    let (mut visible, mut mixed) = match sequence.geometry.tile(rows.clone(), keys.clone()) {
        Tile::None => return (0..0, false),
        Tile::All => (0..tile.len(), false),
        Tile::Mixed => {
            let span = sequence.span(rows.clone(), tile);
            (span.start - tile.start..span.end - tile.start, true)
        }
    };
    if mixed {
        hidden.fill(u16::MAX);
        for row in rows.clone() {
            let lanes = lanes.of_row(row);
            for run in sequence.geometry.runs(row) {
                // Within the tile, whose ends are usize.
                let start = run.start.max(keys.start).min(keys.end) - keys.start;
                let end = run.end.max(keys.start).min(keys.end) - keys.start;
                for hidden in &mut hidden[start as usize..(end as usize).max(start as usize)] {
                    *hidden &= !lanes;
                }
            }
        }
    }
    let coverage = match &sequence.mask_summary {
        _ if attention.mask.is_none() => Coverage::Visible,
        Some(summary) => summary.coverage(rows.clone(), tile.start + visible.start..tile.start + visible.end),
        None => Coverage::Mixed,
    };
    if coverage == Coverage::Hidden {
        return (0..0, false);
    }
    if coverage == Coverage::Mixed {
        let used = rows.clone().fold(0, |used, row| used | lanes.of_row(row));
        let masked = window.of_tile(attention, sequence, rows, (tile, end), lanes);
        if mixed {
            for (hidden, masked) in hidden.iter_mut().zip(masked) {
                *hidden |= masked;
            }
        } else {
            hidden[..masked.len()].copy_from_slice(masked);
        }
        let is_visible = |lanes: &u16| lanes & used != used;
        let within = &hidden[visible.clone()];
        let (Some(first), Some(last)) = (within.iter().position(is_visible), within.iter().rposition(is_visible))
        else {
            return (0..0, false);
        };
        let within = &within[first..=last];
        mixed = within.iter().fold(0, |any, lanes| any | lanes) & used != 0;
        visible = visible.start + first..visible.start + last + 1;
    }
    (visible, mixed)
}

/// Reads the mask bytes of a row of a head into `out`. Returns `None` if there is no mask tensor or the row does not
/// exist.
#[inline(always)]
pub(crate) fn read_mask<'a>(
    attention: &Attention,
    sequence: &Sequence,
    (row, head): (u64, usize),
    keys: &Range<usize>,
    out: &'a mut [u8; TILE_KEYS],
) -> Option<&'a mut [u8]> {
    let mask = attention.mask.as_ref()?;
    if row >= sequence.geometry.q_len() {
        return None;
    }
    let out = out.get_mut(..keys.len())?;
    let rows = sequence.mask.as_ref()?.of_head(head);
    mask.read_row(&rows, row as usize, keys.start, out);
    Some(out)
}

/// Largest number of keys of a window.
pub(crate) const WINDOW_KEYS: usize = 8 * TILE_KEYS;

/// A window of the mask tensor: the keys of several KV tiles that it hides from the queries of a lane group.
///
/// The rows of a mask are far apart, often at a distance that is a power of two. Reading a whole window of each row
/// uses the cache lines that it loads; reading one KV tile at a time would evict them before the next tile.
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
        if let Some((mask, mask_rows)) = mask.filter(|_| !known) {
            self.keys = tile.start..reach(sequence, &rows, tile, end);
            let hidden = &mut self.hidden[..self.keys.len()];
            hidden.fill(0);
            // Rows past the last one have no queries.
            for row in rows.start..rows.end.min(sequence.geometry.q_len()) {
                if mask_rows.differs_by_head() {
                    for (head, lane) in lanes.heads_of(row) {
                        mask.hide(&mask_rows.of_head(head), row as usize, tile.start, lane, hidden);
                    }
                } else {
                    mask.hide(mask_rows, row as usize, tile.start, lanes.of_row(row), hidden);
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
