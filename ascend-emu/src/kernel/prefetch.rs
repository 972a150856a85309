//! Prefetching: loading cache lines into a cache before they are read.
//!
//! A processor has few line fill buffers and stalls when they are full, so prefetches are spread over the
//! computation. The prefill kernel prefetches the rows of the next KV tile into L2, a few cache lines at each step of
//! its products ([`TilePrefetch`]). The decode kernel, which reads rows in place, prefetches one vector beside each
//! vector that it reads ([`PrefetchPlan`]), and one cache line of each page of a new block, so that the page walks
//! overlap.

use super::TILE_KEYS;
use std::iter;
use std::ops::Range;

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// Bytes of a small page of virtual memory.
const PAGE_BYTES: usize = 4096;

/// Largest number of pages to prefetch at once.
const MAX_PAGES: usize = 16;

/// Segments that a [`TilePrefetch`] has room for: keys and rotary parts of a KV tile whose every row is elsewhere.
const SEGMENTS: usize = 2 * TILE_KEYS;

/// The cache that a line is loaded into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheLevel {
    /// For rows that are read next.
    L1,
    /// For rows that are read later, when L1 would have evicted them.
    L2,
}

/// The address of rows that are a constant pitch apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PitchedRows {
    first: *const u8,
    /// Bytes from each row to the next.
    pitch: isize,
}

impl PitchedRows {
    #[inline(always)]
    fn address(self, row: usize, byte: usize) -> *const u8 {
        let row = self.pitch.wrapping_mul(row as isize);
        self.first.wrapping_offset(row).wrapping_add(byte)
    }

    /// The rows from number `row` on.
    #[inline(always)]
    fn after(self, row: usize) -> Self {
        PitchedRows { first: self.address(row, 0), ..self }
    }
}

/// A segment of rows to prefetch, a constant pitch apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefetchRows {
    place: PitchedRows,
    rows: usize,
    /// Bytes of a row.
    bytes: usize,
}

impl PrefetchRows {
    /// No rows.
    pub(super) const NONE: PrefetchRows =
        PrefetchRows { place: PitchedRows { first: std::ptr::null(), pitch: 0 }, rows: 0, bytes: 0 };

    /// Makes `rows` rows of `elements` elements, each `pitch` elements after the one before.
    pub(super) fn new<T>(first: *const T, pitch: isize, rows: usize, elements: usize) -> Self {
        PrefetchRows {
            place: PitchedRows { first: first.cast(), pitch: pitch.wrapping_mul(size_of::<T>() as isize) },
            rows,
            bytes: elements * size_of::<T>(),
        }
    }

    /// Number of cache lines in all rows.
    fn lines(self) -> usize {
        self.rows * self.bytes.div_ceil(CACHE_LINE)
    }

    /// Number of rows.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.rows
    }

    /// At most `rows` of the rows, from number `first` on.
    #[inline(always)]
    pub(super) fn part(self, first: usize, rows: usize) -> Self {
        PrefetchRows { place: self.place.after(first), rows: rows.min(self.rows.saturating_sub(first)), ..self }
    }

    /// Prefetches a cache line of each of the first pages, so that the TLB has them when the rows are read.
    pub(super) fn prefetch_pages(self) {
        for address in self.pages() {
            prefetch(CacheLevel::L2, address);
        }
    }

    /// An address in each of the first [`MAX_PAGES`] pages.
    fn pages(self) -> impl Iterator<Item = *const u8> {
        let rows = PAGE_BYTES / self.place.pitch.unsigned_abs().clamp(1, PAGE_BYTES);
        (0..self.rows).step_by(rows).take(MAX_PAGES).map(move |row| self.place.address(row, 0))
    }

    /// Prefetches row number `row` into L1, if it exists.
    #[inline(always)]
    pub(super) fn prefetch_row(self, row: usize) {
        if row < self.rows {
            for byte in (0..self.bytes).step_by(CACHE_LINE) {
                prefetch(CacheLevel::L1, self.place.address(row, byte));
            }
        }
    }
}

/// Rows to prefetch while the same number of other rows are read, one row for each: some into L1 and some into L2.
/// Each group may be in two segments, since a page may end among its rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefetchPlan {
    l1: [PrefetchRows; 2],
    l2: [PrefetchRows; 2],
    /// An address that is in L1 already, to prefetch where there is no row.
    at_hand: PitchedRows,
}

impl PrefetchPlan {
    /// Makes a plan that prefetches these rows, and `at_hand`, an address in use, where there are none.
    pub(super) fn new(l1: [PrefetchRows; 2], l2: [PrefetchRows; 2], at_hand: *const u8) -> Self {
        let at_hand = PitchedRows { first: at_hand, pitch: 0 };
        PrefetchPlan { l1, l2, at_hand }
    }

