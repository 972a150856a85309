//! Functions of the host, notifies and values in memory, in the order of streams.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope, live};
use ascend_sys::bindings::{
    ACL_NOTIFY_DEVICE_USE_ONLY, ACL_STREAM_WAIT_VALUE_AND, ACL_STREAM_WAIT_VALUE_EQ, ACL_STREAM_WAIT_VALUE_GEQ,
    aclrtCallbackBlockType,
};
use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

const BLOCK: aclrtCallbackBlockType = aclrtCallbackBlockType::ACL_CALLBACK_BLOCK;
const NO_BLOCK: aclrtCallbackBlockType = aclrtCallbackBlockType::ACL_CALLBACK_NO_BLOCK;

/// What a test's functions have seen: numbers, and the threads that they ran on.
type Seen = Mutex<Vec<(u32, ThreadId)>>;

/// A place in a list of what was seen.
struct Note {
    seen: &'static Seen,
    number: u32,
}

unsafe extern "C" fn note(data: *mut c_void) {
    let note = unsafe { &*data.cast::<Note>() };
    let mut seen = note.seen.lock().unwrap();
    seen.push((note.number, thread::current().id()));
}

fn notes(seen: &'static Seen, count: u32) -> Vec<Note> {
    (0..count).map(|number| Note { seen, number }).collect()
}

fn data(note: &Note) -> *mut c_void {
    (&raw const *note).cast::<c_void>().cast_mut()
}

fn numbers_of(seen: &Seen) -> Vec<u32> {
    seen.lock().unwrap().iter().map(|(number, _)| *number).collect()
}

fn set(at: *mut c_void, value: i32, stream: *mut c_void) {
    ok(unsafe { aclrtMemsetAsync(at, 4096, value, 4096, stream) });
}

/// Tests that make notifies take turns, since one counts them.
static NOTIFIES: Mutex<()> = Mutex::new(());

fn notify() -> *mut c_void {
    let mut notify = null_mut();
    ok(unsafe { aclrtCreateNotify(&mut notify, 0) });
    notify
}

#[test]
fn host_functions_run_in_order_and_hold_their_stream_up() {
    static SEEN: Seen = Mutex::new(Vec::new());
    static GO: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn wait(_: *mut c_void) {
        while !GO.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
    }
    let _bench = Bench::new();
    let stream = stream();
    let at = malloc(4096);
    let notes = notes(&SEEN, 3);
    unsafe {
        set(at, 1, stream);
        ok(aclrtLaunchHostFunc(stream, Some(note), data(&notes[0])));
        ok(aclrtLaunchHostFunc(stream, Some(wait), null_mut()));
        set(at, 2, stream);
        ok(aclrtLaunchHostFunc(stream, Some(note), data(&notes[1])));
        ok(aclrtLaunchHostFunc(stream, Some(note), data(&notes[2])));
    }
    thread::sleep(Duration::from_millis(20));
    assert!(numbers_of(&SEEN).len() <= 1);
    GO.store(true, Ordering::Release);
    sync(stream);
    assert_eq!(numbers_of(&SEEN), [0, 1, 2]);
    let own = thread::current().id();
    assert!(SEEN.lock().unwrap().iter().all(|(_, thread)| *thread != own));
    assert_eq!(download::<u8>(at, 4096), [2; 4096]);
    fails(unsafe { aclrtLaunchHostFunc(stream, None, null_mut()) }, 100_000, &["fn is null"]);
    free(at);
    destroy(stream);
}

#[test]
fn a_graph_calls_host_functions_at_each_replay() {
    static SEEN: Seen = Mutex::new(Vec::new());
    let _bench = Bench::new();
    let stream = stream();
    let notes = notes(&SEEN, 2);
    let mut graph = null_mut();
    unsafe {
        ok(aclmdlRICaptureBegin(stream, RELAXED));
        for note_of in &notes {
            ok(aclrtLaunchHostFunc(stream, Some(note), data(note_of)));
        }
        ok(aclmdlRICaptureEnd(stream, &mut graph));
        assert!(numbers_of(&SEEN).is_empty());
        for _ in 0..2 {
            ok(aclmdlRIExecuteAsync(graph, stream));
        }
        sync(stream);
        ok(aclmdlRIDestroy(graph));
    }
    assert_eq!(numbers_of(&SEEN), [0, 1, 0, 1]);
    destroy(stream);
}

