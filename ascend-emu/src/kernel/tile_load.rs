//! Loading tiles of keys and values: rows are widened to single precision, and quantised rows dequantised.

use super::TILE_KEYS;
use super::attention::Attention;
use super::dequantise::Quantisation;
use super::kv::KvTensor;
use super::kv::tile_rows::{StridedRows, TileRow, TileRows};
use super::sequence::Sequence;
use super::simd::{Kernel, Simd, Vector, WIDTH, all_zero};
use super::tensor::input::{InPlaceElement, InputTensor};
use half::{bf16, f16};
use std::ops::Range;

/// Prefetch distance within a segment, in rows.
const PREFETCH_DISTANCE: usize = 8;

/// Vectors of a row in a slice. A loaded tile is stored in slices along the head dimension: first the first `SLICE`
/// vectors of every row, then the next `SLICE`. The rows of a slice are a constant distance apart, whatever the head
/// dimension.
pub(crate) const SLICE: usize = 8;

/// Vectors from row to row of a slice. The number is odd, because rows a power of two apart fall into the same cache
/// set.
pub(crate) const PITCH: usize = SLICE + 1;

/// Number of vectors in a tile that is stored in slices, for rows of `vectors` vectors.
pub(crate) fn tile_vectors(vectors: usize) -> usize {
    vectors.div_ceil(SLICE) * TILE_KEYS * PITCH
}

/// Index of vector `i` of row `j` in a tile that is stored in slices.
#[inline(always)]
pub(crate) fn tile_index(j: usize, i: usize) -> usize {
    i / SLICE * (TILE_KEYS * PITCH) + j * PITCH + i % SLICE
}

/// Vectors from row to row of a buffer of whole rows of `vectors` vectors; odd, like [`PITCH`].
#[inline(always)]
pub(crate) fn stride(vectors: usize) -> usize {
    vectors | 1
}

/// The destination of loaded rows.
pub(crate) enum Destination<'a> {
    /// Whole rows, a [`stride`] apart.
    Rows(&'a mut [Vector]),
    /// In slices, from row `first` of the tile on. `row` is a buffer for one row.
    Tile { tile: &'a mut [Vector], first: usize, row: &'a mut [Vector] },
}

/// The rows of a KV tile to load.
#[derive(Clone, Debug)]
pub(crate) struct TileLoad<'a> {
    pub(crate) attention: &'a Attention,
    pub(crate) sequence: &'a Sequence,
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
    /// Whether to check that all elements are finite.
    pub(crate) check_finite: bool,
}

impl TileLoad<'_> {
    /// Loads the keys. With `check_finite`, returns whether all of them are finite.
    #[inline(always)]
    pub(crate) fn keys<S: Simd>(&self, simd: S, destination: Destination<'_>) -> bool {
        simd.outline(LoadRows {
            load: self,
            tensor: &self.sequence.kv.key,
            quantisation: self.attention.key_quantisation.as_ref(),
            vectors: self.attention.vectors(),
            destination,
        })
    }

    /// Loads the values. With `check_finite`, returns whether all of them are finite.
    #[inline(always)]
    pub(crate) fn values<S: Simd>(&self, simd: S, destination: Destination<'_>) -> bool {
        simd.outline(LoadRows {
            load: self,
            tensor: &self.sequence.kv.value,
            quantisation: self.attention.value_quantisation.as_ref(),
            vectors: self.attention.columns(),
            destination,
        })
    }
}

/// Loads the rows of a tile from one tensor. With `check_finite`, returns whether all elements are finite.
struct LoadRows<'a> {
    load: &'a TileLoad<'a>,
    tensor: &'a KvTensor,
    quantisation: Option<&'a Quantisation>,
    vectors: usize,
    destination: Destination<'a>,
}

