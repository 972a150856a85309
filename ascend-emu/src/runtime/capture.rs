//! Captures: streams whose work is recorded into a graph instead of run.

use crate::handle::Id;
use crate::lock::Lock;
use crate::runtime::graph::{GRAPHS, Graph, Group, Node, Step};
use crate::runtime::task::Task;
use crate::sanitizer::{StreamId, VectorClock, allocation_table, merge};
use crate::status::{
    CAPTURE_CONFLICT, CAPTURE_DEPENDENCY, CAPTURE_INVALIDATED, CAPTURE_WRONG_THREAD, Failure, MEMORY_TYPE, Outcome,
    STREAM_UNJOINED, TASK_GROUP_STATUS, failure,
};
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

/// Which threads must not make calls that CANN considers unsafe during the capture: copies and fills that the host
/// waits for. Allocating and freeing are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every thread.
    Global,
    /// The thread that began the capture.
    ThreadLocal,
    /// No thread.
    Relaxed,
}

/// A point in a captured stream: for each stream of the capture, how many of its steps and records happen before the
/// point.
pub(crate) type Position = VectorClock;

#[derive(Debug)]
struct CapturedStream {
    id: StreamId,
    /// The number of steps and records so far.
    count: u64,
    /// What happens before the next step.
    seen: Position,
    /// Numbers of the steps in the group being recorded.
    group: Option<Vec<usize>>,
}

#[derive(Debug, Default)]
struct State {
    over: bool,
    invalid: Option<String>,
    streams: Vec<CapturedStream>,
    /// The graph, until the capture is over.
    steps: Option<Arc<Graph>>,
}

/// A capture from `aclmdlRICaptureBegin` to `aclmdlRICaptureEnd`.
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

/// Sets the calling thread's mode and returns the one before.
pub(crate) fn exchange_thread_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

fn any_active(captures: &mut Vec<Weak<Capture>>) -> bool {
    captures.retain(|capture| capture.upgrade().is_some_and(|capture| capture.active()));
    !captures.is_empty()
}

