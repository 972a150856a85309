//! A captured graph and its replays.

use std::borrow::Borrow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::attention::Plan;
use crate::error::{Error, Result};
use ascend_spec::Violation;

use crate::rules;
use crate::runtime::{Device, Event, LaunchQueue, Memory, ReplayCheck, ReplayedObject, Stream, StreamProgress, lock};

use super::call::CapturedLaunch;
use super::capture::{CapturedWork, Capturing};
use super::session::{CaptureSession, GraphHandle};
use super::update::{Update, VaryingCalls};

/// A captured graph, and the buffers that it was captured with.
///
/// See the [module](super) for what a replay reads, and an example. Dropping a graph waits for the updates that it has
/// queued; what it captured is freed when its last replay is over.
///
/// # Threads
/// `Send` and `Sync` if the buffers are. Replays of one graph happen one after the other, on whatever streams.
pub struct Graph<B> {
    // Dropped before the events and memory that it uses.
    graph: GraphHandle,
    calls: Arc<VaryingCalls>,
    launches: Vec<CapturedLaunch>,
    checks: Vec<Arc<dyn ReplayCheck>>,
    objects: Vec<Arc<dyn ReplayedObject>>,
    kept: Vec<Arc<Memory>>,
    /// The event recorded after the latest replay.
    done: Option<Arc<Event>>,
    failed: bool,
    order: Arc<ReplayOrder>,
    /// Where the graph was captured. CANN does not document that a graph may outlive that stream.
    _captures: Arc<Stream>,
    buffers: B,
}

/// A number for a graph, never used twice.
fn new_graph() -> u64 {
    static GRAPHS: AtomicU64 = AtomicU64::new(0);
    GRAPHS.fetch_add(1, Ordering::Relaxed)
}

