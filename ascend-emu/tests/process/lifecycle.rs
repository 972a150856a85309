//! Before `aclInit`, with devices set and reset, and after `aclFinalize`: everything is given back.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{FindingKind, findings, live};
use std::ptr::{null, null_mut};

/// Calls before `aclInit`, of which a device needs none, and before a device is chosen.
pub(crate) fn begin() {
    let mut at = null_mut();
    unsafe {
        for (status, code) in [
            (aclrtMalloc(&mut at, 32, HUGE_FIRST), 107_002),
            (aclrtCreateStream(&mut at), 107_002),
            (aclrtSynchronizeDevice(), 107_002),
        ] {
            fails(status, code, &[]);
        }
        fails(aclFinalize(), 100_001, &["aclInit was not called"]);
        ok(aclrtSetDevice(0));
        let early = malloc(32);
        let stream = stream();
        ok(aclrtMemsetAsync(early, 32, 7, 32, stream));
        sync(stream);
        assert_eq!(download::<u8>(early, 32), [7; 32]);
        fails(aclInit(c"/nowhere/acl.json".as_ptr()), 100_003, &["/nowhere/acl.json"]);
        init();
        // The device, its memory and its streams stay as they were.
        assert_eq!(download::<u8>(early, 32), [7; 32]);
        free(early);
        destroy(stream);
        ok(aclrtResetDevice(0));
        fails(aclInit(null()), 100_002, &["already called"]);
        ok(aclnnInit(null()));
        ok(aclnnFinalize());

        for status in [
            aclrtMalloc(&mut at, 32, HUGE_FIRST),
            aclrtMallocHost(&mut at, 32),
            aclrtCreateStream(&mut at),
            aclrtCreateEvent(&mut at),
            aclrtSynchronizeStream(null_mut()),
            aclrtSynchronizeDevice(),
            aclrtGetCurrentContext(&mut at),
        ] {
            fails(status, 107_002, &[]);
        }
        assert!(live().is_empty(), "{:?}", live());
    }
}

/// Devices are set and reset, and the process ends.
pub(crate) fn end() {
    assert!(live().is_empty(), "{:?}", live());
    unsafe {
        // Devices are counted; the last reset ends the context and what is in it.
        let primary = |device| {
            let mut active = -1;
            ok(aclrtGetPrimaryCtxState(device, null_mut(), &mut active));
            active
        };
        assert_eq!(primary(1), 0);
        ok(aclrtSetDevice(1));
        assert_eq!((primary(0), primary(1)), (0, 1));
        // A device's work can be dropped at any time.
        ok(aclrtDeviceTaskAbort(1, 0));
        let mut context = null_mut();
        ok(aclrtGetCurrentContext(&mut context));
        ok(aclrtSetDevice(1));
        let mut again = null_mut();
        ok(aclrtGetCurrentContext(&mut again));
        assert_eq!(context, again);
        fails(aclrtDestroyContext(context), 107_000, &["default context"]);
        let call = Call::new(1);
        call.run(null_mut());
        ok(aclrtResetDevice(1));
        sync(null_mut());
        call.check(1);
        call.destroy();
        let stream = stream();
        let leaked = malloc(100);
        assert!(!live().is_empty());
        ok(aclrtMemsetAsync(leaked, 100, 0, 100, stream));
        ok(aclrtResetDevice(1));
        fails(aclrtSynchronizeStream(stream), 107_002, &["context was destroyed"]);
        assert!(live().is_empty(), "{:?}", live());
        let leak = findings().into_iter().find(|f| f.kind == FindingKind::Leak).unwrap();
        assert!(leak.message.contains("1 allocations of 100 bytes"), "{leak}");

        // Each kind of object is counted and gone when destroyed.
        ok(aclrtSetDevice(0));
        let call = Call::new(2);
        let executor = call.prepare();
        let event = event();
        let stream = crate::bench::stream();
        ok(aclmdlRICaptureBegin(stream, RELAXED));
        let mut group = null_mut();
        ok(aclmdlRICaptureTaskGrpBegin(stream));
        ok(aclmdlRICaptureTaskGrpEnd(stream, &mut group));
        let mut graph = null_mut();
        ok(aclmdlRICaptureEnd(stream, &mut graph));
        let ints = aclCreateIntArray([1].as_ptr(), 1);
        let mut pinned = null_mut();
        ok(aclrtMallocHost(&mut pinned, 10));
        let counted = live();
        assert_eq!((counted.tensors, counted.tensor_lists), (5, 2));
        assert_eq!((counted.executors, counted.int_arrays), (1, 1));
        assert_eq!((counted.streams, counted.events), (1, 1));
        assert_eq!((counted.graphs, counted.task_groups), (1, 1));
        assert_eq!((counted.contexts, counted.host_allocations), (1, 1));
        assert_eq!(counted.device_allocations, 6);
        ok(aclDestroyAclOpExecutor(executor));
        ok(aclrtDestroyEvent(event));
        ok(aclmdlRIDestroy(graph));
        ok(aclDestroyIntArray(ints));
        ok(aclrtFreeHost(pinned));
        call.destroy();
        destroy(stream);
        ok(aclrtResetDeviceForce(0));
        assert!(live().is_empty(), "{:?}", live());

        ok(aclFinalize());
        fails(aclFinalize(), 100_037, &["already called"]);
        fails(aclInit(null()), 100_002, &["cannot be called again"]);
        fails(aclrtSetDevice(0), 100_001, &["aclFinalize"]);
    }
}
