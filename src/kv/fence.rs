//! When the work of a step is over.

use std::fmt;
use std::sync::Arc;

use crate::runtime::{Context, Event, Stream, Timeline, capturing};

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
    fn fence(&self) -> Self::Fence;
}

impl Lane for Stream {
    type Fence = StreamFence;

    fn fence(&self) -> StreamFence {
        let timeline = Arc::clone(self.timeline());
        let context = Arc::clone(self.context());
        // A number of its own: what other libraries queued on the stream has none.
        let number = timeline.advance();
        match context.bind() {
            Ok(api) => timeline.mark(api, number),
            Err(error) => tracing::error!("the end of a step is not marked yet: {error}"),
        }
        StreamFence {
            context,
            timeline,
            number,
        }
    }
}

/// The end of what was queued on a stream when the fence was made.
///
/// It is passed when an event behind that is reached, which is recorded at once or, should that fail, when somebody asks;
/// or when the stream was synchronised.
pub struct StreamFence {
    context: Arc<Context>,
    timeline: Arc<Timeline>,
    number: u64,
}

impl Fence for StreamFence {
    fn is_passed(&self) -> bool {
        let api = match self.context.bind() {
            Ok(api) => api,
            Err(error) => {
                tracing::error!("cannot ask whether a step is over: {error}");
                return false;
            }
        };
        let passed = self.timeline.is_complete(api, self.number);
        if !passed {
            self.timeline.mark(api, self.number);
        }
        passed
    }

    fn wait(&self) {
        let allowed = capturing::refuse("waiting for a step", "wait before or after the capture");
        match allowed.and_then(|()| self.context.bind()) {
            // A fault is told by the stream's next synchronisation.
            Ok(api) => {
                self.timeline.wait(api, self.number);
            }
            Err(error) => tracing::warn!("cannot wait until a step is over: {error}"),
        }
    }
}

impl fmt::Debug for StreamFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamFence")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}
