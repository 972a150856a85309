//! What the kernels fetch: tiles of keys and values in single precision, and of the mask tensor.

use super::attention::{Attention, Sequence};
use super::element::Element;
use super::simd::{Simd, Vector, WIDTH};
use std::ops::Range;

/// Keys in a tile.
pub(super) const KEYS: usize = 96;

/// Reads the rows `keys` of the key tensor, each into as many vectors as it takes, one behind the other.
#[inline(always)]
pub(super) fn read_keys<T: Element, S: Simd>(
    simd: S,
    sequence: &Sequence<T>,
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [Vector],
) {
    let vectors = sequence.key.vectors();
    for (row, out) in keys.zip(out.chunks_exact_mut(vectors)) {
        sequence
            .key
            .read_row(simd, (sequence.kv_batch, kv_head, row), out, 1);
    }
}

/// Reads the rows `keys` of the value tensor, sorted into columns: vector `i` of the row of key number `j` goes to
/// `out[i * KEYS + j]`. Says whether all values are finite.
#[inline(always)]
pub(super) fn read_values<T: Element, S: Simd>(
    simd: S,
    sequence: &Sequence<T>,
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [Vector],
) -> bool {
    let mut watch = simd.splat(0.0);
    for (j, row) in keys.enumerate() {
        let at = (sequence.kv_batch, kv_head, row);
        sequence
            .value
            .watch_row(simd, at, &mut out[j..], KEYS, &mut watch);
    }
    let mut watched = [0.0; WIDTH];
    simd.store(watch, &mut watched);
    watched.iter().all(|product| *product == 0.0)
}

/// Reads the mask bytes of a row, if there are a mask tensor and such a row.
#[inline(always)]
pub(super) fn read_mask<'a, T: Element>(
    attention: &Attention<T>,
    batch: usize,
    row: u64,
    keys: &Range<usize>,
    out: &'a mut [u8; KEYS],
) -> Option<&'a mut [u8]> {
    let mask = attention.mask.as_ref()?;
    if row >= attention.sequences.get(batch)?.geometry.q_len() {
        return None;
    }
    let out = out.get_mut(..keys.len())?;
    mask.read_row(batch, row as usize, keys.start, out);
    Some(out)
}
