//! Graph capture, replay and update.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::{aclmdlRICaptureMode, aclmdlRICaptureStatus};
use std::ffi::c_void;
use std::ptr::null_mut;

pub(crate) fn begin(stream: *mut c_void) {
    ok(unsafe { aclmdlRICaptureBegin(stream, RELAXED) });
}

pub(crate) fn end(stream: *mut c_void) -> *mut c_void {
    let mut graph = null_mut();
    ok(unsafe { aclmdlRICaptureEnd(stream, &mut graph) });
    assert!(!graph.is_null());
    graph
}

fn end_fails(stream: *mut c_void, code: i32, parts: &[&str]) {
    let mut graph = nowhere();
    fails(unsafe { aclmdlRICaptureEnd(stream, &mut graph) }, code, parts);
    assert!(graph.is_null());
}

pub(crate) fn replay(graph: *mut c_void, stream: *mut c_void) {
    ok(unsafe { aclmdlRIExecuteAsync(graph, stream) });
}

fn set(at: *mut c_void, value: i32, stream: *mut c_void) {
    ok(unsafe { aclrtMemsetAsync(at, 64, value, 64, stream) });
}

fn value(at: *mut c_void) -> u8 {
    download::<u8>(at, 1)[0]
}

#[test]
fn captured_work_runs_when_replayed_and_only_then() {
    let _bench = Bench::new();
    let stream = stream();
    let call = Call::new(1);
    begin(stream);
    call.run(stream);
    let graph = end(stream);
    sync(stream);
    assert!(call.is_poisoned());
    for _ in 0..3 {
        call.poison();
        replay(graph, stream);
        sync(stream);
        call.check(1);
    }
    let second = numbers(20, S * D);
    ok(unsafe { aclrtMemcpy(call.q, S * D * 2, second.as_ptr().cast(), S * D * 2, H2D) });
    replay(graph, null_mut());
    sync(null_mut());
    unsafe {
        ok(aclmdlRIDestroy(graph));
        fails(aclmdlRIExecuteAsync(graph, stream), 107_017, &["graph", "already destroyed"]);
    }
    destroy(stream);
    call.destroy();
}

#[test]
fn forked_streams_are_captured_and_have_to_come_back() {
    let _bench = Bench::new();
    let (one, two, fork, join) = (stream(), stream(), event(), event());
    let (a, b) = (malloc(64), malloc(64));
    let record = |event, stream| ok(unsafe { aclrtRecordEvent(event, stream) });
    let wait = |stream, event| ok(unsafe { aclrtStreamWaitEvent(stream, event) });
    begin(one);
    set(a, 1, one);
    record(fork, one);
    wait(two, fork);
    ok(unsafe { aclrtMemcpyAsync(b, 64, a, 64, D2D, two) });
    record(join, two);
    wait(one, join);
    set(a, 2, one);
    let graph = end(one);
    // Both streams queue again.
    set(a, 7, two);
    set(b, 7, two);
    sync(two);
    assert_eq!((value(a), value(b)), (7, 7));
    replay(graph, two);
    sync(two);
    assert_eq!((value(a), value(b)), (2, 1));
    ok(unsafe { aclmdlRIDestroy(graph) });

    begin(one);
    record(fork, one);
    wait(two, fork);
    set(b, 3, two);
    record(join, two);
    wait(one, join);
    // Work after the join has to be joined anew.
    set(b, 4, two);
    end_fails(one, 107_025, &["not joined"]);
    set(b, 5, two);
    sync(two);
    assert_eq!(value(b), 5);
    for event in [fork, join] {
        ok(unsafe { aclrtDestroyEvent(event) });
    }
    for at in [a, b] {
        free(at);
    }
    destroy(one);
    destroy(two);
}

#[test]
fn external_events_cross_the_border_of_a_graph() {
    let _bench = Bench::new();
    let (one, two) = (stream(), stream());
    let (ready, done) = (external_event(), external_event());
    let at = malloc(64);
    begin(one);
    unsafe {
        ok(aclrtStreamWaitEvent(one, ready));
        ok(aclrtResetEvent(ready, one));
        set(at, 1, one);
        ok(aclrtRecordEvent(done, one));
    }
    let graph = end(one);
    for round in 0..3 {
        ok(unsafe { aclrtMemset(at, 64, 9, 64) });
        replay(graph, one);
        fails(unsafe { aclrtSynchronizeStreamWithTimeout(one, 10) }, 507_046, &["in time"]);
        assert_eq!(value_unsynced(at), 9, "round {round}");
        ok(unsafe { aclrtRecordEvent(ready, two) });
        sync(one);
        assert_eq!(value(at), 1);
    }
    let mut status = ascend_sys::bindings::aclrtEventRecordedStatus(0);
    ok(unsafe { aclrtQueryEventStatus(done, &mut status) });
    assert_eq!(status.0, 1);
    unsafe {
        ok(aclmdlRIDestroy(graph));
        ok(aclrtDestroyEvent(ready));
        ok(aclrtDestroyEvent(done));
    }
    free(at);
    destroy(one);
    destroy(two);
}

