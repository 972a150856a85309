//! Streams: queues of commands, each run in order by a thread of its own.

mod capturing;
mod settings;
mod waiting;
mod worker;

pub(crate) use settings::Settings;

use crate::config::check;
use crate::fault::{self, StreamFaults};
use crate::handle::{Kind, Table};
use crate::lock::{Lock, Signal};
use crate::operator::{Access, Addresses};
use crate::runtime::callback;
use crate::runtime::capturable_event::CapturableEvent;
use crate::runtime::capture::{Capture, recordable};
use crate::runtime::event::{Event, wait_limit};
use crate::runtime::graph::{Graph, Group, REPLAY, Step};
use crate::runtime::queue::{Command, Queue};
use crate::runtime::stall::StallWatch;
use crate::runtime::task::Task;
use crate::sanitizer::{Operation, StreamId, StreamProgress, allocation_table};
use crate::status::{
    CAPTURE_CONFLICT, Failure, NO_STREAM_RESOURCE, Outcome, PARAM_INVALID, STREAM_CAPTURED, TASK_GROUP_STATUS, failure,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::thread::{self, JoinHandle};

pub(crate) static STREAMS: Table<Stream> = Table::new(Kind::Stream);

/// The number of a context, unique in the process.
pub(crate) type ContextNumber = u64;

/// What a stream does with submitted work.
#[derive(Debug, Default)]
enum Mode {
    /// Queues it.
    #[default]
    Eager,
    /// Records it into a graph.
    Captured(Arc<Capture>),
    /// Collects it, to replace tasks of a graph.
    Updating(Arc<Group>, Vec<(Task, Addresses)>),
}

#[derive(Debug, Default)]
struct Submission {
    /// The number of commands queued so far.
    seq: u64,
    mode: Mode,
}

impl Submission {
    /// The mode of work that is submitted now. After its capture is over, a stream queues again.
    fn mode(&mut self) -> &mut Mode {
        if matches!(&self.mode, Mode::Captured(capture) if !capture.active()) {
            self.mode = Mode::Eager;
        }
        &mut self.mode
    }
}

#[derive(Debug, Default)]
struct WorkerState {
    queue: Queue,
    /// The number of commands that are over.
    completed: u64,
    running: bool,
    /// Whether the thread is to end after the queue's last command.
    ending: bool,
    /// The event that the thread is waiting for.
    waiting: Option<Arc<Event>>,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    id: StreamId,
    context: ContextNumber,
    pub settings: Settings,
    /// Locked while a command is checked and queued, so that commands are queued in the order of their numbers.
    submission: Lock<Submission>,
    shared: Lock<WorkerState>,
    /// Notified when a command was queued, or the stream ends.
    filled: Signal,
    /// Notified when a command is over, or taken out of the queue.
    advanced: Signal,
    progress: StreamProgress,
    faults: Arc<StreamFaults>,
    /// Whether waits are to end at once.
    abort: AtomicBool,
    thread: Lock<Option<JoinHandle<()>>>,
}

impl Stream {
    /// Starts a stream.
    pub(crate) fn start(context: ContextNumber, device: i32, settings: Settings) -> Outcome<Arc<Self>> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let id = NUMBERS.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let progress = StreamProgress::default();
        let stream = Arc::new(Stream {
            id,
            context,
            settings,
            submission: Lock::default(),
            shared: Lock::default(),
            filled: Signal::new(),
            advanced: Signal::new(),
            progress: Arc::clone(&progress),
            faults: Arc::new(StreamFaults::new(device)),
            abort: AtomicBool::new(false),
            thread: Lock::new(None),
        });
        let worker = Arc::clone(&stream);
        let thread = thread::Builder::new()
            .name(format!("ascend-emu-stream-{id}"))
            .spawn(move || {
                fault::enter_device(Some(device));
                worker.work();
            })
            .map_err(|error| failure!(NO_STREAM_RESOURCE, "no thread for a stream: {error}"))?;
        *stream.thread.lock() = Some(thread);
        allocation_table::add_stream(id, progress);
        Ok(stream)
    }

    /// The stream's device.
    pub(crate) fn device(&self) -> i32 {
        self.faults.device()
    }

    /// The stream's number.
    pub(crate) fn id(&self) -> StreamId {
        self.id
    }

    pub(crate) fn belongs_to(&self, context: ContextNumber) -> bool {
        self.context == context
    }

    // Queueing.

    /// Queues a command that was admitted with the number `submission.seq + 1`.
    fn push(&self, submission: &mut Submission, command: Command, addresses: Option<&Addresses>) {
        submission.seq += 1;
        self.shared.lock().queue.push(command, addresses);
        self.filled.notify_all();
    }

    /// The operation that is queued next.
    fn next_operation(&self, submission: &Submission) -> Operation {
        Operation { stream: self.id, number: submission.seq + 1 }
    }

    /// Waits until the queue has room for another command. No other thread fills it while the caller holds
    /// `submission`.
    fn wait_for_room(&self, name: &'static str, _held: &Submission) -> Outcome {
        let mut watch = StallWatch::default();
        let mut shared = self.shared.lock();
        while shared.queue.is_full() {
            drop(shared);
            watch.look(name, self.id)?;
            shared = self.shared.lock();
            if shared.queue.is_full() {
                shared = self.advanced.wait(shared, StallWatch::next_look());
            }
        }
        Ok(())
    }

    /// Submits a task, which the mode of the stream queues, records or collects. A task that strict checking refuses
    /// fails with `code`.
    pub(crate) fn submit(&self, task: Task, addresses: Option<&Addresses>, code: i32) -> Outcome {
        let none = Addresses::default();
        let mut submission = self.submission.lock();
        match submission.mode() {
            Mode::Eager => {}
            Mode::Captured(capture) => {
                recordable(&task)?;
                let addresses = addresses.cloned().unwrap_or_default();
                return capture.add(self.id, Step::Task(task, Box::new(addresses)));
            }
            Mode::Updating(_, tasks) => {
                recordable(&task)?;
                let addresses = addresses.cloned().unwrap_or_default();
                let visit = |visit: &mut dyn FnMut(Access)| task.accesses(&addresses, visit);
                allocation_table::inspect(check(), code, task.name(), false, &visit)?;
                tasks.push((task, addresses));
                return Ok(());
            }
        }
        self.refuse_stopped(task.name())?;
        self.wait_for_room(task.name(), &submission)?;
        let visit = |visit: &mut dyn FnMut(Access)| task.accesses(addresses.unwrap_or(&none), visit);
        let operation = self.next_operation(&submission);
        let broken = allocation_table::admit(operation, check(), code, task.name(), &visit)?;
        match broken {
            None => {
                self.order(&task);
                self.push(&mut submission, Command::Task(task, check()), addresses);
            }
            Some(fault) => {
                // The missing write of a broken task is no finding besides its fault.
                allocation_table::spare(&visit);
                self.push(&mut submission, Command::Broken(fault), None);
                task.cancel();
            }
        }
        Ok(())
    }

    /// Refuses to queue work in a stream that stopped at a failure.
    fn refuse_stopped(&self, name: &str) -> Outcome {
        match self.faults.stopped() {
            None => Ok(()),
            Some(fault) => Err(failure!(
                fault.code,
                "{name}: the stream, whose failure mode is ACL_STOP_ON_FAILURE, stopped at this: {}",
                fault.message
            )),
        }
    }

    /// Queues a fault in the place of a task. Where the stream is captured, the launch itself fails.
    pub(crate) fn submit_fault(&self, name: &'static str, fault: Failure) -> Outcome {
        let mut submission = self.submission.lock();
        if !matches!(submission.mode(), Mode::Eager) {
            return Err(failure!(fault.code, "{name}: {}, while the stream is captured", fault.message));
        }
        self.wait_for_room(name, &submission)?;
        self.push(&mut submission, Command::Broken(fault), None);
        Ok(())
    }

    /// `aclrtRecordEvent`.
    pub(crate) fn record(&self, event: &CapturableEvent) -> Outcome {
        let mut submission = self.submission.lock();
        if let Mode::Captured(capture) = submission.mode() {
            if event.event().external() {
                return capture.add(self.id, Step::Raise(Arc::clone(event.event())));
            }
            let position = capture.record(self.id)?;
            event.record_captured(capture, position);
            return Ok(());
        }
        self.wait_for_room("aclrtRecordEvent", &submission)?;
        let mark = event.queue_record(self.id, &self.faults);
        let event = Arc::clone(event.event());
        self.push(&mut submission, Command::Record { event, mark }, None);
        Ok(())
    }

    /// `aclrtStreamWaitEvent`.
    pub(crate) fn wait_event(&self, event: &CapturableEvent) -> Outcome {
        let mut submission = self.submission.lock();
        let forked = event.capture();
        match (submission.mode(), forked) {
            (Mode::Captured(capture), _) if event.event().external() => {
                return capture.add(self.id, Step::Await(Arc::clone(event.event())));
            }
            (Mode::Captured(capture), Some((of_event, position))) => {
                return if Arc::ptr_eq(capture, &of_event) {
                    capture.join(self.id, &position)
                } else {
                    Err(capture.refuse_other())
                };
            }
            (Mode::Captured(capture), None) => {
                return if event.recorded_eagerly() { Err(capture.refuse_outside()) } else { Ok(()) };
            }
            (Mode::Updating(..), Some(_)) => {
                return Err(failure!(
                    CAPTURE_CONFLICT,
                    "aclrtStreamWaitEvent: a stream in a task update cannot join a capture"
                ));
            }
            (Mode::Eager, Some((capture, position))) => {
                capture.join(self.id, &position)?;
                submission.mode = Mode::Captured(capture);
                return Ok(());
            }
            (Mode::Eager | Mode::Updating(..), None) => {}
        }
        self.wait_for_room("aclrtStreamWaitEvent", &submission)?;
        if let Some(mark) = event.event().queue_wait(self.id) {
            let command = Command::Wait { event: Arc::clone(event.event()), mark, limit: wait_limit() };
            self.push(&mut submission, command, None);
        }
        Ok(())
    }

    /// `aclrtResetEvent`.
    pub(crate) fn reset(&self, event: &CapturableEvent) -> Outcome {
        let mut submission = self.submission.lock();
        if let Mode::Captured(capture) = submission.mode() {
            return if event.event().external() {
                capture.add(self.id, Step::Lower(Arc::clone(event.event())))
            } else {
                Ok(())
            };
        }
        self.wait_for_room("aclrtResetEvent", &submission)?;
        let ticket = event.queue_reset();
        let event = Arc::clone(event.event());
        self.push(&mut submission, Command::Reset { event, ticket }, None);
        Ok(())
    }

    /// `aclmdlRIExecuteAsync`.
    pub(crate) fn replay(&self, graph: Arc<Graph>) -> Outcome {
        const NAME: &str = REPLAY;
        let mut submission = self.submission.lock();
        match submission.mode() {
            Mode::Eager => {}
            Mode::Captured(capture) => {
                let failure = failure!(STREAM_CAPTURED, "{NAME}: the stream is being captured, and graphs do not nest");
                capture.invalidate(&failure.message);
                return Err(failure);
            }
            Mode::Updating(..) => {
                return Err(failure!(TASK_GROUP_STATUS, "{NAME}: the stream is in a task update"));
            }
        }
        self.wait_for_room(NAME, &submission)?;
        let replay = self.next_operation(&submission);
        let before = graph.updates_before(self.id);
        graph.add_replay(replay);
        let visit = |visit: &mut dyn FnMut(Access)| graph.accesses(&before, visit);
        let admitted = allocation_table::admit(replay, check(), PARAM_INVALID, NAME, &visit);
        if !matches!(admitted, Ok(None)) {
            graph.remove_replay(replay);
        }
        let command = admitted?.map_or_else(|| Command::Replay(Arc::clone(&graph), check()), Command::Broken);
        self.push(&mut submission, command, None);
        Ok(())
    }

    // Ending.

    /// Drops what is queued, ends waits, and returns when the running command is over.
    pub(crate) fn abort(&self) {
        let submission = self.submission.lock();
        self.drop_queued(&submission);
    }

    fn drop_queued(&self, held: &MutexGuard<'_, Submission>) {
        self.abort.store(true, Ordering::Release);
        let mut shared = self.shared.lock();
        while let Some(command) = shared.queue.drop_first() {
            command.cancel();
        }
        while shared.running {
            if let Some(event) = shared.waiting.clone() {
                drop(shared);
                event.wake();
                shared = self.shared.lock();
                if !shared.running {
                    break;
                }
            }
            shared = self.advanced.wait(shared, None);
        }
        shared.completed = held.seq;
        self.faults.resume();
        self.progress.store(held.seq, Ordering::Release);
        drop(shared);
        self.abort.store(false, Ordering::Release);
        self.advanced.notify_all();
    }

    /// Ends the stream: after its work, or at once. A capture that the stream is in becomes invalid.
    pub(crate) fn end(&self, at_once: bool) {
        if let Some(capture) = self.capture() {
            capture.invalidate("a stream in the capture was destroyed");
            self.leave(&capture);
        }
        let submission = self.submission.lock();
        let hopeless = || {
            let over = self.wait_completed("aclrtDestroyStream", submission.seq, None);
            over.is_err()
        };
        if at_once || hopeless() {
            self.drop_queued(&submission);
        }
        self.shared.lock().ending = true;
        self.filled.notify_all();
        let seq = submission.seq;
        drop(submission);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            // The thread contains panics. If it panics all the same, there is nothing left to wait for.
            let _ = thread.join();
        }
        callback::end_stream(self.id);
        allocation_table::host_waited_for_stream(self.id, seq);
        allocation_table::remove_stream(self.id);
    }
}

/// The failure of a call that does not accept the default stream.
pub(crate) fn refuse_default(code: i32, name: &str) -> Failure {
    failure!(code, "{name}: the default stream (null) is not allowed here")
}
