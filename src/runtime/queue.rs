//! Where launches go: a stream, or a graph that is captured from one.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex};

use ascend_sys::bindings as sys;

use crate::error::{Result, acl};

use super::{Context, Event, Memory, Stream, StreamMark, capturing};

/// Where launches go: a [`Stream`], which runs them in its order, or a graph that is being captured
/// ([`Capturing`](crate::graph::Capturing)), whose replays run them.
///
/// Every `launch` and `launch_into` takes either, so that a launch is captured by giving it the other queue. Only
/// this crate implements the trait.
#[allow(private_bounds, reason = "sealed: the bound has no public name")]
pub trait Queue: LaunchQueue {}

impl Queue for Stream {}

/// A check that each replay of a graph passes before it is queued.
pub trait ReplayCheck: fmt::Debug + Send + Sync {
    /// Refuses a replay that would read what it must not.
    fn admits_replay(&self) -> Result<()>;
}

/// What a graph keeps alive besides memory, and what is in order with its replays: a communicator.
pub(crate) trait ReplayedObject: fmt::Debug + Send + Sync {
    /// The order of its calls and replays.
    fn order(&self) -> &Arc<Mutex<CallOrder>>;

    /// Refuses a replay of an object that makes no more calls.
    fn admit(&self) -> Result<()>;

    /// Takes note of work that was queued on a stream.
    fn note(&self, stream: &Stream);
}

/// The end of the latest call of those that have one order on all streams, and its stream. Whoever queues a call holds
/// the lock from [`precede`](Self::precede) to [`finish`](Self::finish), so that no other call comes in between.
#[derive(Debug, Default)]
pub(crate) struct CallOrder(Option<(Event, StreamMark)>);

impl CallOrder {
    /// Lets work that is queued on a stream from now on wait for the latest call.
    pub(crate) fn precede(&self, stream: &Stream) -> Result<()> {
        match &self.0 {
            Some((event, mark)) if !mark.is_of(stream) => stream.wait_event(event),
            _ => Ok(()),
        }
    }

    /// Marks the end of the latest call.
    pub(crate) fn finish(&mut self, stream: &Stream) -> Result<()> {
        match &mut self.0 {
            Some((event, mark)) => {
                event.record(stream)?;
                if !mark.is_of(stream) {
                    *mark = stream.mark();
                }
            }
            None => self.0 = Some((stream.record_event()?, stream.mark())),
        }
        Ok(())
    }
}

/// What launches need of a [`Queue`].
pub(crate) trait LaunchQueue {
    /// The device's context.
    fn context(&self) -> &Arc<Context>;

    /// The stream to pass to the functions of CANN.
    ///
    /// # Errors
    /// If no work may be queued here now.
    fn raw(&self) -> Result<sys::aclrtStream>;

    /// Whether a launch that is queued here runs once, with the memory as it is then; otherwise replays run it.
    fn runs_now(&self) -> bool {
        true
    }

    /// Scratch memory of at least some bytes, not 0, for one launch after the other.
    fn workspace(&self, bytes: usize) -> Result<Arc<Memory>>;

    /// The number of the launch that was queued just now.
    fn queued(&self) -> u64;

    /// Keeps memory for as long as the launch of this number may use it.
    fn keep(&self, number: u64, memory: &Arc<Memory>);

    /// The stream that runs what is queued here; none for a graph, which runs it when it is replayed.
    fn stream(&self) -> Option<&Stream> {
        None
    }

    /// Refuses a launch that makes the memory of its output, where that cannot be done.
    fn makes_outputs(&self) -> Result<()> {
        Ok(())
    }

    /// Takes note of a launch's outcome, and returns it. The first failure fails a capture, also if it is ignored.
    #[inline]
    fn note<R>(&self, outcome: Result<R>) -> Result<R> {
        outcome
    }

