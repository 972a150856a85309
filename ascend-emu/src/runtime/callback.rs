//! Functions of the program that streams call, on the stream's own thread or on a thread that the program has chosen.

use crate::lock::{Lock, Signal, expired};
use crate::sanitizer::StreamId;
use crate::status::{
    Failure, NO_CALLBACK_THREAD, NOT_SUBSCRIBED, Outcome, REPORT_TIMEOUT, STREAM_SUBSCRIBED, THREAD_SUBSCRIBED, failure,
};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A function of the program, with its argument.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCall {
    pub function: unsafe extern "C" fn(*mut c_void),
    /// Address of the argument, whose provenance was exposed.
    pub data: usize,
}

impl HostCall {
    /// Calls the function.
    ///
    /// # Safety
    ///
    /// The program has promised that the function can be called with its argument once the stream reaches it.
    pub(crate) unsafe fn run(self) {
        // SAFETY: the caller's promise.
        unsafe { (self.function)(ptr::with_exposed_provenance_mut(self.data)) };
    }
}

/// The state of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pending,
    Done,
    /// The stream was unsubscribed or destroyed before the call.
    Dropped,
}

#[derive(Debug)]
struct Report {
    stream: StreamId,
    call: HostCall,
    state: Arc<Lock<State>>,
}

/// The calls that wait for one thread of the program. The thread runs the calls of its streams.
#[derive(Debug)]
struct Inbox {
    thread: u64,
    streams: Vec<StreamId>,
    waiting: VecDeque<Report>,
}

static INBOXES: Lock<Vec<Inbox>> = Lock::new(Vec::new());

/// Notified when a call is added, made or dropped.
static CHANGED: Signal = Signal::new();

/// The time after which a waiting thread reads again whether its stream was aborted.
pub(crate) const ABORT_POLL: Duration = Duration::from_millis(20);

/// `aclrtSubscribeReport`.
pub(crate) fn subscribe(name: &str, thread: u64, stream: StreamId) -> Outcome {
    let mut inboxes = INBOXES.lock();
    if let Some(inbox) = inboxes.iter().find(|inbox| inbox.streams.contains(&stream)) {
        return Err(failure!(
            STREAM_SUBSCRIBED,
            "{name}: thread {:#x} runs the callbacks of the stream already; aclrtUnSubscribeReport ends that",
            inbox.thread
        ));
    }
    match inboxes.iter_mut().find(|inbox| inbox.thread == thread) {
        Some(inbox) => inbox.streams.push(stream),
        None => inboxes.push(Inbox { thread, streams: vec![stream], waiting: VecDeque::new() }),
    }
    Ok(())
}

/// `aclrtUnSubscribeReport`.
pub(crate) fn unsubscribe(name: &str, thread: u64, stream: StreamId) -> Outcome {
    let mut inboxes = INBOXES.lock();
    let Some(inbox) = inboxes.iter().find(|inbox| inbox.streams.contains(&stream)) else {
        return Err(failure!(NO_CALLBACK_THREAD, "{name}: no thread runs the callbacks of the stream"));
    };
    if inbox.thread != thread {
        return Err(failure!(
            THREAD_SUBSCRIBED,
            "{name}: threadId: given {thread:#x}, allowed: {:#x}, which runs the callbacks of the stream",
            inbox.thread
        ));
    }
    forget(&mut inboxes, stream);
    Ok(())
}

/// Drops the calls and the subscription of a stream.
pub(crate) fn end_stream(stream: StreamId) {
    forget(&mut INBOXES.lock(), stream);
}

fn forget(inboxes: &mut Vec<Inbox>, stream: StreamId) {
    for inbox in inboxes.iter_mut() {
        inbox.streams.retain(|&known| known != stream);
        inbox.waiting.retain(|report| {
            let stays = report.stream != stream;
            if !stays {
                *report.state.lock() = State::Dropped;
            }
            stays
        });
    }
    inboxes.retain(|inbox| !inbox.streams.is_empty());
    CHANGED.notify_all();
}

/// Refuses a stream whose callbacks no thread runs.
pub(crate) fn subscribed(name: &str, stream: StreamId) -> Outcome {
    let inboxes = INBOXES.lock();
    if inboxes.iter().any(|inbox| inbox.streams.contains(&stream)) {
        return Ok(());
    }
    Err(failure!(
        NO_CALLBACK_THREAD,
        "{name}: no thread runs the callbacks of the stream; aclrtSubscribeReport comes first"
    ))
}

/// Passes a call to the thread of a stream, and with `block` waits until it was made.
pub(crate) fn deliver(stream: StreamId, call: HostCall, block: bool, abort: &AtomicBool) -> Outcome {
    let gone =
        || Failure::new(NO_CALLBACK_THREAD, "aclrtLaunchCallback: no thread runs the callbacks of the stream any more");
    let state = Arc::new(Lock::new(State::Pending));
    let mut inboxes = INBOXES.lock();
    let inbox = inboxes.iter_mut().find(|inbox| inbox.streams.contains(&stream)).ok_or_else(gone)?;
    inbox.waiting.push_back(Report { stream, call, state: Arc::clone(&state) });
    CHANGED.notify_all();
    while block && !abort.load(Ordering::Acquire) {
        match *state.lock() {
            State::Pending => {}
            State::Done => break,
            State::Dropped => return Err(gone()),
        }
        inboxes = CHANGED.wait(inboxes, Instant::now().checked_add(ABORT_POLL));
    }
    Ok(())
}

/// `aclrtProcessReport` of a thread: waits for a call, then makes all calls that are waiting.
///
/// # Safety
///
/// As for [`HostCall::run`], for every call of the thread's streams.
pub(crate) unsafe fn process(name: &str, thread: u64, deadline: Option<Instant>) -> Outcome {
    let mut calls = {
        let mut inboxes = INBOXES.lock();
        loop {
            let inbox = inboxes.iter_mut().find(|inbox| inbox.thread == thread);
            let Some(inbox) = inbox else {
                return Err(failure!(
                    NOT_SUBSCRIBED,
                    "{name}: this thread, {thread:#x}, runs the callbacks of no stream; aclrtSubscribeReport comes \
                     first"
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
        // A waiting thread reads the state while it holds the lock on the inboxes: taking the lock here loses no
        // notification.
        drop(INBOXES.lock());
        CHANGED.notify_all();
    }
    Ok(())
}
