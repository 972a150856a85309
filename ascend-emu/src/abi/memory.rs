//! Memory of devices and of the host, and copies.

use super::{not_null, refuse, store};
use crate::capture::forbid_unsafe;
use crate::config::check;
use crate::context::{current, stream};
use crate::fault::{Site, strike};
use crate::ledger::{self, Place};
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses};
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::{
    CAPTURE_BLOCKS_ASYNC, CAPTURE_MODE, Failure, Outcome, PARAM_INVALID, acl, failure,
};
use crate::task::Task;
use ascend_sys::bindings::{
    aclError, aclrtMemAttr, aclrtMemMallocPolicy, aclrtMemcpyKind, aclrtStream,
};
use std::ffi::c_void;

/// Policies without the flags that may be added to them.
const POLICIES: u32 = aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE1G_ONLY_P2P.0;
const POLICY_FLAGS: u32 = aclrtMemMallocPolicy::ACL_MEM_TYPE_LOW_BAND_WIDTH.0
    | aclrtMemMallocPolicy::ACL_MEM_TYPE_HIGH_BAND_WIDTH.0
    | aclrtMemMallocPolicy::ACL_MEM_ACCESS_USER_SPACE_READONLY.0;

/// # Safety
///
/// `to` is null or valid for writing.
unsafe fn allocate(
    name: &str,
    to: *mut *mut c_void,
    size: usize,
    place: impl FnOnce() -> Outcome<Place>,
) -> Outcome {
    not_null(name, to)?;
    if size == 0 {
        return Err(refuse(&format!("{name}: size"), size, "1 byte or more"));
    }
    let place = place()?;
    strike(Site::Malloc)?;
    let address = ledger::allocate(place, size as u64)?;
    // SAFETY: the caller's promise.
    unsafe { store(name, to, std::ptr::with_exposed_provenance_mut(address)) }
}

/// # Safety
///
/// As [`allocate`].
unsafe fn allocate_device(
    name: &str,
    to: *mut *mut c_void,
    size: usize,
    policy: aclrtMemMallocPolicy,
) -> Outcome {
    if policy.0 & !POLICY_FLAGS > POLICIES {
        let given = format!("{:#x}", policy.0);
        return Err(refuse("policy", given, "an aclrtMemMallocPolicy"));
    }
    // SAFETY: the caller's promise.
    unsafe { allocate(name, to, size, || Ok(Place::Device(current()?.device))) }
}

pub unsafe extern "C" fn aclrtMalloc(
    devPtr: *mut *mut c_void,
    size: usize,
    policy: aclrtMemMallocPolicy,
) -> aclError {
    // SAFETY: the caller's promise.
    acl(|| unsafe { allocate_device("aclrtMalloc", devPtr, size, policy) })
}

pub unsafe extern "C" fn aclrtMallocAlign32(
    devPtr: *mut *mut c_void,
    size: usize,
    policy: aclrtMemMallocPolicy,
) -> aclError {
    // SAFETY: the caller's promise.
    acl(|| unsafe { allocate_device("aclrtMallocAlign32", devPtr, size, policy) })
}

pub unsafe extern "C" fn aclrtMallocHost(hostPtr: *mut *mut c_void, size: usize) -> aclError {
    // SAFETY: the caller's promise.
    acl(|| unsafe {
        allocate("aclrtMallocHost", hostPtr, size, || {
            current()?;
            Ok(Place::PinnedHost)
        })
    })
}

fn free(name: &'static str, device: bool, pointer: *mut c_void) -> Outcome {
    not_null(name, pointer)?;
    current()?;
    ledger::free(check(), name, device, pointer.addr())
}

pub unsafe extern "C" fn aclrtFree(devPtr: *mut c_void) -> aclError {
    acl(|| free("aclrtFree", true, devPtr))
}

pub unsafe extern "C" fn aclrtFreeHost(hostPtr: *mut c_void) -> aclError {
    acl(|| free("aclrtFreeHost", false, hostPtr))
}

