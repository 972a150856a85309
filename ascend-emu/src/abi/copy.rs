//! Copies.

use super::{not_null, refuse};
use crate::config::check;
use crate::fault;
use crate::fault_plan::Site;
use crate::finding_kind::FindingKind;
use crate::injection::strike;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses};
use crate::runtime::capture::forbid_unsafe;
use crate::runtime::context::{current, stream};
use crate::runtime::task::Task;
use crate::sanitizer::allocation_table;
use crate::sanitizer::{Suspicion, report};
use crate::status::{CAPTURE_BLOCKS_ASYNC, CAPTURE_MODE, NOT_SUPPORTED, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{aclError, aclrtCmoType, aclrtMemcpyKind, aclrtStream};
use std::ffi::c_void;

/// Kind of memory at an address, as copies see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Device,
    Pinned,
    Pageable,
}

impl Side {
    pub(super) fn of(address: usize) -> Outcome<Self> {
        if DeviceMemory::get()?.contains(address) {
            return Ok(Side::Device);
        }
        Ok(match allocation_table::lookup(address) {
            Some(_) => Side::Pinned,
            None => Side::Pageable,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Side::Device => "device",
            Side::Pinned | Side::Pageable => "host",
        }
    }
}

/// One end of a copy.
pub(super) struct End {
    pub address: usize,
    pub side: Side,
}

/// A copy with checked arguments.
pub(super) struct Copy {
    pub dst: End,
    pub src: End,
    bytes: u64,
}

impl Copy {
    pub(super) fn new(
        name: &str,
        dst: *mut c_void,
        dst_max: usize,
        src: *const c_void,
        count: usize,
        kind: aclrtMemcpyKind,
    ) -> Outcome<Self> {
        not_null(&format!("{name}: dst"), dst)?;
        not_null(&format!("{name}: src"), src)?;
        check_count(name, "destMax", dst_max, count)?;
        let end = |address: usize| -> Outcome<End> { Ok(End { address, side: Side::of(address)? }) };
        // Exposed, since the copy accesses them by their addresses.
        let copy = Copy { dst: end(dst.expose_provenance())?, src: end(src.expose_provenance())?, bytes: count as u64 };
        use aclrtMemcpyKind as Kind;
        let (to, from) = match kind {
            Kind::ACL_MEMCPY_HOST_TO_HOST => ("host", "host"),
            Kind::ACL_MEMCPY_HOST_TO_DEVICE | Kind::ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE => ("device", "host"),
            Kind::ACL_MEMCPY_DEVICE_TO_HOST => ("host", "device"),
            Kind::ACL_MEMCPY_DEVICE_TO_DEVICE
            | Kind::ACL_MEMCPY_INNER_DEVICE_TO_DEVICE
            | Kind::ACL_MEMCPY_INTER_DEVICE_TO_DEVICE => ("device", "device"),
            Kind::ACL_MEMCPY_DEFAULT => return Ok(copy),
            Kind(other) => {
                let what = format!("{name}: kind");
                return Err(refuse(&what, other, "an aclrtMemcpyKind, 0 to 7"));
            }
        };
        for (what, end, wanted) in [("dst", &copy.dst, to), ("src", &copy.src, from)] {
            if end.side.name() != wanted {
                return Err(failure!(
                    PARAM_INVALID,
                    "{name}: {what} at {:#x} is {} memory, but the kind of copy takes {wanted} memory there",
                    end.address,
                    end.side.name()
                ));
            }
        }
        Ok(copy)
    }

    pub(super) fn task(&self) -> Task {
        Task::Copy { dst: self.dst.address, src: self.src.address, bytes: self.bytes }
    }

    /// The end in pageable host memory.
    pub(super) fn pageable(&self) -> Option<(&'static str, &End)> {
        [("dst", &self.dst), ("src", &self.src)].into_iter().find(|(_, end)| end.side == Side::Pageable)
    }

    /// Visits the ends that the allocation table knows.
    fn visit(&self, visit: &mut dyn FnMut(Access)) {
        for (what, end, write) in [("src", &self.src, false), ("dst", &self.dst, true)] {
            if end.side != Side::Pageable {
                visit(Access { address: end.address, bytes: self.bytes, write, what });
            }
        }
    }

    /// Checks and does the copy on the calling thread.
    ///
    /// # Safety
    ///
    /// Pageable ends are valid for the copy.
    pub(super) unsafe fn run(&self, name: &'static str) -> Outcome {
        allocation_table::inspect(check(), PARAM_INVALID, name, true, &|visit| {
            self.visit(visit);
        })?;
        // SAFETY: the allocation table has found the device and pinned ends live; the caller keeps the others valid.
        unsafe { run_now(&self.task()) }
    }
}

/// # Safety
///
/// As for [`Task::run`].
pub(super) unsafe fn run_now(task: &Task) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe { task.run(&Addresses::default(), (check(), PARAM_INVALID), &mut Vec::new()) }
}

pub(super) fn check_count(name: &str, limit_name: &str, limit: usize, count: usize) -> Outcome {
    if count == 0 {
        return Err(refuse(&format!("{name}: count"), count, "1 byte or more"));
    }
    if count > limit {
        return Err(failure!(
            PARAM_INVALID,
            "{name}: count: given {count} bytes, allowed: at most {limit_name}, {limit}"
        ));
    }
    Ok(())
}

