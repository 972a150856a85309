//! When the work of a step is over.

use ascend_attention::{Event, Stream, StreamMark};

/// Tells whether work that was queued is over.
///
/// Several threads may ask one fence at a time. A fence may ask its pool: it is answered from what is known, without
/// fences being asked again.
pub trait Fence: Send + Sync {
    /// Whether everything before the fence is over. When it cannot be told, it is not.
    fn is_passed(&self) -> bool;

    /// Waits until everything before the fence is over. A fence that cannot wait returns at once, as one does that does not
    /// define this; so does a stream's on a thread that captures a graph.
    fn wait(&self) {}
}

impl Fence for Event {
    fn is_passed(&self) -> bool {
        self.is_complete().unwrap_or_else(|error| {
            tracing::error!("cannot ask whether a step is over: {error}");
            false
        })
    }

    fn wait(&self) {
        if let Err(error) = self.synchronize() {
            tracing::warn!("cannot wait until a step is over: {error}");
        }
    }
}

/// Where the work of a step is queued.
pub trait Lane {
    /// What tells when everything queued so far is over.
    type Fence: Fence + 'static;

    /// A fence behind everything queued so far. A lane that cannot mark its end now returns a fence that is not passed
    /// before that can be told in another way, such as a synchronisation of the lane.
    ///
    /// Where this panics, nobody knows when the step is over. It stays open for ever, which an error of `tracing` says: blocks that
    /// are given back from its beginning on are not handed out again, and the cache stays right.
    fn fence(&self) -> Self::Fence;
}

impl Lane for Stream {
    type Fence = StreamMark;

    fn fence(&self) -> StreamMark {
        self.mark()
    }
}

impl Fence for StreamMark {
    fn is_passed(&self) -> bool {
        self.is_passed().unwrap_or_else(|error| {
            tracing::error!("cannot ask whether a step is over: {error}");
            false
        })
    }

    fn wait(&self) {
        if let Err(error) = self.wait() {
            tracing::warn!("cannot wait until a step is over: {error}");
        }
    }
}