#[test]
fn waiting_for_a_replay_that_nothing_wakes_is_an_error() {
    let _bench = Bench::new();
    let (one, two) = (stream(), stream());
    let ready = external_event();
    begin(one);
    unsafe {
        ok(aclrtStreamWaitEvent(one, ready));
        ok(aclrtResetEvent(ready, one));
    }
    let graph = end(one);
    // Recorded before the replay before it has used the event up: one record for two replays.
    replay(graph, one);
    replay(graph, one);
    ok(unsafe { aclrtRecordEvent(ready, two) });
    sync(two);
    let strict = check_scope(Check::Strict);
    fails(unsafe { aclrtSynchronizeStream(one) }, 507_046, &["waits for an ACL_EVENT_EXTERNAL event"]);
    fails(unsafe { aclrtSynchronizeDevice() }, 507_046, &["aclrtSynchronizeDevice", "no stream has a record"]);
    // Nothing is broken.
    ok(unsafe { aclrtRecordEvent(ready, two) });
    sync(one);
    // A stream with a replay that nothing wakes can be destroyed.
    replay(graph, one);
    destroy(one);
    drop(strict);
    ok(unsafe { aclmdlRIDestroy(graph) });
    ok(unsafe { aclrtDestroyEvent(ready) });
    destroy(two);
}

/// Reads without a synchronisation, which compat lets pass.
fn value_unsynced(at: *mut c_void) -> u8 {
    let _compat = check_scope(Check::Compat);
    value(at)
}

#[test]
fn task_groups_take_new_parameters() {
    let _bench = Bench::new();
    let (one, two) = (stream(), stream());
    let (first, second) = (Call::new(30), Call::new(40));
    let mut group = null_mut();
    let at = malloc(64);
    begin(one);
    unsafe {
        ok(aclmdlRICaptureTaskGrpBegin(one));
        fails(aclmdlRICaptureTaskGrpBegin(one), 107_033, &["already being recorded"]);
        first.run(one);
        ok(aclmdlRICaptureTaskGrpEnd(one, &mut group));
        fails(aclmdlRICaptureTaskGrpEnd(one, &mut group), 107_033, &["no task group"]);
        set(at, 6, one);
    }
    let graph = end(one);
    replay(graph, one);
    sync(one);
    first.check(30);
    assert!(second.is_poisoned());
    unsafe {
        // The update takes effect in the order of its stream.
        let gate = Gate::new();
        gate.hold(two);
        ok(aclmdlRICaptureTaskUpdateBegin(two, group));
        second.run(two);
        ok(aclmdlRICaptureTaskUpdateEnd(two));
        replay(graph, one);
        sync(one);
        assert!(second.is_poisoned());
        gate.open();
        sync(two);
        assert!(second.is_poisoned(), "an update runs nothing");
        gate.destroy();
        first.poison();
        replay(graph, one);
        sync(one);
        second.check(40);
        assert!(first.is_poisoned());
        assert_eq!(value(at), 6);
        // Other tasks than the group's are refused.
        ok(aclmdlRICaptureTaskUpdateBegin(two, group));
        fails(aclmdlRICaptureTaskUpdateBegin(two, group), 107_033, &["already going on"]);
        fails(aclmdlRICaptureTaskUpdateEnd(two), 107_033, &["given 0 tasks", "allowed: 1"]);
        ok(aclmdlRICaptureTaskUpdateBegin(two, group));
        set(at, 1, two);
        fails(aclmdlRICaptureTaskUpdateEnd(two), 107_033, &["aclrtMemsetAsync cannot take the place"]);
        fails(aclmdlRICaptureTaskUpdateEnd(two), 107_033, &["no update is going on"]);
        ok(aclmdlRIDestroy(graph));
        fails(aclmdlRICaptureTaskUpdateBegin(two, group), 107_017, &["task group", "already destroyed"]);
    }
    free(at);
    destroy(one);
    destroy(two);
    first.destroy();
    second.destroy();
}

