//! Memory of devices and of the host.

use super::copy::{Side, check_count, run_now};
use super::{not_null, refuse, store};
use crate::config::check;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::operator::Addresses;
use crate::runtime::capture::forbid_unsafe;
use crate::runtime::context::{current, stream};
use crate::runtime::task::Task;
use crate::sanitizer::allocation_table::{self, MemoryLocation};
use crate::status::{CAPTURE_MODE, NULL_PARAM, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{
    aclError, aclrtMallocAttrType, aclrtMallocConfig, aclrtMemAttr, aclrtMemMallocPolicy, aclrtStream,
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
    location: impl FnOnce() -> Outcome<MemoryLocation>,
) -> Outcome {
    not_null(name, to)?;
    if size == 0 {
        return Err(refuse(&format!("{name}: size"), size, "1 byte or more"));
    }
    let location = location()?;
    strike(Site::Malloc)?;
    let address = allocation_table::allocate(location, size as u64)?;
    // SAFETY: the caller's promise.
    unsafe { store(name, to, std::ptr::with_exposed_provenance_mut(address)) }
}

/// # Safety
///
/// As for [`allocate`].
unsafe fn allocate_device(name: &str, to: *mut *mut c_void, size: usize, policy: aclrtMemMallocPolicy) -> Outcome {
    if policy.0 & !POLICY_FLAGS > POLICIES {
        let policy = format!("{:#x}", policy.0);
        return Err(refuse("policy", policy, "an aclrtMemMallocPolicy"));
    }
    // SAFETY: the caller's promise.
    unsafe { allocate(name, to, size, || Ok(MemoryLocation::Device(current()?.device))) }
}

pub unsafe extern "C" fn aclrtMalloc(devPtr: *mut *mut c_void, size: usize, policy: aclrtMemMallocPolicy) -> aclError {
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

/// Largest number of attributes of an allocation.
const ATTRIBUTES: usize = 16;

/// Checks the attributes of an allocation. The module that memory is for is ignored, and so is the flag that the
/// device uses the host's addresses for host memory, because it always does.
///
/// # Safety
///
/// `config` is null or valid for reading, and so are the attributes that it names.
unsafe fn check_attributes(name: &str, config: *const aclrtMallocConfig) -> Outcome {
    if config.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so valid for reading.
    let config = unsafe { config.read_unaligned() };
    if config.numAttrs == 0 {
        return Ok(());
    }
    not_null(&format!("{name}: cfg->attrs"), config.attrs)?;
    if config.numAttrs > ATTRIBUTES {
        let what = format!("{name}: cfg->numAttrs");
        return Err(refuse(&what, config.numAttrs, "0 to 16"));
    }
    for place in 0..config.numAttrs {
        // SAFETY: the array has `numAttrs` attributes, by the caller's promise.
        let attribute = unsafe { config.attrs.add(place).read_unaligned() };
        match attribute.attr {
            aclrtMallocAttrType::ACL_RT_MEM_ATTR_RSV
            | aclrtMallocAttrType::ACL_RT_MEM_ATTR_MODULE_ID
            | aclrtMallocAttrType::ACL_RT_MEM_ATTR_VA_FLAG => {}
            aclrtMallocAttrType::ACL_RT_MEM_ATTR_DEVICE_ID => {
                // SAFETY: every bit pattern of the union is a number.
                let device = unsafe { attribute.value.deviceId };
                if i32::try_from(device) != Ok(current()?.device) {
                    return Err(failure!(
                        NULL_PARAM,
                        "{name}: cfg->attrs[{place}]: given device {device}, allowed: this thread's, {}",
                        current()?.device
                    ));
                }
            }
            aclrtMallocAttrType(other) => {
                let what = format!("{name}: cfg->attrs[{place}].attr");
                return Err(refuse(&what, other, "an aclrtMallocAttrType, 0 to 3"));
            }
        }
    }
    Ok(())
}

pub unsafe extern "C" fn aclrtMallocWithCfg(
    devPtr: *mut *mut c_void,
    size: usize,
    policy: aclrtMemMallocPolicy,
    cfg: *mut aclrtMallocConfig,
) -> aclError {
    const NAME: &str = "aclrtMallocWithCfg";
    // SAFETY: the caller's promise, for both.
    acl(|| unsafe {
        check_attributes(NAME, cfg)?;
        allocate_device(NAME, devPtr, size, policy)
    })
}

pub unsafe extern "C" fn aclrtMallocHost(hostPtr: *mut *mut c_void, size: usize) -> aclError {
    // SAFETY: the caller's promise.
    acl(|| unsafe {
        allocate("aclrtMallocHost", hostPtr, size, || {
            current()?;
            Ok(MemoryLocation::PinnedHost)
        })
    })
}

pub unsafe extern "C" fn aclrtMallocHostWithCfg(
    ptr: *mut *mut c_void,
    size: u64,
    cfg: *mut aclrtMallocConfig,
) -> aclError {
    const NAME: &str = "aclrtMallocHostWithCfg";
    // SAFETY: the caller's promise, for both. Sizes fit in the address space, whose numbers have 64 bits.
    acl(|| unsafe {
        check_attributes(NAME, cfg)?;
        allocate(NAME, ptr, size as usize, || {
            current()?;
            Ok(MemoryLocation::PinnedHost)
        })
    })
}

fn free(name: &'static str, device: bool, pointer: *mut c_void) -> Outcome {
    not_null(name, pointer)?;
    current()?;
    allocation_table::free(check(), name, device, pointer.addr())
}

pub unsafe extern "C" fn aclrtFree(devPtr: *mut c_void) -> aclError {
    acl(|| free("aclrtFree", true, devPtr))
}

pub unsafe extern "C" fn aclrtFreeHost(hostPtr: *mut c_void) -> aclError {
    acl(|| free("aclrtFreeHost", false, hostPtr))
}

/// A fill with checked arguments.
fn fill(name: &str, device: *mut c_void, max_count: usize, value: i32, count: usize) -> Outcome<Task> {
    not_null(&format!("{name}: devPtr"), device)?;
    check_count(name, "maxCount", max_count, count)?;
    let dst = device.addr();
    if Side::of(dst)? != Side::Device {
        return Err(failure!(PARAM_INVALID, "{name}: devPtr at {dst:#x} is host memory, allowed: device memory"));
    }
    Ok(Task::Fill {
        dst,
        // Like C's memset, only the low byte counts.
        value: value as u8,
        bytes: count as u64,
    })
}

pub unsafe extern "C" fn aclrtMemset(devPtr: *mut c_void, maxCount: usize, value: i32, count: usize) -> aclError {
    const NAME: &str = "aclrtMemset";
    acl(|| {
        current()?;
        let task = fill(NAME, devPtr, maxCount, value, count)?;
        forbid_unsafe(CAPTURE_MODE, NAME)?;
        let none = Addresses::default();
        allocation_table::inspect(check(), PARAM_INVALID, NAME, true, &|visit| {
            task.accesses(&none, visit);
        })?;
        // SAFETY: the allocation table has found the range live.
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

pub unsafe extern "C" fn aclrtGetMemInfo(attr: aclrtMemAttr, free: *mut usize, total: *mut usize) -> aclError {
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
            | Attr::ACL_MEM_P2P_HUGE1G => allocation_table::capacity()?,
            // These products have no DDR memory of their own.
            Attr::ACL_DDR_MEM
            | Attr::ACL_DDR_MEM_HUGE
            | Attr::ACL_DDR_MEM_NORMAL
            | Attr::ACL_DDR_MEM_P2P_HUGE
            | Attr::ACL_DDR_MEM_P2P_NORMAL => 0,
            Attr(other) => return Err(refuse("attr", other, "an aclrtMemAttr, 0 to 17")),
        };
        let left = all.saturating_sub(allocation_table::used_bytes(device));
        // SAFETY: the caller's promise, for both. Device memory fits in the address space.
        unsafe {
            store("free", free, left as usize)?;
            store("total", total, all as usize)
        }
    })
}
