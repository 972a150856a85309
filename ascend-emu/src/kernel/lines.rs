//! Rows of a tile where they lie, for kernels that read each of them once or twice only.

use super::element::Element;
use super::factors::OfHead;
use super::requests::Upcoming;
use super::simd::{Simd, Vector, WIDTH};

/// What a kernel reads a tile's rows from.
pub(super) trait Rows: Copy {
    /// One of them.
    type Row: Row;

    /// Bytes that a vector takes where it lies.
    const BYTES: usize;

    /// Row `j`.
    #[inline(always)]
    fn row(self, j: usize) -> Self::Row {
        let [row] = self.rows(j);
        row
    }

    /// So many rows from `j` on.
    fn rows<const COUNT: usize>(self, j: usize) -> [Self::Row; COUNT];

    /// The same rows from vector `i` on.
    fn from(self, i: usize) -> Self;

    /// The rows from row `j` on.
    fn after(self, j: usize) -> Self;
}

/// A row, read vector by vector.
pub(super) trait Row: Copy {
    /// How many vectors it has.
    fn vectors(self) -> usize;

    /// Vector `i`.
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register;
}

/// Rows of whole vectors of elements of one type, a constant pitch apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines<T> {
    first: *const T,
    /// Elements from each row to the next.
    pitch: isize,
    count: usize,
    vectors: usize,
}

impl<T: Element> Lines<T> {
    /// `count` rows of so many vectors, each `pitch` elements behind the one before.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the vectors of each of these rows may be read. No alignment is assumed.
    pub(super) unsafe fn new(first: *const T, pitch: isize, count: usize, vectors: usize) -> Self {
        Lines {
            first,
            pitch,
            count,
            vectors,
        }
    }

    /// How many rows there are.
    pub(super) fn count(self) -> usize {
        self.count
    }

    /// The same rows, to ask for.
    pub(super) fn upcoming(self) -> Upcoming {
        Upcoming::new(self.first, self.pitch, self.count, self.vectors * WIDTH)
    }

    #[inline(always)]
    fn address(self, j: usize) -> *const T {
        self.first
            .wrapping_offset(self.pitch.wrapping_mul(j as isize))
    }
}

/// A row of [`Lines`]: its first element, and how many vectors may be read from there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line<T> {
    first: *const T,
    vectors: usize,
}

impl<T: Element> Rows for Lines<T> {
    type Row = Line<T>;

    const BYTES: usize = size_of::<[T; WIDTH]>();

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [Line<T>; COUNT] {
        assert!(j < self.count && COUNT <= self.count - j, "no such row");
        let mut lines = [Line {
            first: self.first,
            vectors: self.vectors,
        }; COUNT];
        for (i, line) in lines.iter_mut().enumerate() {
            line.first = self.address(j + i);
        }
        lines
    }

    #[inline(always)]
    fn from(self, i: usize) -> Self {
        assert!(i <= self.vectors, "no such vector");
        Lines {
            first: self.first.wrapping_add(i * WIDTH),
            vectors: self.vectors - i,
            ..self
        }
    }

    #[inline(always)]
    fn after(self, j: usize) -> Self {
        assert!(j <= self.count, "no such row");
        Lines {
            first: self.address(j),
            count: self.count - j,
            ..self
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
        // SAFETY: the row is one of its lines', so its vectors may be read.
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
pub(super) struct Converted<'a, T, H> {
    pub(super) lines: Lines<T>,
    pub(super) of_head: H,
    /// Scale and offset of each row.
    pub(super) of_rows: &'a [(f32, f32)],
}

/// A row of [`Converted`].
#[derive(Clone, Copy, Debug)]
pub(super) struct ConvertedLine<T, H> {
    line: Line<T>,
    of_head: H,
    of_row: (f32, f32),
}

impl<T: Element, H: OfHead> Rows for Converted<'_, T, H> {
    type Row = ConvertedLine<T, H>;

    const BYTES: usize = Lines::<T>::BYTES;

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [ConvertedLine<T, H>; COUNT] {
        let lines: [Line<T>; COUNT] = self.lines.rows(j);
        let of_rows = &self.of_rows[j..][..COUNT];
        let mut converted = [ConvertedLine {
            line: lines[0],
            of_head: self.of_head,
            of_row: (0.0, 0.0),
        }; COUNT];
        for (i, line) in converted.iter_mut().enumerate() {
            line.line = lines[i];
            line.of_row = of_rows[i];
        }
        converted
    }

    #[inline(always)]
    fn from(self, i: usize) -> Self {
        Converted {
            lines: self.lines.from(i),
            of_head: self.of_head.from(i),
            ..self
        }
    }

    #[inline(always)]
    fn after(self, j: usize) -> Self {
        Converted {
            lines: self.lines.after(j),
            of_rows: &self.of_rows[j..],
            ..self
        }
    }
}

impl<T: Element, H: OfHead> Row for ConvertedLine<T, H> {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.line.vectors().min(self.of_head.vectors())
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
    /// The vector of each row that counts as the first.
    pub(super) first: usize,
}

impl<'a> Rows for Fetched<'a> {
    type Row = &'a [Vector];

    const BYTES: usize = size_of::<Vector>();

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [&'a [Vector]; COUNT] {
        let all = &self.vectors[j * self.row..][..COUNT * self.row];
        let mut rows = [all; COUNT];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &all[i * self.row..][self.first..self.row];
        }
        rows
    }

    #[inline(always)]
    fn from(self, i: usize) -> Self {
        Fetched {
            first: self.first + i,
            ..self
        }
    }

    #[inline(always)]
    fn after(self, j: usize) -> Self {
        Fetched {
            vectors: &self.vectors[j * self.row..],
            ..self
        }
    }
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