/// Kind of memory at an address, as copies see it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Device,
    Pinned,
    Pageable,
}

impl Side {
    fn of(address: usize) -> Outcome<Self> {
        if DeviceMemory::get()?.contains(address) {
            return Ok(Side::Device);
        }
        Ok(match ledger::lookup(address) {
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
struct End {
    address: usize,
    side: Side,
}

/// A copy whose arguments are in order.
struct Copy {
    dst: End,
    src: End,
    bytes: u64,
}

impl Copy {
    fn new(
        name: &str,
        dst: *mut c_void,
        room: usize,
        src: *const c_void,
        count: usize,
        kind: aclrtMemcpyKind,
    ) -> Outcome<Self> {
        not_null(&format!("{name}: dst"), dst)?;
        not_null(&format!("{name}: src"), src)?;
        check_count(name, "destMax", room, count)?;
        let end = |address: usize| -> Outcome<End> {
            Ok(End {
                address,
                side: Side::of(address)?,
            })
        };
        // Exposed, since it is by their addresses that the copy reaches them.
        let copy = Copy {
            dst: end(dst.expose_provenance())?,
            src: end(src.expose_provenance())?,
            bytes: count as u64,
        };
        use aclrtMemcpyKind as Kind;
        let (to, from) = match kind {
            Kind::ACL_MEMCPY_HOST_TO_HOST => ("host", "host"),
            Kind::ACL_MEMCPY_HOST_TO_DEVICE | Kind::ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE => {
                ("device", "host")
            }
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

    fn task(&self) -> Task {
        Task::Copy {
            dst: self.dst.address,
            src: self.src.address,
            bytes: self.bytes,
        }
    }

    /// Visits the ends that the ledger knows about.
    fn visit(&self, visit: &mut dyn FnMut(Access)) {
        for (what, end, write) in [("src", &self.src, false), ("dst", &self.dst, true)] {
            if end.side != Side::Pageable {
                visit(Access {
                    address: end.address,
                    bytes: self.bytes,
                    write,
                    what,
                });
            }
        }
    }

    /// Checks and does the copy on the calling thread.
    ///
    /// # Safety
    ///
    /// Pageable ends are valid for the copy.
    unsafe fn run(&self, name: &'static str) -> Outcome {
        ledger::inspect(check(), PARAM_INVALID, name, true, &|visit| {
            self.visit(visit);
        })?;
        // SAFETY: the ledger has found the device and pinned ends live; the caller answers for the others.
        unsafe { run_now(&self.task()) }
    }
}

/// # Safety
///
/// As [`Task::run`].
unsafe fn run_now(task: &Task) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe { task.run(&Addresses::default(), &mut Vec::new()) }.map_err(Failure::from)
}

fn check_count(name: &str, room_name: &str, room: usize, count: usize) -> Outcome {
    if count == 0 {
        return Err(refuse(&format!("{name}: count"), count, "1 byte or more"));
    }
    if count > room {
        return Err(failure!(
            PARAM_INVALID,
            "{name}: count: given {count} bytes, allowed: at most {room_name}, {room}"
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
        // SAFETY: host memory is valid, by the caller's promise.
        unsafe { copy.run(NAME) }
    })
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
        let stream = self::stream(NAME, stream)?;
        let copy = Copy::new(NAME, dst, destMax, src, count, kind)?;
        strike(Site::Memcpy)?;
        let pageable = [("dst", &copy.dst), ("src", &copy.src)]
            .into_iter()
            .find(|(_, end)| end.side == Side::Pageable);
        let Some((what, end)) = pageable.filter(|_| !stream.records()) else {
            return stream.submit(copy.task(), None, PARAM_INVALID);
        };
        forbid_unsafe(CAPTURE_BLOCKS_ASYNC, NAME)?;
        let suspicion = Suspicion {
            kind: FindingKind::PageableCopy,
            site: (NAME, what),
            message: format!(
                "{NAME}: {what} at {:#x} is host memory that is not pinned (aclrtMallocHost); the copy waits for the \
                 stream",
                end.address
            ),
        };
        report(check(), PARAM_INVALID, suspicion)?;
        // Nothing says how long pageable memory stays: do it now, in the stream's order.
        stream.wait(NAME)?;
        // SAFETY: host memory is valid, by the caller's promise.
        unsafe { copy.run(NAME) }
    })
}

/// A fill whose arguments are in order.
fn fill(name: &str, device: *mut c_void, room: usize, value: i32, count: usize) -> Outcome<Task> {
    not_null(&format!("{name}: devPtr"), device)?;
    check_count(name, "maxCount", room, count)?;
    let dst = device.addr();
    if Side::of(dst)? != Side::Device {
        return Err(failure!(
            PARAM_INVALID,
            "{name}: devPtr at {dst:#x} is host memory, allowed: device memory"
        ));
    }
    Ok(Task::Fill {
        dst,
        // As C's memset: the low byte.
        value: value as u8,
        bytes: count as u64,
    })
}

pub unsafe extern "C" fn aclrtMemset(
    devPtr: *mut c_void,
    maxCount: usize,
    value: i32,
    count: usize,
) -> aclError {
    const NAME: &str = "aclrtMemset";
    acl(|| {
        current()?;
        let task = fill(NAME, devPtr, maxCount, value, count)?;
        forbid_unsafe(CAPTURE_MODE, NAME)?;
        let none = Addresses::default();
        ledger::inspect(check(), PARAM_INVALID, NAME, true, &|visit| {
            task.accesses(&none, visit);
        })?;
        // SAFETY: the ledger has found the range live.
        unsafe { run_now(&task) }
    })
}

pub unsafe extern "C" fn aclrtMemsetAsync(
    devPtr: *mut c_void,
    maxCount: usize,
    value: i32,
    count: usize,
    stream: aclrtStream,
) -> aclError {
    const NAME: &str = "aclrtMemsetAsync";
    acl(|| {
        let stream = self::stream(NAME, stream)?;
        let task = fill(NAME, devPtr, maxCount, value, count)?;
        stream.submit(task, None, PARAM_INVALID)
    })
}

pub unsafe extern "C" fn aclrtGetMemInfo(
    attr: aclrtMemAttr,
    free: *mut usize,
    total: *mut usize,
) -> aclError {
    use aclrtMemAttr as Attr;
    acl(|| {
        let device = current()?.device;
        let all = match attr {
            Attr::ACL_HBM_MEM
            | Attr::ACL_HBM_MEM_HUGE
            | Attr::ACL_HBM_MEM_NORMAL
            | Attr::ACL_HBM_MEM_P2P_HUGE
            | Attr::ACL_HBM_MEM_P2P_NORMAL
            | Attr::ACL_HBM_MEM_HUGE1G
            | Attr::ACL_HBM_MEM_P2P_HUGE1G
            | Attr::ACL_MEM_NORMAL
            | Attr::ACL_MEM_HUGE
            | Attr::ACL_MEM_HUGE1G
            | Attr::ACL_MEM_P2P_NORMAL
            | Attr::ACL_MEM_P2P_HUGE
            | Attr::ACL_MEM_P2P_HUGE1G => ledger::capacity()?,
            // These products have no DDR memory of their own.
            Attr::ACL_DDR_MEM
            | Attr::ACL_DDR_MEM_HUGE
            | Attr::ACL_DDR_MEM_NORMAL
            | Attr::ACL_DDR_MEM_P2P_HUGE
            | Attr::ACL_DDR_MEM_P2P_NORMAL => 0,
            Attr(other) => return Err(refuse("attr", other, "an aclrtMemAttr, 0 to 17")),
        };
        let left = all.saturating_sub(ledger::used_bytes(device));
        // SAFETY: the caller's promise, for both. Device memory fits in the address space.
        unsafe {
            store("free", free, left as usize)?;
            store("total", total, all as usize)
        }
    })
}
