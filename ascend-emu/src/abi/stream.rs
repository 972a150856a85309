//! Streams, and the attributes that programs set and read.

use super::{answer, deadline, not_null, refuse, store};
use crate::fault;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::runtime::capturable_event::EVENTS;
use crate::runtime::context::{current, stream, stream_of_any_context};
use crate::runtime::stream::Settings;
use crate::status::{Failure, INTERNAL, NOT_SUPPORTED, Outcome, acl, failure};
use ascend_sys::bindings::{
    self as sys, ACL_CONTINUE_ON_FAILURE, ACL_STOP_ON_FAILURE, aclError, aclrtEvent, aclrtStream, aclrtStreamAttr,
    aclrtStreamAttrValue, aclrtStreamStatus,
};
use std::time::Instant;

/// Flags of `aclrtCreateStreamWithConfig`.
const FLAGS: u32 = sys::ACL_STREAM_FAST_LAUNCH
    | sys::ACL_STREAM_FAST_SYNC
    | sys::ACL_STREAM_PERSISTENT
    | sys::ACL_STREAM_HUGE
    | sys::ACL_STREAM_CPU_SCHEDULE
    | sys::ACL_STREAM_DEVICE_USE_ONLY;

/// Lowest priority; 0 is the highest.
const LOWEST: u32 = 7;

pub unsafe extern "C" fn aclrtCreateStream(stream: *mut aclrtStream) -> aclError {
    answer!(stream, {
        let id = current()?.create_stream(Settings::default())?;
        id.raw()
    })
}

pub unsafe extern "C" fn aclrtCreateStreamWithConfig(stream: *mut aclrtStream, priority: u32, flag: u32) -> aclError {
    answer!(stream, {
        if priority > LOWEST {
            return Err(refuse("priority", priority, "0 (highest) to 7"));
        }
        if flag & !FLAGS != 0 {
            return Err(refuse("flag", format_args!("{flag:#x}"), "ACL_STREAM_* flags"));
        }
        let id = current()?.create_stream(Settings::new(priority, flag))?;
        id.raw()
    })
}

pub unsafe extern "C" fn aclrtDestroyStream(stream: aclrtStream) -> aclError {
    acl(|| current()?.destroy_stream("aclrtDestroyStream", stream, false))
}

pub unsafe extern "C" fn aclrtDestroyStreamForce(stream: aclrtStream) -> aclError {
    acl(|| current()?.destroy_stream("aclrtDestroyStreamForce", stream, true))
}

fn synchronize(name: &'static str, raw: aclrtStream, deadline: Option<Instant>) -> Outcome {
    let stream = stream_of_any_context(raw)?;
    let outcome = stream.synchronize(name, deadline);
    strike(Site::Sync)?;
    outcome?;
    fault::check_device(name, Some(stream.device()))
}

pub unsafe extern "C" fn aclrtSynchronizeStream(stream: aclrtStream) -> aclError {
    acl(|| synchronize("aclrtSynchronizeStream", stream, None))
}

pub unsafe extern "C" fn aclrtSynchronizeStreamWithTimeout(stream: aclrtStream, timeout: i32) -> aclError {
    const NAME: &str = "aclrtSynchronizeStreamWithTimeout";
    acl(|| synchronize(NAME, stream, deadline(NAME, timeout)?))
}

