//! The edge between raw addresses and the kernels: tensors that are read and written a row at a time, each row checked
//! against the extents that the caller vouched for.
//!
//! No reference to a tensor's memory is ever formed. Addresses come from C programs, so that they need not be aligned,
//! and other streams of a faulty program may write the memory while it is read.

use super::element::Element;
use super::simd::{Simd, Vector, WIDTH};
use ascend_spec::fia::MaskTensor;
use ascend_spec::{Extents, View};

/// Sizes of a tensor's logical axes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) rows: usize,
    pub(super) dim: usize,
}

impl Sizes {
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
struct Grid<T> {
    base: *mut T,
    view: View,
    sizes: Sizes,
    /// Whether the elements of a row lie side by side.
    dense: bool,
}

impl<T> Clone for Grid<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Grid<T> {}

impl<T> Grid<T> {
    fn new(base: *mut u8, view: View, sizes: Sizes) -> Self {
        // A view that reaches outside of what an address can name has no rows.
        let bytes = |elements: u64| elements.checked_mul(size_of::<T>() as u64);
        let last = view
            .elements(sizes.extents())
            .and_then(|range| bytes(range.end));
        let fits = last.is_some_and(|last| isize::try_from(last).is_ok());
        let sizes = if fits {
            sizes
        } else {
            Sizes { rows: 0, ..sizes }
        };
        Grid {
            base: base.cast(),
            view,
            sizes,
            dense: view.dim == 1 || sizes.dim == 1,
        }
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

    /// Address of the first element of a row that exists.
    #[inline(always)]
    fn row(&self, batch: usize, head: usize, row: usize) -> *mut T {
        let Sizes {
            batch: batches,
            heads,
            rows,
            ..
        } = self.sizes;
        assert!(batch < batches && head < heads && row < rows, "no such row");
        self.base
            .wrapping_offset(self.view.at(batch, head, row) as isize)
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<T>(Grid<T>);

// SAFETY: the address is only read through, and whoever made the source vouches for that on any thread.
unsafe impl<T: Element> Send for Source<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Source<T> {}

impl<T: Element> Source<T> {
    /// # Safety
    ///
    /// As long as the source is used, every element of `view` within `sizes`, counted from `base`, may be read.
    pub(super) unsafe fn new(base: *const u8, view: View, sizes: Sizes) -> Self {
        Source(Grid::new(base.cast_mut(), view, sizes))
    }

    /// Number of elements in a row.
    pub(super) fn dim(&self) -> usize {
        self.0.sizes.dim
    }

    /// Vectors that hold a row.
    pub(super) fn vectors(&self) -> usize {
        self.dim().div_ceil(WIDTH)
    }

    /// Widens one row: its vector number `i` goes to `out[i * step]`, filled up with zeros.
    #[inline(always)]
    pub(super) fn read_row<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        out: &mut [Vector],
        step: usize,
    ) {
        self.watch_row(simd, at, out, step, &mut simd.splat(0.0));
    }

    /// [`Source::read_row`] that leaves a NaN in `watch`, which holds zeros, if an element is not finite.
    #[inline(always)]
    pub(super) fn watch_row<S: Simd>(
        &self,
        simd: S,
        (batch, head, row): (usize, usize, usize),
        out: &mut [Vector],
        step: usize,
        watch: &mut S::Register,
    ) {
        let first = self.0.row(batch, head, row).cast_const();
        let dim = self.dim();
        for (i, out) in out
            .iter_mut()
            .step_by(step)
            .take(self.vectors())
            .enumerate()
        {
            let at = i * WIDTH;
            let values = if self.0.dense && at + WIDTH <= dim {
                // SAFETY: `row` checked that the row exists; the vector lies within its `dim` elements, all readable
                // by the contract of `new`. No alignment is assumed.
                unsafe { first.wrapping_add(at).cast::<[T; WIDTH]>().read_unaligned() }
            } else {
                let mut values = [T::ZERO; WIDTH];
                let stride = self.0.view.dim as isize;
                for (value, d) in values.iter_mut().zip(at..dim) {
                    // SAFETY: as above, element `d` of the row.
                    *value = unsafe {
                        first
                            .wrapping_offset(stride.wrapping_mul(d as isize))
                            .read_unaligned()
                    };
                }
                values
            };
            let wide = T::widen(simd, &values);
            *watch = simd.mul_add(wide, simd.splat(0.0), *watch);
            simd.store(wide, out);
        }
    }
}

/// A tensor that is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sink<T>(Grid<T>);

// SAFETY: the address is only written through, and whoever made the sink vouches for that on any thread.
unsafe impl<T: Element> Send for Sink<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for Sink<T> {}

impl<T: Element> Sink<T> {
    /// # Safety
    ///
    /// As long as the sink is used, every element of `view` within `sizes`, counted from `base`, may be written, and
    /// nobody else reads or writes them. If the sink is not disjoint, only one thread at a time writes.
    pub(super) unsafe fn new(base: *mut u8, view: View, sizes: Sizes) -> Self {
        Sink(Grid::new(base, view, sizes))
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
    pub(super) fn write_row<S: Simd>(
        &self,
        simd: S,
        (batch, head, row): (usize, usize, usize),
        values: &[Vector],
    ) {
        let first = self.0.row(batch, head, row);
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

/// A full mask tensor; it has a byte an element, and any byte but 0 hides.
#[derive(Clone, Copy, Debug)]
pub(super) struct MaskBytes {
    base: *const u8,
    at: MaskTensor,
    batch: usize,
    rows: usize,
    keys: usize,
}

// SAFETY: the address is only read through, and whoever made the value vouches for that on any thread.
unsafe impl Send for MaskBytes {}
// SAFETY: as above.
unsafe impl Sync for MaskBytes {}

impl MaskBytes {
    /// # Safety
    ///
    /// As long as the value is used, every byte that `at` names for a batch entry below `batch`, a row below `rows` and
    /// a key below `keys`, counted from `base`, may be read.
    pub(super) unsafe fn new(
        base: *const u8,
        at: MaskTensor,
        batch: usize,
        rows: usize,
        keys: usize,
    ) -> Self {
        MaskBytes {
            base,
            at,
            batch,
            rows,
            keys,
        }
    }

    /// Copies the bytes of one row from key `first_key` on.
    #[inline(always)]
    pub(super) fn read_row(&self, batch: usize, row: usize, first_key: usize, out: &mut [u8]) {
        let end = first_key.checked_add(out.len());
        let exists =
            batch < self.batch && row < self.rows && end.is_some_and(|end| end <= self.keys);
        assert!(exists, "no such mask row");
        let key = self.at.key as isize;
        let first = self
            .base
            .wrapping_offset(self.at.at(batch, row) as isize)
            .wrapping_offset(key.wrapping_mul(first_key as isize));
        if key == 1 {
            // SAFETY: the bytes exist, as checked, and may be read by the contract of `new`; `out` is ours alone.
            unsafe { first.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
        } else {
            for (j, out) in out.iter_mut().enumerate() {
                // SAFETY: as above, one byte.
                *out = unsafe { first.wrapping_offset(key.wrapping_mul(j as isize)).read() };
            }
        }
    }
}