/// Replaces the one task of a group by what `queue` queues in a stream.
fn update(stream: *mut c_void, group: *mut c_void, queue: impl FnOnce()) {
    ok(unsafe { aclmdlRICaptureTaskUpdateBegin(stream, group) });
    queue();
    ok(unsafe { aclmdlRICaptureTaskUpdateEnd(stream) });
}

#[test]
fn memory_of_an_update_is_in_use_until_the_replay_is_over() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let [one, two, three] = [(); 3].map(|()| stream());
    let (wake, over) = (external_event(), event());
    let (old, new, later) = (malloc(64), malloc(64), malloc(64));
    let mut group = null_mut();
    begin(one);
    unsafe {
        ok(aclrtStreamWaitEvent(one, wake));
        ok(aclrtResetEvent(wake, one));
        ok(aclmdlRICaptureTaskGrpBegin(one));
        set(old, 1, one);
        ok(aclmdlRICaptureTaskGrpEnd(one, &mut group));
    }
    let graph = end(one);
    // The replay is queued first, and runs the task of an update behind it.
    replay(graph, one);
    update(two, group, || set(new, 2, two));
    unsafe {
        let parts = ["devPtr", "queued aclmdlRIExecuteAsync"];
        fails(aclrtFree(new), 207_002, &parts);
        fails(aclrtFree(old), 207_002, &parts);
        ok(aclrtRecordEvent(wake, two));
        sync(one);
        assert_eq!(value(new), 2);
        free(old);
        // A replay that happens before an update does not run its task.
        replay(graph, one);
        ok(aclrtRecordEvent(over, one));
        ok(aclrtStreamWaitEvent(two, over));
        update(two, group, || set(later, 3, two));
        free(later);
        fails(aclrtFree(new), 207_002, &parts);
        ok(aclrtRecordEvent(wake, three));
        sync(one);
        free(new);
        // The next one does.
        fails(aclmdlRIExecuteAsync(graph, one), 107_000, &["devPtr", "freed"]);
        ok(aclmdlRIDestroy(graph));
        ok(aclrtDestroyEvent(wake));
        ok(aclrtDestroyEvent(over));
    }
    for stream in [one, two, three] {
        destroy(stream);
    }
}

#[test]
fn an_update_before_a_replay_frees_the_memory_of_the_task_before() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (one, two, updated) = (stream(), stream(), event());
    let (old, new) = (malloc(64), malloc(64));
    let mut group = null_mut();
    begin(one);
    unsafe {
        ok(aclmdlRICaptureTaskGrpBegin(one));
        set(old, 1, one);
        ok(aclmdlRICaptureTaskGrpEnd(one, &mut group));
    }
    let graph = end(one);
    let gate = Gate::new();
    gate.hold(two);
    update(two, group, || set(new, 2, two));
    free(old);
    unsafe {
        // Nothing orders the replay after the update, which waits: the old task may run.
        fails(aclmdlRIExecuteAsync(graph, one), 107_000, &["devPtr", "freed"]);
        ok(aclrtRecordEvent(updated, two));
        ok(aclrtStreamWaitEvent(one, updated));
        replay(graph, one);
        fails(aclrtFree(new), 207_002, &["queued aclmdlRIExecuteAsync"]);
        gate.open();
        sync(one);
        assert_eq!(value(new), 2);
        // An update that is dropped changes nothing.
        let other = malloc(64);
        let closed = Gate::new();
        closed.hold(two);
        update(two, group, || set(other, 3, two));
        ok(aclrtStreamAbort(two));
        closed.destroy();
        free(other);
        replay(graph, one);
        sync(one);
        ok(aclmdlRIDestroy(graph));
        ok(aclrtDestroyEvent(updated));
    }
    gate.destroy();
    free(new);
    destroy(one);
    destroy(two);
}

