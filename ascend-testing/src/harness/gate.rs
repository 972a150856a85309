//! A gate that streams wait at until the host opens it.

use std::ffi::c_void;
use std::ptr;

use ascend_attention::sys::bindings::{self as sys, aclError};
use ascend_attention::{Device, Stream};

/// Holds streams up until it is opened.
pub struct Gate {
    stream: Stream,
    event: *mut c_void,
    graph: *mut c_void,
}

// SAFETY: the handles are names that the emulation takes from any thread.
unsafe impl Sync for Gate {}

#[track_caller]
fn ok(status: aclError) {
    assert_eq!(status, 0);
}

impl Gate {
    pub fn new(device: &Device) -> Self {
        let stream = device.stream().unwrap();
        let (mut event, mut graph) = (ptr::null_mut(), ptr::null_mut());
        let api = super::functions();
        let relaxed = sys::aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; the others are places for results, and then live handles.
        unsafe {
            let flag = sys::ACL_EVENT_EXTERNAL;
            ok(api.aclrtCreateEventWithFlag.unwrap()(&mut event, flag));
            ok(api.aclmdlRICaptureBegin.unwrap()(stream.as_raw(), relaxed));
            ok(api.aclrtStreamWaitEvent.unwrap()(stream.as_raw(), event));
            ok(api.aclmdlRICaptureEnd.unwrap()(stream.as_raw(), &mut graph));
        }
        Self { stream, event, graph }
    }

    /// What is queued on a stream from now on waits for the gate.
    pub fn hold(&self, stream: &Stream) {
        stream.record_event().unwrap();
        let execute = super::functions().aclmdlRIExecuteAsync.unwrap();
        // SAFETY: graph and stream are alive.
        ok(unsafe { execute(self.graph, stream.as_raw()) });
    }

    pub fn open(&self) {
        // Makes the device this thread's.
        self.stream.record_event().unwrap();
        let record = super::functions().aclrtRecordEvent.unwrap();
        // SAFETY: event and stream are alive.
        ok(unsafe { record(self.event, self.stream.as_raw()) });
        self.stream.synchronize().unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let api = super::functions();
        self.open();
        // SAFETY: both are alive and destroyed once; nothing waits for them any more.
        unsafe {
            ok(api.aclmdlRIDestroy.unwrap()(self.graph));
            ok(api.aclrtDestroyEvent.unwrap()(self.event));
        }
    }
}
