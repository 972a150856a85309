//! What the kernels fetch: tiles of keys and values in single precision, and of the mask tensor.

use super::attention::{Attention, Sequence};
use super::cells::Cover;
use super::factors::Conversion;
use super::keys::{Keys, Part};
use super::simd::{Kernel, Simd, Vector, WIDTH};
use ascend_spec::Tile;
use std::ops::Range;

/// Keys in a tile.
pub(super) const KEYS: usize = 96;

/// Of each key of a tile, the lanes that do not see it, a bit each.
pub(super) type Hidden = [u16; KEYS];

/// Vectors of a stretch. The rows of a tile that products read are cut into stretches: first so many vectors of every row,
/// then the next ones. All rows of a stretch can be found from one address, whatever the head dimension.
pub(super) const STRETCH: usize = 8;

/// Vectors from row to row of a stretch. An odd number: rows that lie a power of two apart would get into each other's way
/// in a cache.
pub(super) const PITCH: usize = STRETCH + 1;

/// Vectors of a tile, cut into stretches, whose rows take so many.
pub(super) fn tile_vectors(row: usize) -> usize {
    row.div_ceil(STRETCH) * KEYS * PITCH
}

/// Vectors from row to row, likewise odd, where whole rows lie behind each other.
#[inline(always)]
pub(super) fn stride(vectors: usize) -> usize {
    vectors | 1
}

/// Where rows go.
pub(super) enum Places<'a> {
    /// Each a [`stride`] behind the one before.
    Rows(&'a mut [Vector]),
    /// Into a tile that is cut into stretches, from its row `first` on. `row` holds one row.
    Tile {
        tile: &'a mut [Vector],
        first: usize,
        row: &'a mut [Vector],
    },
}

/// Reads the rows `keys` of the keys. Says whether all are finite.
#[inline(always)]
pub(super) fn read_keys<S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    kv_head: usize,
    keys: Range<usize>,
    places: Places<'_>,
) -> bool {
    simd.apart(ReadRows {
        of: &sequence.keys,
        part: &sequence.keys.key,
        conversion: attention.key_conversion.as_ref(),
        kv_head,
        keys,
        vectors: attention.vectors(),
        places,
    })
}

/// Reads the rows `keys` of the values. Says whether all are finite.
#[inline(always)]
pub(super) fn read_values<S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    kv_head: usize,
    keys: Range<usize>,
    places: Places<'_>,
) -> bool {
    simd.apart(ReadRows {
        of: &sequence.keys,
        part: &sequence.keys.value,
        conversion: attention.value_conversion.as_ref(),
        kv_head,
        keys,
        vectors: attention.columns(),
        places,
    })
}

/// Rows to read; says whether all elements are finite.
struct ReadRows<'a> {
    of: &'a Keys,
    part: &'a Part,
    conversion: Option<&'a Conversion>,
    kv_head: usize,
    keys: Range<usize>,
    vectors: usize,
    places: Places<'a>,
}

impl ReadRows<'_> {
    #[inline(always)]
    fn read<S: Simd>(&self, simd: S, key: usize, out: &mut [Vector], watch: &mut S::Register) {
        let at = (self.kv_head, key);
        self.of
            .read(simd, self.part, self.conversion, at, (out, 1), watch);
    }
}

impl Kernel for ReadRows<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> bool {
        let mut watch = simd.splat(0.0);
        let mut places = std::mem::replace(&mut self.places, Places::Rows(&mut []));
        let stride = stride(self.vectors);
        for (j, key) in self.keys.clone().enumerate() {
            let (out, cut) = match &mut places {
                Places::Rows(rows) => (&mut rows[j * stride..], None),
                Places::Tile { tile, first, .. } if self.vectors <= STRETCH => {
                    (&mut tile[(*first + j) * PITCH..], None)
                }
                Places::Tile { tile, first, row } => (&mut **row, Some((tile, *first + j))),
            };
            self.read(simd, key, out, &mut watch);
            if let Some((tile, j)) = cut {
                let stretches = tile.chunks_exact_mut(KEYS * PITCH);
                for (to, from) in stretches.zip(out[..self.vectors].chunks(STRETCH)) {
                    to[j * PITCH..][..from.len()].copy_from_slice(from);
                }
            }
        }
        let mut watched = [0.0; WIDTH];
        simd.store(watch, &mut watched);
        watched.iter().all(|product| *product == 0.0)
    }
}

