//! Registered host memory between two pages without access, and the call that ends the process by touching one.

use crate::bench::ok;
use ascend_emu::abi::{aclrtHostRegister, aclrtHostUnregister};
use ascend_sys::bindings::aclrtHostRegisterType;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Which end of its memory a tensor touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Edge {
    First,
    Last,
}

/// Memory of as many tensors as a call has.
pub(super) struct Pages {
    /// The first page without access.
    base: *mut u8,
    page: usize,
    regions: usize,
    next: usize,
}

impl Pages {
    /// Bytes of a region.
    pub(super) const REGION: usize = 8 << 20;

    pub(super) fn new(regions: usize) -> Self {
        tell_faults();
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let step = Self::REGION + page;
        let bytes = regions * step + page;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let pages = Pages { base: base.cast(), page, regions, next: 0 };
        for region in 0..regions {
            let (at, access) = (pages.region(region), libc::PROT_READ | libc::PROT_WRITE);
            let kind = aclrtHostRegisterType::ACL_HOST_REGISTER_MAPPED;
            let mut mapped = null_mut();
            unsafe {
                assert_eq!(libc::mprotect(at.cast(), Self::REGION, access), 0);
                ok(aclrtHostRegister(at.cast(), Self::REGION as u64, kind, &mut mapped));
            }
            assert_eq!(mapped.cast(), at);
        }
        pages
    }

    fn region(&self, region: usize) -> *mut u8 {
        let before = self.page + region * (Self::REGION + self.page);
        self.base.wrapping_add(before)
    }

    /// Goes back to the first region.
    pub(super) fn rewind(&mut self) {
        self.next = 0;
    }

    /// The base address of a tensor that touches these bytes from it on and that meets an edge of the next region, and
    /// those bytes; none of a tensor that no region holds.
    pub(super) fn place(&mut self, bytes: Option<std::ops::Range<u64>>, edge: Edge) -> (*mut u8, &mut [u8]) {
        let first = self.region(self.next % self.regions);
        self.next += 1;
        let held = |bytes: &std::ops::Range<u64>| bytes.end - bytes.start <= Self::REGION as u64;
        let Some(bytes) = bytes.filter(held) else {
            return (first, &mut []);
        };
        let (start, count) = (bytes.start as usize, (bytes.end - bytes.start) as usize);
        let at = match edge {
            Edge::First => first,
            Edge::Last => first.wrapping_add(Self::REGION - count),
        };
        // The region is this value's alone, and no launch runs while a call is made.
        (at.wrapping_sub(start), unsafe { std::slice::from_raw_parts_mut(at, count) })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for region in 0..self.regions {
            ok(unsafe { aclrtHostUnregister(self.region(region).cast()) });
        }
        let bytes = self.regions * (Self::REGION + self.page) + self.page;
        assert_eq!(unsafe { libc::munmap(self.base.cast(), bytes) }, 0);
    }
}

/// The text of the call that runs.
static CALL: (AtomicPtr<u8>, AtomicUsize) = (AtomicPtr::new(null_mut()), AtomicUsize::new(0));

/// Says which call runs from now on. The text is kept to the end of the next one.
pub(super) fn running(call: &str) {
    CALL.1.store(0, Ordering::SeqCst);
    CALL.0.store(call.as_ptr().cast_mut(), Ordering::SeqCst);
    CALL.1.store(call.len(), Ordering::SeqCst);
}

/// Has a fault write the call that runs to standard error before it ends the process.
fn tell_faults() {
    extern "C" fn tell(signal: c_int) {
        let (text, length) = (CALL.0.load(Ordering::SeqCst), CALL.1.load(Ordering::SeqCst));
        let what = b"\na launch leaves its tensors: ";
        unsafe {
            libc::write(2, what.as_ptr().cast(), what.len());
            libc::write(2, text.cast(), length);
            libc::write(2, b"\n".as_ptr().cast(), 1);
            libc::signal(signal, libc::SIG_DFL);
        }
    }
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        unsafe { libc::signal(signal, tell as extern "C" fn(c_int) as libc::sighandler_t) };
    }
}