    /// Keeps an object that replays of what is queued here use; work that runs now has its own order.
    #[inline]
    fn keep_object(&self, _object: impl FnOnce() -> Arc<dyn ReplayedObject>) {}

    /// Adds checks of a launch's tensors to those that replays pass; a launch that runs now needs none.
    #[inline]
    fn before_replays<I: IntoIterator<Item = Arc<dyn ReplayCheck>>>(&self, _checks: impl FnOnce() -> I) {}
}

impl LaunchQueue for Stream {
    #[inline]
    fn context(&self) -> &Arc<Context> {
        self.context()
    }

    #[inline]
    fn raw(&self) -> Result<sys::aclrtStream> {
        capturing::refuse("work on a stream", "give it the `Capturing` in place of the stream")?;
        Ok(self.as_raw())
    }

    fn workspace(&self, bytes: usize) -> Result<Arc<Memory>> {
        self.workspace(bytes)
    }

    #[inline]
    fn queued(&self) -> u64 {
        self.progress().advance()
    }

    #[inline]
    fn keep(&self, number: u64, memory: &Arc<Memory>) {
        memory.uses().mark(self.progress(), number);
    }

    #[inline]
    fn stream(&self) -> Option<&Stream> {
        Some(self)
    }
}

impl Memory {
    /// Queues a copy between this memory and pinned host memory.
    ///
    /// # Safety
    /// `host` has `len` bytes of pinned memory that nothing else touches until the stream has passed the copy.
    pub(crate) unsafe fn copy_async(
        &self,
        offset: usize,
        host: *mut c_void,
        len: usize,
        to_device: bool,
        stream: &Stream,
    ) -> Result<()> {
        if to_device {
            self.writable("tensor")?;
        }
        self.holds(offset, len)?;
        capturing::refuse("a copy from or to the host", "copy before the replay")?;
        let api = self.context().bind()?;
        let device = self.at(offset);
        let (from, to, kind) = if to_device {
            (host, device, sys::aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE)
        } else {
            (device, host, sys::aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_HOST)
        };
        let outcome = if len == 0 {
            Ok(())
        } else {
            // SAFETY: both have `len` bytes: the device's as checked, the host's by the caller, who keeps it; the
            // mark below keeps the device's.
            unsafe { acl!(api, aclrtMemcpyAsync(to, len, from, len, kind, stream.as_raw())) }
        };
        self.uses().mark(stream.progress(), stream.progress().advance());
        outcome
    }

    /// Queues a copy from other device memory, or from another part of this.
    pub(crate) fn copy_from_device(
        self: &Arc<Self>,
        offset: usize,
        source: &Arc<Self>,
        source_offset: usize,
        len: usize,
        queue: &impl LaunchQueue,
    ) -> Result<()> {
        self.writable("tensor")?;
        self.holds(offset, len)?;
        source.holds(source_offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let api = self.context().bind()?;
        let raw = queue.raw()?;
        let kind = sys::aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_DEVICE;
        let (to, from) = (self.at(offset), source.at(source_offset));
        // SAFETY: both have `len` bytes, as checked; they are kept below for as long as the copy may use them.
        let outcome = unsafe { acl!(api, aclrtMemcpyAsync(to, len, from.cast_const(), len, kind, raw)) };
        let number = queue.queued();
        queue.keep(number, self);
        queue.keep(number, source);
        outcome
    }

    /// Queues zeros for bytes.
    pub(crate) fn clear(self: &Arc<Self>, offset: usize, len: usize, stream: &Stream) -> Result<()> {
        self.writable("tensor")?;
        self.holds(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let api = self.context().bind()?;
        let raw = stream.raw()?;
        // SAFETY: the memory has `len` bytes there, as checked; it is kept below for as long as the zeros may be
        // written.
        let outcome = unsafe { acl!(api, aclrtMemsetAsync(self.at(offset), len, 0, len, raw)) };
        let number = stream.queued();
        stream.keep(number, self);
        outcome
    }
}
