//! The rows of a tile where they lie, for kernels that read each of them once or twice only.

use super::element::Element;
use super::factors::OfHead;
use super::requests::{CACHE_LINE, Near, prefetch};
use super::simd::{Simd, Vector, WIDTH};
use super::tile::KEYS;

/// What a kernel reads a tile's rows from.
pub(super) trait Rows: Copy {
    /// One of them.
    type Row: Row;

    /// Row `j`.
    #[inline(always)]
    fn row(self, j: usize) -> Self::Row {
        let [row] = self.rows(j);
        row
    }

    /// So many rows from `j` on.
    fn rows<const COUNT: usize>(self, j: usize) -> [Self::Row; COUNT];

    /// Asks for row `j`, if there is one, to be brought near.
    fn prefetch(self, j: usize);
}

/// A row, read vector by vector.
pub(super) trait Row: Copy {
    /// How many vectors it has.
    fn vectors(self) -> usize;

    /// Vector `i`.
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register;
}

/// Rows of whole vectors of elements of one type, anywhere in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines<T> {
    rows: [*const T; KEYS],
    count: usize,
    vectors: usize,
}

impl<T: Element> Lines<T> {
    /// Of no rows yet, with so many vectors each.
    pub(super) fn new(vectors: usize) -> Self {
        Lines {
            rows: [std::ptr::null(); KEYS],
            count: 0,
            vectors,
        }
    }

    /// Adds `count` rows, as far as there is room, each `stride` elements behind the one before.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the vectors of each of these rows may be read. No alignment is assumed.
    pub(super) unsafe fn push(&mut self, first: *const T, stride: isize, count: usize) {
        let places = self.rows.get_mut(self.count..).unwrap_or_default();
        let mut row = first;
        for place in places.iter_mut().take(count) {
            *place = row;
            row = row.wrapping_offset(stride);
            self.count += 1;
        }
    }
}

impl<T> Lines<T> {
    /// The address of each row.
    pub(super) fn addresses(&self) -> &[*const T] {
        self.rows.get(..self.count).unwrap_or_default()
    }

    /// The rows, to read. Kernels take these, and not the lines themselves, since what is behind a reference has to be
    /// looked up again after every request for a cache line.
    pub(super) fn view(&self) -> View<'_, T> {
        View {
            rows: self.addresses(),
            vectors: self.vectors,
        }
    }
}

/// Rows of [`Lines`].
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a, T> {
    rows: &'a [*const T],
    vectors: usize,
}

/// A row of a [`View`]: its first element, and how many vectors may be read from there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line<T> {
    first: *const T,
    vectors: usize,
}

impl<T: Element> Rows for View<'_, T> {
    type Row = Line<T>;

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [Line<T>; COUNT] {
        let rows = &self.rows[j..][..COUNT];
        let mut lines = [Line {
            first: std::ptr::null(),
            vectors: self.vectors,
        }; COUNT];
        for (line, first) in lines.iter_mut().zip(rows) {
            line.first = *first;
        }
        lines
    }

    #[inline(always)]
    fn prefetch(self, j: usize) {
        if let Some(row) = self.rows.get(j) {
            for byte in (0..self.vectors * size_of::<[T; WIDTH]>()).step_by(CACHE_LINE) {
                prefetch(Near::First, row.cast::<u8>().wrapping_add(byte));
            }
        }
    }
}

impl<T: Element> Row for Line<T> {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register {
        assert!(i < self.vectors, "no such vector");
        // SAFETY: the row was pushed, so its vectors may be read.
        let values = unsafe {
            self.first
                .wrapping_add(i * WIDTH)
                .cast::<[T; WIDTH]>()
                .read_unaligned()
        };
        T::widen(simd, &values)
    }
}

/// Rows of stored integers, made values in registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Converted<'a, T> {
    pub(super) lines: View<'a, T>,
    pub(super) of_head: OfHead<'a>,
    /// Scale and offset of each row.
    pub(super) of_rows: &'a OfRows,
}

/// A row of [`Converted`].
#[derive(Clone, Copy, Debug)]
pub(super) struct ConvertedLine<'a, T> {
    line: Line<T>,
    of_head: OfHead<'a>,
    of_row: (f32, f32),
}

/// Scale and offset of each row of a tile.
pub(super) type OfRows = [(f32, f32); KEYS];

impl<'a, T: Element> Rows for Converted<'a, T> {
    type Row = ConvertedLine<'a, T>;

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [ConvertedLine<'a, T>; COUNT] {
        let lines: [Line<T>; COUNT] = self.lines.rows(j);
        let mut converted = [ConvertedLine {
            line: lines[0],
            of_head: self.of_head,
            of_row: (0.0, 0.0),
        }; COUNT];
        for (i, line) in converted.iter_mut().enumerate() {
            line.line = lines[i];
            line.of_row = self.of_rows[j + i];
        }
        converted
    }

    #[inline(always)]
    fn prefetch(self, j: usize) {
        self.lines.prefetch(j);
    }
}

impl<T: Element> Row for ConvertedLine<'_, T> {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.line.vectors
    }

    #[inline(always)]
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register {
        let stored = self.line.at(simd, i);
        self.of_head.value(simd, stored, i, self.of_row)
    }
}

/// Rows that were fetched into a buffer: vector `i` of row `j` is number `j * row + i`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetched<'a> {
    pub(super) vectors: &'a [Vector],
    pub(super) row: usize,
}

impl<'a> Rows for Fetched<'a> {
    type Row = &'a [Vector];

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [&'a [Vector]; COUNT] {
        let all = &self.vectors[j * self.row..][..COUNT * self.row];
        let mut rows = [all; COUNT];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &all[i * self.row..][..self.row];
        }
        rows
    }

    #[inline(always)]
    fn prefetch(self, _: usize) {}
}

impl Row for &[Vector] {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register {
        simd.load(&self[i])
    }
}
