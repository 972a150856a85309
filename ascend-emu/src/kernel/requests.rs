//! Requests for cache lines that will be read soon.
//!
//! The rows of the next tile are asked for while the products of this one are computed, a few cache lines at each step: a
//! processor keeps few requests, and stops where there are more. With dozens at a step nothing was gained; with a few,
//! fetching the tiles of latent attention takes an eighth of the time instead of a fifth. Decode, which reads rows where they
//! lie, asks for one vector with each that it reads, and for the pages of a block before its rows: decode from blocks of 128
//! takes 4 % less time by that.

use std::iter;
use std::ops::Range;

/// Bytes that the processor fetches at once.
pub(super) const CACHE_LINE: usize = 64;

/// Bytes of a page of memory, where pages are small.
const PAGE: usize = 4096;

/// Pages that are looked up at once.
const PAGES: usize = 16;

/// Runs of rows that are remembered: keys, rotary parts and values of a tile in blocks of 16.
const RUNS: usize = 24;

/// How near a cache line is brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Near {
    /// Into the first cache, for what is read next.
    First,
    /// Into the second cache, for what is read when the first one has forgotten it.
    Second,
}

/// Where rows are that lie a constant pitch apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pitched {
    first: *const u8,
    /// Bytes from each row to the next.
    pitch: isize,
}

impl Pitched {
    #[inline(always)]
    fn address(self, row: usize, byte: usize) -> *const u8 {
        let row = self.pitch.wrapping_mul(row as isize);
        self.first.wrapping_offset(row).wrapping_add(byte)
    }

    /// The same from row `row` on.
    #[inline(always)]
    fn from(self, row: usize) -> Self {
        Pitched {
            first: self.address(row, 0),
            ..self
        }
    }
}

/// Rows that will be read, a constant pitch apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Upcoming {
    at: Pitched,
    rows: usize,
    /// Bytes of a row.
    bytes: usize,
}

impl Upcoming {
    /// No rows.
    pub(super) const NONE: Upcoming = Upcoming {
        at: Pitched {
            first: std::ptr::null(),
            pitch: 0,
        },
        rows: 0,
        bytes: 0,
    };

    /// So many rows of so many elements, each `pitch` elements behind the one before.
    pub(super) fn new<T>(first: *const T, pitch: isize, rows: usize, elements: usize) -> Self {
        Upcoming {
            at: Pitched {
                first: first.cast(),
                pitch: pitch.wrapping_mul(size_of::<T>() as isize),
            },
            rows,
            bytes: elements * size_of::<T>(),
        }
    }

    /// Cache lines of all rows.
    fn lines(self) -> usize {
        self.rows * self.bytes.div_ceil(CACHE_LINE)
    }

    /// How many rows there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.rows
    }

    /// Some of the rows, at most `rows`, from number `first` on.
    #[inline(always)]
    pub(super) fn part(self, first: usize, rows: usize) -> Self {
        Upcoming {
            at: self.at.from(first),
            rows: rows.min(self.rows.saturating_sub(first)),
            ..self
        }
    }

    /// Has the processor look up where the first pages of the rows are, by asking for a cache line of each.
    pub(super) fn find_pages(self) {
        for address in self.pages() {
            prefetch(Near::Second, address);
        }
    }

    /// An address in each of the first pages.
    fn pages(self) -> impl Iterator<Item = *const u8> {
        let rows = PAGE / self.at.pitch.unsigned_abs().clamp(1, PAGE);
        (0..self.rows)
            .step_by(rows)
            .take(PAGES)
            .map(move |row| self.at.address(row, 0))
    }

    /// Asks for a row to be brought into the first cache, if there is such a one.
    #[inline(always)]
    pub(super) fn ask_for(self, row: usize) {
        if row < self.rows {
            for byte in (0..self.bytes).step_by(CACHE_LINE) {
                prefetch(Near::First, self.at.address(row, byte));
            }
        }
    }
}

/// Rows to ask for while as many others are read: some for the first cache and some for the second. The border of a block
/// may lie among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asks {
    first: [Upcoming; 2],
    second: [Upcoming; 2],
    /// What is asked for where there is nothing else.
    at_hand: Pitched,
}

