//! Faults of a device's hardware, which never occur in the emulator, and aborting a device's work.

use super::{not_null, refuse, store};
use crate::runtime::context::{self, known_device};
use crate::status::{NOT_SUPPORTED, acl, failure};
use ascend_sys::bindings::{aclError, aclrtErrorInfo, aclrtErrorType, aclrtMemUceInfo};
use std::mem::MaybeUninit;

pub unsafe extern "C" fn aclrtGetMemUceInfo(
    deviceId: i32,
    memUceInfoArray: *mut aclrtMemUceInfo,
    arraySize: usize,
    retSize: *mut usize,
) -> aclError {
    acl(|| {
        not_null("memUceInfoArray", memUceInfoArray)?;
        not_null("retSize", retSize)?;
        known_device(deviceId)?;
        if arraySize == 0 {
            let what = "aclrtGetMemUceInfo: arraySize";
            return Err(refuse(what, arraySize, "1 or more"));
        }
        // SAFETY: the caller's promise.
        unsafe { store("retSize", retSize, 0) }
    })
}

pub unsafe extern "C" fn aclrtGetErrorVerbose(
    deviceId: i32,
    errorInfo: *mut aclrtErrorInfo,
) -> aclError {
    acl(|| {
        not_null("errorInfo", errorInfo)?;
        known_device(deviceId)?;
        // SAFETY: all members are numbers and pointers, for which zero is a value. Zero is ACL_RT_NO_ERROR, without
        // details and with nothing to repair.
        let healthy = unsafe { MaybeUninit::<aclrtErrorInfo>::zeroed().assume_init() };
        // SAFETY: the caller's promise.
        unsafe { store("errorInfo", errorInfo, healthy) }
    })
}

pub unsafe extern "C" fn aclrtRepairError(
    deviceId: i32,
    errorInfo: *const aclrtErrorInfo,
) -> aclError {
    const NAME: &str = "aclrtRepairError";
    acl(|| {
        not_null("errorInfo", errorInfo)?;
        known_device(deviceId)?;
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
