//! What is known of a tile of keys before its products: who sees which of them, and what is added to the scores.

use super::ahead::Ahead;
use super::attention::{Attention, Sequence};
use super::cells::Cover;
use super::simd::{Simd, Vector};
use ascend_spec::Tile;
use std::ops::Range;

/// Keys in a tile.
pub(super) const KEYS: usize = 96;

/// Of each key of a tile, the lanes that do not see it, a bit each.
pub(super) type Hidden = [u16; KEYS];

/// Finds which keys of a tile, one of those before `end`, some rows see. A lane is a query; `lanes(row)` are the bits of a
/// row's. Gives the range that holds every visible key, counted from the tile's first, and whether `hidden` was filled
/// because the rows do not see all of it.
#[inline(always)]
pub(super) fn look(
    attention: &Attention,
    sequence: &Sequence,
    rows: Range<u64>,
    (tile, end): (&Range<usize>, usize),
    lanes: impl Fn(u64) -> u16,
    ahead: &mut Ahead<'_>,
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
    if cover == Cover::Part {
        let used = rows.clone().fold(0, |used, row| used | lanes(row));
        let masked = ahead.of_tile(attention, sequence, rows, (tile, end), lanes);
        if mixed {
            for (hidden, masked) in hidden.iter_mut().zip(masked) {
                *hidden |= masked;
            }
        } else {
            hidden[..masked.len()].copy_from_slice(masked);
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
    mask.read_row(sequence.mask.as_ref()?, row as usize, keys.start, out);
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
    out: &mut [Vector],
) -> bool {
    let Some(bias) = &attention.bias else {
        return false;
    };
    let (first_row, first_key) = sequence.origin;
    let at = (sequence.keys.sequence, head, first_row + row);
    let first = first_key + keys.start;
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
