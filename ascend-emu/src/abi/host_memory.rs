//! Registered host memory, and the place of memory.

use super::copy::Side;
use super::{answer, not_null, refuse, store};
use crate::config::check;
use crate::memory::DeviceMemory;
use crate::runtime::context::{current, usable};
use crate::sanitizer::allocation_table::{self, MemoryLocation};
use crate::status::{NOT_SUPPORTED, NULL_PARAM, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{
    ACL_HOST_REG_IOMEMORY, ACL_HOST_REG_MAPPED, ACL_HOST_REG_PINNED, ACL_HOST_REG_READONLY, aclError,
    aclrtHostRegisterType, aclrtMemLocation, aclrtMemLocationType, aclrtPtrAttributes,
};
use std::ffi::c_void;

/// Alignment of memory that is registered.
const ALIGNMENT: usize = 4096;

/// Registers host memory.
fn register(name: &str, host: *mut c_void, bytes: u64, mapped: bool, pin: bool) -> Outcome {
    not_null(&format!("{name}: ptr"), host)?;
    current()?;
    // Exposed, since the device accesses it by its address.
    let address = host.expose_provenance();
    if bytes == 0 {
        return Err(refuse(&format!("{name}: size"), bytes, "1 byte or more"));
    }
    if !address.is_multiple_of(ALIGNMENT) {
        return Err(failure!(PARAM_INVALID, "{name}: ptr: given {address:#x}, allowed: a multiple of {ALIGNMENT}"));
    }
    if Side::of(address)? == Side::Device {
        return Err(failure!(PARAM_INVALID, "{name}: ptr at {address:#x} is device memory, allowed: host memory"));
    }
    allocation_table::register_host(name, address, bytes, mapped, pin)
}

/// Registers host memory. Its device address is the host's own.
pub unsafe extern "C" fn aclrtHostRegister(
    ptr: *mut c_void,
    size: u64,
    type_: aclrtHostRegisterType,
    devPtr: *mut *mut c_void,
) -> aclError {
    use aclrtHostRegisterType as Type;
    const NAME: &str = "aclrtHostRegister";
    answer!(devPtr, {
        match type_ {
            Type::ACL_HOST_REGISTER_MAPPED => {}
            Type::ACL_HOST_REGISTER_IOMEMORY | Type::ACL_HOST_REGISTER_READONLY => {
                return Err(failure!(
                    NOT_SUPPORTED,
                    "{NAME}: type: given {:#x}, allowed: ACL_HOST_REGISTER_MAPPED (0)",
                    type_.0
                ));
            }
            Type(other) => {
                let what = format!("{NAME}: type");
                return Err(refuse(&what, other, "an aclrtHostRegisterType"));
            }
        }
        register(NAME, ptr, size, true, false)?;
        ptr
    })
}

pub unsafe extern "C" fn aclrtHostRegisterV2(ptr: *mut c_void, size: u64, flag: u32) -> aclError {
    const NAME: &str = "aclrtHostRegisterV2";
    const KNOWN: u32 = ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED | ACL_HOST_REG_IOMEMORY | ACL_HOST_REG_READONLY;
    acl(|| {
        if flag == 0 || flag & !KNOWN != 0 {
            let flag = format!("{flag:#x}");
            return Err(refuse(&format!("{NAME}: flag"), flag, "ACL_HOST_REG_* flags"));
        }
        if flag & (ACL_HOST_REG_IOMEMORY | ACL_HOST_REG_READONLY) != 0 {
            return Err(failure!(
                NOT_SUPPORTED,
                "{NAME}: flag: given {flag:#x}, allowed: ACL_HOST_REG_MAPPED (0x2) and ACL_HOST_REG_PINNED \
                 (0x10000000)"
            ));
        }
        let has = |bit| flag & bit != 0;
        register(NAME, ptr, size, has(ACL_HOST_REG_MAPPED), has(ACL_HOST_REG_PINNED))
    })
}

pub unsafe extern "C" fn aclrtHostGetDevicePointer(
    pHost: *mut c_void,
    pDevice: *mut *mut c_void,
    flag: u32,
) -> aclError {
    const NAME: &str = "aclrtHostGetDevicePointer";
    acl(|| {
        not_null("pHost", pHost)?;
        not_null("pDevice", pDevice)?;
        if flag != 0 {
            return Err(failure!(NULL_PARAM, "{NAME}: flag: given {flag:#x}, allowed: 0"));
        }
        current()?;
        if !allocation_table::registered_mapped(NAME, pHost.addr())? {
            return Err(failure!(
                PARAM_INVALID,
                "{NAME}: {:#x} was registered without ACL_HOST_REG_MAPPED",
                pHost.addr()
            ));
        }
        // SAFETY: the caller's promise.
        unsafe { store("pDevice", pDevice, pHost) }
    })
}

pub unsafe extern "C" fn aclrtHostUnregister(ptr: *mut c_void) -> aclError {
    const NAME: &str = "aclrtHostUnregister";
    acl(|| {
        not_null("ptr", ptr)?;
        current()?;
        allocation_table::unregister_host(check(), NAME, ptr.addr())
    })
}

pub unsafe extern "C" fn aclrtPointerGetAttributes(
    ptr: *const c_void,
    attributes: *mut aclrtPtrAttributes,
) -> aclError {
    use aclrtMemLocationType as Type;
    const NAME: &str = "aclrtPointerGetAttributes";
    acl(|| {
        not_null("ptr", ptr)?;
        not_null("attributes", attributes)?;
        usable()?;
        let memory = DeviceMemory::get()?;
        let location = allocation_table::lookup(ptr.addr()).map(|allocation| allocation.location);
        let (type_, id) = match location {
            Some(MemoryLocation::Device(device)) => (Type::ACL_MEM_LOCATION_TYPE_DEVICE, device as u32),
            Some(MemoryLocation::PinnedHost) => (Type::ACL_MEM_LOCATION_TYPE_HOST, 0),
            None if memory.contains(ptr.addr()) => {
                return Err(failure!(PARAM_INVALID, "{NAME}: no device memory is allocated at {:#x}", ptr.addr()));
            }
            None => (Type::ACL_MEM_LOCATION_TYPE_UNREGISTERED, 0),
        };
        let found = aclrtPtrAttributes {
            location: aclrtMemLocation { id, type_ },
            pageSize: memory.page() as u32,
            rsv: [0; 4],
        };
        // SAFETY: the caller's promise.
        unsafe { store("attributes", attributes, found) }
    })
}
