//! Events that cross the border of a graph.

use std::ptr;
use std::sync::Arc;

use ascend_sys::{Api, bindings as sys};

use crate::error::{Result, acl};
use crate::runtime::{Context, Resource, Stream, Uses};

/// An event that a graph waits for, recorded by a stream outside.
#[derive(Debug)]
pub(super) struct ExternalEvent {
    context: Arc<Context>,
    raw: sys::aclrtEvent,
    uses: Uses,
}

// SAFETY: `raw` is a name, not memory; CANN takes calls with one event from any thread whose context is the event's.
unsafe impl Send for ExternalEvent {}
// SAFETY: as for `Send`.
unsafe impl Sync for ExternalEvent {}

impl ExternalEvent {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let api = context.bind()?;
        let mut raw = ptr::null_mut();
        // Only events that this function makes can be reset.
        // SAFETY: `raw` is a place for the result.
        unsafe { acl!(api, aclrtCreateEventWithFlag(&mut raw, sys::ACL_EVENT_EXTERNAL)) }?;
        Ok(Self { context: Arc::clone(context), raw, uses: Uses::default() })
    }

    /// Lets work that is captured from now on wait for the next record of the event, and resets the event for the one
    /// after.
    pub(super) fn await_in(&self, api: &Api, capturing: &Stream) -> Result<()> {
        // SAFETY: event and stream are alive; the graph keeps the event.
        unsafe {
            acl!(api, aclrtStreamWaitEvent(capturing.as_raw(), self.raw))?;
            acl!(api, aclrtResetEvent(self.raw, capturing.as_raw()))
        }
    }

    /// Records the event after what is queued on a stream.
    pub(super) fn record(&self, api: &Api, stream: &Stream) -> Result<()> {
        // SAFETY: event and stream are alive; the mark keeps the event until the stream has passed it.
        let outcome = unsafe { acl!(api, aclrtRecordEvent(self.raw, stream.as_raw())) };
        self.uses.mark(stream.progress(), stream.progress().advance());
        outcome
    }

    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }
}

impl Drop for ExternalEvent {
    fn drop(&mut self) {
        // SAFETY: this object made the event; every record, and every replay of the graph that waits for it, was noted.
        unsafe { self.context.retire(Resource::Event(self.raw), &mut self.uses) };
    }
}
