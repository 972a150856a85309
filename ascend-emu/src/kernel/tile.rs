//! What the kernels fetch: tiles of keys and values in single precision, and of the mask tensor.

use super::attention::{Attention, Sequence};
use super::element::Element;
use super::simd::{Simd, Vector, WIDTH};
use std::ops::Range;

/// Keys in a tile.
pub(super) const KEYS: usize = 96;

/// Reads the rows `keys` of the keys, each into as many vectors as it takes, one behind the other.
#[inline(always)]
pub(super) fn read_keys<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [Vector],
) {
    let conversion = attention.key_conversion.as_ref();
    for (key, out) in keys.zip(out.chunks_exact_mut(attention.vectors())) {
        let at = (kv_head, key);
        sequence.keys.read_key(simd, conversion, at, out, 1);
    }
}

/// Reads the rows `keys` of the values, sorted into columns: vector `i` of the row of key number `j` goes to
/// `out[i * KEYS + j]`. Says whether all values are finite.
#[inline(always)]
pub(super) fn read_values<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    kv_head: usize,
    keys: Range<usize>,
    out: &mut [Vector],
) -> bool {
    let conversion = attention.value_conversion.as_ref();
    let mut watch = simd.splat(0.0);
    for (j, key) in keys.enumerate() {
        let (at, out) = ((kv_head, key), &mut out[j..]);
        sequence
            .keys
            .read_value(simd, conversion, at, out, KEYS, &mut watch);
    }
    let mut watched = [0.0; WIDTH];
    simd.store(watch, &mut watched);
    watched.iter().all(|product| *product == 0.0)
}

/// Reads the mask bytes of a row, if there are a mask tensor and such a row.
#[inline(always)]
pub(super) fn read_mask<'a, T: Element>(
    attention: &Attention<T>,
    sequence: &Sequence<T>,
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

/// Reads the position bias of a row that exists, if there is one. Says whether there
/// is one.
#[inline(always)]
pub(super) fn read_bias<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
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
