//! Capabilities of a device.

use super::{answer, not_null, refuse, store};
use crate::runtime::context::{self, device_exists, known_device, machine, usable};
use crate::sanitizer::allocation_table;
use crate::status::{NOT_SUPPORTED, Outcome, acl, failure};
use ascend_spec::Soc;
use ascend_sys::bindings::{aclCannAttr, aclDeviceInfo, aclError, aclrtDevAttr, aclrtFloatOverflowMode, aclrtUuid};
use std::ffi::c_char;

/// Converts the number of a device from an unsigned one.
fn device(name: &str, id: u32) -> Outcome {
    usable()?;
    let id = i32::try_from(id).map_err(|_| refuse(&format!("{name}: deviceId"), id, "the number of a device"))?;
    device_exists(id)
}

pub unsafe extern "C" fn aclGetDeviceCapability(deviceId: u32, deviceInfo: aclDeviceInfo, value: *mut i64) -> aclError {
    const NAME: &str = "aclGetDeviceCapability";
    answer!(value, {
        device(NAME, deviceId)?;
        let chip = context::chip();
        match deviceInfo {
            aclDeviceInfo::ACL_DEVICE_INFO_AI_CORE_NUM => i64::from(chip.cube_cores),
            aclDeviceInfo::ACL_DEVICE_INFO_VECTOR_CORE_NUM => i64::from(chip.vector_cores),
            aclDeviceInfo::ACL_DEVICE_INFO_L2_SIZE => chip.cache,
            aclDeviceInfo(other) => {
                let what = format!("{NAME}: deviceInfo");
                return Err(refuse(&what, other, "an aclDeviceInfo, 0 to 2"));
            }
        }
    })
}

/// Capabilities of a product.
const ABILITIES: [aclCannAttr; 2] = [aclCannAttr::ACL_CANN_ATTR_INF_NAN, aclCannAttr::ACL_CANN_ATTR_BF16];

/// The capabilities of the calling thread's machine.
fn abilities() -> &'static [aclCannAttr] {
    match machine().target.soc {
        Soc::AtlasA2 | Soc::AtlasA3 | Soc::Ascend950 => &ABILITIES,
        _ => &[],
    }
}

pub unsafe extern "C" fn aclGetCannAttributeList(cannAttrList: *mut *const aclCannAttr, num: *mut usize) -> aclError {
    acl(|| {
        not_null("cannAttrList", cannAttrList)?;
        not_null("num", num)?;
        let abilities = abilities();
        // SAFETY: the caller's promise, for both.
        unsafe {
            store("cannAttrList", cannAttrList, abilities.as_ptr())?;
            store("num", num, abilities.len())
        }
    })
}

pub unsafe extern "C" fn aclGetCannAttribute(cannAttr: aclCannAttr, value: *mut i32) -> aclError {
    answer!(value, {
        if !(0..=2).contains(&cannAttr.0) {
            let what = "aclGetCannAttribute: cannAttr";
            return Err(refuse(what, cannAttr.0, "an aclCannAttr, 0 to 2"));
        }
        let there = abilities().contains(&cannAttr);
        i32::from(there)
    })
}

/// Version of the architecture of a product's cores.
fn architecture(soc: Soc) -> i64 {
    match soc {
        Soc::AtlasA2 | Soc::AtlasA3 => 2201,
        Soc::Ascend950 => 3510,
        Soc::AtlasInference => 2002,
        Soc::AtlasTraining => 1001,
        Soc::Atlas200I500A2 => 3002,
    }
}

pub unsafe extern "C" fn aclrtGetDeviceInfo(deviceId: u32, attr: aclrtDevAttr, value: *mut i64) -> aclError {
    use aclrtDevAttr as Attr;
    const NAME: &str = "aclrtGetDeviceInfo";
    answer!(value, {
        device(NAME, deviceId)?;
        let chip = context::chip();
        let soc = machine().target.soc;
        let threads = Attr::ACL_DEV_ATTR_WARP_SIZE.0..=Attr::ACL_DEV_ATTR_MAX_BLOCK_DIM_Z.0;
        match attr {
            Attr::ACL_DEV_ATTR_AICPU_CORE_NUM => i64::from(chip.cpu_cores),
            Attr::ACL_DEV_ATTR_AICORE_CORE_NUM | Attr::ACL_DEV_ATTR_CUBE_CORE_NUM => i64::from(chip.cube_cores),
            Attr::ACL_DEV_ATTR_VECTOR_CORE_NUM => i64::from(chip.vector_cores),
            Attr::ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE => {
                i64::try_from(allocation_table::capacity()?).unwrap_or(i64::MAX)
            }
            Attr::ACL_DEV_ATTR_L2_CACHE_SIZE => chip.cache,
            Attr::ACL_DEV_ATTR_PHY_CHIP_ID => i64::from(deviceId),
            Attr::ACL_DEV_ATTR_IS_VIRTUAL => 0,
            Attr::ACL_DEV_ATTR_NPU_ARCH => architecture(soc),
            // Products without such threads return 0.
            Attr(other) if threads.contains(&other) && soc != Soc::Ascend950 => 0,
            Attr(other) => {
                return Err(failure!(
                    NOT_SUPPORTED,
                    "{NAME}: attr: given {other}, which the emulator knows nothing of; allowed: cores, memory, cache, \
                     number and architecture"
                ));
            }
        }
    })
}

