//! Device memory: addresses that the host cannot follow, and the bytes behind them.
//!
//! One range of addresses is reserved without access: the *device view*, whose addresses `aclrtMalloc` hands out and
//! whose use on the host faults as it does with an NPU. A second range of the same size, readable and writable, holds
//! the bytes: the *backing view*. The two differ by a constant.

mod physical;
mod ranges;

pub(crate) use physical::{PhysicalMemory, hide};
pub(crate) use ranges::{Range, Ranges};

use crate::config::config;
use crate::lock::Lock;
use crate::status::{Failure, MEMORY_ALLOCATION, Outcome, failure};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::OnceLock;

/// Size of the reservation unless more is needed; halved until the operating system grants it.
const RESERVED: u64 = 64 << 30;

/// The smallest reservation that the emulator starts with.
const LEAST: u64 = 64 << 20;

/// The two views.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    /// First address of the device view.
    base: usize,
    /// First address of the backing view.
    backing: usize,
    len: usize,
    page: usize,
    /// The ranges that programs reserve.
    pub ranges: Ranges,
}

impl DeviceMemory {
    /// Reserves both views.
    fn reserve(wanted: u64) -> Outcome<Self> {
        // SAFETY: `sysconf` has no precondition.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(1 << 12).max(1 << 12);
        let mut size = wanted.max(LEAST).next_multiple_of(page as u64);
        while size >= LEAST {
            if let Ok(len) = usize::try_from(size)
                && let Some(base) = map(len, libc::PROT_NONE)
            {
                if let Some(backing) = map(len, libc::PROT_READ | libc::PROT_WRITE) {
                    prefer_huge_pages(backing, len);
                    return Ok(DeviceMemory { base, backing, len, page, ranges: Ranges::default() });
                }
                // SAFETY: the range was mapped just now and nothing refers to it.
                unsafe { libc::munmap(ptr::with_exposed_provenance_mut(base), len) };
            }
            size = (size / 2).next_multiple_of(page as u64);
        }
        Err(failure!(
            MEMORY_ALLOCATION,
            "the operating system grants no address range of {LEAST} bytes for device memory"
        ))
    }

    /// The process's device memory; reserved at the first call.
    pub(crate) fn get() -> Outcome<&'static DeviceMemory> {
        static MEMORY: OnceLock<Result<DeviceMemory, Failure>> = OnceLock::new();
        MEMORY
            .get_or_init(|| {
                // Twice what can be in use, for guard pages and for memory that is reused late.
                let config = config();
                let wanted = config
                    .memory
                    .map_or(RESERVED, |bytes| bytes.saturating_mul(u64::from(config.devices)).saturating_mul(2));
                DeviceMemory::reserve(wanted)
            })
            .as_ref()
            .map_err(Failure::clone)
    }

    /// Whether an address is a device's: in the device view, or in a range that a program has reserved.
    pub(crate) fn contains(&self, address: usize) -> bool {
        self.views(address) || self.ranges.contain(address)
    }

    /// Whether an address is within the device view.
    fn views(&self, address: usize) -> bool {
        (self.base..self.base + self.len).contains(&address)
    }

    pub(crate) fn page(&self) -> usize {
        self.page
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// The host's pointer to the byte at an address: into the backing view for device addresses, the address itself
    /// for host memory.
    ///
    /// The pointer is valid for the bytes of the allocation that contains the address. The caller knows that there is
    /// one: operations are checked against the live allocations before they are queued, and memory that is freed too
    /// early stays mapped.
    pub(crate) fn host(&self, address: usize) -> *mut u8 {
        let host = if self.views(address) {
            self.backing + (address - self.base)
        } else {
            self.ranges.host(address).unwrap_or(address)
        };
        ptr::with_exposed_provenance_mut(host)
    }

    /// Gives the memory of whole pages back to the operating system; it reads as zero afterwards.
    pub(crate) fn discard(&self, address: usize, bytes: usize, poisoned: bool) {
        if poisoned && self.views(address) {
            // SAFETY: as below.
            return unsafe { hide(self.host(address), bytes) };
        }
        if bytes == 0 || !self.views(address) || bytes > self.base + self.len - address {
            return;
        }
        // SAFETY: the range is within the backing view, which this object owns; allocations are whole pages, and
        // the caller gives up the allocation.
        unsafe { libc::madvise(self.host(address).cast(), bytes, libc::MADV_DONTNEED) };
    }
}

/// Maps fresh anonymous memory without reserving swap for it, and returns the address.
fn map(len: usize, protection: i32) -> Option<usize> {
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches no other memory.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            len,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance())
}

/// Asks for huge pages in a range that [`map`] gave: keys that are scattered over a long cache take a page walk each
/// with small ones. The system may not have any.
#[cfg(target_os = "linux")]
fn prefer_huge_pages(start: usize, len: usize) {
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the range is this crate's own; what it reads as does not change.
    unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
}

/// Does nothing: the operating system has its own way of choosing pages.
#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_start: usize, _len: usize) {}

/// Hands out ranges of the device view: untouched ones first, returned ones once those are used up, so that a stale
/// address stays stale for long.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Start of the part that was never handed out.
    fresh: usize,
    end: usize,
    /// Returned ranges, by address; neighbours are merged.
    returned: BTreeMap<usize, usize>,
}

