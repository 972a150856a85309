//! Where launches go: a stream, or a graph that is captured from one.

use std::sync::Arc;

use ascend_sys::bindings as sys;

use crate::error::Result;

use super::{Context, Memory, Stream, capturing};

/// Something that takes launches in order, and the memory that they need.
pub(crate) trait Queue {
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
}

impl Queue for Stream {
    #[inline]
    fn context(&self) -> &Arc<Context> {
        self.context()
    }

    #[inline]
    fn raw(&self) -> Result<sys::aclrtStream> {
        capturing::refuse("work on a stream", "record it with `Capturing`")?;
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
