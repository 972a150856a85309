//! Streams run asynchronously and in order; events order them.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::{
    ACL_STREAM_FAST_LAUNCH, aclrtDevResLimitType, aclrtStreamAttr, aclrtStreamAttrValue, aclrtStreamStatus,
};
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::thread;
use std::time::{Duration, Instant};

pub(super) fn set(at: *mut c_void, value: i32, stream: *mut c_void) {
    ok(unsafe { aclrtMemsetAsync(at, 4096, value, 4096, stream) });
}

pub(super) fn complete(stream: *mut c_void) -> bool {
    let mut status = aclrtStreamStatus::ACL_STREAM_STATUS_RESERVED;
    ok(unsafe { aclrtStreamQuery(stream, &mut status) });
    status == aclrtStreamStatus::ACL_STREAM_STATUS_COMPLETE
}

#[test]
fn work_runs_in_order_and_later_than_it_is_queued() {
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let (a, b) = (malloc(4096), malloc(4096));
    ok(unsafe { aclrtMemset(a, 4096, 1, 4096) });
    gate.hold(stream);
    for value in 2..60 {
        set(a, value, stream);
        ok(unsafe { aclrtMemcpyAsync(b, 4096, a, 4096, D2D, stream) });
    }
    set(a, 99, stream);
    assert!(!complete(stream));
    gate.open();
    sync(stream);
    assert!(complete(stream));
    assert_eq!(download::<u8>(a, 4096), [99; 4096]);
    assert_eq!(download::<u8>(b, 4096), [59; 4096]);
    free(a);
    free(b);
    gate.destroy();
    destroy(stream);
}

/// Handles may go to another thread.
#[derive(Clone, Copy)]
struct Shared<'a, T>(&'a T);
unsafe impl<T> Send for Shared<'_, T> {}

#[test]
fn more_work_than_a_queue_holds_waits_for_room() {
    let bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let at = malloc(4096);
    gate.hold(stream);
    thread::scope(|scope| {
        let (bench, gate) = (Shared(&bench), Shared(&gate));
        let opener = scope.spawn(move || {
            thread::sleep(Duration::from_millis(50));
            let (bench, gate) = (bench, gate);
            bench.0.enter();
            gate.0.open();
        });
        // Far more than the queue holds: this goes on only once the gate opens.
        for value in 0..3000 {
            set(at, value, stream);
        }
        opener.join().unwrap();
    });
    sync(stream);
    assert_eq!(download::<u8>(at, 1), [(2999 % 256) as u8]);
    free(at);
    gate.destroy();
    destroy(stream);
}

#[test]
fn waiting_ends_at_its_timeout() {
    let _bench = Bench::new();
    let (stream, event, gate) = (stream(), event(), Gate::new());
    gate.hold(stream);
    let begin = Instant::now();
    unsafe {
        ok(aclrtRecordEvent(event, stream));
        fails(aclrtSynchronizeStreamWithTimeout(stream, 20), 507_046, &["in time"]);
        fails(aclrtSynchronizeEventWithTimeout(event, 20), 507_047, &["in time"]);
        fails(aclrtSynchronizeDeviceWithTimeout(20), 507_046, &["in time"]);
        fails(aclrtSynchronizeStreamWithTimeout(stream, -2), 107_000, &["timeout", "-2"]);
        assert!(begin.elapsed() >= Duration::from_millis(60));
        gate.open();
        ok(aclrtSynchronizeStreamWithTimeout(stream, -1));
        ok(aclrtSynchronizeEventWithTimeout(event, 10_000));
        ok(aclrtSynchronizeDevice());
        ok(aclrtDestroyEvent(event));
    }
    gate.destroy();
    destroy(stream);
}

#[test]
fn abort_drops_what_is_queued() {
    let _bench = Bench::new();
    let (stream, two, event, gate) = (stream(), crate::bench::stream(), event(), Gate::new());
    let at = malloc(4096);
    ok(unsafe { aclrtMemset(at, 4096, 1, 4096) });
    gate.hold(stream);
    set(at, 2, stream);
    unsafe {
        ok(aclrtRecordEvent(event, stream));
        ok(aclrtStreamWaitEvent(two, event));
        ok(aclrtStreamAbort(stream));
    }
    // Nobody waits for ever for what was dropped.
    sync(two);
    sync(stream);
    assert_eq!(download::<u8>(at, 4096), [1; 4096]);
    set(at, 3, stream);
    sync(stream);
    assert_eq!(download::<u8>(at, 4096), [3; 4096]);
    free(at);
    ok(unsafe { aclrtDestroyEvent(event) });
    gate.open();
    gate.destroy();
    destroy(stream);
    destroy(two);
}