#[test]
fn synchronising_spoils_a_capture() {
    let _bench = Bench::new();
    let (stream, event) = (stream(), event());
    let mut status = aclmdlRICaptureStatus(9);
    let mut graph = null_mut();
    let spoil: [(&dyn Fn() -> i32, i32); 3] = [
        (&|| unsafe { aclrtSynchronizeStream(stream) }, 107_027),
        (&|| unsafe { aclrtSynchronizeEvent(event) }, 107_028),
        (&|| unsafe { aclrtStreamQuery(stream, &mut std::mem::zeroed()) }, 107_027),
    ];
    for (spoil, code) in spoil {
        begin(stream);
        unsafe {
            ok(aclrtRecordEvent(event, stream));
            ok(aclmdlRICaptureGetInfo(stream, &mut status, &mut graph));
            assert_eq!(status, aclmdlRICaptureStatus::ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
            assert!(!graph.is_null());
            fails(aclmdlRIExecuteAsync(graph, null_mut()), 107_026, &["still being captured"]);
            fails(spoil(), code, &["being captured"]);
            ok(aclmdlRICaptureGetInfo(stream, &mut status, &mut graph));
            assert_eq!(status, aclmdlRICaptureStatus::ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED);
            fails(aclrtRecordEvent(event, stream), 507_903, &["became invalid"]);
        }
        end_fails(stream, 507_903, &["became invalid", "being captured"]);
        ok(unsafe { aclmdlRICaptureGetInfo(stream, &mut status, null_mut()) });
        assert_eq!(status, aclmdlRICaptureStatus::ACL_MODEL_RI_CAPTURE_STATUS_NONE);
        sync(stream);
    }
    ok(unsafe { aclrtDestroyEvent(event) });
    destroy(stream);
}

#[test]
fn a_device_is_not_waited_for_during_a_capture_which_goes_on() {
    let bench = Bench::new();
    let (captured, other, gate) = (stream(), stream(), Gate::new());
    let at = malloc(64);
    // Nothing is waited for: other streams have work that is not over.
    gate.hold(other);
    begin(captured);
    set(at, 1, captured);
    let refused = || unsafe {
        fails(aclrtSynchronizeDevice(), 107_027, &["being captured"]);
        fails(aclrtSynchronizeDeviceWithTimeout(1), 107_027, &["being captured"]);
    };
    refused();
    let context = bench.context.addr();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let context = std::ptr::without_provenance_mut(context);
            ok(unsafe { aclrtSetCurrentContext(context) });
            refused();
        });
    });
    set(at, 2, captured);
    let graph = end(captured);
    gate.open();
    replay(graph, captured);
    ok(unsafe { aclrtSynchronizeDevice() });
    assert_eq!(value(at), 2);
    ok(unsafe { aclmdlRIDestroy(graph) });
    free(at);
    gate.destroy();
    destroy(captured);
    destroy(other);
}

#[test]
fn captures_begin_and_end_where_they_may() {
    let bench = Bench::new();
    let (one, two, event) = (stream(), stream(), event());
    let mut graph = null_mut();
    let local = aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
    unsafe {
        fails(aclmdlRICaptureBegin(null_mut(), RELAXED), 107_031, &["default stream"]);
        fails(aclmdlRICaptureBegin(one, aclmdlRICaptureMode(5)), 107_000, &["mode", "5"]);
        fails(aclmdlRICaptureEnd(one, &mut graph), 107_029, &["not being captured"]);
        begin(one);
        fails(aclmdlRICaptureBegin(one, RELAXED), 107_027, &["already being captured"]);
        ok(aclrtRecordEvent(event, one));
        ok(aclrtStreamWaitEvent(two, event));
        fails(aclmdlRICaptureEnd(two, &mut graph), 107_032, &["another stream"]);
        end_fails(one, 107_025, &["not joined"]);
        // On another thread only when relaxed.
        for (mode, code) in [(local, 107_038), (RELAXED, 0)] {
            ok(aclmdlRICaptureBegin(one, mode));
            let (context, stream) = (bench.context.addr(), one.addr());
            let status = std::thread::spawn(move || {
                let pointer = std::ptr::without_provenance_mut;
                ok(aclrtSetCurrentContext(pointer(context)));
                let mut graph = null_mut();
                let status = aclmdlRICaptureEnd(pointer(stream), &mut graph);
                if status == 0 {
                    ok(aclmdlRIDestroy(graph));
                }
                status
            })
            .join()
            .unwrap();
            assert_eq!(status, code);
            if code != 0 {
                ok(aclmdlRIDestroy(end(one)));
            }
        }
        ok(aclrtDestroyEvent(event));
    }
    destroy(one);
    destroy(two);
}

#[test]
fn a_capture_does_not_wait_for_outside_work() {
    let _bench = Bench::new();
    let (one, two, event) = (stream(), stream(), event());
    unsafe {
        ok(aclrtRecordEvent(event, two));
        begin(one);
        fails(aclrtStreamWaitEvent(one, event), 107_024, &["outside the capture"]);
        end_fails(one, 507_903, &["outside the capture"]);
        // Nor for another capture.
        begin(one);
        begin(two);
        ok(aclrtRecordEvent(event, two));
        fails(aclrtStreamWaitEvent(one, event), 107_032, &["another capture"]);
        end_fails(one, 507_903, &["another capture"]);
        ok(aclmdlRIDestroy(end(two)));
        ok(aclrtDestroyEvent(event));
    }
    destroy(one);
    destroy(two);
}

