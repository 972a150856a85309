//! Faults on demand, and what is left after them.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Site, inject};
use std::ptr::null_mut;

#[test]
fn a_chosen_allocation_fails() {
    let _bench = Bench::new();
    let fault = inject(Site::Malloc, 2, 207_001);
    let at = malloc(32);
    let mut other = null_mut();
    fails(unsafe { aclrtMalloc(&mut other, 32, HUGE_FIRST) }, 207_001, &["fault on demand", "malloc"]);
    assert!(other.is_null());
    let third = malloc(32);
    drop(fault);
    free(at);
    free(third);
}

#[test]
fn a_device_fault_shows_at_the_next_synchronisation() {
    let _bench = Bench::new();
    let call = Call::new(1);
    let stream = stream();
    let _fault = inject(Site::Launch, 1, 507_015);
    call.run(stream);
    assert!({
        ok(unsafe { aclrtStreamWaitEvent(stream, event()) });
        true
    });
    fails(unsafe { aclrtSynchronizeStream(stream) }, 507_015, &["fault on demand"]);
    assert!(call.is_poisoned());
    sync(stream);
    call.run(stream);
    sync(stream);
    call.check(1);
    destroy(stream);
    call.destroy();
}

#[test]
fn the_first_of_several_faults_is_told_and_later_work_runs() {
    let _bench = Bench::new();
    let (call, other) = (Call::new(2), Call::new(12));
    let stream = stream();
    let first = inject(Site::Launch, 1, 507_015);
    let second = inject(Site::Launch, 2, 507_014);
    call.run(stream);
    call.run(stream);
    drop((first, second));
    other.run(stream);
    fails(unsafe { aclrtSynchronizeDevice() }, 507_015, &["fault on demand"]);
    assert!(call.is_poisoned());
    other.check(12);
    destroy(stream);
    call.destroy();
    other.destroy();
}

#[test]
fn an_event_tells_a_fault_too() {
    let _bench = Bench::new();
    let call = Call::new(3);
    let (stream, event) = (stream(), event());
    let _fault = inject(Site::Launch, 1, 507_035);
    call.run(stream);
    unsafe {
        ok(aclrtRecordEvent(event, stream));
        fails(aclrtSynchronizeEvent(event), 507_035, &["fault on demand"]);
        ok(aclrtSynchronizeEvent(event));
        ok(aclrtDestroyEvent(event));
    }
    destroy(stream);
    call.destroy();
}

#[test]
fn a_host_side_fault_of_a_launch_queues_nothing() {
    let _bench = Bench::new();
    let call = Call::new(4);
    let executor = call.prepare();
    let _fault = inject(Site::Launch, 1, 361_001);
    fails(call.launch(executor, null_mut()), 361_001, &["fault on demand"]);
    sync(null_mut());
    assert!(call.is_poisoned());
    // The executor was not used up.
    ok(call.launch(executor, null_mut()));
    sync(null_mut());
    call.check(4);
    call.destroy();
}

#[test]
fn synchronisations_and_copies_fail_when_chosen() {
    let _bench = Bench::new();
    let at = malloc(32);
    let _sync = inject(Site::Sync, 2, 507_014);
    let _copy = inject(Site::Memcpy, 1, 507_899);
    let host = [0u8; 32];
    unsafe {
        ok(aclrtSynchronizeDevice());
        fails(aclrtSynchronizeStream(null_mut()), 507_014, &["fault on demand", "sync"]);
        ok(aclrtSynchronizeStream(null_mut()));
        fails(aclrtMemcpy(at, 32, host.as_ptr().cast(), 32, H2D), 507_899, &["memcpy"]);
        ok(aclrtMemcpy(at, 32, host.as_ptr().cast(), 32, H2D));
    }
    free(at);
}

#[test]
fn last_errors_are_kept_per_thread() {
    let _bench = Bench::new();
    let level = ascend_sys::bindings::aclrtLastErrLevel::ACL_RT_THREAD_LEVEL;
    unsafe {
        aclrtGetLastError(level);
        fails(aclrtFree(null_mut()), 100_000, &["null"]);
        let other = std::thread::spawn(move || {
            assert_eq!(aclrtPeekAtLastError(level), 0);
            // Whether the thread has a device is a question.
            fails(aclrtGetDevice(&mut 0), 107_002, &["context"]);
            assert_eq!(aclrtPeekAtLastError(level), 0);
        });
        other.join().unwrap();
        assert_eq!(aclrtPeekAtLastError(level), 100_000);
        assert_eq!(aclrtGetLastError(level), 100_000);
        assert_eq!(aclrtGetLastError(level), 0);
        assert_eq!(message(), "", "a message is told once");
    }
}