impl Asks {
    /// For these rows, and then for one that is in the first cache anyway.
    pub(super) fn new(first: [Upcoming; 2], second: [Upcoming; 2], at_hand: *const u8) -> Self {
        let at_hand = Pitched {
            first: at_hand,
            pitch: 0,
        };
        Asks {
            first,
            second,
            at_hand,
        }
    }

    /// For nothing.
    pub(super) fn nothing(at_hand: *const u8) -> Self {
        Asks::new([Upcoming::NONE; 2], [Upcoming::NONE; 2], at_hand)
    }

    /// What to ask for while the rows `place` are read: parts of `place`, and for each rows a constant pitch apart.
    #[inline(always)]
    pub(super) fn along(
        &self,
        place: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Asking)> {
        let mut start = place.start;
        iter::from_fn(move || {
            let left = place.end - start;
            if left == 0 {
                return None;
            }
            let (first, of_first) = self.row(&self.first, start);
            let (second, of_second) = self.row(&self.second, start);
            let part = start..start + left.min(of_first).min(of_second);
            start = part.end;
            Some((part, Asking { first, second }))
        })
    }

    /// Row `j` of some, and how many there are from it on at the same pitch.
    #[inline(always)]
    fn row(&self, [here, behind]: &[Upcoming; 2], j: usize) -> (Pitched, usize) {
        let left = match j.checked_sub(here.rows) {
            None => here.part(j, usize::MAX),
            Some(j) => behind.part(j, usize::MAX),
        };
        match left.rows {
            0 => (self.at_hand, usize::MAX),
            rows => (left.at, rows),
        }
    }
}

/// Rows to ask for, a constant pitch apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking {
    first: Pitched,
    second: Pitched,
}

impl Asking {
    /// Asks for the cache lines with these bytes of a row.
    #[inline(always)]
    pub(super) fn ask(self, row: usize, byte: usize) {
        prefetch(Near::First, self.first.address(row, byte));
        prefetch(Near::Second, self.second.address(row, byte));
    }

    /// The rows from `row` on.
    #[inline(always)]
    pub(super) fn from(self, row: usize) -> Self {
        Asking {
            first: self.first.from(row),
            second: self.second.from(row),
        }
    }
}

/// Rows of a tile that will be read, asked for a few cache lines at a time.
#[derive(Debug)]
pub(super) struct Requests {
    runs: [Upcoming; RUNS],
    count: usize,
    /// Cache lines of all rows.
    lines: usize,
    /// Those to ask for at once.
    share: usize,
    /// What to ask for next: the run, the row and its byte.
    at: (usize, usize, usize),
}

impl Requests {
    /// For nothing.
    pub(super) fn none() -> Self {
        Requests {
            runs: [Upcoming::NONE; RUNS],
            count: 0,
            lines: 0,
            share: 0,
            at: (0, 0, 0),
        }
    }

    /// Forgets all rows.
    pub(super) fn clear(&mut self) {
        (self.count, self.lines, self.at) = (0, 0, (0, 0, 0));
    }

    /// Adds rows, if there is room.
    pub(super) fn add(&mut self, rows: Upcoming) {
        if let Some(place) = self.runs.get_mut(self.count).filter(|_| rows.lines() > 0) {
            *place = rows;
            self.count += 1;
            self.lines += rows.lines();
        }
    }

    /// Sets that so many calls of [`Requests::ask`] ask for everything.
    pub(super) fn spread(&mut self, calls: usize) {
        self.share = self.lines.div_ceil(calls.max(1));
    }

    /// Asks for a share of those cache lines that are left.
    #[inline(always)]
    pub(super) fn ask(&mut self) {
        for _ in 0..self.share {
            let Some(address) = self.next() else {
                break;
            };
            prefetch(Near::Second, address);
        }
    }

    /// The next cache line to ask for.
    #[inline(always)]
    fn next(&mut self) -> Option<*const u8> {
        let (run, row, byte) = self.at;
        let rows = self.runs[..self.count].get(run)?;
        self.at = if byte + CACHE_LINE < rows.bytes {
            (run, row, byte + CACHE_LINE)
        } else if row + 1 < rows.rows {
            (run, row + 1, 0)
        } else {
            (run + 1, 0, 0)
        };
        Some(rows.at.address(row, byte))
    }
}

