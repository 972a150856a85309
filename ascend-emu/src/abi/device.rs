//! Devices and contexts, faults of hardware, which never occur in the emulator, and access of devices to each other's
//! memory, which every device has: what a program enables is kept and reported.

use super::{answer, deadline, not_null, refuse, store};
use crate::config::config;
use crate::fault;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::lock::Lock;
use crate::runtime::context::{self, PROCESS_OPTIONS};
use crate::status::{FEATURE_UNSUPPORTED, NOT_SUPPORTED, NULL_PARAM, Outcome, acl, acl_answer, failure};
use ascend_sys::bindings::{
    aclError, aclSysParamOpt, aclrtContext, aclrtErrorInfo, aclrtErrorType, aclrtMemUceInfo, aclrtRunMode,
};
use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::time::Instant;

pub unsafe extern "C" fn aclrtGetDevice(deviceId: *mut i32) -> aclError {
    // Clients call this to find out whether a device was chosen, so a failure is not the thread's last error.
    acl_answer(|| {
        let device = context::current()?.device;
        // SAFETY: the caller's promise.
        unsafe { store("deviceId", deviceId, device) }
    })
}

pub unsafe extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> aclError {
    // SAFETY: the caller's promise.
    acl(|| unsafe { store("count", count, config().devices) })
}

pub unsafe extern "C" fn aclrtGetRunMode(runMode: *mut aclrtRunMode) -> aclError {
    // SAFETY: the caller's promise.
    acl(|| unsafe { store("runMode", runMode, aclrtRunMode::ACL_HOST) })
}

fn synchronize(name: &'static str, deadline: Option<Instant>) -> Outcome {
    let outcome = context::current()?.synchronize(name, deadline);
    strike(Site::Sync)?;
    outcome?;
    fault::check_thread_device(name)
}

pub unsafe extern "C" fn aclrtSynchronizeDevice() -> aclError {
    acl(|| synchronize("aclrtSynchronizeDevice", None))
}

pub unsafe extern "C" fn aclrtSynchronizeDeviceWithTimeout(timeout: i32) -> aclError {
    const NAME: &str = "aclrtSynchronizeDeviceWithTimeout";
    acl(|| synchronize(NAME, deadline(NAME, timeout)?))
}

pub unsafe extern "C" fn aclrtDestroyContext(context: aclrtContext) -> aclError {
    acl(|| context::destroy(context))
}

pub unsafe extern "C" fn aclrtSetCurrentContext(context: aclrtContext) -> aclError {
    acl(|| context::set_current(context))
}

pub unsafe extern "C" fn aclrtGetCurrentContext(context: *mut aclrtContext) -> aclError {
    acl(|| {
        let (id, _) = context::current_with_id()?;
        // SAFETY: the caller's promise.
        unsafe { store("context", context, id.raw()) }
    })
}

pub unsafe extern "C" fn aclrtCtxSetSysParamOpt(opt: aclSysParamOpt, value: i64) -> aclError {
    acl(|| context::current()?.options.set("aclrtCtxSetSysParamOpt", i64::from(opt.0), value))
}

pub unsafe extern "C" fn aclrtCtxGetSysParamOpt(opt: aclSysParamOpt, value: *mut i64) -> aclError {
    acl(|| {
        let found = context::current()?.options.get_set("aclrtCtxGetSysParamOpt", i64::from(opt.0))?;
        // SAFETY: the caller's promise.
        unsafe { store("value", value, found) }
    })
}

pub unsafe extern "C" fn aclrtSetSysParamOpt(opt: aclSysParamOpt, value: i64) -> aclError {
    acl(|| PROCESS_OPTIONS.set("aclrtSetSysParamOpt", i64::from(opt.0), value))
}

pub unsafe extern "C" fn aclrtGetSysParamOpt(opt: aclSysParamOpt, value: *mut i64) -> aclError {
    acl(|| {
        // Unlike a context, a process has every option from the start, since programs query options before they set
        // them.
        let found = PROCESS_OPTIONS.get("aclrtGetSysParamOpt", i64::from(opt.0))?;
        let found = found.unwrap_or_default();
        // SAFETY: the caller's promise.
        unsafe { store("value", value, found) }
    })
}

