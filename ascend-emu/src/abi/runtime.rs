//! Initialisation, versions, errors, numbers.

use super::{refuse, store};
use crate::lock::Lock;
use crate::runtime::context;
use crate::status::{self, INVALID_FILE, NULL_PARAM, UNINITIALIZED, acl, aclnn, failure, value};
use ascend_spec::DType;
use ascend_sys::bindings::{aclDataType, aclError, aclFloat16, aclnnStatus, aclrtLastErrLevel};
use half::f16;
use std::ffi::{CStr, c_char};
use std::path::Path;

/// Version of the ACL interface.
const ACL: [i32; 3] = [1, 13, 0];

pub unsafe extern "C" fn aclInit(configPath: *const c_char) -> aclError {
    acl(|| {
        if !configPath.is_null() {
            // SAFETY: not null, so a NUL-terminated text.
            let path = unsafe { CStr::from_ptr(configPath) }.to_string_lossy();
            if !path.is_empty() && !Path::new(&*path).is_file() {
                return Err(failure!(INVALID_FILE, "aclInit: configPath: there is no file `{path}`"));
            }
        }
        context::initialize()
    })
}

pub unsafe extern "C" fn aclFinalize() -> aclError {
    acl(context::finalize)
}

pub unsafe extern "C" fn aclFinalizeReference(refCount: *mut u64) -> aclError {
    acl(|| {
        context::finalize()?;
        // SAFETY: the caller's promise.
        unsafe { store("refCount", refCount, 0) }
    })
}

/// Whether `aclnnInit` was called without its `aclnnFinalize`; it changes nothing else.
static ACLNN: Lock<bool> = Lock::new(false);

pub unsafe extern "C" fn aclnnInit(_configPath: *const c_char) -> aclnnStatus {
    aclnn(|| {
        *ACLNN.lock() = true;
        Ok(())
    })
}

pub unsafe extern "C" fn aclnnFinalize() -> aclnnStatus {
    aclnn(|| {
        if std::mem::take(&mut *ACLNN.lock()) {
            Ok(())
        } else {
            Err(failure!(UNINITIALIZED, "aclnnInit was not called"))
        }
    })
}

pub unsafe extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    status::take_message()
}

pub unsafe extern "C" fn aclrtGetLastError(level: aclrtLastErrLevel) -> aclError {
    last_error(level, true)
}

pub unsafe extern "C" fn aclrtPeekAtLastError(level: aclrtLastErrLevel) -> aclError {
    last_error(level, false)
}

fn last_error(level: aclrtLastErrLevel, forget: bool) -> aclError {
    if level == aclrtLastErrLevel::ACL_RT_THREAD_LEVEL {
        return status::last_error(forget);
    }
    acl(|| Err(refuse("level", level.0, "ACL_RT_THREAD_LEVEL (0)")))
}

pub unsafe extern "C" fn aclrtGetVersion(
    majorVersion: *mut i32,
    minorVersion: *mut i32,
    patchVersion: *mut i32,
) -> aclError {
    acl(|| {
        let [major, minor, patch] = ACL;
        // SAFETY: the caller's promise, for each of them.
        unsafe {
            store("majorVersion", majorVersion, major)?;
            store("minorVersion", minorVersion, minor)?;
            store("patchVersion", patchVersion, patch)
        }
    })
}

pub unsafe extern "C" fn aclDataTypeSize(dataType: aclDataType) -> usize {
    value(0, || {
        let dtype = DType::from_acl(dataType.0)
            .ok_or_else(|| failure!(NULL_PARAM, "dataType: {} is no aclDataType", dataType.0))?;
        // CANN returns 0 for types without a fixed size, and 1 for types smaller than a byte.
        Ok(match dtype.bits() {
            0 => 0,
            _ => dtype.size().unwrap_or(1),
        })
    })
}

pub unsafe extern "C" fn aclFloat16ToFloat(value: aclFloat16) -> f32 {
    f16::from_bits(value).to_f32()
}

pub unsafe extern "C" fn aclFloatToFloat16(value: f32) -> aclFloat16 {
    f16::from_f32(value).to_bits()
}