/// Asks for a cache line. Any address will do.
#[inline(always)]
pub(super) fn prefetch(near: Near, address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of the baseline and never faults.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        match near {
            Near::First => _mm_prefetch::<_MM_HINT_T0>(address.cast()),
            Near::Second => _mm_prefetch::<_MM_HINT_T1>(address.cast()),
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of the baseline, never faults and changes nothing that a program can see.
    unsafe {
        match near {
            Near::First => core::arch::asm!(
                "prfm pldl1keep, [{address}]",
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            ),
            Near::Second => core::arch::asm!(
                "prfm pldl2keep, [{address}]",
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            ),
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (near, address);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_every_row_is_asked_for_once() {
        let (halves, bytes) = ([0u16; 4 * 100], [0i8; 3 * 64]);
        let mut requests = Requests::none();
        let of = |i: usize| halves[i * 100..].as_ptr();
        requests.add(Upcoming::new(of(0), 200, 2, 100));
        requests.add(Upcoming::new(of(3), -200, 1, 100));
        requests.add(Upcoming::new(of(1), 100, 0, 100));
        requests.add(Upcoming::new(bytes[64..].as_ptr(), 64, 1, 64));
        let lines = |row: *const u16| {
            (0..200)
                .step_by(CACHE_LINE)
                .map(move |byte| row.cast::<u8>().wrapping_add(byte))
        };
        let mut want: Vec<*const u8> = [of(0), of(2), of(3)].into_iter().flat_map(lines).collect();
        want.push(bytes[64..].as_ptr().cast());
        let all: Vec<*const u8> = std::iter::from_fn(|| requests.next()).collect();
        assert_eq!(all, want);
        requests.clear();
        assert_eq!(requests.next(), None);
    }

    #[test]
    fn so_many_shares_are_everything() {
        let bytes = [0i8; 64 * 50];
        let mut requests = Requests::none();
        requests.add(Upcoming::new(bytes.as_ptr(), 64, 50, 64));
        requests.spread(7);
        for _ in 0..6 {
            requests.ask();
        }
        assert!(requests.next().is_some());
        requests.ask();
        assert_eq!(requests.next(), None);
    }

    #[test]
    fn rows_are_found_on_both_sides_of_a_border() {
        let bytes = [0i8; 64 * 20];
        let at = |row: usize| bytes[64 * row..].as_ptr().cast::<u8>();
        let of = |row, pitch, rows| Upcoming::new(at(row).cast::<i8>(), pitch, rows, 64);
        let (here, behind, none) = (of(0, 128, 3), of(19, -64, 2), Upcoming::NONE);
        let asks = Asks::new([here, behind], [none; 2], at(9));
        let parts: Vec<_> = asks
            .along(2..8)
            .map(|(part, asking)| (part, asking.first, asking.second))
            .collect();
        let rows = |first: *const u8, pitch| Pitched { first, pitch };
        let at_hand = rows(at(9), 0);
        assert_eq!(
            parts,
            [
                (2..3, rows(at(4), 128), at_hand),
                (3..5, rows(at(19), -64), at_hand),
                (5..8, at_hand, at_hand)
            ]
        );
        assert_eq!(asks.along(4..4).count(), 0);
        let parts: Vec<_> = Asks::nothing(at(9))
            .along(1..7)
            .map(|(part, asking)| (part, asking.first))
            .collect();
        assert_eq!(parts, [(1..7, at_hand)]);
    }

    #[test]
    fn pages_are_looked_up_once_and_not_too_many() {
        let first = std::ptr::null::<i8>();
        let pages = |pitch, rows| -> Vec<usize> {
            let rows = Upcoming::new(first, pitch, rows, 64);
            rows.pages().map(<*const u8>::addr).collect()
        };
        assert_eq!(pages(1 << 10, 10), [0, 4096, 8192]);
        assert_eq!(pages(5000, 3), [0, 5000, 10000]);
        assert_eq!(pages(1 << 11, 1000).len(), PAGES);
        assert_eq!(pages(-4096, 2), [0, 4096usize.wrapping_neg()]);
        assert_eq!(pages(0, 3), [0]);
        assert_eq!(pages(64, 0), [0; 0]);
    }

    #[test]
    fn rows_without_room_are_left_out() {
        let byte = 0i8;
        let mut requests = Requests::none();
        for _ in 0..2 * RUNS {
            requests.add(Upcoming::new(&raw const byte, 1, 3, 1));
        }
        assert_eq!(std::iter::from_fn(|| requests.next()).count(), 3 * RUNS);
    }
}
