//! Graphs that share a workspace.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::runtime::{Device, Memory, Stream};

use super::capture::Capturing;
use super::captured_graph::{Graph, ReplayOrder};

/// Captures graphs that share one workspace, one stream for captures and one for updates: those of the layers of a
/// model, or of several batch sizes.
///
/// Replays of a group's graphs happen one after the other: a replay on another stream than the previous one waits on
/// the device until that is over. They may be replayed in any order, on whatever streams and threads, also while
/// another thread captures a further graph.
pub struct GraphGroup {
    /// Nothing but captures uses it, so that no replay queues anything on a stream that is being captured.
    captures: Arc<Stream>,
    workspace: Option<Arc<Memory>>,
    order: Arc<ReplayOrder>,
}

impl GraphGroup {
    /// A group without graphs.
    ///
    /// # Errors
    /// As for [`Device::stream`].
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            captures: Arc::new(device.stream()?),
            workspace: None,
            order: Arc::new(ReplayOrder::new(device.stream()?)),
        })
    }

    /// Captures a graph, as [`Graph::capture`] does. It shares the workspace of the graphs captured before, if that
    /// is large enough: capture the largest graph first.
    ///
    /// # Errors
    /// What `record` returns; as for [`Graph::capture`].
    pub fn capture<B, R, E: From<Error>>(
        &mut self,
        buffers: B,
        record: impl FnOnce(&Capturing<'_>, &B) -> Result<R, E>,
    ) -> Result<(Graph<B>, R), E> {
        let Self { captures, workspace, order } = self;
        Graph::capture_in(captures, workspace, order, buffers, record)
    }
}

impl fmt::Debug for GraphGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphGroup").field("device", &self.captures.device().id()).finish_non_exhaustive()
    }
}
