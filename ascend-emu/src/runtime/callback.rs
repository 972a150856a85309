//! Functions of the program that streams call: on the stream's own thread, or on a thread that the program has named.

use crate::fault::Fault;
use crate::lock::{Lock, Signal, expired};
use crate::sanitizer::StreamId;
use crate::status::{
    NO_CALLBACK_THREAD, NOT_SUBSCRIBED, Outcome, REPORT_TIMEOUT, STREAM_SUBSCRIBED,
    THREAD_SUBSCRIBED, failure,
};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A function of the program, and what it is given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCall {
    pub function: unsafe extern "C" fn(*mut c_void),
    /// Address of what it is given, whose provenance was exposed.
    pub data: usize,
}

impl HostCall {
    /// Calls the function.
    ///
    /// # Safety
    ///
    /// The program has promised that the function can be called with its argument once the stream is there.
    pub(crate) unsafe fn run(self) {
        // SAFETY: the caller's promise.
        unsafe { (self.function)(ptr::with_exposed_provenance_mut(self.data)) };
    }
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pending,
    Done,
    /// Its stream was taken from the thread before.
    Dropped,
}

#[derive(Debug)]
struct Report {
    lane: StreamId,
    call: HostCall,
    state: Arc<Lock<State>>,
}

/// A thread that runs the calls of streams.
#[derive(Debug)]
struct Inbox {
    thread: u64,
    lanes: Vec<StreamId>,
    waiting: VecDeque<Report>,
}

static INBOXES: Lock<Vec<Inbox>> = Lock::new(Vec::new());

/// A call came, was made or was dropped.
static CHANGED: Signal = Signal::new();

/// How often those who wait look whether their stream was aborted.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// `aclrtSubscribeReport`.
pub(crate) fn subscribe(name: &str, thread: u64, lane: StreamId) -> Outcome {
    let mut inboxes = INBOXES.lock();
    if let Some(inbox) = inboxes.iter().find(|inbox| inbox.lanes.contains(&lane)) {
        return Err(failure!(
            STREAM_SUBSCRIBED,
            "{name}: thread {:#x} runs the callbacks of the stream already; aclrtUnSubscribeReport ends that",
            inbox.thread
        ));
    }
    match inboxes.iter_mut().find(|inbox| inbox.thread == thread) {
        Some(inbox) => inbox.lanes.push(lane),
        None => inboxes.push(Inbox {
            thread,
            lanes: vec![lane],
            waiting: VecDeque::new(),
        }),
    }
    Ok(())
}

/// `aclrtUnSubscribeReport`.
pub(crate) fn unsubscribe(name: &str, thread: u64, lane: StreamId) -> Outcome {
    let mut inboxes = INBOXES.lock();
    let Some(inbox) = inboxes.iter().find(|inbox| inbox.lanes.contains(&lane)) else {
        return Err(failure!(
            NO_CALLBACK_THREAD,
            "{name}: no thread runs the callbacks of the stream"
        ));
    };
    if inbox.thread != thread {
        return Err(failure!(
            THREAD_SUBSCRIBED,
            "{name}: threadId: given {thread:#x}, allowed: {:#x}, which runs the callbacks of the stream",
            inbox.thread
        ));
    }
    forget(&mut inboxes, lane);
    Ok(())
}

/// Ends what there is of a stream.
pub(crate) fn end_stream(lane: StreamId) {
    forget(&mut INBOXES.lock(), lane);
}

fn forget(inboxes: &mut Vec<Inbox>, lane: StreamId) {
    for inbox in inboxes.iter_mut() {
        inbox.lanes.retain(|&of| of != lane);
        inbox.waiting.retain(|report| {
            let stays = report.lane != lane;
            if !stays {
                *report.state.lock() = State::Dropped;
            }
            stays
        });
    }
    inboxes.retain(|inbox| !inbox.lanes.is_empty());
    CHANGED.notify_all();
}

/// Refuses a stream whose callbacks no thread runs.
pub(crate) fn subscribed(name: &str, lane: StreamId) -> Outcome {
    let inboxes = INBOXES.lock();
    if inboxes.iter().any(|inbox| inbox.lanes.contains(&lane)) {
        return Ok(());
    }
    Err(failure!(
        NO_CALLBACK_THREAD,
        "{name}: no thread runs the callbacks of the stream; aclrtSubscribeReport comes first"
    ))
}

/// Hands a call to the thread of a stream; waits until it was made if `block`.
pub(crate) fn deliver(
    lane: StreamId,
    call: HostCall,
    block: bool,
    abort: &AtomicBool,
) -> Result<(), Fault> {
    let gone = || Fault {
        code: NO_CALLBACK_THREAD,
        message: "aclrtLaunchCallback: no thread runs the callbacks of the stream any more"
            .to_owned(),
    };
    let state = Arc::new(Lock::new(State::Pending));
    let mut inboxes = INBOXES.lock();
    let inbox = inboxes
        .iter_mut()
        .find(|inbox| inbox.lanes.contains(&lane))
        .ok_or_else(gone)?;
    inbox.waiting.push_back(Report {
        lane,
        call,
        state: Arc::clone(&state),
    });
    CHANGED.notify_all();
    while block && !abort.load(Ordering::Acquire) {
        match *state.lock() {
            State::Pending => {}
            State::Done => break,
            State::Dropped => return Err(gone()),
        }
        inboxes = CHANGED.wait(inboxes, Instant::now().checked_add(LOOK));
    }
    Ok(())
}

/// `aclrtProcessReport` of a thread: makes every call there is, of which it waits for the first one.
///
/// # Safety
///
/// As for [`HostCall::run`], of every call of the thread's streams.
pub(crate) unsafe fn process(name: &str, thread: u64, deadline: Option<Instant>) -> Outcome {
    let mut calls = {
        let mut inboxes = INBOXES.lock();
        loop {
            let inbox = inboxes.iter_mut().find(|inbox| inbox.thread == thread);
            let Some(inbox) = inbox else {
                return Err(failure!(
                    NOT_SUBSCRIBED,
                    "{name}: this thread, {thread:#x}, runs the callbacks of no stream; aclrtSubscribeReport comes first"
                ));
            };
            if !inbox.waiting.is_empty() {
                break std::mem::take(&mut inbox.waiting);
            }
            if expired(deadline) {
                return Err(failure!(REPORT_TIMEOUT, "{name}: no callback came in time"));
            }
            inboxes = CHANGED.wait(inboxes, deadline);
        }
    };
    while let Some(report) = calls.pop_front() {
        // SAFETY: the caller's promise.
        unsafe { report.call.run() };
        *report.state.lock() = State::Done;
        // Not lost: who waits looks at the state while holding the inboxes.
        drop(INBOXES.lock());
        CHANGED.notify_all();
    }
    Ok(())
}
