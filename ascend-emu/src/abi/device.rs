//! Devices and contexts.

use super::{deadline, store};
use crate::config::config;
use crate::failed_device;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::runtime::context::{self, Options};
use crate::status::{Outcome, acl, acl_answer};
use ascend_sys::bindings::{aclError, aclSysParamOpt, aclrtContext, aclrtRunMode};
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
    failed_device::check(name)
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

static PROCESS: Options = Options::new();

pub unsafe extern "C" fn aclrtCtxSetSysParamOpt(opt: aclSysParamOpt, value: i64) -> aclError {
    acl(|| {
        context::current()?
            .options
            .set("aclrtCtxSetSysParamOpt", i64::from(opt.0), value)
    })
}

pub unsafe extern "C" fn aclrtCtxGetSysParamOpt(opt: aclSysParamOpt, value: *mut i64) -> aclError {
    acl(|| {
        let found = context::current()?
            .options
            .get_set("aclrtCtxGetSysParamOpt", i64::from(opt.0))?;
        // SAFETY: the caller's promise.
        unsafe { store("value", value, found) }
    })
}

pub unsafe extern "C" fn aclrtSetSysParamOpt(opt: aclSysParamOpt, value: i64) -> aclError {
    acl(|| PROCESS.set("aclrtSetSysParamOpt", i64::from(opt.0), value))
}

pub unsafe extern "C" fn aclrtGetSysParamOpt(opt: aclSysParamOpt, value: *mut i64) -> aclError {
    acl(|| {
        // Unlike a context, a process has every option from the start, since programs query options before they set
        // them.
        let found = PROCESS.get("aclrtGetSysParamOpt", i64::from(opt.0))?;
        let found = found.unwrap_or_default();
        // SAFETY: the caller's promise.
        unsafe { store("value", value, found) }
    })
}