pub unsafe extern "C" fn aclrtMemcpy(
    dst: *mut c_void,
    destMax: usize,
    src: *const c_void,
    count: usize,
    kind: aclrtMemcpyKind,
) -> aclError {
    const NAME: &str = "aclrtMemcpy";
    acl(|| {
        current()?;
        let copy = Copy::new(NAME, dst, destMax, src, count, kind)?;
        forbid_unsafe(CAPTURE_MODE, NAME)?;
        strike(Site::Memcpy)?;
        fault::check_thread_device(NAME)?;
        // SAFETY: host memory is valid, by the caller's promise.
        unsafe { copy.run(NAME) }
    })
}

/// Whether pageable host memory of an asynchronous copy is reported. The copy waits for the stream in either case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PageableCopies {
    /// It is reported as a finding.
    Finding,
    /// It is the documented use of the function.
    Allowed,
}

/// # Safety
///
/// Host memory is valid for the copies, and stays so until they are over.
pub(super) unsafe fn copy_async(
    name: &'static str,
    copies: &[Copy],
    stream: aclrtStream,
    allowed: PageableCopies,
) -> Outcome {
    let stream = self::stream(name, stream)?;
    strike(Site::Memcpy)?;
    fault::check_device(name, Some(stream.device()))?;
    let pageable = copies.iter().find_map(|copy| Some((copy, copy.pageable()?)));
    let Some((copy, (what, end))) = pageable.filter(|_| !stream.records()) else {
        for copy in copies {
            stream.submit(copy.task(), None, PARAM_INVALID)?;
        }
        return Ok(());
    };
    forbid_unsafe(CAPTURE_BLOCKS_ASYNC, name)?;
    if allowed == PageableCopies::Finding {
        let suspicion = Suspicion {
            kind: FindingKind::PageableCopy,
            site: (name, what),
            // The device's end, since the host memory may differ with each call.
            tensor: if what == "dst" { copy.src.address } else { copy.dst.address },
            message: format!(
                "{name}: {what} at {:#x} is host memory that is not pinned (aclrtMallocHost); the copy waits for the \
                 stream",
                end.address
            ),
        };
        report(check(), PARAM_INVALID, suspicion)?;
    }
    // Pageable memory may end after the call, so the copy is made now, in the order of the stream.
    stream.wait(name)?;
    for copy in copies {
        // SAFETY: host memory is valid, by the caller's promise.
        unsafe { copy.run(name) }?;
    }
    Ok(())
}

pub unsafe extern "C" fn aclrtMemcpyAsync(
    dst: *mut c_void,
    destMax: usize,
    src: *const c_void,
    count: usize,
    kind: aclrtMemcpyKind,
    stream: aclrtStream,
) -> aclError {
    const NAME: &str = "aclrtMemcpyAsync";
    acl(|| {
        self::stream(NAME, stream)?;
        let copy = Copy::new(NAME, dst, destMax, src, count, kind)?;
        // SAFETY: the caller's promise.
        unsafe { copy_async(NAME, &[copy], stream, PageableCopies::Finding) }
    })
}

pub unsafe extern "C" fn aclrtMemcpyAsyncWithCondition(
    dst: *mut c_void,
    destMax: usize,
    src: *const c_void,
    count: usize,
    kind: aclrtMemcpyKind,
    stream: aclrtStream,
) -> aclError {
    const NAME: &str = "aclrtMemcpyAsyncWithCondition";
    acl(|| {
        self::stream(NAME, stream)?;
        let copy = Copy::new(NAME, dst, destMax, src, count, kind)?;
        // SAFETY: the caller's promise.
        unsafe { copy_async(NAME, &[copy], stream, PageableCopies::Allowed) }
    })
}

/// Checks the range of a hint to the cache. The emulator has no such cache.
pub unsafe extern "C" fn aclrtCmoAsync(
    src: *mut c_void,
    size: usize,
    cmoType: aclrtCmoType,
    stream: aclrtStream,
) -> aclError {
    const NAME: &str = "aclrtCmoAsync";
    acl(|| {
        self::stream(NAME, stream)?;
        not_null(&format!("{NAME}: src"), src)?;
        check_count(NAME, "what there is", usize::MAX, size)?;
        if !(0..=3).contains(&cmoType.0) {
            let what = format!("{NAME}: cmoType");
            return Err(refuse(&what, cmoType.0, "an aclrtCmoType, 0 to 3"));
        }
        if cmoType != aclrtCmoType::ACL_RT_CMO_TYPE_PREFETCH {
            return Err(failure!(
                NOT_SUPPORTED,
                "{NAME}: cmoType: given {}, allowed: ACL_RT_CMO_TYPE_PREFETCH (0)",
                cmoType.0
            ));
        }
        if Side::of(src.addr())? != Side::Device {
            return Err(failure!(
                PARAM_INVALID,
                "{NAME}: src at {:#x} is host memory, allowed: device memory",
                src.addr()
            ));
        }
        allocation_table::inspect(check(), PARAM_INVALID, NAME, false, &|visit| {
            visit(Access { address: src.addr(), bytes: size as u64, write: false, what: "src" });
        })
    })
}
