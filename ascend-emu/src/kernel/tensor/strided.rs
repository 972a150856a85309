//! Strided tensors of one element type, read and written by the row.
//!
//! Each row is checked against the sizes that the caller vouched for. No reference to a tensor's memory is ever
//! formed: the addresses come from C programs, so they need not be aligned, and other streams of a faulty program may
//! write the memory while it is read.

use super::Element;
use crate::kernel::simd::{Simd, Vector, WIDTH};
use ascend_spec::attention_problem::Rows;
use ascend_spec::{Extents, View};
use std::ops::Range;

/// Sizes of a tensor's logical axes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
}

impl Sizes {
    /// No elements along any axis.
    pub(crate) const NONE: Sizes = Sizes { batch: 0, heads: 0, rows: 0, dim: 0 };

    /// These sizes as [`Extents`].
    fn extents(self) -> Extents {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        Extents { batch: count(self.batch), heads: count(self.heads), rows: count(self.rows), dim: count(self.dim) }
    }
}

impl From<Extents> for Sizes {
    fn from(extents: Extents) -> Self {
        let count = |n: i64| usize::try_from(n).unwrap_or(0);
        Sizes {
            batch: count(extents.batch),
            heads: count(extents.heads),
            rows: count(extents.rows),
            dim: count(extents.dim),
        }
    }
}

/// A tensor whose rows are placed by a [`View`].
#[derive(Debug)]
pub(crate) struct StridedTensor<T> {
    base: *mut T,
    view: View,
    /// Number of contiguous elements in an NZ cache, a multiple of [`WIDTH`]; 0 for rows that are not cut into
    /// fractals.
    lanes: usize,
    sizes: Sizes,
    /// Whether the elements of a vector are contiguous.
    dense: bool,
}

impl<T> Clone for StridedTensor<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for StridedTensor<T> {}

// SAFETY: the type only computes addresses. Types that access them have a contract for every thread.
unsafe impl<T> Send for StridedTensor<T> {}
// SAFETY: the type only computes addresses. Types that access them have a contract for every thread.
unsafe impl<T> Sync for StridedTensor<T> {}

impl<T> StridedTensor<T> {
    pub(crate) fn new(base: *mut u8, rows: &Rows, sizes: Sizes) -> Self {
        let view = rows.view;
        let lanes = if rows.lanes.is_multiple_of(WIDTH) && sizes.dim.is_multiple_of(WIDTH) { rows.lanes } else { 0 };
        // A view that reaches outside of the address space has no rows.
        let bytes = |elements: u64| elements.checked_mul(size_of::<T>() as u64);
        let runs = Sizes { dim: sizes.dim.checked_div(lanes).unwrap_or(sizes.dim), ..sizes };
        let last = view.elements(runs.extents()).and_then(|range| range.end.checked_add(lanes as u64)).and_then(bytes);
        let fits = last.is_some_and(|last| isize::try_from(last).is_ok()) && lanes == rows.lanes;
        let sizes = if fits { sizes } else { Sizes { rows: 0, ..sizes } };
        StridedTensor { base: base.cast(), view, lanes, sizes, dense: view.dim == 1 || sizes.dim == 1 || lanes > 0 }
    }

    pub(crate) fn base(&self) -> *mut T {
        self.base
    }

    pub(crate) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Whether row `i` of both tensors begins at the same element for every `i`, with the same strides.
    pub(crate) fn coincides(&self, other: &Self) -> bool {
        self.base == other.base && self.view == other.view && self.lanes == other.lanes
    }

    /// Whether no two elements share memory. The answer is `false` where strides interleave, even if no elements
    /// overlap.
    fn is_disjoint(&self) -> bool {
        let Sizes { batch, heads, rows, dim } = self.sizes;
        let view = &self.view;
        disjoint([(batch, view.batch), (heads, view.head), (rows, view.row), (dim, view.dim)])
    }

    /// Whether the elements of a vector are contiguous.
    pub(crate) fn is_dense(&self) -> bool {
        self.dense
    }

    /// Offset of the first element of a row.
    ///
    /// # Panics
    /// If the row does not exist.
    #[inline(always)]
    pub(crate) fn first(&self, (batch, head, row): (usize, usize, usize)) -> isize {
        let Sizes { batch: batches, heads, rows, .. } = self.sizes;
        assert!(batch < batches && head < heads && row < rows, "no such row");
        self.view.at(batch, head, row) as isize
    }

    /// Offset of element `d` from the first element of its row.
    #[inline(always)]
    pub(crate) fn column(&self, d: usize) -> isize {
        let (d, lanes) = (d as isize, self.lanes as isize);
        let stride = self.view.dim as isize;
        if lanes == 0 { stride.wrapping_mul(d) } else { stride.wrapping_mul(d / lanes).wrapping_add(d % lanes) }
    }