impl<B> Graph<B> {
    /// Captures what `record` launches. The graph owns the buffers from then on; what `record` returns comes back
    /// beside the graph. Nothing runs until the graph is replayed.
    ///
    /// The capture goes on a stream of its own: nothing of the caller's is captured by accident, and no stream of the
    /// caller's is changed, whatever happens in `record`. After an error or a panic there everything is destroyed.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// What `record` returns; [`Error::Capturing`](crate::Error::Capturing) within another capture;
    /// [`Error::StreamsExhausted`](crate::Error::StreamsExhausted) if the device has not the streams that a graph
    /// needs; [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclmdlRICaptureBegin")]
    #[doc(alias = "aclmdlRICaptureEnd")]
    pub fn capture<R>(
        device: &Device,
        buffers: B,
        record: impl FnOnce(&Capturing<'_>, &B) -> Result<R>,
    ) -> Result<(Self, R)> {
        let (captures, updates) = (Arc::new(device.stream()?), device.stream()?);
        Self::capture_in(&captures, &mut None, &Arc::new(ReplayOrder::new(updates)), buffers, record)
    }

    /// As [`Graph::capture`](Self::capture), but with a stream that only captures use, and a workspace that graphs of
    /// one order share; a capture that needs a larger one replaces it.
    pub(super) fn capture_in<R, E: From<Error>>(
        captures: &Arc<Stream>,
        workspace: &mut Option<Arc<Memory>>,
        order: &Arc<ReplayOrder>,
        buffers: B,
        record: impl FnOnce(&Capturing<'_>, &B) -> Result<R, E>,
    ) -> Result<(Self, R), E> {
        let number = new_graph();
        // Made before the session, which has to end first if `record` panics.
        let capturing = Capturing::new(number, captures, workspace.clone());
        let session = CaptureSession::begin(captures)?;
        let outcome = record(&capturing, &buffers);
        let graph = session.end();
        let value = outcome?;
        let captured = capturing.finish()?;
        let graph = graph?;
        let CapturedWork { calls, launches, checks, objects, kept, workspace: taken } = captured;
        *workspace = taken;
        let graph = Self {
            graph,
            calls: Arc::new(VaryingCalls { graph: number, calls }),
            launches,
            checks,
            objects,
            kept,
            done: None,
            failed: false,
            order: Arc::clone(order),
            _captures: Arc::clone(captures),
            buffers,
        };
        Ok((graph, value))
    }

    /// The buffers, to be read and refilled in place, on a stream that is in order with the replays.
    pub fn buffers(&self) -> &B {
        &self.buffers
    }

    /// Ends the graph and gives the buffers back.
    pub fn into_buffers(self) -> B {
        self.buffers
    }

    /// Number of launches whose lengths vary.
    pub fn varying(&self) -> usize {
        self.launches.len()
    }

    /// Begins the update that the next replay needs: with lengths for each call captured by [`Capturing::attention`],
    /// with nothing for a graph without such calls.
    pub fn update(&self) -> Update {
        Update::new(&self.calls)
    }

    /// Queues a replay with new lengths. Returns at once. Pass `&update` to keep the update: if a rule refuses the
    /// launch, mend the cause and launch again with it. The replay runs after what the stream has queued, and after the
    /// graph's previous replay, on whatever stream that was.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// Before anything is launched: [`GRAPH_UPDATE`](crate::rules::GRAPH_UPDATE) for a call without lengths, an
    /// update of another graph, or one that a replay was queued with;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`Error::Violation`](crate::Error::Violation) by `block_table.row_short` for a table that does not name the
    /// blocks of the keys that the replay reads; [`COLLECTIVE_LEFT`](crate::rules::COLLECTIVE_LEFT) for calls of a rank
    /// that has left its communicator. After a failure of CANN's, the replay that was queued runs with whatever lengths
    /// its calls had: its results mean nothing, but no stream waits for ever. A replay that could not be ordered before
    /// the next is the last ([`GRAPH_FAILED`](crate::rules::GRAPH_FAILED)).
    #[doc(alias = "aclmdlRIExecuteAsync")]
    #[doc(alias = "aclmdlRICaptureTaskUpdateBegin")]
    #[doc(alias = "aclmdlRICaptureTaskUpdateEnd")]
    #[doc(alias = "replay")]
    pub fn launch(&mut self, stream: &Stream, update: impl Borrow<Update>) -> Result<()> {
        stream.check_device("stream", self.order.updates.device())?;
        LaunchQueue::raw(stream)?;
        if self.failed {
            return Err(Violation::new(
                &rules::GRAPH_FAILED,
                "a graph whose last replay failed",
                "graphs whose replays were queued whole",
                "capture again",
            )
            .into());
        }
        let update = update.borrow();
        let plans = update.complete(&self.calls)?;
        for launch in &self.launches {
            if let Some(Some(plan)) = plans.get(launch.call) {
                launch.admits(plan)?;
            }
        }
        self.checks.iter().try_for_each(|check| check.admits_replay())?;
        let order = Arc::clone(&self.order);
        order.after_latest(stream, || self.queue(stream, (update, plans)))
    }

    /// Queues a replay after the graph's previous one, and the updates that give it its lengths.
    fn queue(
        &mut self,
        stream: &Stream,
        (update, plans): (&Update, &[Option<Plan>]),
    ) -> (Option<QueuedReplay>, Result<()>) {
        if let Some(done) = &self.done {
            // The lengths must not change, nor the events be raised, while the previous replay may read them.
            let waits = stream.wait_event(done);
            if let Err(error) = waits.and_then(|()| self.order.updates.wait_event(done)) {
                return (None, Err(error));
            }
        }
        let mut executed = None;
        let noted = in_turn(&self.objects, stream, || {
            // SAFETY: the graph's events and memory are marked below.
            executed = Some(unsafe { self.graph.execute(stream) });
            update.use_up();
        });
        let Some((number, launched)) = executed else {
            return (None, noted);
        };
        for memory in &self.kept {
            memory.uses().mark(stream.progress(), number);
        }
        for launch in &self.launches {
            launch.event.uses().mark(stream.progress(), number);
        }
        if launched.is_err() {
            return (None, launched);
        }
        let ordered = match &self.done {
            Some(done) => done.record(stream),
            None => (stream.record_event()).map(|done| self.done = Some(Arc::new(done))),
        };
        let released = self.release(plans);
        let ordered = ordered.and(noted);
        self.failed = ordered.is_err() || released.is_err();
        let done = self.done.clone().filter(|_| ordered.is_ok());
        (Some(QueuedReplay { number, done }), ordered.and(released))
    }

    /// Gives the launched replay its lengths, call by call. After a failure the other calls keep the lengths that
    /// they have, but every event is recorded, since the replay waits for all of them.
    fn release(&self, plans: &[Option<Plan>]) -> Result<()> {
        let updates = &self.order.updates;
        let api = updates.context().bind()?;
        let mut outcome = Ok(());
        for launch in &self.launches {
            if let (Ok(()), Some(Some(plan))) = (&outcome, plans.get(launch.call)) {
                outcome = launch.update(api, updates, plan);
            }
            let mut recorded = launch.event.record(api, updates);
            if recorded.is_err() {
                // Nothing else would end the replay.
                recorded = launch.event.record(api, updates);
            }
            outcome = outcome.and(recorded);
        }
        outcome
    }
}

/// Queues a replay by `launch` in turn with the other work of objects, unless one of them refuses it.
fn in_turn(objects: &[Arc<dyn ReplayedObject>], stream: &Stream, launch: impl FnOnce()) -> Result<()> {
    let mut orders: Vec<_> = objects.iter().map(|object| object.order()).collect();
    // Every replay takes its turns in one order, so that no two wait for each other.
    orders.sort_by_key(|order| Arc::as_ptr(order).addr());
    orders.dedup_by(|one, other| Arc::ptr_eq(one, other));
    let mut turns: Vec<_> = orders.into_iter().map(|order| lock(order)).collect();
    objects.iter().try_for_each(|object| object.admit())?;
    turns.iter().try_for_each(|turn| turn.precede(stream))?;
    launch();
    objects.iter().for_each(|object| object.note(stream));
    // All turns end, whatever one of them says.
    let mut finished = Ok(());
    for turn in &mut turns {
        finished = finished.and(turn.finish(stream));
    }
    finished
}

impl<B> fmt::Debug for Graph<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("calls", &self.calls.calls.len())
            .field("launches", &self.launches.len())
            .finish_non_exhaustive()
    }
}

