//! Notifies, and values in memory that streams write and wait for.

use super::copy::Side;
use super::{answer, not_null, refuse};
use crate::runtime::context::{current, stream};
use crate::runtime::notify::{NOTIFIES, Notify};
use crate::runtime::stream_value::Comparison;
use crate::runtime::task::Task;
use crate::status::{NOT_SUPPORTED, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{self as sys, aclError, aclrtNotify, aclrtStream};
use std::ffi::c_void;
use std::time::Duration;

pub unsafe extern "C" fn aclrtCreateNotify(notify: *mut aclrtNotify, flag: u64) -> aclError {
    const NAME: &str = "aclrtCreateNotify";
    answer!(notify, {
        current()?;
        if flag == u64::from(sys::ACL_NOTIFY_DEVICE_USE_ONLY) {
            return Err(failure!(
                NOT_SUPPORTED,
                "{NAME}: flag: given ACL_NOTIFY_DEVICE_USE_ONLY (1), which kernels of the program's own would use; \
                 allowed: ACL_NOTIFY_DEFAULT (0)"
            ));
        }
        if flag != u64::from(sys::ACL_NOTIFY_DEFAULT) {
            return Err(refuse(&format!("{NAME}: flag"), flag, "ACL_NOTIFY_DEFAULT (0)"));
        }
        Notify::create().raw()
    })
}

pub unsafe extern "C" fn aclrtDestroyNotify(notify: aclrtNotify) -> aclError {
    acl(|| NOTIFIES.remove(notify).map(drop))
}

pub unsafe extern "C" fn aclrtRecordNotify(notify: aclrtNotify, stream: aclrtStream) -> aclError {
    acl(|| {
        let stream = self::stream("aclrtRecordNotify", stream)?;
        stream.submit(Task::Raise(NOTIFIES.get(notify)?), None, PARAM_INVALID)
    })
}

pub unsafe extern "C" fn aclrtWaitAndResetNotify(notify: aclrtNotify, stream: aclrtStream, timeout: u32) -> aclError {
    acl(|| {
        let stream = self::stream("aclrtWaitAndResetNotify", stream)?;
        let task = Task::AwaitNotify {
            notify: NOTIFIES.get(notify)?,
            limit: (timeout > 0).then(|| Duration::from_secs(u64::from(timeout))),
        };
        stream.submit(task, None, PARAM_INVALID)
    })
}

pub unsafe extern "C" fn aclrtGetNotifyId(notify: aclrtNotify, notifyId: *mut u32) -> aclError {
    answer!(notifyId, NOTIFIES.get(notify)?.id)
}

/// The address of a value in device memory.
fn value_address(name: &str, address: *mut c_void) -> Outcome<usize> {
    not_null(&format!("{name}: devAddr"), address)?;
    let address = address.addr();
    if Side::of(address)? != Side::Device {
        return Err(failure!(PARAM_INVALID, "{name}: devAddr at {address:#x} is host memory, allowed: device memory"));
    }
    if !address.is_multiple_of(8) {
        return Err(failure!(PARAM_INVALID, "{name}: devAddr: given {address:#x}, allowed: a multiple of 8"));
    }
    Ok(address)
}

pub unsafe extern "C" fn aclrtValueWrite(devAddr: *mut c_void, value: u64, flag: u32, stream: aclrtStream) -> aclError {
    const NAME: &str = "aclrtValueWrite";
    acl(|| {
        let stream = self::stream(NAME, stream)?;
        let address = value_address(NAME, devAddr)?;
        if flag != 0 {
            return Err(refuse(&format!("{NAME}: flag"), flag, "0"));
        }
        stream.submit(Task::Write { address, value }, None, PARAM_INVALID)
    })
}

pub unsafe extern "C" fn aclrtValueWait(devAddr: *mut c_void, value: u64, flag: u32, stream: aclrtStream) -> aclError {
    const NAME: &str = "aclrtValueWait";
    acl(|| {
        let stream = self::stream(NAME, stream)?;
        let address = value_address(NAME, devAddr)?;
        let comparison = match flag {
            sys::ACL_STREAM_WAIT_VALUE_GEQ => Comparison::NotBelow,
            sys::ACL_STREAM_WAIT_VALUE_EQ => Comparison::Equal,
            sys::ACL_STREAM_WAIT_VALUE_AND => Comparison::SharedBit,
            sys::ACL_STREAM_WAIT_VALUE_NOR => Comparison::MissingBit,
            other => {
                let what = format!("{NAME}: flag");
                return Err(refuse(&what, other, "an ACL_STREAM_WAIT_VALUE_* flag, 0 to 3"));
            }
        };
        let task = Task::AwaitValue { address, value, comparison };
        stream.submit(task, None, PARAM_INVALID)
    })
}
