//! Attributes of streams that programs set and read.

use super::stream::LOWEST;
use super::{not_null, refuse, store};
use crate::runtime::context::{current, stream};
use crate::status::{Failure, NOT_SUPPORTED, Outcome, acl, failure};
use ascend_sys::bindings::{
    ACL_CONTINUE_ON_FAILURE, ACL_STOP_ON_FAILURE, aclError, aclrtStream, aclrtStreamAttr,
    aclrtStreamAttrValue,
};

pub unsafe extern "C" fn aclrtStreamGetPriority(
    stream: aclrtStream,
    priority: *mut u32,
) -> aclError {
    acl(|| {
        not_null("priority", priority)?;
        let stream = self::stream("aclrtStreamGetPriority", stream)?;
        // SAFETY: the caller's promise.
        unsafe { store("priority", priority, stream.settings.values().priority) }
    })
}

pub unsafe extern "C" fn aclrtStreamGetFlags(stream: aclrtStream, flags: *mut u32) -> aclError {
    acl(|| {
        not_null("flags", flags)?;
        let stream = self::stream("aclrtStreamGetFlags", stream)?;
        // SAFETY: the caller's promise.
        unsafe { store("flags", flags, stream.settings.values().flags) }
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
fn switch(what: &str, given: u32) -> Outcome<bool> {
    match given {
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
                // SAFETY: as above.
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
    acl(|| {
        not_null("value", value)?;
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
        let filled = aclrtStreamAttrValue {
            reserve: [word, 0, 0, 0],
        };
        // SAFETY: the caller's promise.
        unsafe { store("value", value, filled) }
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

pub unsafe extern "C" fn aclrtGetStreamOverflowSwitch(
    stream: aclrtStream,
    flag: *mut u32,
) -> aclError {
    acl(|| {
        not_null("flag", flag)?;
        let stream = self::stream("aclrtGetStreamOverflowSwitch", stream)?;
        let on = stream.settings.values().overflow_switch;
        // SAFETY: the caller's promise.
        unsafe { store("flag", flag, u32::from(on)) }
    })
}
