//! When the work of a step is over.

use ascend_attention::{Event, Stream, StreamMark};

/// Reports whether work that was queued is over.
///
/// Several threads may query one fence at a time. A fence may call its pool: the pool answers from what it knows,
/// without querying fences again.
pub trait Fence: Send + Sync {
    /// Whether everything queued before the fence is over; `false` where that is not known.
    fn is_passed(&self) -> bool;

    /// Waits until everything queued before the fence is over. A fence that cannot wait returns at once, as does the
    /// default; so does a stream's fence on a thread that captures a graph.
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
pub trait FencedQueue {
    /// The type that reports when everything queued so far is over.
    type Fence: Fence + 'static;

    /// A fence after everything queued so far. A queue that cannot mark its end now returns a fence that is not passed
    /// until that is known in another way, such as by a synchronisation of the queue.
    ///
    /// If this panics, the end of the step is never known. The step stays open for ever, which an error of `tracing`
    /// reports: blocks that are given back from its beginning on are not handed out again, and the cache stays
    /// correct.
    fn fence(&self) -> Self::Fence;
}

impl FencedQueue for Stream {
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