#[test]
fn force_destroys_at_once_and_destroy_waits() {
    let _bench = Bench::new();
    let (one, two, gate) = (stream(), stream(), Gate::new());
    let at = malloc(4096);
    gate.hold(one);
    set(at, 1, one);
    ok(unsafe { aclrtDestroyStreamForce(one) });
    for _ in 0..50 {
        set(at, 7, two);
    }
    destroy(two);
    assert_eq!(download::<u8>(at, 4096), [7; 4096]);
    free(at);
    gate.destroy();
}

#[test]
fn streams_belong_to_a_context() {
    let first = Bench::new();
    let stream = stream();
    let second = Bench::new();
    let event = event();
    let mut id = 0;
    unsafe {
        fails(aclrtRecordEvent(event, stream), 107_003, &["another context"]);
        fails(aclrtMemsetAsync(null_mut(), 0, 0, 0, stream), 107_003, &["another context"]);
        fails(aclrtDestroyStream(null_mut()), 100_000, &["default stream"]);
        ok(aclrtStreamGetId(null_mut(), &mut id));
        drop(second);
        fails(aclrtSynchronizeStream(null_mut()), 107_002, &["no context"]);
        first.enter();
        let mut other = 0;
        ok(aclrtStreamGetId(stream, &mut other));
        assert_ne!(id, other);
        ok(aclrtDestroyEvent(event));
    }
    // The rest of a context's streams end with it.
    drop(first);
    let _third = Bench::new();
    fails(unsafe { aclrtSynchronizeStream(stream) }, 107_017, &["already destroyed"]);
}

/// Waits and queries take a stream of any context, and leave the thread's context as it is.
#[test]
fn streams_of_another_context_are_waited_for_and_queried() {
    let first = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let at = malloc(4096);
    gate.hold(stream);
    set(at, 5, stream);
    let second = Bench::new();
    let mut context = null_mut();
    unsafe {
        ok(aclrtGetCurrentContext(&mut context));
        assert!(!complete(stream));
        fails(aclrtSynchronizeStreamWithTimeout(stream, 5), 507_046, &["aclrtSynchronizeStreamWithTimeout"]);
        first.enter();
        gate.open();
        second.enter();
        ok(aclrtSynchronizeStream(stream));
        ok(aclrtSynchronizeStreamWithTimeout(stream, 1000));
        assert!(complete(stream));
        let mut now = null_mut();
        ok(aclrtGetCurrentContext(&mut now));
        assert_eq!(now, context);
        // What the wait has ordered may be read.
        assert_eq!(download::<u8>(at, 64), [5; 64]);
        // A thread without a context is refused, as in CANN.
        let handle = stream.expose_provenance();
        let alone = thread::spawn(move || {
            let stream = with_exposed_provenance_mut(handle);
            fails(aclrtSynchronizeStream(stream), 107_002, &["no context"]);
        });
        alone.join().unwrap();
    }
    first.enter();
    free(at);
    gate.destroy();
    destroy(stream);
    drop(second);
    drop(first);
}

#[test]
fn configurations_are_checked() {
    let _bench = Bench::new();
    let mut stream = null_mut();
    unsafe {
        fails(aclrtCreateStreamWithConfig(&mut stream, 8, 0), 107_000, &["priority"]);
        fails(aclrtCreateStreamWithConfig(&mut stream, 0, 0x8000), 107_000, &["flag", "0x8000"]);
        fails(aclrtCreateStream(null_mut()), 100_000, &["null"]);
        ok(aclrtCreateStreamWithConfig(&mut stream, 7, 3));
        let mut event = null_mut();
        fails(aclrtCreateEventWithFlag(&mut event, 0x1000), 107_000, &["0x1000"]);
    }
    destroy(stream);
}

