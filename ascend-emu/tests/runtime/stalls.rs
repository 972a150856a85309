//! Waits of the host that nothing ends: in strict mode an error that names the event, whatever the host waits for.

use crate::bench::*;
use crate::graphs::{begin, end, replay};
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::{self as sys, aclrtStream};
use std::ffi::c_void;

/// A replay on a stream that waits for an event which nobody has recorded.
struct Stalled {
    one: aclrtStream,
    two: aclrtStream,
    ready: *mut c_void,
    graph: *mut c_void,
}

impl Stalled {
    fn new() -> Self {
        let (one, two) = (stream(), stream());
        let ready = external_event();
        begin(one);
        unsafe {
            ok(aclrtStreamWaitEvent(one, ready));
            ok(aclrtResetEvent(ready, one));
        }
        let graph = end(one);
        replay(graph, one);
        Stalled { one, two, ready, graph }
    }

    /// Asserts that a wait failed, and that its message names the event as a trace does.
    #[track_caller]
    fn tells(&self, status: i32, function: &str, parts: &[&str]) {
        let event = format!("{:#x}", self.ready.addr());
        let all: Vec<&str> = [&[function, &event], parts].concat();
        fails(status, 507_046, &all);
    }

    fn release(&self) {
        ok(unsafe { aclrtRecordEvent(self.ready, self.two) });
        sync(self.one);
    }

    fn destroy(self) {
        destroy(self.one);
        destroy(self.two);
        unsafe {
            ok(aclmdlRIDestroy(self.graph));
            ok(aclrtDestroyEvent(self.ready));
        }
    }
}

const NOTHING: &str = "no stream has a record queued";

#[test]
fn an_event_after_a_stalled_replay() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let stalled = Stalled::new();
    let behind = event();
    ok(unsafe { aclrtRecordEvent(behind, stalled.one) });
    let status = unsafe { aclrtSynchronizeEvent(behind) };
    stalled.tells(status, "aclrtSynchronizeEvent", &[NOTHING]);
    stalled.release();
    ok(unsafe { aclrtSynchronizeEvent(behind) });
    ok(unsafe { aclrtDestroyEvent(behind) });
    stalled.destroy();
}

#[test]
fn a_stream_that_waits_for_a_stalled_one() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let stalled = Stalled::new();
    let (three, behind) = (stream(), event());
    unsafe {
        ok(aclrtRecordEvent(behind, stalled.one));
        ok(aclrtStreamWaitEvent(three, behind));
    }
    let status = unsafe { aclrtSynchronizeStream(three) };
    stalled.tells(status, "aclrtSynchronizeStream", &[NOTHING]);
    // Also a copy that waits for the stream.
    let at = malloc(1);
    let host: *mut u8 = &mut 0;
    let status = unsafe { aclrtMemcpyAsync(host.cast(), 1, at, 1, D2H, three) };
    stalled.tells(status, "aclrtMemcpyAsync", &[NOTHING]);
    stalled.release();
    sync(three);
    free(at);
    destroy(three);
    ok(unsafe { aclrtDestroyEvent(behind) });
    stalled.destroy();
}

#[test]
fn a_record_that_comes_after_the_wait_itself() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let stalled = Stalled::new();
    let (two, behind) = (stalled.two, event());
    // By way of another stream, which waits for the replay.
    unsafe {
        ok(aclrtRecordEvent(behind, stalled.one));
        ok(aclrtStreamWaitEvent(two, behind));
        ok(aclrtRecordEvent(stalled.ready, two));
    }
    for stream in [stalled.one, two] {
        let status = unsafe { aclrtSynchronizeStream(stream) };
        let itself = "the only record queued comes after this wait itself";
        stalled.tells(status, "aclrtSynchronizeStream", &[itself]);
    }
    // Destroying a stream ends what it waits for, and so what the other one does.
    stalled.destroy();
    ok(unsafe { aclrtDestroyEvent(behind) });
}

/// An update stream records the event twice before the first replay has used it up.
#[test]
fn records_that_came_too_early_count_as_one() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let stalled = Stalled::new();
    stalled.release();
    for _ in 0..2 {
        ok(unsafe { aclrtRecordEvent(stalled.ready, stalled.two) });
    }
    sync(stalled.two);
    replay(stalled.graph, stalled.one);
    sync(stalled.one);
    replay(stalled.graph, stalled.one);
    let status = unsafe { aclrtSynchronizeStream(stalled.one) };
    let lost = "2 records came before its latest reset";
    stalled.tells(status, "aclrtSynchronizeStream", &[NOTHING, lost]);
    stalled.release();
    stalled.destroy();
}

#[test]
fn a_full_queue_behind_a_stalled_replay() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let stalled = Stalled::new();
    let at = malloc(64);
    let full = (0..2000).map(|_| unsafe { aclrtMemsetAsync(at, 64, 1, 64, stalled.one) });
    let status = full.into_iter().find(|status| *status != 0);
    stalled.tells(status.unwrap_or(0), "aclrtMemsetAsync", &[NOTHING]);
    stalled.release();
    free(at);
    stalled.destroy();
}

/// An update stream of PyTorch writes a value for its `ExternalEvent`, and a graph waits for it.
#[test]
fn a_value_that_nobody_writes() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (one, two) = (stream(), stream());
    let at = malloc(64);
    begin(one);
    unsafe {
        ok(aclrtValueWait(at, 1, sys::ACL_STREAM_WAIT_VALUE_GEQ, one));
        ok(aclrtValueWrite(at, 0, 0, one));
    }
    let graph = end(one);
    for _ in 0..2 {
        replay(graph, one);
        let status = unsafe { aclrtSynchronizeStream(one) };
        let parts = [
            "aclrtSynchronizeStream",
            &format!("{:#x}", at.addr()),
            "no other stream has work queued",
            "aclrtValueWrite",
        ];
        fails(status, 507_046, &parts);
        ok(unsafe { aclrtValueWrite(at, 1, 0, two) });
        sync(one);
        sync(two);
    }
    destroy(one);
    destroy(two);
    ok(unsafe { aclmdlRIDestroy(graph) });
    free(at);
}