/// Finds which keys of a tile some rows see. A lane is a query; `lanes(row)` are the bits of a row's. Gives the range
/// that holds every visible key, counted from the tile's first, and whether `hidden` was filled because the rows do not
/// see all of it.
#[inline(always)]
pub(super) fn look(
    attention: &Attention,
    sequence: &Sequence,
    rows: Range<u64>,
    tile: &Range<usize>,
    lanes: impl Fn(u64) -> u16,
    hidden: &mut Hidden,
) -> (Range<usize>, bool) {
    let keys = tile.start as u64..tile.end as u64;
    let (mut seen, mut mixed) = match sequence.geometry.tile(rows.clone(), keys.clone()) {
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
            let lanes = lanes(row);
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
    let cover = match &sequence.cells {
        _ if attention.mask.is_none() => Cover::Nothing,
        Some(cells) => cells.cover(rows.clone(), tile.start + seen.start..tile.start + seen.end),
        None => Cover::Part,
    };
    if cover == Cover::All {
        return (0..0, false);
    }
    if let Some(mask) = attention.mask.as_ref().filter(|_| cover == Cover::Part) {
        if !mixed {
            hidden.fill(0);
        }
        let mut used = 0;
        for row in rows {
            let lanes = lanes(row);
            used |= lanes;
            // Nobody looks at a row that does not exist.
            if row < sequence.geometry.q_len() {
                let (batch, _, row) = sequence.at(0, row as usize);
                let first_key = sequence.first_key + tile.start;
                mask.hide((batch, row), first_key, lanes, &mut hidden[..tile.len()]);
            }
        }
        let visible = |lanes: &u16| lanes & used != used;
        let within = &hidden[seen.clone()];
        let (Some(first), Some(last)) = (
            within.iter().position(visible),
            within.iter().rposition(visible),
        ) else {
            return (0..0, false);
        };
        let within = &within[first..=last];
        mixed = within.iter().fold(0, |any, lanes| any | lanes) & used != 0;
        seen = seen.start + first..seen.start + last + 1;
    }
    (seen, mixed)
}

/// Reads the mask bytes of a row, if there are a mask tensor and such a row.
#[inline(always)]
pub(super) fn read_mask<'a>(
    attention: &Attention,
    sequence: &Sequence,
    row: u64,
    keys: &Range<usize>,
    out: &'a mut [u8; KEYS],
) -> Option<&'a mut [u8]> {
    let mask = attention.mask.as_ref()?;
    if row >= sequence.geometry.q_len() {
        return None;
    }
    let out = out.get_mut(..keys.len())?;
    let (batch, _, row) = sequence.at(0, row as usize);
    mask.read_row(batch, row, sequence.first_key + keys.start, out);
    Some(out)
}

/// Reads the position bias of a row that exists, in bits as the scores are, if there is one. Says whether there is one.
#[inline(always)]
pub(super) fn read_bias<S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    (row, head): (usize, usize),
    keys: &Range<usize>,
    out: &mut [Vector; KEYS / WIDTH],
) -> bool {
    let Some(bias) = &attention.bias else {
        return false;
    };
    let first = sequence.first_key + keys.start;
    let at = sequence.at(head, row);
    bias.read(simd, at, first..first + keys.len(), out);
    for out in out.as_flattened_mut() {
        *out *= std::f32::consts::LOG2_E;
    }
    true
}

/// The nearest integer that `INT8` holds to `weight * quantum`.
#[inline(always)]
pub(super) fn quantise(weight: &Vector, quantum: f32) -> Vector {
    let mut integer = *weight;
    for weight in &mut integer {
        *weight = (*weight * quantum)
            .round_ties_even()
            .clamp(f32::from(i8::MIN), f32::from(i8::MAX));
    }
    integer
}
