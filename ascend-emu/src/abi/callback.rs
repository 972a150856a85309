//! Callbacks: functions of the program that streams call.

use super::{deadline, refuse};
use crate::runtime::callback::{self, HostCall};
use crate::runtime::context::{stream, usable};
use crate::runtime::task::Task;
use crate::status::{NULL_PARAM, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{aclError, aclrtCallback, aclrtCallbackBlockType, aclrtHostFunc, aclrtStream};
use std::ffi::c_void;

/// The number of the calling thread, as `pthread_self` returns it.
fn own_thread() -> u64 {
    // SAFETY: the function has no precondition.
    unsafe { libc::pthread_self() as u64 }
}

/// Checks that the function is not null, and takes it with its argument.
fn host_call(name: &str, function: aclrtHostFunc, data: *mut c_void) -> Outcome<HostCall> {
    let function = function.ok_or_else(|| failure!(NULL_PARAM, "{name}: fn is null"))?;
    Ok(HostCall { function, data: data.expose_provenance() })
}

pub unsafe extern "C" fn aclrtSubscribeReport(threadId: u64, stream: aclrtStream) -> aclError {
    const NAME: &str = "aclrtSubscribeReport";
    acl(|| callback::subscribe(NAME, threadId, self::stream(NAME, stream)?.id()))
}

pub unsafe extern "C" fn aclrtUnSubscribeReport(threadId: u64, stream: aclrtStream) -> aclError {
    const NAME: &str = "aclrtUnSubscribeReport";
    acl(|| callback::unsubscribe(NAME, threadId, self::stream(NAME, stream)?.id()))
}

pub unsafe extern "C" fn aclrtProcessReport(timeout: i32) -> aclError {
    const NAME: &str = "aclrtProcessReport";
    acl(|| {
        usable()?;
        if timeout == 0 {
            let what = format!("{NAME}: timeout");
            return Err(refuse(&what, 0, "-1 (for ever), or milliseconds from 1 on"));
        }
        let deadline = deadline(NAME, timeout)?;
        // SAFETY: the program that launched the callbacks promised that they can be called.
        unsafe { callback::process(NAME, own_thread(), deadline) }
    })
}

pub unsafe extern "C" fn aclrtLaunchCallback(
    fn_: aclrtCallback,
    userData: *mut c_void,
    blockType: aclrtCallbackBlockType,
    stream: aclrtStream,
) -> aclError {
    const NAME: &str = "aclrtLaunchCallback";
    acl(|| {
        let call = host_call(NAME, fn_, userData)?;
        let block = match blockType {
            aclrtCallbackBlockType::ACL_CALLBACK_NO_BLOCK => false,
            aclrtCallbackBlockType::ACL_CALLBACK_BLOCK => true,
            aclrtCallbackBlockType(other) => {
                let what = format!("{NAME}: blockType");
                return Err(refuse(&what, other, "an aclrtCallbackBlockType, 0 or 1"));
            }
        };
        let stream = self::stream(NAME, stream)?;
        let id = stream.id();
        callback::subscribed(NAME, id)?;
        let report = Task::Report { stream: id, call, block };
        stream.submit(report, None, PARAM_INVALID)
    })
}

pub unsafe extern "C" fn aclrtLaunchHostFunc(stream: aclrtStream, fn_: aclrtHostFunc, args: *mut c_void) -> aclError {
    const NAME: &str = "aclrtLaunchHostFunc";
    acl(|| {
        let call = host_call(NAME, fn_, args)?;
        self::stream(NAME, stream)?.submit(Task::Call(call), None, PARAM_INVALID)
    })
}
