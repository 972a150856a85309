//! Virtual memory: ranges of addresses, and the physical memory that is mapped to them. Both belong to the process, and
//! physical memory names its device: like CANN, these functions ask for no current context.

use super::{answer, not_null, refuse};
use crate::config::check;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::memory::Ranges;
use crate::runtime::context::{current, device_exists, usable};
use crate::sanitizer::allocation_table;
use crate::status::{NOT_SUPPORTED, NULL_PARAM, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{
    aclError, aclrtDrvMemHandle, aclrtMemAllocationType, aclrtMemAttr, aclrtMemGranularityOptions, aclrtMemHandleType,
    aclrtMemLocationType, aclrtPhysicalMemProp,
};
use std::ffi::c_void;
use std::ptr::with_exposed_provenance_mut;

pub unsafe extern "C" fn aclrtReserveMemAddress(
    virPtr: *mut *mut c_void,
    size: usize,
    alignment: usize,
    expectPtr: *mut c_void,
    flags: u64,
) -> aclError {
    const NAME: &str = "aclrtReserveMemAddress";
    answer!(virPtr, {
        usable()?;
        let device = current().ok().map(|context| context.device);
        if size == 0 {
            return Err(refuse(&format!("{NAME}: size"), size, "1 byte or more"));
        }
        if alignment != 0 {
            return Err(refuse(&format!("{NAME}: alignment"), alignment, "0"));
        }
        // Older headers use flag 1 for ranges with huge pages; the emulator treats both flags alike.
        if flags > 1 {
            return Err(refuse(&format!("{NAME}: flags"), flags, "0 or 1"));
        }
        if !expectPtr.is_null() {
            return Err(failure!(
                NOT_SUPPORTED,
                "{NAME}: expectPtr: given {:#x}, allowed: null, with which the emulator chooses the address",
                expectPtr.addr()
            ));
        }
        let address = allocation_table::reserve(device, size)?;
        with_exposed_provenance_mut(address)
    })
}

pub unsafe extern "C" fn aclrtReleaseMemAddress(virPtr: *mut c_void) -> aclError {
    acl(|| {
        not_null("virPtr", virPtr)?;
        usable()?;
        allocation_table::release_range("aclrtReleaseMemAddress", virPtr.addr())
    })
}

/// Checks the properties of physical memory. Returns the number of its device, and the unit of its size.
///
/// # Safety
///
/// `prop` is null or valid for reading.
unsafe fn properties(name: &str, prop: *const aclrtPhysicalMemProp) -> Outcome<(i32, usize)> {
    use aclrtMemAttr as Attr;
    not_null("prop", prop)?;
    usable()?;
    // SAFETY: not null, so valid for reading.
    let prop = unsafe { prop.read_unaligned() };
    let one = |what: &str, value: u32| failure!(NULL_PARAM, "{name}: prop->{what}: given {value}, allowed: 0");
    if prop.handleType != aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_NONE {
        return Err(one("handleType", prop.handleType.0));
    }
    if prop.allocationType != aclrtMemAllocationType::ACL_MEM_ALLOCATION_TYPE_PINNED {
        return Err(one("allocationType", prop.allocationType.0));
    }
    if prop.location.type_ != aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE {
        return Err(failure!(
            NOT_SUPPORTED,
            "{name}: prop->location.type: given {}, allowed: ACL_MEM_LOCATION_TYPE_DEVICE (1)",
            prop.location.type_.0
        ));
    }
    let device = i32::try_from(prop.location.id)
        .map_err(|_| refuse(&format!("{name}: prop->location.id"), prop.location.id, "a device"))?;
    device_exists(device)?;
    let unit = match prop.memAttr {
        Attr::ACL_HBM_MEM_HUGE
        | Attr::ACL_HBM_MEM_NORMAL
        | Attr::ACL_HBM_MEM_P2P_HUGE
        | Attr::ACL_HBM_MEM_P2P_NORMAL
        | Attr::ACL_MEM_NORMAL
        | Attr::ACL_MEM_HUGE
        | Attr::ACL_MEM_P2P_NORMAL
        | Attr::ACL_MEM_P2P_HUGE => Ranges::ALIGNMENT,
        Attr::ACL_HBM_MEM_HUGE1G | Attr::ACL_HBM_MEM_P2P_HUGE1G | Attr::ACL_MEM_HUGE1G | Attr::ACL_MEM_P2P_HUGE1G => {
            1 << 30
        }
        Attr(other) => {
            return Err(failure!(
                NULL_PARAM,
                "{name}: prop->memAttr: given {other}, allowed: the kinds of a device's own memory, ACL_HBM_MEM_* and \
                 ACL_MEM_*"
            ));
        }
    };
    Ok((device, unit))
}

pub unsafe extern "C" fn aclrtMallocPhysical(
    handle: *mut aclrtDrvMemHandle,
    size: usize,
    prop: *const aclrtPhysicalMemProp,
    flags: u64,
) -> aclError {
    const NAME: &str = "aclrtMallocPhysical";
    answer!(handle, {
        if size == 0 {
            return Err(refuse(&format!("{NAME}: size"), size, "1 byte or more"));
        }
        if flags != 0 {
            return Err(failure!(NULL_PARAM, "{NAME}: flags: given {flags:#x}, allowed: 0"));
        }
        // SAFETY: the caller's promise.
        let (device, _) = unsafe { properties(NAME, prop) }?;
        strike(Site::Malloc)?;
        let id = allocation_table::allocate_physical(device, size as u64)?;
        id.raw()
    })
}

pub unsafe extern "C" fn aclrtFreePhysical(handle: aclrtDrvMemHandle) -> aclError {
    acl(|| {
        usable()?;
        allocation_table::free_physical(handle)
    })
}

pub unsafe extern "C" fn aclrtMapMem(
    virPtr: *mut c_void,
    size: usize,
    offset: usize,
    handle: aclrtDrvMemHandle,
    flags: u64,
) -> aclError {
    const NAME: &str = "aclrtMapMem";
    acl(|| {
        not_null("virPtr", virPtr)?;
        usable()?;
        if offset != 0 {
            return Err(refuse(&format!("{NAME}: offset"), offset, "0"));
        }
        if flags != 0 {
            return Err(failure!(NULL_PARAM, "{NAME}: flags: given {flags:#x}, allowed: 0"));
        }
        allocation_table::map(NAME, virPtr.addr(), size, handle)
    })
}

pub unsafe extern "C" fn aclrtUnmapMem(virPtr: *mut c_void) -> aclError {
    acl(|| {
        not_null("virPtr", virPtr)?;
        usable()?;
        allocation_table::unmap(check(), "aclrtUnmapMem", virPtr.addr())
    })
}

pub unsafe extern "C" fn aclrtMemGetAllocationGranularity(
    prop: *mut aclrtPhysicalMemProp,
    option: aclrtMemGranularityOptions,
    granularity: *mut usize,
) -> aclError {
    use aclrtMemGranularityOptions as Options;
    const NAME: &str = "aclrtMemGetAllocationGranularity";
    answer!(granularity, {
        // SAFETY: the caller's promise.
        let (_, unit) = unsafe { properties(NAME, prop) }?;
        match option {
            Options::ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM | Options::ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED => {}
            Options(other) => {
                return Err(failure!(
                    PARAM_INVALID,
                    "{NAME}: option: given {other}, allowed: 0 (minimum), 1 (recommended)"
                ));
            }
        }
        unit
    })
}
