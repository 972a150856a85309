//! Ranges of addresses that programs reserve, each with a device view and a backing view of its own.

use super::map;
use crate::lock::Lock;
use crate::status::{MEMORY_ALLOCATION, Outcome, failure};
use std::ptr;
use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A reserved range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// First address of the device view, a multiple of [`Ranges::ALIGNMENT`].
    pub base: usize,
    pub len: usize,
    /// First address of the backing view.
    backing: usize,
}

impl Range {
    fn contains(&self, address: usize) -> bool {
        (self.base..self.base + self.len).contains(&address)
    }
}

/// The reserved ranges of the process. Ranges are never unmapped: one that was given back is reserved again later.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// The number of ranges, so that a process without any takes no lock.
    count: AtomicUsize,
    all: RwLock<Vec<Range>>,
    /// Ranges that were given back.
    idle: Lock<Vec<Range>>,
}

impl Ranges {
    /// The unit of addresses and sizes.
    pub(crate) const ALIGNMENT: usize = 2 << 20;

    fn find(&self, address: usize) -> Option<Range> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let all = self.all.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        all.iter().find(|range| range.contains(address)).copied()
    }

    pub(crate) fn contain(&self, address: usize) -> bool {
        self.find(address).is_some()
    }

    /// The host's address of a byte in one of the ranges.
    pub(crate) fn host(&self, address: usize) -> Option<usize> {
        let range = self.find(address)?;
        Some(range.backing + (address - range.base))
    }

    /// Reserves a range of at least `bytes` bytes.
    pub(crate) fn reserve(&self, bytes: usize) -> Outcome<Range> {
        let len = bytes.checked_next_multiple_of(Self::ALIGNMENT).filter(|len| *len <= isize::MAX as usize / 2);
        let len = len.ok_or_else(|| Self::refused(bytes))?;
        let mut idle = self.idle.lock();
        // The smallest that is large enough.
        let fitting = idle.iter().enumerate().filter(|(_, range)| range.len >= len);
        if let Some((at, _)) = fitting.min_by_key(|(_, range)| range.len) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        let device = map(len + Self::ALIGNMENT, libc::PROT_NONE).ok_or_else(|| Self::refused(bytes))?;
        let Some(backing) = map(len, libc::PROT_READ | libc::PROT_WRITE) else {
            // SAFETY: the range was mapped just now and nothing refers to it.
            unsafe { libc::munmap(ptr::with_exposed_provenance_mut(device), len + Self::ALIGNMENT) };
            return Err(Self::refused(bytes));
        };
        let range = Range { base: device.next_multiple_of(Self::ALIGNMENT), len, backing };
        let mut all = self.all.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        all.push(range);
        self.count.store(all.len(), Ordering::Release);
        Ok(range)
    }

    fn refused(bytes: usize) -> crate::status::Failure {
        failure!(MEMORY_ALLOCATION, "the operating system grants no address range of {bytes} bytes")
    }

    /// Takes back a range that [`Ranges::reserve`] gave, in which nothing is mapped.
    pub(crate) fn give_back(&self, range: Range) {
        self.idle.lock().push(range);
    }
}
