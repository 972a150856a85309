//! Requests for cache lines that will be read soon.
//!
//! The rows of the next tile are asked for while the products of this one are computed, a few cache lines at each step: a
//! processor keeps few requests, and stops where there are more. With dozens at a step nothing was gained; with a few,
//! fetching the tiles of latent attention takes an eighth of the time instead of a fifth.

use super::tile::KEYS;

/// Bytes that the processor fetches at once.
pub(super) const CACHE_LINE: usize = 64;

/// How near a cache line is brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Near {
    /// Into the first cache, for what is read next.
    First,
    /// Into the second cache, for what is read when the first one has forgotten it.
    Second,
}

/// Rows that will be read.
#[derive(Debug)]
pub(super) struct Requests {
    /// Of each row, where it begins, and its bytes.
    rows: [(*const u8, usize); 3 * KEYS],
    count: usize,
    /// Cache lines of all rows.
    lines: usize,
    /// Those to ask for at once.
    share: usize,
    /// The next row to ask for, and how much of it was asked for.
    at: (usize, usize),
}

impl Requests {
    /// For nothing.
    pub(super) fn none() -> Self {
        Requests {
            rows: [(std::ptr::null(), 0); 3 * KEYS],
            count: 0,
            lines: 0,
            share: 0,
            at: (0, 0),
        }
    }

    /// Forgets all rows.
    pub(super) fn clear(&mut self) {
        (self.count, self.lines, self.at) = (0, 0, (0, 0));
    }

    /// Adds rows of so many elements, as far as there is room.
    pub(super) fn add<T>(&mut self, rows: &[*const T], elements: usize) {
        let bytes = elements * size_of::<T>();
        let places = self.rows.get_mut(self.count..).unwrap_or_default();
        for (place, row) in places.iter_mut().zip(rows) {
            *place = (row.cast(), bytes);
            self.count += 1;
            self.lines += bytes.div_ceil(CACHE_LINE);
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
        let (row, byte) = self.at;
        let &(first, bytes) = self.rows[..self.count].get(row)?;
        self.at = if byte + CACHE_LINE < bytes {
            (row, byte + CACHE_LINE)
        } else {
            (row + 1, 0)
        };
        Some(first.wrapping_add(byte))
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
        requests.add(&[of(0), of(2), of(1)], 100);
        requests.add(&[bytes[64..].as_ptr()], 64);
        let lines = |row: *const u16| {
            (0..200)
                .step_by(CACHE_LINE)
                .map(move |byte| row.cast::<u8>().wrapping_add(byte))
        };
        let mut want: Vec<*const u8> = [of(0), of(2), of(1)].into_iter().flat_map(lines).collect();
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
        let rows: Vec<*const i8> = bytes.chunks(64).map(<[i8]>::as_ptr).collect();
        requests.add(&rows, 64);
        requests.spread(7);
        for _ in 0..6 {
            requests.ask();
        }
        assert!(requests.next().is_some());
        requests.ask();
        assert_eq!(requests.next(), None);
    }

    #[test]
    fn rows_without_room_are_left_out() {
        let byte = 0i8;
        let mut requests = Requests::none();
        requests.add(&[std::ptr::from_ref(&byte); 4 * KEYS], 1);
        assert_eq!(std::iter::from_fn(|| requests.next()).count(), 3 * KEYS);
    }
}
