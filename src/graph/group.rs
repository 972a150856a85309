//! Graphs that share a workspace.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use ascend_spec::Violation;

use crate::rules;
use crate::runtime::{Device, Event, Memory, Stream, StreamProgress, lock};

use super::capture::Capturing;
use super::captured::Graph;

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
            order: Arc::new(ReplayOrder {
                updates: device.stream()?,
                latest: Mutex::default(),
            }),
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
        let Self {
            captures,
            workspace,
            order,
        } = self;
        Graph::capture_in(captures, workspace, order, buffers, record)
    }
}

impl fmt::Debug for GraphGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphGroup")
            .field("device", &self.captures.device().id())
            .finish_non_exhaustive()
    }
}

/// The replays of graphs with one workspace.
pub(super) struct ReplayOrder {
    /// The stream on which the replays get their lengths. It is never captured.
    pub(super) updates: Stream,
    latest: Mutex<Option<Latest>>,
}

struct Latest {
    progress: Arc<StreamProgress>,
    replay: Replayed,
}

/// A replay that was queued.
pub(super) struct Replayed {
    /// Its number on the stream.
    pub(super) number: u64,
    /// The event recorded after the replay; `None` if recording failed.
    pub(super) done: Option<Arc<Event>>,
}

impl ReplayOrder {
    /// Queues a replay after the latest one. `launch` returns the replay that it has queued, if any, and the outcome.
    pub(super) fn behind_latest(
        &self,
        stream: &Stream,
        launch: impl FnOnce() -> (Option<Replayed>, Result<()>),
    ) -> Result<()> {
        let mut latest = lock(&self.latest);
        if let Some(before) = latest.as_ref() {
            before.precede(stream)?;
        }
        let (replayed, outcome) = launch();
        if let Some(replay) = replayed {
            let progress = Arc::clone(stream.progress());
            *latest = Some(Latest { progress, replay });
        }
        outcome
    }
}

impl Latest {
    /// Lets work that is queued on the stream from now on wait for this replay.
    fn precede(&self, stream: &Stream) -> Result<()> {
        if Arc::ptr_eq(&self.progress, stream.progress()) {
            return Ok(());
        }
        let api = stream.context().bind()?;
        if self.progress.is_complete(api, self.replay.number) {
            return Ok(());
        }
        match &self.replay.done {
            Some(done) => stream.wait_event(done),
            None => Err(Violation::new(
                &rules::GRAPH_FAILED,
                "a graph on another stream than that of a replay whose end is not marked",
                "graphs whose replays can be ordered",
                "synchronise the stream of the failed replay, or capture again",
            )
            .into()),
        }
    }
}

impl fmt::Debug for ReplayOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayOrder").finish_non_exhaustive()
    }
}