/// A thread that runs callbacks until told to stop.
struct Runner {
    number: u64,
    thread: Option<thread::JoinHandle<ThreadId>>,
    stop: std::sync::Arc<AtomicBool>,
}

impl Runner {
    fn new() -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let (send, receive) = std::sync::mpsc::channel();
        let stopped = std::sync::Arc::clone(&stop);
        let thread = thread::spawn(move || {
            send.send(unsafe { libc::pthread_self() }).unwrap();
            while !stopped.load(Ordering::Acquire) {
                let status = unsafe { aclrtProcessReport(10) };
                assert!([0, 100_035, 100_036].contains(&status), "{}", message());
            }
            thread::current().id()
        });
        Runner { number: receive.recv().unwrap(), thread: Some(thread), stop }
    }

    fn end(mut self) -> ThreadId {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap()
    }
}

#[test]
fn callbacks_run_on_the_thread_that_was_named() {
    static SEEN: Seen = Mutex::new(Vec::new());
    let _bench = Bench::new();
    let stream = stream();
    let runner = Runner::new();
    let notes = notes(&SEEN, 4);
    let at = malloc(4096);
    unsafe {
        let launch = |place: usize, block| aclrtLaunchCallback(Some(note), data(&notes[place]), block, stream);
        fails(launch(0, BLOCK), 107_015, &["aclrtSubscribeReport"]);
        ok(aclrtSubscribeReport(runner.number, stream));
        for place in 0..4 {
            ok(launch(place, if place % 2 == 0 { BLOCK } else { NO_BLOCK }));
        }
        set(at, 9, stream);
        sync(stream);
        // The last one is not waited for by its stream.
        while numbers_of(&SEEN).len() < 4 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(numbers_of(&SEEN), [0, 1, 2, 3]);
        fails(launch(0, aclrtCallbackBlockType(2)), 107_000, &["blockType"]);
        fails(aclrtSubscribeReport(runner.number + 1, stream), 107_011, &["already"]);
        fails(aclrtUnSubscribeReport(runner.number + 1, stream), 107_012, &["threadId"]);
        ok(aclrtUnSubscribeReport(runner.number, stream));
        fails(aclrtUnSubscribeReport(runner.number, stream), 107_015, &["no thread"]);
        fails(launch(0, BLOCK), 107_015, &[]);
    }
    let thread = runner.end();
    assert!(SEEN.lock().unwrap().iter().all(|(_, seen)| *seen == thread));
    assert_eq!(download::<u8>(at, 4096), [9; 4096]);
    free(at);
    destroy(stream);
}

#[test]
fn a_thread_without_callbacks_is_told_so() {
    let _bench = Bench::new();
    let stream = stream();
    unsafe {
        fails(aclrtProcessReport(10), 100_035, &["no stream"]);
        fails(aclrtProcessReport(0), 107_000, &["timeout"]);
        fails(aclrtProcessReport(-2), 107_000, &["timeout"]);
        let own = libc::pthread_self();
        ok(aclrtSubscribeReport(own, stream));
        let begun = Instant::now();
        fails(aclrtProcessReport(30), 100_036, &["in time"]);
        assert!(begun.elapsed() >= Duration::from_millis(30));
        // Destroying the stream ends it.
        destroy(stream);
        fails(aclrtProcessReport(10), 100_035, &[]);
    }
}

#[test]
fn a_callback_that_nobody_runs_is_a_fault_once_its_thread_is_taken_away() {
    static SEEN: Seen = Mutex::new(Vec::new());
    let _bench = Bench::new();
    let (one, two) = (stream(), stream());
    let notes = notes(&SEEN, 1);
    unsafe {
        let own = libc::pthread_self();
        for stream in [one, two] {
            ok(aclrtSubscribeReport(own, stream));
            ok(aclrtLaunchCallback(Some(note), data(&notes[0]), BLOCK, stream));
        }
        fails(aclrtSynchronizeStreamWithTimeout(one, 20), 507_046, &["in time"]);
        ok(aclrtUnSubscribeReport(own, one));
        fails(aclrtSynchronizeStream(one), 107_015, &["any more"]);
        // Aborting ends the wait as well.
        ok(aclrtStreamAbort(two));
        sync(two);
    }
    destroy(one);
    destroy(two);
}

