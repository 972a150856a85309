//! Streams: queues of work that a device does in order.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ascend_sys::{Api, bindings as sys};

use crate::error::{Result, acl};
use crate::runtime::stream_progress::synchronise_stream;
use crate::runtime::{Context, Device, Memory, Resource, StreamProgress, Uses, capturing, lock};

/// A queue of work that the device does in order. Different streams run side by side; [`Event`](crate::Event)s order
/// them.
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
    progress: Arc<StreamProgress>,
    /// Scratch memory of the operators launched here. Work on a stream is done one after the other, so one will do.
    workspace: Mutex<Option<Arc<Memory>>>,
}

// SAFETY: `raw` is a name, not memory; CANN takes calls with one stream from any thread whose context is the stream's,
// which each function here sees to, and orders them itself.
unsafe impl Send for Stream {}
// SAFETY: as for `Send`.
unsafe impl Sync for Stream {}

impl Device {
    /// A new stream.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl), for example when the device has no stream left.
    #[doc(alias = "aclrtCreateStream")]
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self.clone())
    }
}

impl Stream {
    pub(super) fn create(device: Device) -> Result<Self> {
        let api = device.context().bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for the result.
        unsafe { acl!(api, aclrtCreateStream(&mut raw)) }?;
        Ok(Self::new(device, raw, true))
    }

    fn new(device: Device, raw: sys::aclrtStream, owned: bool) -> Self {
        Self { device, raw, owned, progress: Arc::new(StreamProgress::new(raw)), workspace: Mutex::new(None) }
    }

    /// Wraps a stream of another owner, such as another framework. Dropping it neither waits nor destroys.
    ///
    /// # Safety
    /// `raw` is a stream (`aclrtStream`) of the device's default context, which stays alive as long as this object and
    /// until the work queued through it is over.
    pub unsafe fn from_raw_borrowed(device: &Device, raw: *mut c_void) -> Self {
        Self::new(device.clone(), raw, false)
    }

    /// The raw stream (`aclrtStream`), valid while this object is. Memory that other libraries' work on the stream
    /// uses has to outlive that work.
    ///
    /// [`Graph`](crate::Graph) captures graphs. This crate does not know of those that other code captures from the
    /// stream (`aclmdlRICaptureBegin`): what it queues meanwhile runs whenever the graph does, while it takes that
    /// work to be over once the stream was synchronised. The capturing program has to keep every tensor and plan of
    /// such launches, and the stream with its workspace, which a later launch may replace by a larger one, until the
    /// graph is destroyed.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Refuses a stream of another device than this one, or of the same device of another runtime.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE), which calls the stream `argument`.
    pub fn check_device(&self, argument: &'static str, device: &Device) -> Result<()> {
        device.context().admits(argument, self.context())
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.device.context()
    }

    pub(crate) fn progress(&self) -> &Arc<StreamProgress> {
        &self.progress
    }

    /// Waits for everything queued so far.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl): this call failed, or work queued earlier did;
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures.
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
    /// [`Error::Timeout`](crate::Error::Timeout) when the time is up; otherwise as for [`Stream::synchronize`].
    #[doc(alias = "aclrtSynchronizeStreamWithTimeout")]
    pub fn synchronize_timeout(&self, limit: Duration) -> Result<()> {
        capturing::refuse("waiting for a stream", "wait before or after the capture")?;
        let api = self.context().bind()?;
        let limit = milliseconds(limit);
        // SAFETY: the stream is alive as long as this object.
        self.finish(|| unsafe { acl!(api, aclrtSynchronizeStreamWithTimeout(self.raw, limit)) })
    }

    /// Runs a synchronisation and notes what is over because of it. After a failure, that of a fault included,
    /// nothing is known to be over: by default CANN goes on with a stream after a fault.
    fn finish(&self, synchronize: impl FnOnce() -> Result<()>) -> Result<()> {
        let number = self.progress.issued();
        let outcome = synchronize().and_then(|()| {
            self.progress.finish(number);
            self.context().sweep();
            self.progress.take_fault().map_or(Ok(()), Err)
        });
        self.progress.waited(number, &outcome);
        outcome
    }

    /// Whether everything queued so far is over.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl); [`Error::Capturing`](crate::Error::Capturing) on a thread that captures.
    #[doc(alias = "aclrtStreamQuery")]
    pub fn is_idle(&self) -> Result<bool> {
        capturing::refuse("waiting for a stream", "wait before or after the capture")?;
        let api = self.context().bind()?;
        let number = self.progress.issued();
        let mut status = sys::aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY;
        // SAFETY: the stream is alive as long as this object; `status` is a place for the result.
        unsafe { acl!(api, aclrtStreamQuery(self.raw, &mut status)) }?;
        let idle = status == sys::aclrtStreamStatus::ACL_STREAM_STATUS_COMPLETE;
        if idle {
            self.progress.finish(number);
        }
        Ok(idle)
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
        lock(&self.workspace).as_ref().map_or(0, |memory| memory.bytes())
    }

    /// Waits for the work of a stream that is being dropped. Returns whether the work is known to be over.
    fn drain(&self, api: &Api) -> bool {
        let mut outcome = synchronise_stream(api, self.raw);
        if let Err(error) = &outcome {
            tracing::error!("work on a dropped stream failed: {error}");
            // CANN reports a fault once, while the work after it goes on: the second wait shows whether all is over.
            outcome = synchronise_stream(api, self.raw);
        }
        if let Some(fault) = self.progress.take_fault() {
            tracing::error!("work on a dropped stream failed: {fault}");
        }
        outcome.is_ok()
    }

    /// Ends the stream once it has passed a number: now or, as long as that is not known, later.
    fn end_behind(&self, number: u64, owned: Option<sys::aclrtStream>) {
        let progress = Arc::clone(&self.progress);
        let mut uses = Uses::default();
        uses.mark(&self.progress, number);
        // SAFETY: this object is being dropped, and nothing else ends the stream or frees its markers.
        unsafe { self.context().retire(Resource::Stream { progress, owned }, &mut uses) };
    }

    fn destroy(&self, api: &Api) {
        // A number of its own, since work that other libraries queued has none.
        let number = self.progress.advance();
        self.progress.seal();
        if self.drain(api) {
            self.progress.finish(u64::MAX);
        } else {
            self.progress.unseal();
        }
        self.end_behind(number, Some(self.raw));
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
        self.progress.seal();
        if !self.progress.mark_end(api) && self.drain(api) {
            self.progress.finish(u64::MAX);
        }
        self.end_behind(self.progress.issued(), None);
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