/// The replays of graphs with one workspace.
pub(super) struct ReplayOrder {
    /// The stream on which the replays get their lengths. It is never captured.
    updates: Stream,
    latest: Mutex<Option<LatestReplay>>,
}

struct LatestReplay {
    progress: Arc<StreamProgress>,
    replay: QueuedReplay,
}

/// A replay that was queued.
struct QueuedReplay {
    /// Its number on the stream.
    number: u64,
    /// The event recorded after the replay; `None` if recording failed.
    done: Option<Arc<Event>>,
}

impl ReplayOrder {
    /// An order of replays that get their lengths on a stream of their own.
    pub(super) fn new(updates: Stream) -> Self {
        Self { updates, latest: Mutex::default() }
    }

    /// Queues a replay after the latest one. `launch` returns the replay that it has queued, if any, and the outcome.
    fn after_latest(&self, stream: &Stream, launch: impl FnOnce() -> (Option<QueuedReplay>, Result<()>)) -> Result<()> {
        let mut latest = lock(&self.latest);
        if let Some(before) = latest.as_ref() {
            before.precede(stream)?;
        }
        let (replayed, outcome) = launch();
        if let Some(replay) = replayed {
            let progress = Arc::clone(stream.progress());
            *latest = Some(LatestReplay { progress, replay });
        }
        outcome
    }
}

impl LatestReplay {
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