    /// Address of the first element of a row, which must exist.
    #[inline(always)]
    fn row(&self, row: (usize, usize, usize)) -> *mut T {
        self.base.wrapping_offset(self.first(row))
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadTensor<T>(StridedTensor<T>);

impl<T: Element> ReadTensor<T> {
    /// The tensor at `base`.
    ///
    /// # Safety
    ///
    /// As long as the value is used, every element of `rows` within `sizes`, counted from `base`, may be read.
    pub(crate) unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes) -> Self {
        ReadTensor(StridedTensor::new(base.cast_mut(), rows, sizes))
    }

    pub(crate) fn sizes(&self) -> Sizes {
        self.0.sizes
    }

    /// Whether row `i` of both tensors begins at the same element for every `i`, with the same strides.
    pub(crate) fn coincides(&self, other: &Self) -> bool {
        self.0.coincides(&other.0)
    }

    /// The address of a row, and the number of elements from each row to the next. Returns `None` unless `count` rows
    /// from it on exist and each is whole vectors whose elements are contiguous.
    #[inline(always)]
    pub(crate) fn rows_in_place(
        &self,
        (batch, head, row): (usize, usize, usize),
        count: usize,
    ) -> Option<(*const T, isize)> {
        let sizes = self.0.sizes;
        let exist = row < sizes.rows && count <= sizes.rows - row;
        let whole = sizes.dim.is_multiple_of(WIDTH);
        let dense = self.0.view.dim == 1 && self.0.lanes == 0;
        let first = || self.0.row((batch, head, row)).cast_const();
        (exist && whole && dense).then(|| (first(), self.0.view.row as isize))
    }

    /// Widens the elements `columns` of a row: vector `i` of them goes to `out[i * step]`, the last one padded with
    /// zeros. Adds NaN to `nonfinite` if an element is not finite.
    #[inline(always)]
    pub(crate) fn read<S: Simd>(
        &self,
        simd: S,
        row: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
        nonfinite: &mut S::Register,
    ) {
        assert!(columns.end <= self.0.sizes.dim, "no such column");
        let first = self.0.row(row).cast_const();
        let mut left = columns.clone();
        let mut out = out.iter_mut().step_by(step);
        if self.0.view.dim == 1 && self.0.lanes == 0 {
            // The common case has a tight loop of its own.
            let whole = columns.len() / WIDTH;
            let first = first.wrapping_add(columns.start);
            for (i, out) in (0..whole).zip(&mut out) {
                // SAFETY: `row` checked that the row exists; the vector is within its elements, which are
                // contiguous and readable by the contract of `new`. No alignment is assumed.
                let values = unsafe { first.wrapping_add(i * WIDTH).cast::<[T; WIDTH]>().read_unaligned() };
                widen(simd, &values, out, nonfinite);
            }
            left.start += whole * WIDTH;
        }
        for (column, out) in left.clone().step_by(WIDTH).zip(out) {
            let values = if self.0.dense && column + WIDTH <= left.end {
                // SAFETY: the row exists, and the vector is within its elements: fractals hold whole vectors, and
                // `columns` starts at one.
                unsafe { first.wrapping_offset(self.0.column(column)).cast::<[T; WIDTH]>().read_unaligned() }
            } else {
                let mut values = [T::ZERO; WIDTH];
                for (value, d) in values.iter_mut().zip(column..left.end) {
                    // SAFETY: `row` checked that the row exists, and it has element `d`.
                    *value = unsafe { first.wrapping_offset(self.0.column(d)).read_unaligned() };
                }
                values
            };
            widen(simd, &values, out, nonfinite);
        }
    }
}

/// Widens a vector into `out`. Adds NaN to `nonfinite` if an element is not finite.
#[inline(always)]
fn widen<T: Element, S: Simd>(simd: S, values: &[T; WIDTH], out: &mut Vector, nonfinite: &mut S::Register) {
    let wide = T::widen(simd, values);
    *nonfinite = simd.mul_add(wide, simd.splat(0.0), *nonfinite);
    simd.store(wide, out);
}

/// A tensor that is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteTensor<T>(StridedTensor<T>);

impl<T: Element> WriteTensor<T> {
    /// The tensor at `base`.
    ///
    /// # Safety
    ///
    /// As long as the value is used, every element of `rows` within `sizes`, counted from `base`, may be written, and
    /// no other code reads or writes them. If the tensor is not disjoint, only one thread at a time writes.
    pub(crate) unsafe fn new(base: *mut u8, rows: &Rows, sizes: Sizes) -> Self {
        WriteTensor(StridedTensor::new(base, rows, sizes))
    }

    /// Whether no two elements share memory, so that threads may write different rows at once.
    pub(crate) fn is_disjoint(&self) -> bool {
        self.0.is_disjoint()
    }

    /// Number of elements in a row.
    pub(crate) fn dim(&self) -> usize {
        self.0.sizes.dim
    }

    /// Writes one row, rounded to the element type.
    #[inline(always)]
    pub(crate) fn write_row<S: Simd>(&self, simd: S, row: (usize, usize, usize), values: &[Vector]) {
        let first = self.0.row(row);
        let dim = self.dim();
        for (i, values) in values.iter().take(dim.div_ceil(WIDTH)).enumerate() {
            let column = i * WIDTH;
            let narrow = T::narrow(simd, simd.load(values));
            if self.0.dense && column + WIDTH <= dim {
                // SAFETY: `row` checked that the row exists; the vector is within its `dim` elements, all writable
                // by the contract of `new`. No alignment is assumed.
                unsafe { first.wrapping_add(column).cast::<[T; WIDTH]>().write_unaligned(narrow) };
            } else {
                let stride = self.0.view.dim as isize;
                for (value, d) in narrow.iter().zip(column..dim) {
                    // SAFETY: `row` checked that the row exists, and it has element `d`.
                    unsafe {
                        first.wrapping_offset(stride.wrapping_mul(d as isize)).write_unaligned(*value);
                    }
                }
            }
        }
    }
}

/// Whether no two elements of a tensor with these sizes and strides share memory. The answer is `false` where strides
/// interleave, even if no elements overlap.
pub(crate) fn disjoint(mut axes: [(usize, i64); 4]) -> bool {
    axes.sort_by_key(|&(_, stride)| stride.unsigned_abs());
    let mut reach = 0u64;
    for (size, stride) in axes.into_iter().filter(|&(size, _)| size > 1) {
        let stride = stride.unsigned_abs();
        if stride <= reach {
            return false;
        }
        reach = reach.saturating_add(stride.saturating_mul(size as u64 - 1));
    }
    true
}
