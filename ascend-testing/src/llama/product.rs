//! Products of matrices, by the crate `matrixmultiply`.

use std::ops::Range;

use matrixmultiply::{dgemm, sgemm};

/// A matrix in borrowed numbers: element `(i, j)` has the index `i * row + j * column`.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    numbers: &'a [T],
    rows: usize,
    columns: usize,
    row: usize,
    column: usize,
}

impl<'a, T> View<'a, T> {
    /// Rows of `columns` numbers, one behind the other.
    pub fn rows_of(columns: usize, numbers: &'a [T]) -> Self {
        Self { numbers, rows: numbers.len() / columns, columns, row: columns, column: 1 }
    }

    /// Some of its columns.
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start < columns.end && columns.end <= self.columns);
        Self { numbers: &self.numbers[columns.start * self.column..], columns: columns.len(), ..self }
    }

    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, row: self.column, column: self.row, ..self }
    }

    /// Whether every element is one of the numbers.
    fn is_whole(&self) -> bool {
        let last = self.rows.wrapping_sub(1) * self.row + self.columns.wrapping_sub(1) * self.column;
        self.rows > 0 && self.columns > 0 && last < self.numbers.len()
    }
}

/// A function of `matrixmultiply`: sizes, factor, two matrices with their strides, factor, the result with its strides.
type Gemm<T> =
    unsafe fn(usize, usize, usize, T, *const T, isize, isize, *const T, isize, isize, T, *mut T, isize, isize);

/// Numbers that there is a product for.
pub trait Real: Copy {
    const ZERO: Self;
    const ONE: Self;
    const GEMM: Gemm<Self>;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const GEMM: Gemm<Self> = sgemm;
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const GEMM: Gemm<Self> = dgemm;
}

/// The product, row by row.
pub fn product<T: Real>(a: View<'_, T>, b: View<'_, T>) -> Vec<T> {
    assert!(a.is_whole() && b.is_whole() && a.columns == b.rows);
    let mut out = vec![T::ZERO; a.rows * b.columns];
    let [a_row, a_column, b_row, b_column, width] =
        [a.row, a.column, b.row, b.column, b.columns].map(|stride| stride as isize);
    // SAFETY: the elements of both matrices are within their numbers, as was just checked; `out` has a place for each
    // element of the product.
    unsafe {
        T::GEMM(
            a.rows,
            a.columns,
            b.columns,
            T::ONE,
            a.numbers.as_ptr(),
            a_row,
            a_column,
            b.numbers.as_ptr(),
            b_row,
            b_column,
            T::ZERO,
            out.as_mut_ptr(),
            width,
            1,
        );
    }
    out
}