#[test]
fn a_notify_orders_two_streams_and_is_lowered_by_the_wait() {
    let _alone = NOTIFIES.lock().unwrap_or_else(PoisonError::into_inner);
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let before = live().notifies;
    let (raising, waiting, gate) = (stream(), stream(), Gate::new());
    let (notify, other) = (notify(), notify());
    let (a, b) = (malloc(4096), malloc(4096));
    assert_eq!(live().notifies, before + 2);
    unsafe {
        let (mut one, mut two) = (0, 0);
        ok(aclrtGetNotifyId(notify, &mut one));
        ok(aclrtGetNotifyId(other, &mut two));
        assert_ne!(one, two);
        gate.hold(raising);
        for round in 1..4 {
            set(a, round, raising);
            ok(aclrtRecordNotify(notify, raising));
            ok(aclrtWaitAndResetNotify(notify, waiting, 0));
            // Strict checking knows the order.
            ok(aclrtMemcpyAsync(b, 4096, a, 4096, D2D, waiting));
            ok(aclrtRecordNotify(other, waiting));
            ok(aclrtWaitAndResetNotify(other, raising, 0));
        }
        gate.open();
        sync(waiting);
        assert_eq!(download::<u8>(b, 4096), [3; 4096]);
        sync(raising);
        // It was lowered: another wait has nothing to take.
        ok(aclrtWaitAndResetNotify(notify, waiting, 1));
        fails(aclrtSynchronizeStream(waiting), 107_020, &["aclrtWaitAndResetNotify", "1 s"]);
        // A wait that is queued first is no race: nobody knows yet what it comes after.
        ok(aclrtWaitAndResetNotify(notify, waiting, 0));
        set(a, 7, waiting);
        set(a, 6, raising);
        ok(aclrtRecordNotify(notify, raising));
        sync(waiting);
        sync(raising);
        assert_eq!(download::<u8>(a, 4096), [7; 4096]);
        // Aborting ends a wait.
        ok(aclrtWaitAndResetNotify(notify, waiting, 0));
        ok(aclrtStreamAbort(waiting));
        for notify in [notify, other] {
            ok(aclrtDestroyNotify(notify));
        }
        fails(aclrtRecordNotify(notify, raising), 107_017, &["notify"]);
        fails(aclrtDestroyNotify(null_mut()), 100_000, &["null"]);
        let mut made = null_mut();
        let device_only = u64::from(ACL_NOTIFY_DEVICE_USE_ONLY);
        fails(aclrtCreateNotify(&mut made, device_only), 207_000, &["flag"]);
        fails(aclrtCreateNotify(&mut made, 9), 107_000, &["flag", "9"]);
        fails(aclrtCreateNotify(null_mut(), 0), 100_000, &["notify"]);
    }
    assert_eq!(live().notifies, before);
    free(a);
    free(b);
    gate.destroy();
    destroy(raising);
    destroy(waiting);
}

#[test]
fn races_without_a_notify_are_still_found() {
    let _alone = NOTIFIES.lock().unwrap_or_else(PoisonError::into_inner);
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let (one, two, gate) = (stream(), stream(), Gate::new());
    let notify = notify();
    let at = malloc(4096);
    unsafe {
        gate.hold(one);
        ok(aclrtRecordNotify(notify, one));
        // Later than the record, so that the wait does not order it.
        set(at, 1, one);
        ok(aclrtWaitAndResetNotify(notify, two, 0));
        fails(aclrtMemsetAsync(at, 4096, 2, 4096, two), 107_000, &["race between streams"]);
        gate.open();
        sync(one);
        sync(two);
        ok(aclrtDestroyNotify(notify));
    }
    free(at);
    gate.destroy();
    destroy(one);
    destroy(two);
}