impl Destination<'_> {
    /// The places of vector `i` of row `j` and of the vectors after it, up to the end of the slice, for rows of
    /// `vectors` vectors.
    #[inline(always)]
    fn places(&mut self, vectors: usize, j: usize, i: usize) -> &mut [Vector] {
        let (all, first) = match self {
            Destination::Rows(rows) => (&mut **rows, j * stride(vectors) + i),
            Destination::Tile { tile, first, .. } => (&mut **tile, tile_index(*first + j, i)),
        };
        &mut all[first..][..(SLICE - i % SLICE).min(vectors - i)]
    }

    /// Widens rows, from row `first_row` and vector `first` on, where whole rows have `vectors` vectors. Adds NaN to
    /// `nonfinite`, if it is given, where an element is not finite.
    #[inline(always)]
    pub(crate) fn widen<T: InPlaceElement, S: Simd>(
        &mut self,
        simd: S,
        rows: StridedRows<T>,
        vectors: usize,
        (first_row, first): (usize, usize),
        mut nonfinite: Option<&mut S::Register>,
    ) {
        let mut own = simd.splat(0.0);
        let prefetch = rows.to_prefetch();
        for j in 0..rows.count() {
            prefetch.prefetch_row(j + PREFETCH_DISTANCE);
            let row = rows.row(j);
            let mut i = 0;
            while i < row.vectors() {
                let places = self.places(vectors, first_row + j, first + i);
                let count = places.len().min(row.vectors() - i);
                for (k, place) in places[..count].iter_mut().enumerate() {
                    simd.store(row.at(simd, i + k), place);
                }
                if nonfinite.is_some() {
                    for value in &places[..count] {
                        own = simd.mul_add(simd.load(value), simd.splat(0.0), own);
                    }
                }
                i += count;
            }
        }
        if let Some(nonfinite) = &mut nonfinite {
            **nonfinite = simd.add(**nonfinite, own);
        }
    }
}

impl LoadRows<'_> {
    /// Loads the segment that begins with row number `done`, if it is whole vectors of `T`. Returns its number of
    /// rows.
    #[inline(always)]
    fn load_segment<T: InPlaceElement, S: Simd>(
        &self,
        simd: S,
        destination: &mut Destination<'_>,
        done: usize,
        nonfinite: &mut S::Register,
    ) -> Option<usize> {
        let (tensor, head) = (self.tensor, self.load.kv_head);
        let (kv, rows) = (&self.load.sequence.kv, &self.load.rows);
        let keys = rows.start + done..rows.end;
        let found = kv.rows_in_place::<T>(tensor, head, keys.clone())?;
        let count = found.rows.count();
        if kv.is_listed() {
            let distant = |key: usize| keys.end.min(key + PREFETCH_DISTANCE);
            for key in distant(keys.start)..distant(keys.start + count.min(PREFETCH_DISTANCE)) {
                if let Some(next) = kv.rows_in_place::<T>(tensor, head, key..key + 1) {
                    next.all().for_each(|rows| rows.to_prefetch().prefetch_row(0));
                }
            }
        }
        let mut widen = |rows, first| {
            let nonfinite = self.load.check_finite.then_some(&mut *nonfinite);
            destination.widen(simd, rows, self.vectors, (done, first), nonfinite);
        };
        if tensor.rope.is_some() {
            widen(found.rope?, tensor.dim / WIDTH);
        }
        widen(found.rows, 0);
        Some(count)
    }

    /// Loads row number `j`, of any type and storage.
    #[inline(always)]
    fn load_row<S: Simd>(&self, simd: S, destination: &mut Destination<'_>, j: usize, nonfinite: &mut S::Register) {
        let row = (self.load.kv_head, self.load.rows.start + j);
        let out = match destination {
            Destination::Rows(rows) => &mut rows[j * stride(self.vectors)..],
            Destination::Tile { row, .. } => &mut **row,
        };
        let kv = &self.load.sequence.kv;
        kv.read(simd, self.tensor, self.quantisation, row, (out, 1), nonfinite);
        if let Destination::Tile { tile, first, row } = destination {
            for (slice, from) in row[..self.vectors].chunks(SLICE).enumerate() {
                let to = tile_index(*first + j, slice * SLICE);
                tile[to..][..from.len()].copy_from_slice(from);
            }
        }
    }
}

impl Kernel for LoadRows<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> bool {
        let mut nonfinite = simd.splat(0.0);
        let mut destination = std::mem::replace(&mut self.destination, Destination::Rows(&mut []));
        let mut done = 0;
        while done < self.load.rows.len() {
            let loaded = match (self.quantisation, &self.tensor.own) {
                (Some(_), _) => None,
                (None, InputTensor::F16(_)) => {
                    self.load_segment::<f16, S>(simd, &mut destination, done, &mut nonfinite)
                }
                (None, InputTensor::Bf16(_)) => {
                    self.load_segment::<bf16, S>(simd, &mut destination, done, &mut nonfinite)
                }
                (None, _) => self.load_segment::<f32, S>(simd, &mut destination, done, &mut nonfinite),
            };
            done += match loaded {
                Some(rows) => rows,
                None => {
                    self.load_row(simd, &mut destination, done, &mut nonfinite);
                    1
                }
            };
        }
        all_zero(simd, nonfinite)
    }
}
