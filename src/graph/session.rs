//! A capture in progress: begun once, ended once, whatever happens in between; and the handle of the graph that it
//! leaves.

use std::ptr;
use std::sync::Arc;

use ascend_sys::bindings as sys;

use crate::error::{Result, acl};
use crate::runtime::{Context, Resource, Stream, Uses, capturing};

/// A captured graph (`aclmdlRI`).
#[derive(Debug)]
pub(super) struct GraphHandle {
    context: Arc<Context>,
    raw: sys::aclmdlRI,
    uses: Uses,
}

// SAFETY: `raw` is a name, not memory; CANN takes calls with one graph from any thread whose context is the graph's.
unsafe impl Send for GraphHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for GraphHandle {}

impl GraphHandle {
    /// Queues a replay. Returns its number on the stream, and the outcome.
    ///
    /// # Safety
    /// The caller keeps all that the graph uses until the stream has passed that number, also after a failure.
    pub(super) unsafe fn execute(&self, stream: &Stream) -> (u64, Result<()>) {
        let execute = || -> Result<()> {
            let api = self.context.bind()?;
            // SAFETY: graph and stream are alive, the mark below keeps the graph, and the caller everything else.
            unsafe { acl!(api, aclmdlRIExecuteAsync(self.raw, stream.as_raw())) }
        };
        let outcome = execute();
        let number = stream.progress().advance();
        self.uses.mark(stream.progress(), number);
        (number, outcome)
    }
}

impl Drop for GraphHandle {
    fn drop(&mut self) {
        // SAFETY: this object owns the graph, and every replay was noted in `uses`.
        unsafe { self.context.retire(Resource::Graph(self.raw), &mut self.uses) };
    }
}

/// A stream whose work is recorded. Dropping it ends the capture and destroys what was recorded.
pub(super) struct CaptureSession<'a> {
    stream: &'a Stream,
    open: bool,
    _scope: capturing::Scope,
}

impl<'a> CaptureSession<'a> {
    pub(super) fn begin(stream: &'a Stream) -> Result<Self> {
        let scope = capturing::begin()?;
        let api = stream.context().bind()?;
        // Other threads are not restricted; the scope refuses what this thread must not do meanwhile.
        let mode = sys::aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and only captures use it.
        unsafe { acl!(api, aclmdlRICaptureBegin(stream.as_raw(), mode)) }?;
        Ok(Self { stream, open: true, _scope: scope })
    }

    /// Ends the capture and returns the graph.
    pub(super) fn end(mut self) -> Result<GraphHandle> {
        self.close()
    }

    fn close(&mut self) -> Result<GraphHandle> {
        self.open = false;
        let api = self.stream.context().bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the stream is being captured; `raw` is a place for the result.
        let ended = unsafe { acl!(api, aclmdlRICaptureEnd(self.stream.as_raw(), &mut raw)) };
        ended.map(|()| GraphHandle { context: Arc::clone(self.stream.context()), raw, uses: Uses::default() })
    }
}

impl Drop for CaptureSession<'_> {
    fn drop(&mut self) {
        if self.open {
            // What failed already is being reported; the end of a failed capture fails too.
            drop(self.close());
        }
    }
}
