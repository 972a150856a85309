//! The rows of a tile where they lie, for kernels that read each of them once or twice only.

use super::element::Element;
use super::factors::Conversion;
use super::simd::{Simd, Vector, WIDTH};
use super::tile::KEYS;

/// Bytes that the processor fetches at once.
pub(super) const CACHE_LINE: usize = 64;

/// What a kernel reads a tile's rows from, vector by vector.
pub(super) trait Rows: Copy {
    /// Vector `i` of row `j`.
    fn at<S: Simd>(self, simd: S, j: usize, i: usize) -> S::Register;

    /// Asks for vector `i` of row `j` to be brought near, where it begins a cache line or might.
    fn prefetch(self, j: usize, i: usize);
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

impl<T: Element> Rows for &Lines<T> {
    #[inline(always)]
    fn at<S: Simd>(self, simd: S, j: usize, i: usize) -> S::Register {
        assert!(
            j < self.count.min(KEYS) && i < self.vectors,
            "no such vector"
        );
        // SAFETY: the row was pushed, so its vectors may be read.
        let values = unsafe {
            self.rows[j]
                .wrapping_add(i * WIDTH)
                .cast::<[T; WIDTH]>()
                .read_unaligned()
        };
        T::widen(simd, &values)
    }

    #[inline(always)]
    fn prefetch(self, j: usize, i: usize) {
        let byte = i * size_of::<[T; WIDTH]>();
        if byte.is_multiple_of(CACHE_LINE)
            && let Some(row) = self.rows[..self.count.min(KEYS)].get(j)
        {
            prefetch(row.cast::<u8>().wrapping_add(byte));
        }
    }
}

/// Rows of stored integers, made values in registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Converted<'a, T> {
    pub(super) lines: &'a Lines<T>,
    pub(super) conversion: &'a Conversion,
    pub(super) head: usize,
    /// Scale and offset of each row.
    pub(super) of_rows: &'a OfRows,
}

/// Scale and offset of each row of a tile.
pub(super) type OfRows = [(f32, f32); KEYS];

impl<T: Element> Rows for Converted<'_, T> {
    #[inline(always)]
    fn at<S: Simd>(self, simd: S, j: usize, i: usize) -> S::Register {
        let stored = self.lines.at(simd, j, i);
        let of_row = self.of_rows[j];
        self.conversion.value(simd, stored, (self.head, i), of_row)
    }

    #[inline(always)]
    fn prefetch(self, j: usize, i: usize) {
        self.lines.prefetch(j, i);
    }
}

/// Rows that were fetched into a buffer: vector `i` of row `j` is number `j * row + i`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetched<'a> {
    pub(super) vectors: &'a [Vector],
    pub(super) row: usize,
}

impl Rows for Fetched<'_> {
    #[inline(always)]
    fn at<S: Simd>(self, simd: S, j: usize, i: usize) -> S::Register {
        simd.load(&self.vectors[j * self.row + i])
    }

    #[inline(always)]
    fn prefetch(self, _: usize, _: usize) {}
}

/// Asks for a cache line. Any address will do.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of the baseline and never faults.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of the baseline, never faults and changes nothing that a program can see.
    unsafe {
        core::arch::asm!(
            "prfm pldl1keep, [{address}]",
            address = in(reg) address,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
