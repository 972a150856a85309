//! Streams: queues of work that a device does in order.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ascend_sys::{Api, bindings as sys};

use crate::error::{Error, Result, acl};
use crate::memory::Memory;
use crate::runtime::{Context, Device, Event, Resource, Timeline, Uses, capturing, lock};

/// A queue of work that the device does in order. Different streams run side by side; [`Event`]s order them.
///
/// Work is queued by [`Plan::launch`](crate::attention::Plan::launch) and the asynchronous copies; it is over when
/// [`Stream::synchronize`] returns. Dropping a stream waits for its work.
///
/// # Threads
/// `Send` and `Sync`: several threads may queue work; it is done in the order in which the calls were made.
pub struct Stream {
    device: Device,
    raw: sys::aclrtStream,
    owned: bool,
    timeline: Arc<Timeline>,
    /// Scratch memory of the operators launched here. Work on a stream is done one after the other, so one will do.
    workspace: Mutex<Option<Arc<Memory>>>,
}

// SAFETY: `raw` is a name, not memory; CANN takes calls with one stream from any thread whose context is the stream's,
// which each function here sees to, and orders them itself.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn create(device: Device) -> Result<Self> {
        let api = device.context().bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for the result.
        unsafe { acl!(api, aclrtCreateStream(&mut raw)) }?;
        Ok(Self::new(device, raw, true))
    }

    fn new(device: Device, raw: sys::aclrtStream, owned: bool) -> Self {
        Self {
            device,
            raw,
            owned,
            timeline: Arc::new(Timeline::new(raw)),
            workspace: Mutex::new(None),
        }
    }

    /// A stream of somebody else, such as another framework. Dropping it neither waits nor destroys.
    ///
    /// # Safety
    /// `raw` is a stream (`aclrtStream`) of the device's default context, which stays alive as long as this object and
    /// until the work queued through it is over.
    pub unsafe fn from_raw_borrowed(device: &Device, raw: *mut c_void) -> Self {
        Self::new(device.clone(), raw, false)
    }

    /// The raw stream (`aclrtStream`), valid while this object is. Memory that work queued behind this crate's back
    /// uses has to outlive that work.
    ///
    /// [`Graph`](crate::Graph) captures graphs. This crate does not know of those that are captured from the stream
    /// behind its back (`aclmdlRICaptureBegin`): what it queues meanwhile runs whenever the graph does, while it takes
    /// that work to be over once the stream was synchronised. Whoever captures has to keep every tensor and plan of such
    /// launches, and the stream with its workspace, which a later launch may replace by a larger one, until the graph is
    /// destroyed.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.device.context()
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// Waits for everything queued so far.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`]: this call failed, or work queued earlier did.
    #[doc(alias = "aclrtSynchronizeStream")]
    pub fn synchronize(&self) -> Result<()> {
        capturing::refuse("waiting for a stream", "wait before or after the capture")?;
        let api = self.context().bind()?;
        // SAFETY: the stream is alive as long as this object.
        self.finish(|| unsafe { acl!(api, aclrtSynchronizeStream(self.raw)) })
    }

    /// Waits for everything queued so far, but not longer than a while (in steps of a millisecond, at most 24 days).
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the time is up; otherwise as [`Stream::synchronize`].
    #[doc(alias = "aclrtSynchronizeStreamWithTimeout")]
    pub fn synchronize_timeout(&self, limit: Duration) -> Result<()> {
        capturing::refuse("waiting for a stream", "wait before or after the capture")?;
        let api = self.context().bind()?;
        let limit = milliseconds(limit);
        // SAFETY: the stream is alive as long as this object.
        self.finish(|| unsafe { acl!(api, aclrtSynchronizeStreamWithTimeout(self.raw, limit)) })
    }

    /// Runs a synchronisation and takes note of what is over because of it.
    fn finish(&self, synchronize: impl FnOnce() -> Result<()>) -> Result<()> {
        let number = self.timeline.issued();
        let outcome = synchronize();
        if outcome.as_ref().map_or_else(is_device_fault, |()| true) {
            self.timeline.finish(number);
            self.context().sweep();
        }
        outcome
    }

    /// Whether everything queued so far is over.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`].
    #[doc(alias = "aclrtStreamQuery")]
    pub fn is_idle(&self) -> Result<bool> {
        capturing::refuse("waiting for a stream", "wait before or after the capture")?;
        let api = self.context().bind()?;
        let number = self.timeline.issued();
        let mut status = sys::aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY;
        // SAFETY: the stream is alive as long as this object; `status` is a place for the result.
        unsafe { acl!(api, aclrtStreamQuery(self.raw, &mut status)) }?;
        let idle = status == sys::aclrtStreamStatus::ACL_STREAM_STATUS_COMPLETE;
        if idle {
            self.timeline.finish(number);
        }
        Ok(idle)
    }

    /// Records a new event behind everything queued so far. Other streams and the host can wait for it.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`].
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
    /// [`Error::Acl`].
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
    /// [`Error::InvalidArgument`] for an event of another device; [`Error::Acl`].
    #[doc(alias = "aclrtStreamWaitEvent")]
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        event.wait_on(self)
    }

    /// Scratch memory of at least some bytes, for work on this stream.
    pub(crate) fn workspace(&self, bytes: usize) -> Result<Arc<Memory>> {
        let mut kept = lock(&self.workspace);
        if let Some(memory) = kept.as_ref().filter(|memory| memory.bytes() >= bytes) {
            return Ok(Arc::clone(memory));
        }
        // The old one goes first; if work still uses it, it goes when that is over.
        *kept = None;
        let memory = Arc::new(Memory::alloc(self.context(), bytes)?);
        Ok(Arc::clone(kept.insert(memory)))
    }

    /// Bytes of scratch memory that this stream keeps for its operators: the most that one of them needed.
    pub fn workspace_bytes(&self) -> usize {
        lock(&self.workspace)
            .as_ref()
            .map_or(0, |memory| memory.bytes())
    }

    fn destroy(&self, api: &Api) {
        self.timeline.seal();
        let synchronize = || -> Result<()> {
            // SAFETY: the stream is alive until it is destroyed below.
            unsafe { acl!(api, aclrtSynchronizeStream(self.raw)) }
        };
        if let Err(error) = synchronize() {
            tracing::error!("work on a dropped stream failed: {error}");
        }
        self.timeline.end(api);
        let destroy = || -> Result<()> {
            // SAFETY: this object made the stream and is being dropped; the timeline no longer uses it.
            unsafe { acl!(api, aclrtDestroyStream(self.raw)) }
        };
        if let Err(error) = destroy() {
            tracing::error!("cannot destroy a stream: {error}");
        }
        // Its work is over: what was dropped while the work used it goes now, and not when somebody next asks.
        self.context().sweep();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let api = match self.context().bind() {
            Ok(api) => api,
            Err(error) => return tracing::error!("cannot drop a stream: {error}"),
        };
        if self.owned {
            return self.destroy(api);
        }
        if !self.timeline.hand_back(api) {
            let synchronize = || -> Result<()> {
                // SAFETY: the stream is alive as long as this object.
                unsafe { acl!(api, aclrtSynchronizeStream(self.raw)) }
            };
            if let Err(error) = synchronize() {
                tracing::error!("work on a borrowed stream failed: {error}");
            }
            return self.timeline.end(api);
        }
        let mut uses = Uses::default();
        uses.mark(&self.timeline, self.timeline.issued());
        // SAFETY: stands for no resource but the markers of this stream, which nothing else frees.
        unsafe { self.context().retire(Resource::Stream, &mut uses) };
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device.id())
            .field("raw", &self.raw)
            .field("owned", &self.owned)
            .finish_non_exhaustive()
    }
}

/// A limit as the C functions take it: -1 would mean for ever.
pub(super) fn milliseconds(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis()).unwrap_or(i32::MAX)
}

/// Whether a failure says that the device has stopped the work: after that, nothing of it still runs.
fn is_device_fault(error: &Error) -> bool {
    matches!(error, Error::Acl { status, .. } if (sys::ACL_ERROR_RT_LOST_HEARTBEAT..=sys::ACL_ERROR_RT_SUSPECT_REMOTE_ERROR).contains(&status.0))
}