/// The identity of an emulated device is the same in every process.
pub unsafe extern "C" fn aclrtDeviceGetUuid(deviceId: i32, uuid: *mut aclrtUuid) -> aclError {
    answer!(uuid, {
        known_device(deviceId)?;
        let name = b"ascend-emu\0\0";
        let mut bytes = [0; 16];
        let text = name.iter().copied().chain(deviceId.to_be_bytes());
        for (to, byte) in bytes.iter_mut().zip(text) {
            *to = byte as c_char;
        }
        aclrtUuid { bytes }
    })
}

/// # Safety
///
/// `to` is null or valid for writing.
unsafe fn same_device(name: &'static str, id: i32, to: *mut i32) -> aclError {
    acl(|| {
        not_null(name, to)?;
        known_device(id)?;
        // SAFETY: the caller's promise.
        unsafe { store(name, to, id) }
    })
}

/// Programs call the emulator's devices by their own numbers.
pub unsafe extern "C" fn aclrtGetLogicDevIdByUserDevId(userDevid: i32, logicDevId: *mut i32) -> aclError {
    // SAFETY: the caller's promise.
    unsafe { same_device("logicDevId", userDevid, logicDevId) }
}

/// Programs call the emulator's devices by their own numbers.
pub unsafe extern "C" fn aclrtGetUserDevIdByLogicDevId(logicDevId: i32, userDevid: *mut i32) -> aclError {
    // SAFETY: the caller's promise.
    unsafe { same_device("userDevid", logicDevId, userDevid) }
}

pub unsafe extern "C" fn aclrtDeviceGetBareTgid(pid: *mut i32) -> aclError {
    acl(|| {
        let own =
            i32::try_from(std::process::id()).map_err(|_| refuse("pid", std::process::id(), "a number of 31 bits"))?;
        // SAFETY: the caller's promise.
        unsafe { store("pid", pid, own) }
    })
}

pub unsafe extern "C" fn aclrtGetPrimaryCtxState(deviceId: i32, flags: *mut u32, active: *mut i32) -> aclError {
    const NAME: &str = "aclrtGetPrimaryCtxState";
    answer!(active, {
        if !flags.is_null() {
            return Err(refuse(&format!("{NAME}: flags"), format_args!("{flags:?}"), "null"));
        }
        let there = context::has_primary(deviceId)?;
        i32::from(there)
    })
}

/// Operators of the emulator compute infinities where numbers leave their range.
const OVERFLOW: aclrtFloatOverflowMode = aclrtFloatOverflowMode::ACL_RT_OVERFLOW_MODE_INFNAN;

pub unsafe extern "C" fn aclrtSetDeviceSatMode(mode: aclrtFloatOverflowMode) -> aclError {
    const NAME: &str = "aclrtSetDeviceSatMode";
    acl(|| {
        context::current()?;
        match mode {
            OVERFLOW => Ok(()),
            aclrtFloatOverflowMode::ACL_RT_OVERFLOW_MODE_SATURATION => Err(failure!(
                NOT_SUPPORTED,
                "{NAME}: the emulator's operators compute infinities, not the largest number in their place; the mode \
                 there is: ACL_RT_OVERFLOW_MODE_INFNAN (1)"
            )),
            aclrtFloatOverflowMode(other) => {
                Err(refuse(&format!("{NAME}: mode"), other, "an aclrtFloatOverflowMode, 0 or 1"))
            }
        }
    })
}

pub unsafe extern "C" fn aclrtGetDeviceSatMode(mode: *mut aclrtFloatOverflowMode) -> aclError {
    acl(|| {
        context::current()?;
        // SAFETY: the caller's promise.
        unsafe { store("mode", mode, OVERFLOW) }
    })
}
