//! Captures: streams whose work is recorded into a graph instead of run.

use crate::handle::Id;
use crate::lock::Lock;
use crate::runtime::graph::{GRAPHS, Graph, Group, Node, Step};
use crate::runtime::task::Task;
use crate::sanitizer::{StreamId, VectorClock, allocation_table, merge};
use crate::status::{
    CAPTURE_CONFLICT, CAPTURE_DEPENDENCY, CAPTURE_INVALIDATED, CAPTURE_WRONG_THREAD, Failure,
    MEMORY_TYPE, Outcome, STREAM_UNJOINED, TASK_GROUP_STATUS, failure,
};
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

/// Whom a capture keeps from the calls that CANN takes for unsafe meanwhile: copies and fills that the host waits for.
/// Allocating and freeing are not among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every thread.
    Global,
    /// The thread that began it.
    ThreadLocal,
    /// Nobody.
    Relaxed,
}

/// How far a stream has come in a capture: for each stream of the capture, the number of marks known to be passed.
pub(crate) type Position = VectorClock;

#[derive(Debug)]
struct Lane {
    id: StreamId,
    /// Marks passed: steps and records.
    count: u64,
    /// What the next step comes after.
    seen: Position,
    /// Places of the steps in the group being recorded.
    group: Option<Vec<usize>>,
}

#[derive(Debug, Default)]
struct State {
    over: bool,
    invalid: Option<String>,
    lanes: Vec<Lane>,
    /// The graph, until the capture is over.
    steps: Option<Arc<Graph>>,
}

/// A capture going on.
#[derive(Debug)]
pub(crate) struct Capture {
    pub graph: Id,
    mode: Mode,
    thread: ThreadId,
    origin: StreamId,
    state: Lock<State>,
}

static GLOBAL: Lock<Vec<Weak<Capture>>> = Lock::new(Vec::new());

