//! Points in the work of a stream that the host can query and wait for.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::runtime::{Context, Stream, StreamProgress, capturing};

/// The end of what was queued on a stream when the mark was made. From [`Stream::mark`]; it may outlive the stream.
///
/// It is passed when the stream has reached an event after that end, or was synchronised. The event is recorded at
/// once or, should that fail, when the mark is queried.
///
/// # Threads
/// `Send` and `Sync`: several threads may query one mark at a time.
#[derive(Clone)]
pub struct StreamMark {
    context: Arc<Context>,
    progress: Arc<StreamProgress>,
    number: u64,
}

impl Stream {
    /// Marks the end of everything queued so far, also by other libraries. A failure of CANN loses nothing: the mark
    /// then is passed later.
    pub fn mark(&self) -> StreamMark {
        let progress = Arc::clone(self.progress());
        let context = Arc::clone(self.context());
        // A number of its own: what other libraries queued on the stream has none.
        let number = progress.advance();
        match context.bind() {
            Ok(api) => progress.mark(api, number),
            Err(error) => tracing::error!("the end of a step is not marked yet: {error}"),
        }
        StreamMark { context, progress, number }
    }
}

impl StreamMark {
    /// Whether everything before the mark is over.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl) if the device cannot be queried.
    pub fn is_passed(&self) -> Result<bool> {
        let api = self.context.bind()?;
        let passed = self.progress.is_complete(api, self.number);
        if !passed {
            self.progress.mark(api, self.number);
        }
        Ok(passed)
    }

    /// Waits until everything before the mark is over. Returns whether it is known to be. Other streams are not
    /// waited for, and a fault of this one is reported by its next synchronisation.
    ///
    /// # Errors
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures; [`Error::Acl`](crate::Error::Acl).
    pub fn wait(&self) -> Result<bool> {
        capturing::refuse("waiting for a step", "wait before or after the capture")?;
        let api = self.context.bind()?;
        Ok(self.progress.wait(api, self.number))
    }

    /// A mark after everything queued on the stream by now, also of a stream that was dropped.
    #[must_use = "the mark itself stays where it is"]
    pub fn latest(&self) -> Self {
        Self { number: self.progress.advance(), ..self.clone() }
    }

    /// Whether it is a mark of this stream.
    pub fn is_of(&self, stream: &Stream) -> bool {
        Arc::ptr_eq(&self.progress, stream.progress())
    }
}

impl fmt::Debug for StreamMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamMark").field("number", &self.number).finish_non_exhaustive()
    }
}