#[test]
fn modes_forbid_what_disturbs() {
    let _bench = Bench::new();
    let stream = stream();
    let at = malloc(64);
    let local = aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
    let eager = crate::bench::stream();
    let mut host = [0u8; 64];
    ok(unsafe { aclmdlRICaptureBegin(stream, local) });
    unsafe {
        fails(aclrtMemset(at, 64, 0, 64), 107_030, &["aclrtMemset", "captured"]);
        fails(aclrtMemcpy(host.as_mut_ptr().cast(), 64, at, 64, D2H), 107_030, &["aclrtMemcpy", "captured"]);
        // Memory that is not pinned makes it wait.
        fails(
            aclrtMemcpyAsync(host.as_mut_ptr().cast(), 64, at, 64, D2H, eager),
            107_041,
            &["aclrtMemcpyAsync", "captured"],
        );
        // Allocating and freeing disturb nobody.
        let mut pinned = null_mut();
        ok(aclrtMallocHost(&mut pinned, 64));
        ok(aclrtFreeHost(pinned));
        free(malloc(32));
        let mut mode = RELAXED;
        ok(aclmdlRICaptureThreadExchangeMode(&mut mode));
        assert_eq!(mode, aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_GLOBAL);
        ok(aclrtMemset(at, 64, 0, 64));
        ok(aclmdlRICaptureThreadExchangeMode(&mut mode));
        assert_eq!(mode, RELAXED);
        let mut wrong = aclmdlRICaptureMode(7);
        fails(aclmdlRICaptureThreadExchangeMode(&mut wrong), 107_000, &["mode", "7"]);
    }
    // The capture goes on.
    set(at, 1, stream);
    let graph = end(stream);
    ok(unsafe { aclmdlRIDestroy(graph) });
    free(at);
    destroy(stream);
    destroy(eager);
}

#[test]
fn captured_copies_need_pinned_memory() {
    let _bench = Bench::new();
    let stream = stream();
    let at = malloc(64);
    let mut host = [0u8; 64];
    let mut pinned = null_mut();
    unsafe {
        ok(aclrtMallocHost(&mut pinned, 64));
        begin(stream);
        fails(aclrtMemcpyAsync(host.as_mut_ptr().cast(), 64, at, 64, D2H, stream), 107_016, &["dst", "pinned"]);
        ok(aclrtMemcpyAsync(pinned, 64, at, 64, D2H, stream));
        let graph = end(stream);
        ok(aclrtMemset(at, 64, 8, 64));
        replay(graph, stream);
        sync(stream);
        assert_eq!(pinned.cast::<u8>().read(), 8);
        // What a graph names has to live as long as it is replayed.
        ok(aclrtFreeHost(pinned));
        ok(aclmdlRIExecuteAsync(graph, stream));
        fails(aclrtSynchronizeStream(stream), 507_015, &["aclmdlRIExecuteAsync", "dst", "freed"]);
        ok(aclmdlRIDestroy(graph));
    }
    free(at);
    destroy(stream);
}

#[test]
fn a_graph_runs_to_its_end_at_once() {
    let _bench = Bench::new();
    let stream = stream();
    let at = malloc(64);
    begin(stream);
    set(at, 4, stream);
    let graph = end(stream);
    unsafe {
        ok(aclmdlRIExecute(graph, -1));
        assert_eq!(value(at), 4);
        fails(aclmdlRIExecute(graph, -5), 107_000, &["timeout"]);
        ok(aclmdlRIDebugPrint(graph));
        begin(stream);
        fails(aclmdlRIExecuteAsync(graph, stream), 107_027, &["do not nest"]);
        end_fails(stream, 507_903, &["do not nest"]);
        ok(aclmdlRIDestroy(graph));
    }
    free(at);
    destroy(stream);
}

#[test]
fn destroying_a_captured_stream_spoils_the_capture() {
    let _bench = Bench::new();
    let (one, two, fork) = (stream(), stream(), event());
    begin(one);
    unsafe {
        ok(aclrtRecordEvent(fork, one));
        ok(aclrtStreamWaitEvent(two, fork));
    }
    destroy(two);
    end_fails(one, 507_903, &["destroyed"]);
    begin(one);
    destroy(one);
    ok(unsafe { aclrtDestroyEvent(fork) });
}