pub unsafe extern "C" fn aclrtStreamAbort(stream: aclrtStream) -> aclError {
    acl(|| {
        self::stream("aclrtStreamAbort", stream)?.abort();
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtStreamQuery(stream: aclrtStream, status: *mut aclrtStreamStatus) -> aclError {
    const NAME: &str = "aclrtStreamQuery";
    answer!(status, {
        let over = stream_of_any_context(stream)?.query(NAME)?;
        if over {
            aclrtStreamStatus::ACL_STREAM_STATUS_COMPLETE
        } else {
            aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY
        }
    })
}

pub unsafe extern "C" fn aclrtStreamWaitEvent(stream: aclrtStream, event: aclrtEvent) -> aclError {
    acl(|| self::stream("aclrtStreamWaitEvent", stream)?.wait_event(&*EVENTS.get(event)?))
}

pub unsafe extern "C" fn aclrtStreamGetId(stream: aclrtStream, streamId: *mut i32) -> aclError {
    acl(|| {
        let number = self::stream("aclrtStreamGetId", stream)?.id();
        let id = i32::try_from(number).map_err(|_| failure!(INTERNAL, "stream {number} has no 32-bit number"))?;
        // SAFETY: the caller's promise.
        unsafe { store("streamId", streamId, id) }
    })
}

pub unsafe extern "C" fn aclrtStreamGetPriority(stream: aclrtStream, priority: *mut u32) -> aclError {
    answer!(priority, {
        let stream = self::stream("aclrtStreamGetPriority", stream)?;
        stream.settings.values().priority
    })
}

pub unsafe extern "C" fn aclrtStreamGetFlags(stream: aclrtStream, flags: *mut u32) -> aclError {
    answer!(flags, {
        let stream = self::stream("aclrtStreamGetFlags", stream)?;
        stream.settings.values().flags
    })
}

pub unsafe extern "C" fn aclrtDeviceGetStreamPriorityRange(
    leastPriority: *mut i32,
    greatestPriority: *mut i32,
) -> aclError {
    acl(|| {
        current()?;
        // SAFETY: the caller's promise, for both.
        unsafe {
            store("leastPriority", leastPriority, LOWEST as i32)?;
            store("greatestPriority", greatestPriority, 0)
        }
    })
}

/// A switch, 0 or 1.
fn switch(what: &str, value: u32) -> Outcome<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(refuse(what, other, "0 (off), 1 (on)")),
    }
}

fn unknown(name: &str, attribute: aclrtStreamAttr) -> Failure {
    let what = format!("{name}: stmAttrType");
    refuse(&what, attribute.0, "an aclrtStreamAttr, 1 to 5")
}

pub unsafe extern "C" fn aclrtSetStreamAttribute(
    stream: aclrtStream,
    stmAttrType: aclrtStreamAttr,
    value: *mut aclrtStreamAttrValue,
) -> aclError {
    use aclrtStreamAttr as Attr;
    const NAME: &str = "aclrtSetStreamAttribute";
    acl(|| {
        not_null("value", value)?;
        let stream = self::stream(NAME, stream)?;
        // SAFETY: not null, so valid for reading the member of the attribute. Every bit pattern is a number.
        let word = || unsafe { value.cast::<u32>().read_unaligned() };
        match stmAttrType {
            Attr::ACL_STREAM_ATTR_FAILURE_MODE => {
                // SAFETY: not null, so valid for reading the member of the attribute.
                let mode = unsafe { value.cast::<u64>().read_unaligned() };
                stream.set_failure_mode(NAME, mode)?;
            }
            Attr::ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK => {
                let on = switch(&format!("{NAME}: overflowSwitch"), word())?;
                stream.settings.change(|values| values.overflow_switch = on);
            }
            Attr::ACL_STREAM_ATTR_USER_CUSTOM_TAG => {
                let tag = word();
                stream.settings.change(|values| values.tag = tag);
            }
            Attr::ACL_STREAM_ATTR_CACHE_OP_INFO => {
                let on = switch(&format!("{NAME}: cacheOpInfoSwitch"), word())?;
                stream.settings.change(|values| values.cache_op_info = on);
            }
            Attr::ACL_STREAM_ATTR_PRIORITY => {
                return Err(failure!(
                    NOT_SUPPORTED,
                    "{NAME}: the priority of a stream stays as aclrtCreateStreamWithConfig made it"
                ));
            }
            other => return Err(unknown(NAME, other)),
        }
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtGetStreamAttribute(
    stream: aclrtStream,
    stmAttrType: aclrtStreamAttr,
    value: *mut aclrtStreamAttrValue,
) -> aclError {
    use aclrtStreamAttr as Attr;
    const NAME: &str = "aclrtGetStreamAttribute";
    answer!(value, {
        let values = self::stream(NAME, stream)?.settings.values();
        let word = match stmAttrType {
            Attr::ACL_STREAM_ATTR_FAILURE_MODE if values.stop_on_failure => ACL_STOP_ON_FAILURE,
            Attr::ACL_STREAM_ATTR_FAILURE_MODE => ACL_CONTINUE_ON_FAILURE,
            Attr::ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK => u32::from(values.overflow_switch),
            Attr::ACL_STREAM_ATTR_USER_CUSTOM_TAG => values.tag,
            Attr::ACL_STREAM_ATTR_CACHE_OP_INFO => u32::from(values.cache_op_info),
            Attr::ACL_STREAM_ATTR_PRIORITY => values.priority,
            other => return Err(unknown(NAME, other)),
        };
        // The rest of the 16 bytes is zero, so that the mode of 8 bytes is right as well.
        aclrtStreamAttrValue { reserve: [word, 0, 0, 0] }
    })
}

pub unsafe extern "C" fn aclrtSetStreamFailureMode(stream: aclrtStream, mode: u64) -> aclError {
    const NAME: &str = "aclrtSetStreamFailureMode";
    acl(|| self::stream(NAME, stream)?.set_failure_mode(NAME, mode))
}

pub unsafe extern "C" fn aclrtSetStreamOverflowSwitch(stream: aclrtStream, flag: u32) -> aclError {
    const NAME: &str = "aclrtSetStreamOverflowSwitch";
    acl(|| {
        let stream = self::stream(NAME, stream)?;
        let on = switch(&format!("{NAME}: flag"), flag)?;
        stream.settings.change(|values| values.overflow_switch = on);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtGetStreamOverflowSwitch(stream: aclrtStream, flag: *mut u32) -> aclError {
    answer!(flag, {
        let stream = self::stream("aclrtGetStreamOverflowSwitch", stream)?;
        let on = stream.settings.values().overflow_switch;
        u32::from(on)
    })
}
