//! Graph capture.

use super::{answer, deadline, not_null, refuse, store};
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::runtime::capture::{Mode, exchange_thread_mode};
use crate::runtime::context::stream;
use crate::runtime::graph::{GRAPHS, GROUPS, Graph};
use crate::runtime::stream::{Stream, refuse_default};
use crate::status::{CAPTURE_IMPLICIT, MODEL_CAPTURED, Outcome, acl, failure};
use ascend_sys::bindings::{aclError, aclmdlRI, aclmdlRICaptureMode, aclmdlRICaptureStatus, aclrtStream, aclrtTaskGrp};
use std::ptr;
use std::sync::Arc;

/// The stream behind a handle. The default stream is refused.
fn explicit(name: &str, raw: aclrtStream) -> Outcome<Arc<Stream>> {
    if raw.is_null() {
        return Err(refuse_default(CAPTURE_IMPLICIT, name));
    }
    stream(name, raw)
}

fn mode(mode: aclmdlRICaptureMode) -> Outcome<Mode> {
    Ok(match mode {
        aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_GLOBAL => Mode::Global,
        aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL => Mode::ThreadLocal,
        aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_RELAXED => Mode::Relaxed,
        aclmdlRICaptureMode(other) => {
            return Err(refuse("mode", other, "an aclmdlRICaptureMode, 0 to 2"));
        }
    })
}

fn mode_to_c(mode: Mode) -> aclmdlRICaptureMode {
    match mode {
        Mode::Global => aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_GLOBAL,
        Mode::ThreadLocal => aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL,
        Mode::Relaxed => aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_RELAXED,
    }
}

/// The graph behind a handle. Refused until its capture is over.
fn complete(name: &str, raw: aclmdlRI) -> Outcome<Arc<Graph>> {
    let graph = GRAPHS.get(raw)?;
    if !graph.is_complete() {
        return Err(failure!(MODEL_CAPTURED, "{name}: the graph is still being captured"));
    }
    Ok(graph)
}

pub unsafe extern "C" fn aclmdlRICaptureBegin(stream: aclrtStream, mode: aclmdlRICaptureMode) -> aclError {
    acl(|| explicit("aclmdlRICaptureBegin", stream)?.begin_capture(self::mode(mode)?))
}

pub unsafe extern "C" fn aclmdlRICaptureGetInfo(
    stream: aclrtStream,
    status: *mut aclmdlRICaptureStatus,
    modelRI: *mut aclmdlRI,
) -> aclError {
    use aclmdlRICaptureStatus as Status;
    acl(|| {
        let stream = self::stream("aclmdlRICaptureGetInfo", stream)?;
        let (found, graph) = match stream.capture() {
            None => (Status::ACL_MODEL_RI_CAPTURE_STATUS_NONE, ptr::null_mut()),
            Some(capture) if capture.valid() => (Status::ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE, capture.graph.raw()),
            Some(_) => (Status::ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED, ptr::null_mut()),
        };
        // SAFETY: the caller's promise, for both.
        unsafe {
            store("status", status, found)?;
            if modelRI.is_null() {
                return Ok(());
            }
            store("modelRI", modelRI, graph)
        }
    })
}

pub unsafe extern "C" fn aclmdlRICaptureEnd(stream: aclrtStream, modelRI: *mut aclmdlRI) -> aclError {
    const NAME: &str = "aclmdlRICaptureEnd";
    answer!(modelRI, {
        // SAFETY: the caller's promise.
        unsafe { store("modelRI", modelRI, ptr::null_mut()) }?;
        let graph = explicit(NAME, stream)?.end_capture()?;
        graph.raw()
    })
}

pub unsafe extern "C" fn aclmdlRICaptureThreadExchangeMode(mode: *mut aclmdlRICaptureMode) -> aclError {
    acl(|| {
        not_null("mode", mode)?;
        // SAFETY: not null, so valid for reading and writing one value.
        let new = self::mode(unsafe { mode.read_unaligned() })?;
        let old = exchange_thread_mode(new);
        // SAFETY: not null, so valid for writing one value.
        unsafe { store("mode", mode, mode_to_c(old)) }
    })
}

pub unsafe extern "C" fn aclmdlRIExecuteAsync(modelRI: aclmdlRI, stream: aclrtStream) -> aclError {
    const NAME: &str = "aclmdlRIExecuteAsync";
    acl(|| self::stream(NAME, stream)?.replay(complete(NAME, modelRI)?))
}

pub unsafe extern "C" fn aclmdlRIExecute(modelRI: aclmdlRI, timeout: i32) -> aclError {
    const NAME: &str = "aclmdlRIExecute";
    acl(|| {
        let deadline = deadline(NAME, timeout)?;
        let stream = stream(NAME, ptr::null())?;
        stream.replay(complete(NAME, modelRI)?)?;
        let outcome = stream.synchronize(NAME, deadline);
        strike(Site::Sync)?;
        outcome
    })
}

pub unsafe extern "C" fn aclmdlRIDestroy(modelRI: aclmdlRI) -> aclError {
    acl(|| {
        complete("aclmdlRIDestroy", modelRI)?;
        GRAPHS.remove(modelRI)?.destroy_groups();
        Ok(())
    })
}

pub unsafe extern "C" fn aclmdlRIDebugPrint(modelRI: aclmdlRI) -> aclError {
    acl(|| {
        print!("{}", GRAPHS.get(modelRI)?.describe());
        Ok(())
    })
}

pub unsafe extern "C" fn aclmdlRICaptureTaskGrpBegin(stream: aclrtStream) -> aclError {
    const NAME: &str = "aclmdlRICaptureTaskGrpBegin";
    acl(|| {
        let stream = explicit(NAME, stream)?;
        stream.captured(NAME)?.begin_group(stream.id())
    })
}

pub unsafe extern "C" fn aclmdlRICaptureTaskGrpEnd(stream: aclrtStream, handle: *mut aclrtTaskGrp) -> aclError {
    const NAME: &str = "aclmdlRICaptureTaskGrpEnd";
    answer!(handle, {
        let stream = explicit(NAME, stream)?;
        let group = stream.captured(NAME)?.end_group(stream.id())?;
        group.raw()
    })
}

pub unsafe extern "C" fn aclmdlRICaptureTaskUpdateBegin(stream: aclrtStream, handle: aclrtTaskGrp) -> aclError {
    acl(|| explicit("aclmdlRICaptureTaskUpdateBegin", stream)?.begin_update(GROUPS.get(handle)?))
}

pub unsafe extern "C" fn aclmdlRICaptureTaskUpdateEnd(stream: aclrtStream) -> aclError {
    acl(|| explicit("aclmdlRICaptureTaskUpdateEnd", stream)?.end_update())
}
