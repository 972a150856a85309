//! Events.

use super::{answer, deadline};
use crate::config::check;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::runtime::capturable_event::{CapturableEvent, EVENTS};
use crate::runtime::context::{current, stream};
use crate::status::{Outcome, acl};
use ascend_sys::bindings::{aclError, aclrtEvent, aclrtEventRecordedStatus, aclrtEventWaitStatus, aclrtStream};
use std::time::Instant;

/// # Safety
///
/// `event` is null or valid for writing.
unsafe fn create(event: *mut aclrtEvent, flags: Option<u32>) -> aclError {
    answer!(event, {
        current()?;
        let id = CapturableEvent::create(flags)?;
        id.raw()
    })
}

pub unsafe extern "C" fn aclrtCreateEvent(event: *mut aclrtEvent) -> aclError {
    // SAFETY: the caller's promise.
    unsafe { create(event, None) }
}

pub unsafe extern "C" fn aclrtCreateEventWithFlag(event: *mut aclrtEvent, flag: u32) -> aclError {
    // SAFETY: the caller's promise.
    unsafe { create(event, Some(flag)) }
}

pub unsafe extern "C" fn aclrtCreateEventExWithFlag(event: *mut aclrtEvent, flag: u32) -> aclError {
    // SAFETY: the caller's promise.
    unsafe { create(event, Some(flag)) }
}

pub unsafe extern "C" fn aclrtDestroyEvent(event: aclrtEvent) -> aclError {
    acl(|| EVENTS.remove(event).map(drop))
}

fn synchronize(event: aclrtEvent, deadline: Option<Instant>) -> Outcome {
    let outcome = EVENTS.get(event)?.synchronize(check(), deadline);
    strike(Site::Sync)?;
    outcome
}

pub unsafe extern "C" fn aclrtSynchronizeEvent(event: aclrtEvent) -> aclError {
    acl(|| synchronize(event, None))
}

pub unsafe extern "C" fn aclrtSynchronizeEventWithTimeout(event: aclrtEvent, timeout: i32) -> aclError {
    acl(|| synchronize(event, deadline("aclrtSynchronizeEventWithTimeout", timeout)?))
}

pub unsafe extern "C" fn aclrtRecordEvent(event: aclrtEvent, stream: aclrtStream) -> aclError {
    acl(|| self::stream("aclrtRecordEvent", stream)?.record(&*EVENTS.get(event)?))
}

pub unsafe extern "C" fn aclrtResetEvent(event: aclrtEvent, stream: aclrtStream) -> aclError {
    acl(|| self::stream("aclrtResetEvent", stream)?.reset(&*EVENTS.get(event)?))
}

pub unsafe extern "C" fn aclrtQueryEventStatus(event: aclrtEvent, status: *mut aclrtEventRecordedStatus) -> aclError {
    answer!(status, {
        if EVENTS.get(event)?.query("aclrtQueryEventStatus")? {
            aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE
        } else {
            aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY
        }
    })
}

pub unsafe extern "C" fn aclrtQueryEventWaitStatus(event: aclrtEvent, status: *mut aclrtEventWaitStatus) -> aclError {
    answer!(status, {
        if EVENTS.get(event)?.query_waits("aclrtQueryEventWaitStatus")? {
            aclrtEventWaitStatus::ACL_EVENT_WAIT_STATUS_COMPLETE
        } else {
            aclrtEventWaitStatus::ACL_EVENT_WAIT_STATUS_NOT_READY
        }
    })
}

pub unsafe extern "C" fn aclrtEventElapsedTime(ms: *mut f32, startEvent: aclrtEvent, endEvent: aclrtEvent) -> aclError {
    answer!(ms, { CapturableEvent::elapsed_ms(&*EVENTS.get(startEvent)?, &*EVENTS.get(endEvent)?)? })
}

pub unsafe extern "C" fn aclrtEventGetTimestamp(event: aclrtEvent, timestamp: *mut u64) -> aclError {
    answer!(timestamp, EVENTS.get(event)?.timestamp()?)
}