impl Arena {
    pub(crate) fn new(base: usize, len: usize) -> Self {
        Arena { fresh: base, end: base.saturating_add(len), returned: BTreeMap::new() }
    }

    /// A range of exactly `bytes`.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        if bytes <= self.end - self.fresh {
            let start = self.fresh;
            self.fresh += bytes;
            return Some(start);
        }
        let (&start, &size) = self.returned.iter().find(|&(_, &size)| size >= bytes)?;
        self.returned.remove(&start);
        if size > bytes {
            self.returned.insert(start + bytes, size - bytes);
        }
        Some(start)
    }

    /// Takes back a range that [`Arena::take`] gave.
    pub(crate) fn give_back(&mut self, mut start: usize, mut bytes: usize) {
        if let Some(after) = self.returned.remove(&(start + bytes)) {
            bytes += after;
        }
        if let Some((&before, &size)) = self.returned.range(..start).next_back()
            && before + size == start
        {
            self.returned.remove(&before);
            start = before;
            bytes += size;
        }
        if start + bytes == self.fresh && self.end - self.fresh < bytes {
            self.fresh = start;
        } else {
            self.returned.insert(start, bytes);
        }
    }
}

/// Each byte of poisoned memory: two, or four, are a NaN of `FLOAT16`, `BFLOAT16` and `FLOAT`.
pub(crate) const POISON: u8 = 0xff;

/// Bytes of the file of poison. Longer memory maps it again and again, and takes room only where it is written to.
const POISON_FILE: usize = 16 << 20;

/// Memory from this size on maps the file: to fill it would take longer.
const MAPPED_FROM: usize = 1 << 20;

/// The most mappings of the file for one allocation, since a process has some ten thousands. What is beyond reads as
/// zero.
const MOST_MAPPINGS: usize = 256;

/// The file of poison, once it was made. Where the system grants none, the next allocation asks again.
static POISONED: Lock<Option<PhysicalMemory>> = Lock::new(None);

fn poison_file() -> Option<PhysicalMemory> {
    let file = PhysicalMemory::new(POISON_FILE).ok()?;
    file.fill(POISON, POISON_FILE).then_some(file)
}

impl DeviceMemory {
    /// Fills whole pages with NaN: of large memory what can be had without taking as much of the host's.
    ///
    /// # Safety
    ///
    /// The pages are within the device view, are allocated, and nothing else accesses them.
    pub(crate) unsafe fn poison(&self, address: usize, bytes: usize) {
        let host = self.host(address);
        let mut poisoned = POISONED.lock();
        if bytes >= MAPPED_FROM && poisoned.is_none() {
            *poisoned = poison_file();
        }
        let Some(file) = poisoned.as_ref().filter(|_| bytes >= MAPPED_FROM) else {
            // SAFETY: the caller's promise.
            return unsafe { host.write_bytes(POISON, bytes.min(POISON_FILE)) };
        };
        for offset in (0..bytes).step_by(POISON_FILE).take(MOST_MAPPINGS) {
            // SAFETY: the caller's promise.
            let mapped = unsafe { file.show_privately(host.add(offset), 0, POISON_FILE.min(bytes - offset)) };
            if mapped.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_views_are_apart_and_the_backing_holds_bytes() {
        let memory = DeviceMemory::reserve(LEAST).unwrap();
        let address = memory.base + 5 * memory.page;
        let host = memory.host(address);
        assert!(memory.contains(address) && !memory.contains(host.addr()));
        // SAFETY: `host` is in the backing view, which is readable and writable.
        unsafe {
            host.write(7);
            assert_eq!(host.read(), 7);
            memory.discard(address, memory.page, false);
            assert_eq!(host.read(), 0);
        }
        let local = 3u8;
        assert_eq!(memory.host((&raw const local).addr()).addr(), (&raw const local).addr());
    }

    #[test]
    fn the_host_cannot_read_the_device_view() {
        let memory = DeviceMemory::reserve(LEAST).unwrap();
        let mut pipe = [0; 2];
        // SAFETY: `pipe` has room for two descriptors; `write` reports an unreadable buffer as EFAULT.
        let written = unsafe {
            assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
            let n = libc::write(pipe[1], ptr::with_exposed_provenance(memory.base), 1);
            libc::close(pipe[0]);
            libc::close(pipe[1]);
            n
        };
        assert_eq!(written, -1);
    }

    #[test]
    fn returned_ranges_are_reused_last_and_merged() {
        let mut arena = Arena::new(0x1000, 0x4000);
        let a = arena.take(0x1000).unwrap();
        let b = arena.take(0x1000).unwrap();
        arena.give_back(a, 0x1000);
        let c = arena.take(0x1000).unwrap();
        assert_ne!(a, c);
        let d = arena.take(0x1000).unwrap();
        assert_eq!(arena.take(0x2000), None);
        arena.give_back(b, 0x1000);
        assert_eq!(arena.take(0x2000), Some(a));
        for at in [d, a, c] {
            arena.give_back(at, 0x1000);
        }
        arena.give_back(b, 0x1000);
        assert_eq!(arena.take(0x4000), Some(0x1000));
    }
}
