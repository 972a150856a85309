//! The edge between raw addresses and the kernels: tensors that are read and written a row at a time, each row checked
//! against the extents that the caller vouched for.
//!
//! No reference to a tensor's memory is ever formed. Addresses come from C programs, so that they need not be aligned,
//! and other streams of a faulty program may write the memory while it is read.

use super::element::Element;
use super::simd::{Simd, Vector, WIDTH};
use ascend_spec::fia::Rows;
use ascend_spec::{Extents, View};
use std::ops::Range;

/// Sizes of a tensor's logical axes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) rows: usize,
    pub(super) dim: usize,
}

impl Sizes {
    /// Nothing along any axis.
    pub(super) const NONE: Sizes = Sizes {
        batch: 0,
        heads: 0,
        rows: 0,
        dim: 0,
    };

    /// As the contract counts them.
    fn extents(self) -> Extents {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        Extents {
            batch: count(self.batch),
            heads: count(self.heads),
            rows: count(self.rows),
            dim: count(self.dim),
        }
    }
}

/// A tensor whose rows lie at the places of a [`View`].
#[derive(Debug)]
pub(super) struct Strided<T> {
    base: *mut T,
    view: View,
    /// Elements that lie side by side in an NZ cache, a multiple of [`WIDTH`]; 0 where a row is not cut into runs.
    lanes: usize,
    sizes: Sizes,
    /// Whether the elements of a vector lie side by side.
    dense: bool,
}

impl<T> Clone for Strided<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Strided<T> {}

impl<T> Strided<T> {
    pub(super) fn new(base: *mut u8, rows: &Rows, sizes: Sizes) -> Self {
        let view = rows.view;
        let lanes = if rows.lanes.is_multiple_of(WIDTH) && sizes.dim.is_multiple_of(WIDTH) {
            rows.lanes
        } else {
            0
        };
        // A view that reaches outside of what an address can name has no rows.
        let bytes = |elements: u64| elements.checked_mul(size_of::<T>() as u64);
        let runs = Sizes {
            dim: sizes.dim.checked_div(lanes).unwrap_or(sizes.dim),
            ..sizes
        };
        let last = view
            .elements(runs.extents())
            .and_then(|range| range.end.checked_add(lanes as u64))
            .and_then(bytes);
        let fits = last.is_some_and(|last| isize::try_from(last).is_ok()) && lanes == rows.lanes;
        let sizes = if fits {
            sizes
        } else {
            Sizes { rows: 0, ..sizes }
        };
        Strided {
            base: base.cast(),
            view,
            lanes,
            sizes,
            dense: view.dim == 1 || sizes.dim == 1 || lanes > 0,
        }
    }

    pub(super) fn base(&self) -> *mut T {
        self.base
    }

    pub(super) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Whether rows of the same number begin at the same element and go on alike.
    fn coincides(&self, other: &Self) -> bool {
        self.base == other.base && self.view == other.view && self.lanes == other.lanes
    }

    /// Whether no two elements share memory. May say no where it is so in an intricate way.
    fn is_disjoint(&self) -> bool {
        let Sizes {
            batch,
            heads,
            rows,
            dim,
        } = self.sizes;
        let view = &self.view;
        let mut axes = [
            (batch, view.batch),
            (heads, view.head),
            (rows, view.row),
            (dim, view.dim),
        ];
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

    /// Whether the elements of a vector lie side by side.
    pub(super) fn is_dense(&self) -> bool {
        self.dense
    }

    /// Number of the first element of a row that exists.
    #[inline(always)]
    pub(super) fn first(&self, (batch, head, row): (usize, usize, usize)) -> isize {
        let Sizes {
            batch: batches,
            heads,
            rows,
            ..
        } = self.sizes;
        assert!(batch < batches && head < heads && row < rows, "no such row");
        self.view.at(batch, head, row) as isize
    }

    /// Elements from the first of a row to number `d`.
    #[inline(always)]
    pub(super) fn column(&self, d: usize) -> isize {
        let (d, lanes) = (d as isize, self.lanes as isize);
        let stride = self.view.dim as isize;
        if lanes == 0 {
            stride.wrapping_mul(d)
        } else {
            stride.wrapping_mul(d / lanes).wrapping_add(d % lanes)
        }
    }

    /// Address of the first element of a row that exists.
    #[inline(always)]
    fn row(&self, at: (usize, usize, usize)) -> *mut T {
        self.base.wrapping_offset(self.first(at))
    }
}

/// A tensor that is read, of elements of one type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain<T>(Strided<T>);

// SAFETY: the address is only read through, and whoever made the value vouches for that on any thread.
unsafe impl<T: Element> Send for Plain<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Plain<T> {}

impl<T: Element> Plain<T> {
    /// # Safety
    ///
    /// As long as the value is used, every element of `rows` within `sizes`, counted from `base`, may be read.
    pub(super) unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes) -> Self {
        Plain(Strided::new(base.cast_mut(), rows, sizes))
    }