thread_local! {
    static BEGUN: RefCell<Vec<Weak<Capture>>> = const { RefCell::new(Vec::new()) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Exchanges the calling thread's mode.
pub(crate) fn exchange_thread_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

fn any_active(captures: &mut Vec<Weak<Capture>>) -> bool {
    captures.retain(|capture| capture.upgrade().is_some_and(|capture| capture.active()));
    !captures.is_empty()
}

/// Refuses a copy or fill that the host waits for, with a status, while a capture forbids these.
pub(crate) fn forbid_unsafe(code: i32, name: &str) -> Outcome {
    let refused = match MODE.try_with(Cell::get).unwrap_or(Mode::Relaxed) {
        Mode::Relaxed => false,
        mode => {
            let local = BEGUN
                .try_with(|begun| begun.try_borrow_mut().is_ok_and(|mut b| any_active(&mut b)))
                .unwrap_or(false);
            local || (mode == Mode::Global && any_active(&mut GLOBAL.lock()))
        }
    };
    if refused {
        return Err(failure!(
            code,
            "{name} is not allowed while a stream is being captured; aclmdlRICaptureThreadExchangeMode to RELAXED \
             allows it"
        ));
    }
    Ok(())
}

impl Capture {
    /// A capture that begins at a stream.
    pub(crate) fn begin(stream: StreamId, mode: Mode) -> Arc<Self> {
        let graph = GRAPHS.reserve();
        let steps = Arc::new(Graph::default());
        GRAPHS.insert_at(graph, Arc::clone(&steps));
        let capture = Arc::new(Capture {
            graph,
            mode,
            thread: thread::current().id(),
            origin: stream,
            state: Lock::new(State {
                lanes: vec![Lane::new(stream)],
                steps: Some(steps),
                ..State::default()
            }),
        });
        match mode {
            Mode::Global => {
                GLOBAL.lock().push(Arc::downgrade(&capture));
                BEGUN.with_borrow_mut(|begun| begun.push(Arc::downgrade(&capture)));
            }
            Mode::ThreadLocal => {
                BEGUN.with_borrow_mut(|begun| begun.push(Arc::downgrade(&capture)));
            }
            Mode::Relaxed => {}
        }
        capture
    }

    /// Whether it still goes on, valid or not.
    pub(crate) fn active(&self) -> bool {
        !self.state.lock().over
    }

    pub(crate) fn valid(&self) -> bool {
        self.state.lock().invalid.is_none()
    }

    /// Spoils the capture: what led to it is told when it ends.
    pub(crate) fn invalidate(&self, why: &str) {
        self.state
            .lock()
            .invalid
            .get_or_insert_with(|| why.to_owned());
    }

    fn invalidated(why: &str) -> Failure {
        failure!(
            CAPTURE_INVALIDATED,
            "the capture became invalid when this happened: {why}"
        )
    }

    fn with_lane<T>(
        &self,
        lane: StreamId,
        body: impl FnOnce(&mut Lane, &Arc<Graph>) -> Outcome<T>,
    ) -> Outcome<T> {
        let mut state = self.state.lock();
        if let Some(why) = &state.invalid {
            return Err(Self::invalidated(why));
        }
        let State { lanes, steps, .. } = &mut *state;
        let lane = lanes.iter_mut().find(|found| found.id == lane);
        match (lane, steps) {
            (Some(lane), Some(steps)) => body(lane, steps),
            _ => Err(Self::invalidated("the stream left the capture")),
        }
    }

    /// Records a step.
    pub(crate) fn add(&self, lane: StreamId, step: Step) -> Outcome {
        self.with_lane(lane, |lane, graph| {
            let is_task = matches!(step, Step::Task(..));
            let place = graph.push(Node {
                lane: lane.id,
                step,
            });
            lane.count += 1;
            if let (Some(group), true) = (&mut lane.group, is_task) {
                group.push(place);
            }
            Ok(())
        })
    }

    /// Records an event, which other streams can wait for to join the capture; the position of the record.
    pub(crate) fn record(&self, lane: StreamId) -> Outcome<Position> {
        self.with_lane(lane, |lane, _| {
            lane.count += 1;
            let mut position = lane.seen.clone();
            merge(&mut position, &[(lane.id, lane.count)]);
            Ok(position)
        })
    }

    /// Lets a stream, already captured or not, go on after a position.
    pub(crate) fn join(&self, stream: StreamId, position: &Position) -> Outcome {
        let mut state = self.state.lock();
        if let Some(why) = &state.invalid {
            return Err(Self::invalidated(why));
        }
        let at = match state.lanes.iter().position(|l| l.id == stream) {
            Some(at) => at,
            None => {
                let mut lane = Lane::new(stream);
                // A forked stream has to come back even if nothing is recorded in it.
                lane.count = 1;
                state.lanes.push(lane);
                state.lanes.len() - 1
            }
        };
        if let Some(lane) = state.lanes.get_mut(at) {
            merge(&mut lane.seen, position);
        }
        Ok(())
    }

    /// The stream that is being captured is asked to wait for work outside the capture.
    pub(crate) fn refuse_outside(&self) -> Failure {
        let failure = failure!(
            CAPTURE_DEPENDENCY,
            "aclrtStreamWaitEvent: the event was recorded outside the capture; only an ACL_EVENT_EXTERNAL one can \
             cross its border"
        );
        self.invalidate(&failure.message);
        failure
    }

    /// Two captures cannot depend on each other.
    pub(crate) fn refuse_other(&self) -> Failure {
        let failure = failure!(
            CAPTURE_CONFLICT,
            "aclrtStreamWaitEvent: the event belongs to another capture"
        );
        self.invalidate(&failure.message);
        failure
    }

    /// Begins a task group in a stream.
    pub(crate) fn begin_group(&self, lane: StreamId) -> Outcome {
        self.with_lane(lane, |lane, _| {
            if lane.group.is_some() {
                return Err(failure!(
                    TASK_GROUP_STATUS,
                    "aclmdlRICaptureTaskGrpBegin: a task group is already being recorded in this stream"
                ));
            }
            lane.group = Some(Vec::new());
            Ok(())
        })
    }

    /// Ends a task group; its handle.
    pub(crate) fn end_group(&self, lane: StreamId) -> Outcome<Id> {
        self.with_lane(lane, |lane, graph| {
            let members = lane.group.take().ok_or_else(|| {
                failure!(
                    TASK_GROUP_STATUS,
                    "aclmdlRICaptureTaskGrpEnd: no task group is being recorded in this stream"
                )
            })?;
            Ok(Group::create(graph, members))
        })
    }

    /// Whether the calling thread may end it.
    pub(crate) fn check_end(&self, lane: StreamId) -> Outcome {
        if lane != self.origin {
            return Err(failure!(
                CAPTURE_CONFLICT,
                "aclmdlRICaptureEnd: the capture began on another stream"
            ));
        }
        if self.mode != Mode::Relaxed && self.thread != thread::current().id() {
            return Err(failure!(
                CAPTURE_WRONG_THREAD,
                "aclmdlRICaptureEnd: the capture began on another thread, and its mode is not RELAXED"
            ));
        }
        Ok(())
    }

    /// Ends the capture, which its streams leave: its graph is complete, or gone if the capture failed.
    pub(crate) fn end(&self) -> Outcome {
        let mut state = self.state.lock();
        state.over = true;
        let lanes = std::mem::take(&mut state.lanes);
        let outcome = match &state.invalid {
            Some(why) => Err(Self::invalidated(why)),
            None => self.check_joined(&lanes),
        };
        let steps = state.steps.take();
        drop(state);
        let Some(steps) = steps else {
            return outcome;
        };
        if outcome.is_err() {
            steps.destroy_groups();
            // The handle is there unless the caller destroyed it during the capture.
            let _ = GRAPHS.remove_id(self.graph);
        } else {
            steps.complete();
        }
        outcome
    }

    fn check_joined(&self, lanes: &[Lane]) -> Outcome {
        if lanes.iter().any(|lane| lane.group.is_some()) {
            return Err(failure!(
                TASK_GROUP_STATUS,
                "aclmdlRICaptureEnd: a task group was begun and not ended"
            ));
        }
        let seen = lanes.iter().find(|lane| lane.id == self.origin);
        let joined = |lane: &Lane| {
            seen.is_some_and(|origin| {
                let known = origin.seen.iter().find(|(id, _)| *id == lane.id);
                known.is_some_and(|&(_, count)| count >= lane.count)
            })
        };
        match lanes.iter().find(|l| l.id != self.origin && !joined(l)) {
            None => Ok(()),
            Some(lane) => Err(failure!(
                STREAM_UNJOINED,
                "aclmdlRICaptureEnd: stream {} was forked from the captured one and its last work was not joined by an \
                 event",
                lane.id
            )),
        }
    }
}

impl Lane {
    fn new(stream: StreamId) -> Self {
        Lane {
            id: stream,
            count: 0,
            seen: Position::new(),
            group: None,
        }
    }
}

/// Whether a task may be recorded: host memory in it has to be pinned.
pub(crate) fn recordable(task: &Task) -> Outcome {
    let Task::Copy { dst, src, .. } = task else {
        return Ok(());
    };
    for (name, address) in [("dst", *dst), ("src", *src)] {
        if allocation_table::lookup(address).is_none() {
            return Err(failure!(
                MEMORY_TYPE,
                "aclrtMemcpyAsync: {name} at {address:#x} is neither device nor pinned host memory, which a captured \
                 copy needs"
            ));
        }
    }
    Ok(())
}
