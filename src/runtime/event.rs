//! Events: marks in a stream that other streams and the host wait for.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use ascend_sys::bindings as sys;

use crate::error::{Error, Result, acl};
use crate::runtime::stream::milliseconds;
use crate::runtime::{Context, Device, Resource, Stream, Uses, capturing};

/// A mark in a stream. From [`Stream::record_event`], so there is none that was never recorded.
///
/// Dropping one is safe at any time: streams that wait for it still do.
///
/// # Threads
/// `Send` and `Sync`.
pub struct Event {
    context: Arc<Context>,
    raw: sys::aclrtEvent,
    owned: bool,
    timed: bool,
    uses: Uses,
}

// SAFETY: `raw` is a name, not memory; CANN takes calls with one event from any thread whose context is the event's,
// which each function here sees to.
unsafe impl Send for Event {}
// SAFETY: as for `Send`.
unsafe impl Sync for Event {}

impl Stream {
    /// Records a new event after everything queued so far. Other streams and the host can wait for it.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl); [`Error::Capturing`](crate::Error::Capturing) on a thread that captures.
    #[doc(alias = "aclrtCreateEventExWithFlag")]
    #[doc(alias = "aclrtRecordEvent")]
    pub fn record_event(&self) -> Result<Event> {
        Event::recorded(self, false)
    }

    /// Records a new event that also notes the time, for [`Event::elapsed_since`].
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl); [`Error::Capturing`](crate::Error::Capturing) on a thread that captures.
    #[doc(alias = "aclrtCreateEventExWithFlag")]
    #[doc(alias = "aclrtRecordEvent")]
    pub fn record_timing_event(&self) -> Result<Event> {
        Event::recorded(self, true)
    }

    /// Makes everything queued from now on wait for an event. Does not make the host wait.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for an event of another device;
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures; [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtStreamWaitEvent")]
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        event.wait_on(self)
    }
}

impl Event {
    fn recorded(stream: &Stream, timed: bool) -> Result<Self> {
        let api = stream.context().bind()?;
        let mut flag = sys::ACL_EVENT_SYNC | sys::ACL_EVENT_CAPTURE_STREAM_PROGRESS;
        if timed {
            flag |= sys::ACL_EVENT_TIME_LINE;
        }
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for the result.
        unsafe { acl!(api, aclrtCreateEventExWithFlag(&mut raw, flag)) }?;
        let event = Self { context: Arc::clone(stream.context()), raw, owned: true, timed, uses: Uses::default() };
        event.record(stream)?;
        Ok(event)
    }

    /// Wraps an event of another owner, which has been recorded. Dropping it does not destroy the raw event.
    ///
    /// # Safety
    /// `raw` is an event (`aclrtEvent`) of the device's default context, which stays alive as long as this object and
    /// as the work queued with it.
    pub unsafe fn from_raw_borrowed(device: &Device, raw: *mut c_void) -> Self {
        Self { context: Arc::clone(device.context()), raw, owned: false, timed: true, uses: Uses::default() }
    }

    /// The raw event (`aclrtEvent`), valid while this object is.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }

    /// Moves the mark to the end of everything queued on a stream so far. Waits that were queued before still wait
    /// for the old mark.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; [`Error::Capturing`] on a
    /// thread that captures; [`Error::Acl`].
    #[doc(alias = "aclrtRecordEvent")]
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.queue(stream, |raw| {
            let api = self.context.bind()?;
            // SAFETY: event and stream are alive, and the event is kept until the stream has passed it.
            unsafe { acl!(api, aclrtRecordEvent(self.raw, raw)) }
        })
    }

    fn wait_on(&self, stream: &Stream) -> Result<()> {
        self.queue(stream, |raw| {
            let api = self.context.bind()?;
            // SAFETY: event and stream are alive, and the event is kept until the stream has passed it.
            unsafe { acl!(api, aclrtStreamWaitEvent(raw, self.raw)) }
        })
    }

    fn queue(&self, stream: &Stream, call: impl FnOnce(sys::aclrtStream) -> Result<()>) -> Result<()> {
        stream.context().admits("event", &self.context)?;
        capturing::refuse("an event", "what is captured happens in order without events")?;
        let outcome = call(stream.as_raw());
        self.uses.mark(stream.progress(), stream.progress().advance());
        outcome
    }

    /// Waits for the mark.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`]: this call failed, or work before the mark did; [`Error::Capturing`] on a thread that captures.
    #[doc(alias = "aclrtSynchronizeEvent")]
    pub fn synchronize(&self) -> Result<()> {
        capturing::refuse("waiting for an event", "wait before or after the capture")?;
        let api = self.context.bind()?;
        // SAFETY: the event is alive as long as this object.
        unsafe { acl!(api, aclrtSynchronizeEvent(self.raw)) }
    }

    /// Waits for the mark, but not longer than a while (in steps of a millisecond, at most 24 days).
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the time is up; otherwise as for [`Event::synchronize`].
    #[doc(alias = "aclrtSynchronizeEventWithTimeout")]
    pub fn synchronize_timeout(&self, limit: Duration) -> Result<()> {
        capturing::refuse("waiting for an event", "wait before or after the capture")?;
        let api = self.context.bind()?;
        let limit = milliseconds(limit);
        // SAFETY: the event is alive as long as this object.
        unsafe { acl!(api, aclrtSynchronizeEventWithTimeout(self.raw, limit)) }
    }

    /// Whether the stream has reached the mark.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`].
    #[doc(alias = "aclrtQueryEventStatus")]
    pub fn is_complete(&self) -> Result<bool> {
        let api = self.context.bind()?;
        let mut status = sys::aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: the event is alive as long as this object; `status` is a place for the result.
        unsafe { acl!(api, aclrtQueryEventStatus(self.raw, &mut status)) }?;
        Ok(status == sys::aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE)
    }

    /// Time between two marks that the streams have reached, both from [`Stream::record_timing_event`].
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if one
    /// of the events does not note the time, or they are of different devices; [`Error::Acl`] if one was not reached
    /// yet, or `start` is the later.
    #[doc(alias = "aclrtEventElapsedTime")]
    pub fn elapsed_since(&self, start: &Event) -> Result<Duration> {
        if !self.timed || !start.timed {
            return Err(Error::invalid("event", "an event of record_event", "events of record_timing_event")
                .fix("record both events by `Stream::record_timing_event`"));
        }
        self.context.admits("start", &start.context)?;
        let api = self.context.bind()?;
        let mut ms = 0.0;
        // SAFETY: both events are alive; `ms` is a place for the result.
        unsafe { acl!(api, aclrtEventElapsedTime(&mut ms, start.raw, self.raw)) }?;
        Ok(Duration::try_from_secs_f32(ms / 1000.0).unwrap_or_default())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: this object made the event, and every record and wait was noted in `uses`.
            unsafe { self.context.retire(Resource::Event(self.raw), &mut self.uses) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("raw", &self.raw).field("timed", &self.timed).finish_non_exhaustive()
    }
}
