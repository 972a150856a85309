//! When the work of a step is over.

use std::sync::Arc;

use ascend_attention::{Stream, StreamMark};

/// Reports whether work that was queued is over. Several threads may query one fence at a time.
pub(super) trait Fence: Send + Sync {
    /// Whether everything queued before the fence is over; `false` where that is not known.
    fn is_passed(&self) -> bool;

    /// Waits until everything queued before the fence is over. Returns at once on a thread that captures a graph.
    fn wait(&self);
}

/// Where the work of a step is queued: a stream, or in tests what stands in for one.
pub(super) trait FencedQueue: Sync {
    /// A fence after everything queued so far. Where the end cannot be marked now, the fence is not passed until it is
    /// known in another way, such as by a synchronisation of the queue.
    fn fence(&self) -> Arc<dyn Fence>;
}

impl FencedQueue for Stream {
    fn fence(&self) -> Arc<dyn Fence> {
        Arc::new(self.mark())
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