    /// Makes a plan that prefetches nothing but `at_hand`, an address in use.
    pub(super) fn none(at_hand: *const u8) -> Self {
        PrefetchPlan::new([PrefetchRows::NONE; 2], [PrefetchRows::NONE; 2], at_hand)
    }

    /// Cuts `range`, which counts rows that are read, so that the rows to prefetch are a constant pitch apart in each
    /// piece. Returns the pieces with their cursors.
    #[inline(always)]
    pub(super) fn cursors(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, PrefetchCursor)> {
        let mut start = range.start;
        iter::from_fn(move || {
            let left = range.end - start;
            if left == 0 {
                return None;
            }
            let (l1, of_l1) = self.row(&self.l1, start);
            let (l2, of_l2) = self.row(&self.l2, start);
            let piece = start..start + left.min(of_l1).min(of_l2);
            start = piece.end;
            Some((piece, PrefetchCursor { l1, l2 }))
        })
    }

    /// The address of row `j` of two segments, and the number of rows from it on at the same pitch.
    #[inline(always)]
    fn row(&self, [first, second]: &[PrefetchRows; 2], j: usize) -> (PitchedRows, usize) {
        let left = match j.checked_sub(first.rows) {
            None => first.part(j, usize::MAX),
            Some(j) => second.part(j, usize::MAX),
        };
        match left.rows {
            0 => (self.at_hand, usize::MAX),
            rows => (left.place, rows),
        }
    }
}

/// The next rows to prefetch into L1 and into L2, each a constant pitch apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefetchCursor {
    l1: PitchedRows,
    l2: PitchedRows,
}

impl PrefetchCursor {
    /// Prefetches the cache lines with byte `byte` of row `row`.
    #[inline(always)]
    pub(super) fn prefetch(self, row: usize, byte: usize) {
        prefetch(CacheLevel::L1, self.l1.address(row, byte));
        prefetch(CacheLevel::L2, self.l2.address(row, byte));
    }

    /// The rows from number `row` on.
    #[inline(always)]
    pub(super) fn after(self, row: usize) -> Self {
        PrefetchCursor { l1: self.l1.after(row), l2: self.l2.after(row) }
    }
}

/// Prefetches the rows of the next KV tile into L2, a few cache lines at a time.
#[derive(Debug)]
pub(super) struct TilePrefetch {
    segments: [PrefetchRows; SEGMENTS],
    count: usize,
    /// Number of cache lines in all segments.
    lines: usize,
    /// Cache lines to prefetch at a time.
    share: usize,
    /// The next cache line: segment, row and byte of the row.
    next: (usize, usize, usize),
}

impl TilePrefetch {
    /// Makes a prefetch without rows.
    pub(super) fn none() -> Self {
        TilePrefetch { segments: [PrefetchRows::NONE; SEGMENTS], count: 0, lines: 0, share: 0, next: (0, 0, 0) }
    }

    /// Removes all rows.
    pub(super) fn clear(&mut self) {
        (self.count, self.lines, self.next) = (0, 0, (0, 0, 0));
    }

    /// Adds a segment, if there is room for it.
    pub(super) fn add(&mut self, rows: PrefetchRows) {
        let next = self.segments.get_mut(self.count);
        if let Some(segment) = next.filter(|_| rows.lines() > 0) {
            *segment = rows;
            self.count += 1;
            self.lines += rows.lines();
        }
    }

    /// Spreads the cache lines over `calls` calls of [`TilePrefetch::prefetch_share`].
    pub(super) fn spread(&mut self, calls: usize) {
        self.share = self.lines.div_ceil(calls.max(1));
    }

    /// Prefetches the next share of the cache lines.
    #[inline(always)]
    pub(super) fn prefetch_share(&mut self) {
        for _ in 0..self.share {
            let Some(address) = self.next_line() else {
                break;
            };
            prefetch(CacheLevel::L2, address);
        }
    }

    /// The address of the next cache line.
    #[inline(always)]
    fn next_line(&mut self) -> Option<*const u8> {
        let (segment, row, byte) = self.next;
        let rows = self.segments[..self.count].get(segment)?;
        self.next = if byte + CACHE_LINE < rows.bytes {
            (segment, row, byte + CACHE_LINE)
        } else if row + 1 < rows.rows {
            (segment, row + 1, 0)
        } else {
            (segment + 1, 0, 0)
        };
        Some(rows.place.address(row, byte))
    }
}

