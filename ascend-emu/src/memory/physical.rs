//! Physical memory, which can be mapped to any number of ranges of addresses.
//!
//! It is one file without a name, in which every allocation has a part of its own. An allocation is mapped to a range
//! by mapping its part of the file over the range's backing view.

use super::Arena;
use crate::status::{MEMORY_ALLOCATION, NOT_SUPPORTED, Outcome, failure};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// The file, and its free parts.
#[derive(Debug)]
pub(crate) struct PhysicalMemory {
    file: OwnedFd,
    parts: Arena,
}

impl PhysicalMemory {
    /// Makes a file of at most `len` bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn new(len: usize) -> Outcome<Self> {
        let refused =
            |why: std::io::Error| failure!(NOT_SUPPORTED, "the operating system grants no file in memory: {why}");
        // A file beyond the process's limit would end the process by a signal.
        let size = libc::off_t::try_from(len).unwrap_or(libc::off_t::MAX);
        if file_limit() < size.unsigned_abs() {
            return Err(refused(std::io::ErrorKind::FileTooLarge.into()));
        }
        // SAFETY: the name is a NUL-terminated text.
        let file = unsafe { libc::memfd_create(c"ascend-emu".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(refused(std::io::Error::last_os_error()));
        }
        // SAFETY: the system opened the descriptor just now, for this object alone.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(file.as_raw_fd(), size) } != 0 {
            return Err(refused(std::io::Error::last_os_error()));
        }
        Ok(PhysicalMemory { file, parts: Arena::new(0, len) })
    }

    /// Sets the first bytes of the file to a value. Says whether the system let it.
    pub(crate) fn fill(&self, value: u8, bytes: usize) -> bool {
        // SAFETY: a new mapping, of which nothing else knows, at an address that the system chooses.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.file.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        // SAFETY: the mapping of above, which ends here.
        unsafe {
            mapped.cast::<u8>().write_bytes(value, bytes);
            libc::munmap(mapped, bytes) == 0
        }
    }

    /// Fails: the operating system has no such file.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn new(_len: usize) -> Outcome<Self> {
        Err(failure!(NOT_SUPPORTED, "physical memory is emulated on Linux alone"))
    }

    /// Takes a part of `bytes` bytes, which read as zero, and returns its offset in the file.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        self.parts.take(bytes)
    }

    /// Takes back a part that is mapped nowhere.
    pub(crate) fn give_back(&mut self, offset: usize, bytes: usize) {
        #[cfg(target_os = "linux")]
        {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: the part is within this object's file, and is mapped nowhere.
            let punched =
                unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset as libc::off_t, bytes as libc::off_t) };
            if punched != 0 {
                // The part would not read as zero again: it is not given out any more.
                return;
            }
        }
        self.parts.give_back(offset, bytes);
    }

    /// Maps a part of the file to the host's addresses from `host` on.
    ///
    /// # Safety
    ///
    /// The range is within a backing view of this crate and begins at a page. A read or write of it at the same time
    /// accesses the memory before or the memory after.
    pub(crate) unsafe fn show(&self, host: *mut u8, offset: usize, bytes: usize) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.show_as(libc::MAP_SHARED, host, offset, bytes) }
    }

    /// Maps a part of the file like [`PhysicalMemory::show`], but writes do not change the file.
    ///
    /// # Safety
    ///
    /// As for [`PhysicalMemory::show`].
    pub(crate) unsafe fn show_privately(&self, host: *mut u8, offset: usize, bytes: usize) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.show_as(libc::MAP_PRIVATE | libc::MAP_NORESERVE, host, offset, bytes) }
    }

    /// # Safety
    ///
    /// As for [`PhysicalMemory::show`].
    unsafe fn show_as(&self, kind: i32, host: *mut u8, offset: usize, bytes: usize) -> Outcome {
        // SAFETY: the caller's promise: the mapping replaces one of this crate's own.
        let mapped = unsafe {
            libc::mmap(
                host.cast(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                kind | libc::MAP_FIXED,
                self.file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(failure!(
                MEMORY_ALLOCATION,
                "the operating system does not map physical memory: {}",
                std::io::Error::last_os_error()
            ));
        }
        Ok(())
    }
}

/// The most bytes of a file of this process.
#[cfg(target_os = "linux")]
fn file_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the place is valid. Should the system refuse, there is no limit.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
}

/// Maps fresh memory to the host's addresses from `host` on.
///
/// # Safety
///
/// As for [`PhysicalMemory::show`].
pub(crate) unsafe fn hide(host: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise. If the system refuses, the old memory stays mapped, which is harmless.
    unsafe {
        libc::mmap(
            host.cast(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
}