/// A fork has none of the streams' threads: whoever waits there would wait for ever.
#[test]
fn a_forked_process_is_refused_instead_of_waiting_for_ever() {
    let _bench = Bench::new();
    let (stream, gate) = (stream(), Gate::new());
    let at = malloc(64);
    gate.hold(stream);
    ok(unsafe { aclrtMemsetAsync(at, 64, 1, 64, stream) });
    // SAFETY: the child calls nothing but functions of the emulator, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; the text of the latest error is valid until the next one.
        unsafe {
            libc::alarm(20);
            let refused = |status: i32, code: i32| {
                let text = aclGetRecentErrMsg();
                let named =
                    !text.is_null() && std::ffi::CStr::from_ptr(text).to_bytes().windows(6).any(|w| w == b"forked");
                status == code && named
            };
            let right = refused(aclrtSynchronizeStream(stream), 207_000)
                && refused(aclrtSynchronizeDevice(), 207_000)
                && refused(aclrtMemsetAsync(at, 64, 2, 64, stream), 207_000)
                && refused(aclrtDestroyStream(stream), 207_000)
                && refused(aclrtFree(at), 207_000)
                && refused(aclInit(std::ptr::null()), 207_000)
                && refused(aclnnInit(std::ptr::null()), 361_001);
            libc::_exit(if right { 0 } else { 1 });
        }
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: `status` is a place for the result.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    // The parent goes on.
    gate.open();
    sync(stream);
    assert_eq!(download::<u8>(at, 64), [1; 64]);
    free(at);
    gate.destroy();
    destroy(stream);
}

#[test]
fn attributes_of_a_stream_are_kept() {
    use aclrtStreamAttr as Attr;
    let _bench = Bench::new();
    let mut stream = null_mut();
    let value = |word: u32| aclrtStreamAttrValue { reserve: [word, 0, 0, 0] };
    unsafe {
        ok(aclrtCreateStreamWithConfig(&mut stream, 5, ACL_STREAM_FAST_LAUNCH));
        let (mut priority, mut flags) = (77, 77);
        ok(aclrtStreamGetPriority(stream, &mut priority));
        ok(aclrtStreamGetFlags(stream, &mut flags));
        assert_eq!((priority, flags), (5, ACL_STREAM_FAST_LAUNCH));
        ok(aclrtStreamGetPriority(null_mut(), &mut priority));
        assert_eq!(priority, 0);
        let (mut least, mut greatest) = (77, 77);
        ok(aclrtDeviceGetStreamPriorityRange(&mut least, &mut greatest));
        assert_eq!((least, greatest), (7, 0));

        let get = |attribute| {
            let mut found = value(77);
            ok(aclrtGetStreamAttribute(stream, attribute, &mut found));
            assert_eq!(found.reserve[1..], [0; 3]);
            found.reserve[0]
        };
        for (attribute, set) in [
            (Attr::ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK, 1),
            (Attr::ACL_STREAM_ATTR_USER_CUSTOM_TAG, 1234),
            (Attr::ACL_STREAM_ATTR_CACHE_OP_INFO, 1),
        ] {
            assert_eq!(get(attribute), 0);
            ok(aclrtSetStreamAttribute(stream, attribute, &mut value(set)));
            assert_eq!(get(attribute), set);
        }
        assert_eq!(get(Attr::ACL_STREAM_ATTR_PRIORITY), 5);
        assert_eq!(get(Attr::ACL_STREAM_ATTR_FAILURE_MODE), 0);
        let mut overflow = 77;
        ok(aclrtGetStreamOverflowSwitch(stream, &mut overflow));
        assert_eq!(overflow, 1);
        ok(aclrtSetStreamOverflowSwitch(stream, 0));
        assert_eq!(get(Attr::ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK), 0);

        let set = |attribute, word| aclrtSetStreamAttribute(stream, attribute, &mut value(word));
        fails(set(Attr::ACL_STREAM_ATTR_PRIORITY, 1), 207_000, &["priority"]);
        fails(set(Attr::ACL_STREAM_ATTR_CACHE_OP_INFO, 2), 107_000, &["2"]);
        fails(set(Attr(6), 1), 107_000, &["stmAttrType", "6"]);
        fails(aclrtSetStreamOverflowSwitch(stream, 2), 107_000, &["flag", "2"]);
        fails(aclrtSetStreamAttribute(stream, Attr(1), null_mut()), 100_000, &["value"]);
        fails(aclrtSetStreamFailureMode(stream, 2), 107_000, &["mode", "2"]);
    }
    destroy(stream);
}