/// Refuses a copy or fill that the host waits for, with status `code`, while a capture forbids such calls.
pub(crate) fn forbid_unsafe(code: i32, name: &str) -> Outcome {
    let refused = match MODE.try_with(Cell::get).unwrap_or(Mode::Relaxed) {
        Mode::Relaxed => false,
        mode => {
            let local =
                BEGUN.try_with(|begun| begun.try_borrow_mut().is_ok_and(|mut b| any_active(&mut b))).unwrap_or(false);
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
    /// Begins a capture at a stream.
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
                streams: vec![CapturedStream::new(stream)],
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

    /// Whether the capture has not ended yet, valid or not.
    pub(crate) fn active(&self) -> bool {
        !self.state.lock().over
    }

    pub(crate) fn valid(&self) -> bool {
        self.state.lock().invalid.is_none()
    }

    /// Makes the capture invalid; ending it fails with the reason.
    pub(crate) fn invalidate(&self, why: &str) {
        self.state.lock().invalid.get_or_insert_with(|| why.to_owned());
    }

    fn invalidated(why: &str) -> Failure {
        failure!(CAPTURE_INVALIDATED, "the capture became invalid when this happened: {why}")
    }

    fn with_stream<T>(
        &self,
        stream: StreamId,
        body: impl FnOnce(&mut CapturedStream, &Arc<Graph>) -> Outcome<T>,
    ) -> Outcome<T> {
        let mut state = self.state.lock();
        if let Some(why) = &state.invalid {
            return Err(Self::invalidated(why));
        }
        let State { streams, steps, .. } = &mut *state;
        let stream = streams.iter_mut().find(|found| found.id == stream);
        match (stream, steps) {
            (Some(stream), Some(steps)) => body(stream, steps),
            _ => Err(Self::invalidated("the stream left the capture")),
        }
    }

    /// Records a step.
    pub(crate) fn add(&self, stream: StreamId, step: Step) -> Outcome {
        self.with_stream(stream, |stream, graph| {
            let is_task = matches!(step, Step::Task(..));
            let place = graph.push(Node { stream: stream.id, step });
            stream.count += 1;
            if let (Some(group), true) = (&mut stream.group, is_task) {
                group.push(place);
            }
            Ok(())
        })
    }

    /// Records an event, which other streams can wait for to join the capture; returns the position of the record.
    pub(crate) fn record(&self, stream: StreamId) -> Outcome<Position> {
        self.with_stream(stream, |stream, _| {
            stream.count += 1;
            let mut position = stream.seen.clone();
            merge(&mut position, &[(stream.id, stream.count)]);
            Ok(position)
        })
    }

    /// Adds a stream to the capture, if it is not in it yet, and orders its next step after a position.
    pub(crate) fn join(&self, stream: StreamId, position: &Position) -> Outcome {
        let mut state = self.state.lock();
        if let Some(why) = &state.invalid {
            return Err(Self::invalidated(why));
        }
        let place = match state.streams.iter().position(|known| known.id == stream) {
            Some(place) => place,
            None => {
                let mut forked = CapturedStream::new(stream);
                // A forked stream has to be joined even if nothing is recorded in it.
                forked.count = 1;
                state.streams.push(forked);
                state.streams.len() - 1
            }
        };
        if let Some(joined) = state.streams.get_mut(place) {
            merge(&mut joined.seen, position);
        }
        Ok(())
    }

    /// Refuses to let a captured stream wait for work outside the capture.
    pub(crate) fn refuse_outside(&self) -> Failure {
        let failure = failure!(
            CAPTURE_DEPENDENCY,
            "aclrtStreamWaitEvent: the event was recorded outside the capture; only an ACL_EVENT_EXTERNAL one can \
             cross its border"
        );
        self.invalidate(&failure.message);
        failure
    }

    /// Refuses to let a captured stream wait for a record of another capture.
    pub(crate) fn refuse_other(&self) -> Failure {
        let failure = failure!(CAPTURE_CONFLICT, "aclrtStreamWaitEvent: the event belongs to another capture");
        self.invalidate(&failure.message);
        failure
    }

    /// Begins a task group in a stream.
    pub(crate) fn begin_group(&self, stream: StreamId) -> Outcome {
        self.with_stream(stream, |stream, _| {
            if stream.group.is_some() {
                return Err(failure!(
                    TASK_GROUP_STATUS,
                    "aclmdlRICaptureTaskGrpBegin: a task group is already being recorded in this stream"
                ));
            }
            stream.group = Some(Vec::new());
            Ok(())
        })
    }

    /// Ends a task group and returns its handle.
    pub(crate) fn end_group(&self, stream: StreamId) -> Outcome<Id> {
        self.with_stream(stream, |stream, graph| {
            let members = stream.group.take().ok_or_else(|| {
                failure!(TASK_GROUP_STATUS, "aclmdlRICaptureTaskGrpEnd: no task group is being recorded in this stream")
            })?;
            Ok(Group::create(graph, members))
        })
    }

    /// Refuses to end the capture from another stream or thread than the one that began it.
    pub(crate) fn check_end(&self, stream: StreamId) -> Outcome {
        if stream != self.origin {
            return Err(failure!(CAPTURE_CONFLICT, "aclmdlRICaptureEnd: the capture began on another stream"));
        }
        if self.mode != Mode::Relaxed && self.thread != thread::current().id() {
            return Err(failure!(
                CAPTURE_WRONG_THREAD,
                "aclmdlRICaptureEnd: the capture began on another thread, and its mode is not RELAXED"
            ));
        }
        Ok(())
    }

    /// Ends the capture and takes its streams out of it. The graph is then complete, or destroyed if the capture
    /// failed.
    pub(crate) fn end(&self) -> Outcome {
        let mut state = self.state.lock();
        state.over = true;
        let streams = std::mem::take(&mut state.streams);
        let outcome = match &state.invalid {
            Some(why) => Err(Self::invalidated(why)),
            None => self.check_joined(&streams),
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

    fn check_joined(&self, streams: &[CapturedStream]) -> Outcome {
        if streams.iter().any(|stream| stream.group.is_some()) {
            return Err(failure!(TASK_GROUP_STATUS, "aclmdlRICaptureEnd: a task group was begun and not ended"));
        }
        let seen = streams.iter().find(|stream| stream.id == self.origin);
        let joined = |stream: &CapturedStream| {
            seen.is_some_and(|origin| {
                let known = origin.seen.iter().find(|(id, _)| *id == stream.id);
                known.is_some_and(|&(_, count)| count >= stream.count)
            })
        };
        match streams.iter().find(|stream| stream.id != self.origin && !joined(stream)) {
            None => Ok(()),
            Some(stream) => Err(failure!(
                STREAM_UNJOINED,
                "aclmdlRICaptureEnd: stream {} was forked from the captured one and its last work was not joined by an \
                 event",
                stream.id
            )),
        }
    }
}

impl CapturedStream {
    fn new(stream: StreamId) -> Self {
        CapturedStream { id: stream, count: 0, seen: Position::new(), group: None }
    }
}

/// Whether a task may be recorded. Its host memory has to be pinned.
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
