//! Collectives in streams: queued, captured and replayed, and watched by the sanitizer.

use crate::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::{HcclDataType, HcclReduceOp};
use std::time::{Duration, Instant};

const F32: HcclDataType = HcclDataType::HCCL_DATA_TYPE_FP32;
const SUM: HcclReduceOp = HcclReduceOp::HCCL_REDUCE_SUM;

#[test]
fn a_call_does_not_hold_up_the_host_and_comes_in_the_order_of_its_stream() {
    let _alone = alone();
    world(2, |one| {
        let (a, b) = (Memory { at: upload(&[1f32; 16]) }, Memory::new(64));
        if one.rank == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let begun = Instant::now();
        for _ in 0..10 {
            fine(unsafe { HcclAllReduce(a.at, b.at, 16, F32, SUM, one.comm, one.stream) });
            ok(unsafe { aclrtMemcpyAsync(a.at, 64, b.at, 64, D2D, one.stream) });
        }
        assert!(begun.elapsed() < Duration::from_millis(250), "{:?}", begun.elapsed());
        one.sync();
        assert_eq!(download::<f32>(b.at, 16), [1024.0; 16]);
    });
}

#[test]
fn a_captured_call_meets_the_others_in_each_replay() {
    let _alone = alone();
    world(3, |one| {
        let a = Memory { at: upload(&[1f32; 16]) };
        let graph = unsafe {
            ok(aclmdlRICaptureBegin(one.stream, RELAXED));
            fine(HcclAllReduce(a.at, a.at, 16, F32, SUM, one.comm, one.stream));
            let mut graph = null_mut();
            ok(aclmdlRICaptureEnd(one.stream, &mut graph));
            graph
        };
        assert_eq!(download::<f32>(a.at, 16), [1.0; 16]);
        for _ in 0..2 {
            ok(unsafe { aclmdlRIExecuteAsync(graph, one.stream) });
            fine(unsafe { HcclBarrier(one.comm, one.stream) });
        }
        // A call that is not captured meets a captured one.
        if one.rank == 0 {
            fine(unsafe { HcclAllReduce(a.at, a.at, 16, F32, SUM, one.comm, one.stream) });
        } else {
            ok(unsafe { aclmdlRIExecuteAsync(graph, one.stream) });
        }
        one.sync();
        assert_eq!(download::<f32>(a.at, 16), [27.0; 16]);
        one.destroy_comm();
        ok(unsafe { aclmdlRIExecuteAsync(graph, one.stream) });
        one.fails(&["HcclAllReduce", "its communicator was destroyed"]);
        ok(unsafe { aclmdlRIDestroy(graph) });
    });
}

#[test]
fn strict_checks_know_what_both_sides_touch() {
    let _alone = alone();
    world(2, |one| {
        let (a, b) = (Memory { at: upload(&[1f32; 16]) }, Memory { at: upload(&[0f32; 16]) });
        {
            // Races are found from what was queued, whether the other rank has come or not.
            let races = "strict".parse::<Check>().unwrap();
            let _strict = check_scope(races);
            let other = stream();
            fine(unsafe { HcclAllReduce(a.at, b.at, 16, F32, SUM, one.comm, one.stream) });
            for (at, what) in [(a.at, "sendBuf"), (b.at, "recvBuf")] {
                let status = unsafe { aclrtMemsetAsync(at, 64, 0, 64, other) };
                fails(status, 107_000, &["HcclAllReduce", what, "another stream"]);
                fails(unsafe { aclrtFree(at) }, 207_002, &["HcclAllReduce", what]);
            }
            let mut host = [0f32; 16];
            let status = unsafe { aclrtMemcpy(host.as_mut_ptr().cast(), 64, b.at, 64, D2H) };
            fails(status, 107_000, &["HcclAllReduce", "recvBuf", "no synchronisation"]);
            // A call that is refused is not queued.
            let end = unsafe { a.at.byte_add(48) };
            let result = unsafe { HcclAllGather(end, b.at, 16, F32, one.comm, one.stream) };
            refused(result, HcclResult::HCCL_E_PARA, &["out of bounds", "sendBuf"]);
            one.sync();
            destroy(other);
        }
        assert_eq!(download::<f32>(b.at, 16), [2.0; 16]);
        assert_eq!(download::<f32>(a.at, 16), [1.0; 16]);
    });
}
