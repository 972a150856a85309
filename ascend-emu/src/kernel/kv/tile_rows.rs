//! The rows of a tile as the decode kernel reads them: in place in memory, dequantised in registers, or from a buffer.

use crate::kernel::dequantise::in_registers::HeadDequantise;
use crate::kernel::prefetch::PrefetchRows;
use crate::kernel::simd::{Simd, Vector, WIDTH};
use crate::kernel::tensor::Element;

/// The rows of a tile, read vector by vector.
pub(crate) trait TileRows: Copy {
    /// The type of a row.
    type Row: TileRow;

    /// Bytes of a vector in memory.
    const BYTES: usize;

    /// Row number `j`.
    #[inline(always)]
    fn row(self, j: usize) -> Self::Row {
        let [row] = self.rows(j);
        row
    }

    /// `COUNT` rows from number `j` on.
    fn rows<const COUNT: usize>(self, j: usize) -> [Self::Row; COUNT];

    /// These rows without their first `i` vectors.
    fn skip_vectors(self, i: usize) -> Self;

    /// The rows from number `j` on.
    fn after(self, j: usize) -> Self;
}

/// One row of a tile, read vector by vector.
pub(crate) trait TileRow: Copy {
    /// Number of vectors.
    fn vectors(self) -> usize;

    /// Vector number `i`, widened to single precision.
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register;
}

/// A segment of rows in memory: whole vectors of `T`, a constant pitch apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StridedRows<T> {
    first: *const T,
    /// Elements from each row to the next.
    pitch: isize,
    count: usize,
    vectors: usize,
}

impl<T: Element> StridedRows<T> {
    /// Makes `count` rows of `vectors` vectors, each `pitch` elements after the one before.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the vectors of each of these rows may be read. No alignment is assumed.
    pub(crate) unsafe fn new(first: *const T, pitch: isize, count: usize, vectors: usize) -> Self {
        StridedRows { first, pitch, count, vectors }
    }

    /// Number of rows.
    pub(crate) fn count(self) -> usize {
        self.count
    }

    /// These rows, to prefetch.
    pub(crate) fn to_prefetch(self) -> PrefetchRows {
        PrefetchRows::new(self.first, self.pitch, self.count, self.vectors * WIDTH)
    }

    #[inline(always)]
    fn address(self, j: usize) -> *const T {
        self.first.wrapping_offset(self.pitch.wrapping_mul(j as isize))
    }
}

/// A row of [`StridedRows`]: its first element, and the number of vectors that may be read from there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StridedRow<T> {
    first: *const T,
    vectors: usize,
}

impl<T: Element> TileRows for StridedRows<T> {
    type Row = StridedRow<T>;

    const BYTES: usize = size_of::<[T; WIDTH]>();

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [StridedRow<T>; COUNT] {
        assert!(j < self.count && COUNT <= self.count - j, "no such row");
        let mut rows = [StridedRow { first: self.first, vectors: self.vectors }; COUNT];
        for (i, row) in rows.iter_mut().enumerate() {
            row.first = self.address(j + i);
        }
        rows
    }

    #[inline(always)]
    fn skip_vectors(self, i: usize) -> Self {
        assert!(i <= self.vectors, "no such vector");
        StridedRows { first: self.first.wrapping_add(i * WIDTH), vectors: self.vectors - i, ..self }
    }

    #[inline(always)]
    fn after(self, j: usize) -> Self {
        assert!(j <= self.count, "no such row");
        StridedRows { first: self.address(j), count: self.count - j, ..self }
    }
}

impl<T: Element> TileRow for StridedRow<T> {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.vectors
    }

    #[inline(always)]
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register {
        assert!(i < self.vectors, "no such vector");
        // SAFETY: the row comes from `StridedRows`, whose vectors may be read.
        let values = unsafe { self.first.wrapping_add(i * WIDTH).cast::<[T; WIDTH]>().read_unaligned() };
        T::widen(simd, &values)
    }
}

/// Quantised rows in memory, dequantised in registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DequantisedRows<'a, T, H> {
    pub(crate) rows: StridedRows<T>,
    pub(crate) of_head: H,
    /// Scale and offset of each row.
    pub(crate) of_rows: &'a [(f32, f32)],
}

/// A row of [`DequantisedRows`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct DequantisedRow<T, H> {
    row: StridedRow<T>,
    of_head: H,
    of_row: (f32, f32),
}

impl<T: Element, H: HeadDequantise> TileRows for DequantisedRows<'_, T, H> {
    type Row = DequantisedRow<T, H>;

    const BYTES: usize = StridedRows::<T>::BYTES;

    #[inline(always)]
    fn rows<const COUNT: usize>(self, j: usize) -> [DequantisedRow<T, H>; COUNT] {
        let rows: [StridedRow<T>; COUNT] = self.rows.rows(j);
        let of_rows = &self.of_rows[j..][..COUNT];
        let mut dequantised = [DequantisedRow { row: rows[0], of_head: self.of_head, of_row: (0.0, 0.0) }; COUNT];
        for (i, row) in dequantised.iter_mut().enumerate() {
            row.row = rows[i];
            row.of_row = of_rows[i];
        }
        dequantised
    }

    #[inline(always)]
    fn skip_vectors(self, i: usize) -> Self {
        DequantisedRows { rows: self.rows.skip_vectors(i), of_head: self.of_head.skip_vectors(i), ..self }
    }

    #[inline(always)]
    fn after(self, j: usize) -> Self {
        DequantisedRows { rows: self.rows.after(j), of_rows: &self.of_rows[j..], ..self }
    }
}

impl<T: Element, H: HeadDequantise> TileRow for DequantisedRow<T, H> {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.row.vectors().min(self.of_head.vectors())
    }

    #[inline(always)]
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register {
        let stored = self.row.at(simd, i);
        self.of_head.dequantise(simd, stored, i, self.of_row)
    }
}

/// Rows in a buffer: vector `i` of row `j` is number `j * row + i`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedRows<'a> {
    pub(crate) vectors: &'a [Vector],
    pub(crate) row: usize,
    /// Index of the vector that counts as the first of each row.
    pub(crate) first: usize,
}

impl<'a> TileRows for LoadedRows<'a> {
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
    fn skip_vectors(self, i: usize) -> Self {
        LoadedRows { first: self.first + i, ..self }
    }

    #[inline(always)]
    fn after(self, j: usize) -> Self {
        LoadedRows { vectors: &self.vectors[j * self.row..], ..self }
    }
}

impl TileRow for &[Vector] {
    #[inline(always)]
    fn vectors(self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn at<S: Simd>(self, simd: S, i: usize) -> S::Register {
        simd.load(&self[i])
    }
}
