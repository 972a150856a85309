//! Events: order between streams, times, waits.

use super::streams::{complete, set};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::{aclrtEventRecordedStatus, aclrtEventWaitStatus};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::thread;
use std::time::{Duration, Instant};

fn recorded(event: *mut c_void) -> bool {
    let mut status = aclrtEventRecordedStatus(77);
    ok(unsafe { aclrtQueryEventStatus(event, &mut status) });
    status == aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE
}

fn waits_over(event: *mut c_void) -> bool {
    let mut status = aclrtEventWaitStatus::ACL_EVENT_WAIT_STATUS_RESERVED;
    ok(unsafe { aclrtQueryEventWaitStatus(event, &mut status) });
    status == aclrtEventWaitStatus::ACL_EVENT_WAIT_STATUS_COMPLETE
}

#[test]
fn an_event_orders_two_streams() {
    let _bench = Bench::new();
    for _ in 0..20 {
        let (one, two, event, gate) = (stream(), stream(), event(), Gate::new());
        let (a, b) = (malloc(4096), malloc(4096));
        gate.hold(one);
        set(a, 5, one);
        unsafe {
            ok(aclrtRecordEvent(event, one));
            ok(aclrtStreamWaitEvent(two, event));
            ok(aclrtMemcpyAsync(b, 4096, a, 4096, D2D, two));
        }
        assert!(!complete(two) && !recorded(event) && !waits_over(event));
        gate.open();
        sync(two);
        assert!(recorded(event) && waits_over(event));
        assert_eq!(download::<u8>(b, 4096), [5; 4096]);
        free(a);
        free(b);
        ok(unsafe { aclrtDestroyEvent(event) });
        gate.destroy();
        destroy(one);
        destroy(two);
    }
}

#[test]
fn an_event_never_recorded_holds_nobody_up() {
    let _bench = Bench::new();
    let (stream, event) = (stream(), event());
    ok(unsafe { aclrtStreamWaitEvent(stream, event) });
    sync(stream);
    assert!(!recorded(event) && waits_over(event));
    // In compat this is a finding, and the wait succeeds.
    ok(unsafe { aclrtSynchronizeEvent(event) });
    ok(unsafe { aclrtDestroyEvent(event) });
    destroy(stream);
}

#[test]
fn a_wait_takes_the_record_of_its_time() {
    let _bench = Bench::new();
    let (one, two, event, gate) = (stream(), stream(), event(), Gate::new());
    unsafe {
        ok(aclrtRecordEvent(event, one));
        ok(aclrtStreamWaitEvent(two, event));
        gate.hold(one);
        // A later record of the same event does not concern the wait.
        ok(aclrtRecordEvent(event, one));
    }
    sync(two);
    assert!(!recorded(event));
    gate.open();
    ok(unsafe { aclrtSynchronizeEvent(event) });
    assert!(recorded(event));
    ok(unsafe { aclrtDestroyEvent(event) });
    gate.destroy();
    destroy(one);
    destroy(two);
}

#[test]
fn a_destroyed_event_still_does_what_was_queued() {
    let _bench = Bench::new();
    let (one, two, event, gate) = (stream(), stream(), event(), Gate::new());
    gate.hold(one);
    unsafe {
        ok(aclrtRecordEvent(event, one));
        ok(aclrtStreamWaitEvent(two, event));
        ok(aclrtDestroyEvent(event));
        fails(aclrtRecordEvent(event, one), 107_017, &["event", "already destroyed"]);
    }
    assert!(!complete(two));
    gate.open();
    sync(two);
    gate.destroy();
    destroy(one);
    destroy(two);
}

#[test]
fn reset_makes_an_event_unrecorded() {
    let _bench = Bench::new();
    let (stream, event) = (stream(), event());
    unsafe {
        ok(aclrtRecordEvent(event, stream));
        sync(stream);
        assert!(recorded(event));
        ok(aclrtResetEvent(event, stream));
        sync(stream);
        assert!(!recorded(event));
        ok(aclrtStreamWaitEvent(stream, event));
        sync(stream);
        ok(aclrtRecordEvent(event, stream));
        sync(stream);
        assert!(recorded(event));
        ok(aclrtDestroyEvent(event));
    }
    destroy(stream);
}

