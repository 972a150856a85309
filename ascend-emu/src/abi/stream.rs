//! Streams.

use super::{deadline, not_null, refuse, store};
use crate::failed_device;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::runtime::capturable_event::EVENTS;
use crate::runtime::context::{current, stream};
use crate::runtime::stream::Settings;
use crate::status::{INTERNAL, Outcome, acl, failure};
use ascend_sys::bindings::{self as sys, aclError, aclrtEvent, aclrtStream, aclrtStreamStatus};
use std::time::Instant;

/// Flags of `aclrtCreateStreamWithConfig`.
const FLAGS: u32 = sys::ACL_STREAM_FAST_LAUNCH
    | sys::ACL_STREAM_FAST_SYNC
    | sys::ACL_STREAM_PERSISTENT
    | sys::ACL_STREAM_HUGE
    | sys::ACL_STREAM_CPU_SCHEDULE
    | sys::ACL_STREAM_DEVICE_USE_ONLY;

/// Lowest priority; 0 is the highest.
pub(super) const LOWEST: u32 = 7;

pub unsafe extern "C" fn aclrtCreateStream(stream: *mut aclrtStream) -> aclError {
    acl(|| {
        not_null("stream", stream)?;
        let id = current()?.create_stream(Settings::default())?;
        // SAFETY: the caller's promise.
        unsafe { store("stream", stream, id.raw()) }
    })
}

pub unsafe extern "C" fn aclrtCreateStreamWithConfig(
    stream: *mut aclrtStream,
    priority: u32,
    flag: u32,
) -> aclError {
    acl(|| {
        not_null("stream", stream)?;
        if priority > LOWEST {
            return Err(refuse("priority", priority, "0 (highest) to 7"));
        }
        if flag & !FLAGS != 0 {
            return Err(refuse(
                "flag",
                format_args!("{flag:#x}"),
                "ACL_STREAM_* flags",
            ));
        }
        let id = current()?.create_stream(Settings::new(priority, flag))?;
        // SAFETY: the caller's promise.
        unsafe { store("stream", stream, id.raw()) }
    })
}

pub unsafe extern "C" fn aclrtDestroyStream(stream: aclrtStream) -> aclError {
    acl(|| current()?.destroy_stream("aclrtDestroyStream", stream, false))
}

pub unsafe extern "C" fn aclrtDestroyStreamForce(stream: aclrtStream) -> aclError {
    acl(|| current()?.destroy_stream("aclrtDestroyStreamForce", stream, true))
}

fn synchronize(name: &'static str, raw: aclrtStream, deadline: Option<Instant>) -> Outcome {
    let outcome = stream(name, raw)?.synchronize(name, deadline);
    strike(Site::Sync)?;
    outcome?;
    failed_device::refuse(name)
}

pub unsafe extern "C" fn aclrtSynchronizeStream(stream: aclrtStream) -> aclError {
    acl(|| synchronize("aclrtSynchronizeStream", stream, None))
}

pub unsafe extern "C" fn aclrtSynchronizeStreamWithTimeout(
    stream: aclrtStream,
    timeout: i32,
) -> aclError {
    const NAME: &str = "aclrtSynchronizeStreamWithTimeout";
    acl(|| synchronize(NAME, stream, deadline(NAME, timeout)?))
}

pub unsafe extern "C" fn aclrtStreamAbort(stream: aclrtStream) -> aclError {
    acl(|| {
        self::stream("aclrtStreamAbort", stream)?.abort();
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtStreamQuery(
    stream: aclrtStream,
    status: *mut aclrtStreamStatus,
) -> aclError {
    const NAME: &str = "aclrtStreamQuery";
    acl(|| {
        not_null("status", status)?;
        let over = self::stream(NAME, stream)?.query(NAME)?;
        let found = if over {
            aclrtStreamStatus::ACL_STREAM_STATUS_COMPLETE
        } else {
            aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY
        };
        // SAFETY: the caller's promise.
        unsafe { store("status", status, found) }
    })
}

pub unsafe extern "C" fn aclrtStreamWaitEvent(stream: aclrtStream, event: aclrtEvent) -> aclError {
    acl(|| self::stream("aclrtStreamWaitEvent", stream)?.wait_event(&*EVENTS.get(event)?))
}

pub unsafe extern "C" fn aclrtStreamGetId(stream: aclrtStream, streamId: *mut i32) -> aclError {
    acl(|| {
        let number = self::stream("aclrtStreamGetId", stream)?.id();
        let id = i32::try_from(number)
            .map_err(|_| failure!(INTERNAL, "stream {number} has no 32-bit number"))?;
        // SAFETY: the caller's promise.
        unsafe { store("streamId", streamId, id) }
    })
}