#[test]
fn a_stream_stops_at_a_failure_if_told_to() {
    let _bench = Bench::new();
    let (stream, other) = (stream(), stream());
    let (at, event) = (malloc(4096), event());
    ok(unsafe { aclrtMemset(at, 4096, 1, 4096) });
    ok(unsafe { aclrtSetStreamFailureMode(stream, 1) });
    let call = Call::new(1);
    let fault = ascend_emu::inject(ascend_emu::Site::Launch, 1, 507_015);
    let gate = Gate::new();
    gate.hold(stream);
    call.run(stream);
    set(at, 2, stream);
    ok(unsafe { aclrtRecordEvent(event, stream) });
    // Those who wait for the stopped stream go on.
    ok(unsafe { aclrtStreamWaitEvent(other, event) });
    gate.open();
    sync(other);
    fails(unsafe { aclrtSynchronizeStream(stream) }, 507_015, &[]);
    fails(unsafe { aclrtSynchronizeStream(stream) }, 507_015, &[]);
    assert_eq!(download::<u8>(at, 4096), [1; 4096]);
    fails(unsafe { aclrtMemsetAsync(at, 4096, 3, 4096, stream) }, 507_015, &["ACL_STOP_ON_FAILURE"]);
    fails(unsafe { aclrtSetStreamFailureMode(stream, 0) }, 207_000, &["make another stream"]);
    drop(fault);
    // Aborting clears it.
    ok(unsafe { aclrtStreamAbort(stream) });
    set(at, 4, stream);
    sync(stream);
    assert_eq!(download::<u8>(at, 4096), [4; 4096]);
    call.destroy();
    gate.destroy();
    ok(unsafe { aclrtDestroyEvent(event) });
    free(at);
    destroy(stream);
    destroy(other);
}

#[test]
fn limits_of_cores_are_those_of_the_stream_then_of_the_device_then_of_the_chip() {
    use aclrtDevResLimitType as Cores;
    let _bench = Bench::new();
    let stream = stream();
    let (cube, vector) = (Cores::ACL_RT_DEV_RES_CUBE_CORE, Cores::ACL_RT_DEV_RES_VECTOR_CORE);
    unsafe {
        let device = |cores| {
            let mut value = 77;
            ok(aclrtGetDeviceResLimit(0, cores, &mut value));
            value
        };
        let of_stream = |cores| {
            let mut value = 77;
            ok(aclrtGetStreamResLimit(stream, cores, &mut value));
            value
        };
        let of_thread = |cores| {
            let mut value = 77;
            ok(aclrtGetResInCurrentThread(cores, &mut value));
            value
        };
        let (cubes, vectors) = (device(cube), device(vector));
        assert_eq!((cubes, vectors), (20, 40));
        ok(aclrtSetDeviceResLimit(0, cube, 12));
        assert_eq!((device(cube), device(vector)), (12, vectors));
        assert_eq!(of_stream(cube), 12);
        ok(aclrtSetStreamResLimit(stream, cube, 8));
        assert_eq!((of_stream(cube), of_thread(cube)), (8, 12));
        ok(aclrtUseStreamResInCurrentThread(stream));
        assert_eq!((of_thread(cube), of_thread(vector)), (8, vectors));
        // Another stream than the thread goes by is none of its business.
        ok(aclrtUnuseStreamResInCurrentThread(null_mut()));
        assert_eq!(of_thread(cube), 8);
        ok(aclrtUnuseStreamResInCurrentThread(stream));
        assert_eq!(of_thread(cube), 12);
        ok(aclrtResetStreamResLimit(stream));
        assert_eq!(of_stream(cube), 12);
        ok(aclrtResetDeviceResLimit(0));
        assert_eq!((device(cube), of_thread(cube)), (cubes, cubes));
        fails(aclrtSetDeviceResLimit(0, cube, cubes + 1), 107_000, &["value", "21"]);
        fails(aclrtSetStreamResLimit(stream, Cores(2), 1), 107_000, &["type", "2"]);
        fails(aclrtGetDeviceResLimit(64, cube, &mut 0), 107_001, &["device 64"]);
        fails(aclrtGetDeviceResLimit(0, cube, null_mut()), 100_000, &["value"]);
    }
    destroy(stream);
}