#[test]
fn streams_wait_for_values_in_memory() {
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let (writing, waiting, gate) = (stream(), stream(), Gate::new());
    let flag = malloc(32);
    ok(unsafe { aclrtMemset(flag, 32, 0, 32) });
    let (a, b) = (malloc(4096), malloc(4096));
    unsafe {
        gate.hold(writing);
        set(a, 5, writing);
        ok(aclrtValueWrite(flag, 1, 0, writing));
        ok(aclrtValueWait(flag, 1, ACL_STREAM_WAIT_VALUE_EQ, waiting));
        ok(aclrtMemcpyAsync(b, 4096, a, 4096, D2D, waiting));
        ok(aclrtValueWrite(flag, 0, 0, waiting));
        fails(aclrtFree(flag), 207_002, &["devAddr"]);
        thread::sleep(Duration::from_millis(10));
        gate.open();
        sync(waiting);
        sync(writing);
        assert_eq!(download::<u8>(b, 4096), [5; 4096]);
        assert_eq!(download::<u64>(flag, 1), [0]);
        // A copy of the host's is as good as a write.
        let word = flag.wrapping_byte_add(8);
        ok(aclrtValueWait(word, 6, ACL_STREAM_WAIT_VALUE_AND, waiting));
        let _compat = check_scope(Check::Compat);
        let value = 4u64;
        ok(aclrtMemcpy(word, 8, (&raw const value).cast(), 8, H2D));
        sync(waiting);
        ok(aclrtValueWait(word, 3, ACL_STREAM_WAIT_VALUE_GEQ, waiting));
        sync(waiting);
        // Aborting ends a wait.
        ok(aclrtValueWait(word, 99, ACL_STREAM_WAIT_VALUE_EQ, waiting));
        ok(aclrtStreamAbort(waiting));
        sync(waiting);

        let mut local = 0u64;
        let host = (&raw mut local).cast::<c_void>();
        fails(aclrtValueWrite(host, 1, 0, writing), 107_000, &["host memory"]);
        fails(aclrtValueWrite(null_mut(), 1, 0, writing), 100_000, &["devAddr"]);
        fails(aclrtValueWrite(flag.wrapping_byte_add(4), 1, 0, writing), 107_000, &["multiple of 8"]);
        fails(aclrtValueWrite(flag, 1, 1, writing), 107_000, &["flag"]);
        fails(aclrtValueWait(flag, 1, 4, waiting), 107_000, &["flag", "4"]);
        let _check = check_scope(Check::Strict);
        free(flag);
        fails(aclrtValueWait(flag, 1, 0, waiting), 107_000, &["memory that was freed"]);
    }
    free(a);
    free(b);
    gate.destroy();
    destroy(writing);
    destroy(waiting);
}

#[test]
fn a_graph_waits_for_a_value_that_is_written_after_an_update() {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn count(_: *mut c_void) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
    let _bench = Bench::new();
    let _check = check_scope(Check::Strict);
    let (stream, updating) = (stream(), stream());
    let (flag, at) = (malloc(32), malloc(4096));
    ok(unsafe { aclrtMemset(flag, 32, 0, 32) });
    let (mut graph, mut group) = (null_mut(), null_mut());
    unsafe {
        ok(aclmdlRICaptureBegin(stream, RELAXED));
        ok(aclrtValueWait(flag, 1, ACL_STREAM_WAIT_VALUE_EQ, stream));
        ok(aclrtValueWrite(flag, 0, 0, stream));
        ok(aclmdlRICaptureTaskGrpBegin(stream));
        set(at, 1, stream);
        ok(aclmdlRICaptureTaskGrpEnd(stream, &mut group));
        ok(aclrtLaunchHostFunc(stream, Some(count), without_provenance_mut(1)));
        ok(aclmdlRICaptureEnd(stream, &mut graph));
        for value in 2..5 {
            ok(aclmdlRIExecuteAsync(graph, stream));
            ok(aclmdlRICaptureTaskUpdateBegin(updating, group));
            set(at, value, updating);
            ok(aclmdlRICaptureTaskUpdateEnd(updating));
            ok(aclrtValueWrite(flag, 1, 0, updating));
            sync(stream);
            assert_eq!(download::<u8>(at, 4096), [value as u8; 4096]);
        }
        sync(updating);
        ok(aclmdlRIDestroy(graph));
    }
    assert_eq!(CALLS.load(Ordering::Relaxed), 3);
    free(flag);
    free(at);
    destroy(stream);
    destroy(updating);
}