#[test]
fn time_between_events() {
    let _bench = Bench::new();
    let (stream, start, end, gate) = (stream(), event(), event(), Gate::new());
    let mut ms = -1.0;
    unsafe {
        fails(aclrtEventElapsedTime(&mut ms, start, end), 107_006, &["start event", "not recorded"]);
        ok(aclrtRecordEvent(start, stream));
        sync(stream);
        gate.hold(stream);
        ok(aclrtRecordEvent(end, stream));
        thread::sleep(Duration::from_millis(20));
        fails(aclrtEventElapsedTime(&mut ms, start, end), 107_006, &["end event"]);
        gate.open();
        sync(stream);
        ok(aclrtEventElapsedTime(&mut ms, start, end));
        assert!((20.0..10_000.0).contains(&ms), "{ms}");
        fails(aclrtEventElapsedTime(&mut ms, end, start), 107_007, &["before"]);
        let mut untimed = null_mut();
        ok(aclrtCreateEventWithFlag(&mut untimed, ascend_sys::bindings::ACL_EVENT_SYNC));
        fails(aclrtEventElapsedTime(&mut ms, untimed, end), 107_006, &["ACL_EVENT_TIME_LINE"]);
        for event in [start, end, untimed] {
            ok(aclrtDestroyEvent(event));
        }
    }
    gate.destroy();
    destroy(stream);
}

#[test]
fn a_wait_in_a_stream_ends_at_its_limit() {
    let _bench = Bench::new();
    let (waiting, late, gate) = (stream(), stream(), Gate::new());
    let event = event();
    gate.hold(late);
    ok(unsafe { aclrtRecordEvent(event, late) });
    ok(unsafe { aclrtSetOpWaitTimeout(1) });
    ok(unsafe { aclrtStreamWaitEvent(waiting, event) });
    ok(unsafe { aclrtSetOpWaitTimeout(0) });
    let begun = Instant::now();
    fails(unsafe { aclrtSynchronizeStream(waiting) }, 107_020, &["aclrtSetOpWaitTimeout", "1 s"]);
    assert!(begun.elapsed() >= Duration::from_millis(900));
    ok(unsafe { aclrtStreamWaitEvent(waiting, event) });
    gate.open();
    sync(waiting);
    sync(late);
    ok(unsafe { aclrtDestroyEvent(event) });
    gate.destroy();
    destroy(waiting);
    destroy(late);
}

#[test]
fn timestamps_of_events_rise() {
    let _bench = Bench::new();
    let (first, second) = (event(), event());
    let stamp = |event| {
        let mut microseconds = u64::MAX;
        let status = unsafe { aclrtEventGetTimestamp(event, &mut microseconds) };
        (status, microseconds)
    };
    assert_eq!(stamp(first).0, 107_006);
    ok(unsafe { aclrtRecordEvent(first, null_mut()) });
    sync(null_mut());
    thread::sleep(Duration::from_millis(2));
    ok(unsafe { aclrtRecordEvent(second, null_mut()) });
    sync(null_mut());
    let (one, two) = (stamp(first), stamp(second));
    assert_eq!((one.0, two.0), (0, 0));
    assert!(two.1 >= one.1 + 2000, "{one:?} {two:?}");
    let mut ms = 0.0;
    ok(unsafe { aclrtEventElapsedTime(&mut ms, first, second) });
    assert!((f64::from(ms) * 1e3 - (two.1 - one.1) as f64).abs() < 2.0);
    fails(unsafe { aclrtEventGetTimestamp(first, null_mut()) }, 100_000, &["timestamp"]);
    for event in [first, second] {
        ok(unsafe { aclrtDestroyEvent(event) });
    }
}

#[test]
fn limits_of_time_are_multiples_of_their_unit() {
    let _bench = Bench::new();
    let (mut unit, mut actual, mut told) = (0, 0, 0);
    unsafe {
        ok(aclrtGetOpTimeOutInterval(&mut unit));
        for (given, units) in [(0, 254), (1, 1), (unit, 1), (unit + 1, 2), (u64::MAX, 254)] {
            ok(aclrtSetOpExecuteTimeOutV2(given, &mut actual));
            assert_eq!(actual, units * unit);
        }
        ok(aclrtSetOpExecuteTimeOut(1));
        ok(aclrtGetOpExecuteTimeout(&mut told));
        assert_eq!(u64::from(told), unit / 1000);
        ok(aclrtSetOpExecuteTimeOut(0));
        ok(aclrtGetOpExecuteTimeout(&mut told));
        assert_eq!(u64::from(told), 254 * unit / 1000);
        fails(aclrtSetOpExecuteTimeOutV2(1, null_mut()), 100_000, &["actualTimeout"]);
    }
}
