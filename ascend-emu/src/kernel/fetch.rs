//! Tiles of keys and values, fetched: widened to single precision, stored integers as the values they mean.

use super::attention::{Attention, Sequence};
use super::factors::Conversion;
use super::keys::Part;
use super::lines::{Lines, Row, Rows};
use super::simd::{Kernel, Simd, Vector, WIDTH, all_zero};
use super::source::{Source, Stored};
use super::tile::KEYS;
use half::{bf16, f16};
use std::ops::Range;

/// Rows that are asked for before they are read.
const AHEAD: usize = 8;

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

/// Where a tile, cut into stretches, has vector `i` of row `j`.
#[inline(always)]
pub(super) fn place(j: usize, i: usize) -> usize {
    i / STRETCH * (KEYS * PITCH) + j * PITCH + i % STRETCH
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

/// Rows of keys, and of their values, to read.
#[derive(Clone, Debug)]
pub(super) struct Fetch<'a> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) kv_head: usize,
    pub(super) rows: Range<usize>,
    /// Whether to look if all elements are finite.
    pub(super) with_care: bool,
}

impl Fetch<'_> {
    /// Reads the keys. With care, says whether all are finite.
    #[inline(always)]
    pub(super) fn keys<S: Simd>(&self, simd: S, places: Places<'_>) -> bool {
        simd.apart(ReadRows {
            fetch: self,
            part: &self.sequence.keys.key,
            conversion: self.attention.key_conversion.as_ref(),
            vectors: self.attention.vectors(),
            places,
        })
    }

    /// Reads the values. With care, says whether all are finite.
    #[inline(always)]
    pub(super) fn values<S: Simd>(&self, simd: S, places: Places<'_>) -> bool {
        simd.apart(ReadRows {
            fetch: self,
            part: &self.sequence.keys.value,
            conversion: self.attention.value_conversion.as_ref(),
            vectors: self.attention.columns(),
            places,
        })
    }
}

/// Rows of one kind to read; with care, says whether all elements are finite.
struct ReadRows<'a> {
    fetch: &'a Fetch<'a>,
    part: &'a Part,
    conversion: Option<&'a Conversion>,
    vectors: usize,
    places: Places<'a>,
}

impl Places<'_> {
    /// The places of vector `i` of row `j`, of rows that take so many, and of those that follow it up to the end of the
    /// stretch.
    #[inline(always)]
    fn run(&mut self, vectors: usize, j: usize, i: usize) -> &mut [Vector] {
        let (all, first) = match self {
            Places::Rows(rows) => (&mut **rows, j * stride(vectors) + i),
            Places::Tile { tile, first, .. } => (&mut **tile, place(*first + j, i)),
        };
        &mut all[first..][..(STRETCH - i % STRETCH).min(vectors - i)]
    }
}

impl ReadRows<'_> {
    /// Reads the rows from number `done` on that lie a constant pitch apart, if they are whole vectors of type `T`. Gives how
    /// many they are.
    #[inline(always)]
    fn stream<T: Stored, S: Simd>(
        &self,
        simd: S,
        places: &mut Places<'_>,
        done: usize,
        watch: &mut S::Register,
    ) -> Option<usize> {
        let (part, head) = (self.part, self.fetch.kv_head);
        let (of, rows) = (&self.fetch.sequence.keys, &self.fetch.rows);
        let rows = rows.start + done..rows.end;
        let lines = of.lines::<T>(part, head, rows.clone())?;
        if let Some(rope) = &part.rope {
            let rope = of.rope_lines::<T>(rope, head, rows.start..rows.start + lines.count())?;
            if rope.count() < lines.count() {
                return None;
            }
            self.widen(simd, places, rope, (done, part.dim / WIDTH), watch);
        }
        self.widen(simd, places, lines, (done, 0), watch);
        Some(lines.count())
    }

    /// Widens rows into their places, from row `first_row` and vector `first` on.
    #[inline(always)]
    fn widen<T: Stored, S: Simd>(
        &self,
        simd: S,
        places: &mut Places<'_>,
        rows: Lines<T>,
        (first_row, first): (usize, usize),
        watch: &mut S::Register,
    ) {
        let mut own = *watch;
        let upcoming = rows.upcoming();
        for j in 0..rows.count() {
            upcoming.ask_for(j + AHEAD);
            let row = rows.row(j);
            let mut i = 0;
            while i < row.vectors() {
                let run = places.run(self.vectors, first_row + j, first + i);
                let count = run.len().min(row.vectors() - i);
                for (k, place) in run[..count].iter_mut().enumerate() {
                    simd.store(row.at(simd, i + k), place);
                }
                if self.fetch.with_care {
                    for value in &run[..count] {
                        own = simd.mul_add(simd.load(value), simd.splat(0.0), own);
                    }
                }
                i += count;
            }
        }
        *watch = own;
    }

    /// Reads row number `j`, whatever it is.
    #[inline(always)]
    fn fetch<S: Simd>(&self, simd: S, places: &mut Places<'_>, j: usize, watch: &mut S::Register) {
        let at = (self.fetch.kv_head, self.fetch.rows.start + j);
        let out = match places {
            Places::Rows(rows) => &mut rows[j * stride(self.vectors)..],
            Places::Tile { row, .. } => &mut **row,
        };
        let of = &self.fetch.sequence.keys;
        of.read(simd, self.part, self.conversion, at, (out, 1), watch);
        if let Places::Tile { tile, first, row } = places {
            for (stretch, from) in row[..self.vectors].chunks(STRETCH).enumerate() {
                let to = place(*first + j, stretch * STRETCH);
                tile[to..][..from.len()].copy_from_slice(from);
            }
        }
    }
}

impl Kernel for ReadRows<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) -> bool {
        let mut watch = simd.splat(0.0);
        let mut places = std::mem::replace(&mut self.places, Places::Rows(&mut []));
        let mut done = 0;
        while done < self.fetch.rows.len() {
            let streamed = match (self.conversion, &self.part.own) {
                (Some(_), _) => None,
                (None, Source::Half(_)) => {
                    self.stream::<f16, S>(simd, &mut places, done, &mut watch)
                }
                (None, Source::Brain(_)) => {
                    self.stream::<bf16, S>(simd, &mut places, done, &mut watch)
                }
                (None, _) => self.stream::<f32, S>(simd, &mut places, done, &mut watch),
            };
            done += match streamed {
                Some(rows) => rows,
                None => {
                    self.fetch(simd, &mut places, done, &mut watch);
                    1
                }
            };
        }
        all_zero(simd, watch)
    }
}