    pub(super) fn sizes(&self) -> Sizes {
        self.0.sizes
    }

    /// Whether rows of the same number begin at the same element and go on alike.
    pub(super) fn coincides(&self, other: &Self) -> bool {
        self.0.coincides(&other.0)
    }

    /// Address of a row, and elements from each to the next, where `count` rows from it on exist and the elements of a row
    /// lie side by side and make whole vectors.
    #[inline(always)]
    pub(super) fn lines(
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

    /// Widens the elements `columns` of one row: vector number `i` of them goes to `out[i * step]`, filled up with
    /// zeros. Leaves a NaN in `watch`, which holds zeros, if an element is not finite.
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
        watch: &mut S::Register,
    ) {
        assert!(columns.end <= self.0.sizes.dim, "no such column");
        let first = self.0.row(at).cast_const();
        let mut left = columns.clone();
        let mut out = out.iter_mut().step_by(step);
        if self.0.view.dim == 1 && self.0.lanes == 0 {
            // The common case, tight.
            let whole = columns.len() / WIDTH;
            let first = first.wrapping_add(columns.start);
            for (i, out) in (0..whole).zip(&mut out) {
                // SAFETY: `row` checked that the row exists; the vector lies within its elements, which lie side by
                // side and are readable by the contract of `new`. No alignment is assumed.
                let values = unsafe {
                    first
                        .wrapping_add(i * WIDTH)
                        .cast::<[T; WIDTH]>()
                        .read_unaligned()
                };
                put(simd, &values, out, watch);
            }
            left.start += whole * WIDTH;
        }
        for (at, out) in left.clone().step_by(WIDTH).zip(out) {
            let values = if self.0.dense && at + WIDTH <= left.end {
                // SAFETY: as above; runs are whole vectors, and nobody starts in between.
                unsafe {
                    first
                        .wrapping_offset(self.0.column(at))
                        .cast::<[T; WIDTH]>()
                        .read_unaligned()
                }
            } else {
                let mut values = [T::ZERO; WIDTH];
                for (value, d) in values.iter_mut().zip(at..left.end) {
                    // SAFETY: as above, element `d` of the row.
                    *value = unsafe { first.wrapping_offset(self.0.column(d)).read_unaligned() };
                }
                values
            };
            put(simd, &values, out, watch);
        }
    }
}

/// Widens a vector, and leaves a NaN in `watch` if an element is not finite.
#[inline(always)]
fn put<T: Element, S: Simd>(
    simd: S,
    values: &[T; WIDTH],
    out: &mut Vector,
    watch: &mut S::Register,
) {
    let wide = T::widen(simd, values);
    *watch = simd.mul_add(wide, simd.splat(0.0), *watch);
    simd.store(wide, out);
}

/// A tensor that is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sink<T>(Strided<T>);

// SAFETY: the address is only written through, and whoever made the sink vouches for that on any thread.
unsafe impl<T: Element> Send for Sink<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Sink<T> {}

impl<T: Element> Sink<T> {
    /// # Safety
    ///
    /// As long as the sink is used, every element of `view` within `sizes`, counted from `base`, may be written, and
    /// nobody else reads or writes them. If the sink is not disjoint, only one thread at a time writes.
    pub(super) unsafe fn new(base: *mut u8, rows: &Rows, sizes: Sizes) -> Self {
        Sink(Strided::new(base, rows, sizes))
    }

    /// Whether no two elements share memory, so that threads may write different rows at once.
    pub(super) fn is_disjoint(&self) -> bool {
        self.0.is_disjoint()
    }

    /// Number of elements in a row.
    pub(super) fn dim(&self) -> usize {
        self.0.sizes.dim
    }

    /// Writes one row, rounded to the element type.
    #[inline(always)]
    pub(super) fn write_row<S: Simd>(&self, simd: S, at: (usize, usize, usize), values: &[Vector]) {
        let first = self.0.row(at);
        let dim = self.dim();
        for (i, values) in values.iter().take(dim.div_ceil(WIDTH)).enumerate() {
            let at = i * WIDTH;
            let narrow = T::narrow(simd, simd.load(values));
            if self.0.dense && at + WIDTH <= dim {
                // SAFETY: `row` checked that the row exists; the vector lies within its `dim` elements, all writable
                // by the contract of `new`. No alignment is assumed.
                unsafe {
                    first
                        .wrapping_add(at)
                        .cast::<[T; WIDTH]>()
                        .write_unaligned(narrow)
                };
            } else {
                let stride = self.0.view.dim as isize;
                for (value, d) in narrow.iter().zip(at..dim) {
                    // SAFETY: as above, element `d` of the row.
                    unsafe {
                        first
                            .wrapping_offset(stride.wrapping_mul(d as isize))
                            .write_unaligned(*value);
                    }
                }
            }
        }
    }
}