pub unsafe extern "C" fn aclrtGetMemUceInfo(
    deviceId: i32,
    memUceInfoArray: *mut aclrtMemUceInfo,
    arraySize: usize,
    retSize: *mut usize,
) -> aclError {
    acl(|| {
        not_null("memUceInfoArray", memUceInfoArray)?;
        not_null("retSize", retSize)?;
        context::known_device(deviceId)?;
        if arraySize == 0 {
            let what = "aclrtGetMemUceInfo: arraySize";
            return Err(refuse(what, arraySize, "1 or more"));
        }
        // SAFETY: the caller's promise.
        unsafe { store("retSize", retSize, 0) }
    })
}

pub unsafe extern "C" fn aclrtGetErrorVerbose(deviceId: i32, errorInfo: *mut aclrtErrorInfo) -> aclError {
    answer!(errorInfo, {
        context::known_device(deviceId)?;
        // SAFETY: all members are numbers and pointers, for which zero is a value. Zero is ACL_RT_NO_ERROR, without
        // details and with nothing to repair.
        unsafe { MaybeUninit::<aclrtErrorInfo>::zeroed().assume_init() }
    })
}

pub unsafe extern "C" fn aclrtRepairError(deviceId: i32, errorInfo: *const aclrtErrorInfo) -> aclError {
    const NAME: &str = "aclrtRepairError";
    acl(|| {
        not_null("errorInfo", errorInfo)?;
        context::known_device(deviceId)?;
        // SAFETY: not null, so valid for reading.
        let kind = unsafe { (&raw const (*errorInfo).errorType).read_unaligned() };
        if kind == aclrtErrorType::ACL_RT_NO_ERROR {
            return Ok(());
        }
        Err(failure!(
            NOT_SUPPORTED,
            "{NAME}: errorType: given {}, but the emulator's devices have no faults of hardware; allowed: \
             ACL_RT_NO_ERROR (0), as aclrtGetErrorVerbose tells",
            kind.0
        ))
    })
}

/// Aborts the work of a device. The work that runs ends by itself before the call returns, so the timeout is not
/// needed.
pub unsafe extern "C" fn aclrtDeviceTaskAbort(deviceId: i32, _timeout: u32) -> aclError {
    acl(|| context::abort_device(deviceId))
}

/// Pairs of a device and another whose memory it may access.
static OPEN: Lock<BTreeSet<(i32, i32)>> = Lock::new(BTreeSet::new());

/// Checks that two devices exist and differ.
fn pair(name: &str, device: i32, peer: i32) -> Outcome<(i32, i32)> {
    if device == peer {
        return Err(failure!(
            NULL_PARAM,
            "{name}: peerDeviceId: given {peer}, the device itself, allowed: another device"
        ));
    }
    context::device_exists(device)?;
    context::device_exists(peer)?;
    Ok((device, peer))
}

pub unsafe extern "C" fn aclrtDeviceCanAccessPeer(
    canAccessPeer: *mut i32,
    deviceId: i32,
    peerDeviceId: i32,
) -> aclError {
    answer!(canAccessPeer, {
        context::usable()?;
        pair("aclrtDeviceCanAccessPeer", deviceId, peerDeviceId)?;
        1
    })
}

pub unsafe extern "C" fn aclrtDeviceEnablePeerAccess(peerDeviceId: i32, flags: u32) -> aclError {
    const NAME: &str = "aclrtDeviceEnablePeerAccess";
    acl(|| {
        if flags != 0 {
            return Err(failure!(FEATURE_UNSUPPORTED, "{NAME}: flags: given {flags:#x}, allowed: 0"));
        }
        let pair = pair(NAME, context::current()?.device, peerDeviceId)?;
        OPEN.lock().insert(pair);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtDeviceDisablePeerAccess(peerDeviceId: i32) -> aclError {
    const NAME: &str = "aclrtDeviceDisablePeerAccess";
    acl(|| {
        let pair = pair(NAME, context::current()?.device, peerDeviceId)?;
        if OPEN.lock().remove(&pair) {
            return Ok(());
        }
        Err(refuse(&format!("{NAME}: peerDeviceId"), peerDeviceId, "a device that aclrtDeviceEnablePeerAccess named"))
    })
}

pub unsafe extern "C" fn aclrtDevicePeerAccessStatus(deviceId: i32, peerDeviceId: i32, status: *mut i32) -> aclError {
    answer!(status, {
        context::known_device(deviceId)?;
        context::known_device(peerDeviceId)?;
        let open = OPEN.lock().contains(&(deviceId, peerDeviceId));
        i32::from(open)
    })
}