/// Prefetches the cache line at `address` into the cache `level`. The address need not be valid.
#[inline(always)]
pub(super) fn prefetch(level: CacheLevel, address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of the baseline and never faults.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        match level {
            CacheLevel::L1 => _mm_prefetch::<_MM_HINT_T0>(address.cast()),
            CacheLevel::L2 => _mm_prefetch::<_MM_HINT_T1>(address.cast()),
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of the baseline, never faults and changes nothing that a program can see.
    unsafe {
        match level {
            CacheLevel::L1 => core::arch::asm!(
                "prfm pldl1keep, [{address}]",
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            ),
            CacheLevel::L2 => core::arch::asm!(
                "prfm pldl2keep, [{address}]",
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            ),
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (level, address);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cache_line_of_every_row_is_prefetched_once() {
        let (halves, bytes) = ([0u16; 4 * 100], [0i8; 3 * 64]);
        let mut prefetch = TilePrefetch::none();
        let half = |i: usize| halves[i * 100..].as_ptr();
        prefetch.add(PrefetchRows::new(half(0), 200, 2, 100));
        prefetch.add(PrefetchRows::new(half(3), -200, 1, 100));
        prefetch.add(PrefetchRows::new(half(1), 100, 0, 100));
        prefetch.add(PrefetchRows::new(bytes[64..].as_ptr(), 64, 1, 64));
        let lines = |row: *const u16| (0..200).step_by(CACHE_LINE).map(move |byte| row.cast::<u8>().wrapping_add(byte));
        let mut want: Vec<*const u8> = [half(0), half(2), half(3)].into_iter().flat_map(lines).collect();
        want.push(bytes[64..].as_ptr().cast());
        let all: Vec<*const u8> = std::iter::from_fn(|| prefetch.next_line()).collect();
        assert_eq!(all, want);
        prefetch.clear();
        assert_eq!(prefetch.next_line(), None);
    }

    #[test]
    fn the_shares_together_are_all_cache_lines() {
        let bytes = [0i8; 64 * 50];
        let mut prefetch = TilePrefetch::none();
        prefetch.add(PrefetchRows::new(bytes.as_ptr(), 64, 50, 64));
        prefetch.spread(7);
        for _ in 0..6 {
            prefetch.prefetch_share();
        }
        assert!(prefetch.next_line().is_some());
        prefetch.prefetch_share();
        assert_eq!(prefetch.next_line(), None);
    }

    #[test]
    fn rows_to_prefetch_may_lie_in_two_segments() {
        let bytes = [0i8; 64 * 20];
        let line = |row: usize| bytes[64 * row..].as_ptr().cast::<u8>();
        let strided = |row, pitch, rows| PrefetchRows::new(line(row).cast::<i8>(), pitch, rows, 64);
        let (first, second, none) = (strided(0, 128, 3), strided(19, -64, 2), PrefetchRows::NONE);
        let plan = PrefetchPlan::new([first, second], [none; 2], line(9));
        let pieces: Vec<_> = plan.cursors(2..8).map(|(piece, cursor)| (piece, cursor.l1, cursor.l2)).collect();
        let rows = |first: *const u8, pitch| PitchedRows { first, pitch };
        let at_hand = rows(line(9), 0);
        assert_eq!(
            pieces,
            [(2..3, rows(line(4), 128), at_hand), (3..5, rows(line(19), -64), at_hand), (5..8, at_hand, at_hand)]
        );
        assert_eq!(plan.cursors(4..4).count(), 0);
        let pieces: Vec<_> =
            PrefetchPlan::none(line(9)).cursors(1..7).map(|(piece, cursor)| (piece, cursor.l1)).collect();
        assert_eq!(pieces, [(1..7, at_hand)]);
    }

    #[test]
    fn each_page_is_prefetched_once_up_to_the_limit() {
        let first = std::ptr::null::<i8>();
        let pages = |pitch, rows| -> Vec<usize> {
            let rows = PrefetchRows::new(first, pitch, rows, 64);
            rows.pages().map(<*const u8>::addr).collect()
        };
        assert_eq!(pages(1 << 10, 10), [0, 4096, 8192]);
        assert_eq!(pages(5000, 3), [0, 5000, 10000]);
        assert_eq!(pages(1 << 11, 1000).len(), MAX_PAGES);
        assert_eq!(pages(-4096, 2), [0, 4096usize.wrapping_neg()]);
        assert_eq!(pages(0, 3), [0]);
        assert_eq!(pages(64, 0), [0; 0]);
    }

    #[test]
    fn segments_without_room_are_left_out() {
        let byte = 0i8;
        let mut prefetch = TilePrefetch::none();
        for _ in 0..2 * SEGMENTS {
            prefetch.add(PrefetchRows::new(&raw const byte, 1, 3, 1));
        }
        assert_eq!(std::iter::from_fn(|| prefetch.next_line()).count(), 3 * SEGMENTS);
    }
}
