//! Ranks that make different calls, or of which one does not come: every rank is told, soon, who differs in what.

use crate::*;
use ascend_sys::bindings::{HcclDataType, HcclReduceOp};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const F32: HcclDataType = HcclDataType::HCCL_DATA_TYPE_FP32;
const I32: HcclDataType = HcclDataType::HCCL_DATA_TYPE_INT32;
const SUM: HcclReduceOp = HcclReduceOp::HCCL_REDUCE_SUM;
const MAX: HcclReduceOp = HcclReduceOp::HCCL_REDUCE_MAX;

/// A rank with two buffers.
struct Two<'a> {
    rank: &'a Rank,
    a: *mut c_void,
    b: *mut c_void,
}

impl Two<'_> {
    fn all_reduce(&self, count: u64, dtype: HcclDataType, op: HcclReduceOp) {
        let Rank { comm, stream, .. } = *self.rank;
        fine(unsafe { HcclAllReduce(self.a, self.b, count, dtype, op, comm, stream) });
    }

    fn all_gather(&self, count: u64) {
        let Rank { comm, stream, .. } = *self.rank;
        fine(unsafe { HcclAllGather(self.a, self.b, count, F32, comm, stream) });
    }

    fn broadcast(&self, root: u32) {
        let Rank { comm, stream, .. } = *self.rank;
        fine(unsafe { HcclBroadcast(self.a, 8, F32, root, comm, stream) });
    }

    fn all_gather_v(&self, counts: [u64; 3]) {
        let Rank { comm, stream, .. } = *self.rank;
        let places = [0u64, 100, 200];
        let (counts_at, places) = (counts.as_ptr().cast(), places.as_ptr().cast());
        let own = counts[self.rank.index()];
        fine(unsafe { HcclAllGatherV(self.a, own, self.b, counts_at, places, F32, comm, stream) });
    }

    fn all_to_all_v(&self, sent: [u64; 3], received: [u64; 3]) {
        let Rank { comm, stream, .. } = *self.rank;
        let places = [0u64, 100, 200];
        let list = |list: &[u64; 3]| list.as_ptr().cast::<c_void>();
        let (sent, received, places) = (list(&sent), list(&received), list(&places));
        fine(unsafe { HcclAlltoAllV(self.a, sent, places, F32, self.b, received, places, F32, comm, stream) });
    }
}

/// Runs `call` on three ranks, of which rank 1 does something else, and asserts what each of them is told.
fn differ(call: impl Fn(&Two<'_>) + Sync, parts: &[&str]) {
    let (begun, queued) = (Instant::now(), Barrier::new(3));
    world(3, |one| {
        let (a, b) = (Memory::new(4096), Memory::new(4096));
        // No stream begins before every rank has queued its calls: a later one would be refused.
        let gate = Gate::new();
        gate.hold(one.stream);
        call(&Two { rank: one, a: a.at, b: b.at });
        queued.wait();
        gate.open();
        one.fails(parts);
        // The communicator is at an end, the device is not.
        let result = unsafe { HcclBarrier(one.comm, one.stream) };
        refused(result, HcclResult::HCCL_E_INTERNAL, &[&["HcclBarrier", "has failed"], parts].concat());
        ok(unsafe { aclrtMemsetAsync(a.at, 4096, 1, 4096, one.stream) });
        one.sync();
        gate.destroy();
    });
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn each_field_that_differs_is_named_on_every_rank() {
    let _alone = alone();
    let odd = |two: &Two<'_>| two.rank.rank == 1;
    differ(
        |two| match odd(two) {
            true => two.all_gather(8),
            false => two.all_reduce(8, F32, SUM),
        },
        &["operator: ", "HcclAllGather on rank 1", "HcclAllReduce on rank "],
    );
    differ(|two| two.all_reduce(if odd(two) { 7 } else { 8 }, F32, SUM), &["count: ", "7 on rank 1", "8 on rank "]);
    differ(
        |two| two.all_reduce(8, if odd(two) { I32 } else { F32 }, SUM),
        &["dataType: ", "INT32 on rank 1", "FLOAT on rank "],
    );
    differ(|two| two.all_reduce(8, F32, if odd(two) { MAX } else { SUM }), &["op: ", "MAX on rank 1", "SUM on rank "]);
    differ(|two| two.broadcast(if odd(two) { 2 } else { 0 }), &["root: ", "2 on rank 1", "0 on rank "]);
    differ(
        |two| two.all_gather_v(if odd(two) { [5, 6, 8] } else { [5, 6, 7] }),
        &["entry 2 of the counts", "8 on rank 1", "7 on rank "],
    );
    differ(
        |two| two.all_to_all_v([3; 3], if odd(two) { [3, 3, 4] } else { [3; 3] }),
        &["count: rank 2 sends 3 elements to rank 1, which expects 4"],
    );
}

#[test]
fn calls_in_another_order_are_named_with_their_numbers() {
    let _alone = alone();
    differ(
        |two| {
            two.all_reduce(8, F32, SUM);
            if two.rank.rank == 1 {
                two.broadcast(0);
                two.all_gather(8);
            } else {
                two.all_gather(8);
                two.broadcast(0);
            }
        },
        &["operator: ", "HcclBroadcast on rank 1", "HcclAllGather on rank ", "call 2 of rank ", "same order"],
    );
}

#[test]
fn a_rank_that_destroys_its_communicator_is_named_at_once() {
    let _alone = alone();
    let begun = Instant::now();
    world(3, |one| {
        let (a, b) = (Memory::new(4096), Memory::new(4096));
        let two = Two { rank: one, a: a.at, b: b.at };
        two.all_reduce(8, F32, SUM);
        one.sync();
        if one.rank == 1 {
            // The others wait by now, or come too late: they are told the same.
            std::thread::sleep(Duration::from_millis(100));
            one.destroy_comm();
        } else {
            two.all_gather(8);
            one.fails(&["HcclAllGather of 8 FLOAT", "rank 1", "its communicator was destroyed", "HcclAllReduce"]);
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_destroys_its_communicator_under_its_own_call_is_told_as_well() {
    let _alone = alone();
    world(2, |one| {
        let (a, b) = (Memory::new(4096), Memory::new(4096));
        let two = Two { rank: one, a: a.at, b: b.at };
        if one.rank == 0 {
            two.all_gather(8);
            std::thread::sleep(Duration::from_millis(100));
            one.destroy_comm();
            one.fails(&["HcclAllGather of 8 FLOAT", "rank 0"]);
        } else {
            std::thread::sleep(Duration::from_millis(300));
            let result = unsafe { HcclBarrier(one.comm, one.stream) };
            refused(result, HcclResult::HCCL_E_INTERNAL, &["rank 0", "its communicator was destroyed"]);
        }
    });
}

#[test]
fn a_stream_that_ends_with_a_call_in_it_fails_the_others() {
    let _alone = alone();
    for queued in [false, true] {
        let told = Barrier::new(2);
        world(3, |one| {
            let (a, b) = (Memory::new(4096), Memory::new(4096));
            let two = Two { rank: one, a: a.at, b: b.at };
            match one.rank {
                0 => {
                    two.all_gather(8);
                    if queued {
                        two.all_gather(8);
                    }
                    std::thread::sleep(Duration::from_millis(100));
                    let stream = std::mem::replace(&mut one.stream, null_mut());
                    ok(unsafe { aclrtDestroyStreamForce(stream) });
                }
                1 => {
                    two.all_gather(8);
                    one.fails(&["HcclAllGather", "rank 0"]);
                    told.wait();
                }
                // Rank 2 never comes, so that the others wait.
                _ => drop(told.wait()),
            }
        });
    }
}

#[test]
fn a_device_that_is_reset_takes_its_rank_away() {
    let _alone = alone();
    let info = root_info();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let context = enter(0);
            let (mut comm, stream, buffer) = (null_mut(), stream(), malloc(64));
            fine(unsafe { HcclCommInitRootInfo(2, &info, 0, &mut comm) });
            fine(unsafe { HcclBroadcast(buffer, 8, F32, 1, comm, stream) });
            fails(unsafe { aclrtSynchronizeStream(stream) }, 507_048, &["rank 1", "its device was reset"]);
            fine(unsafe { HcclCommDestroy(comm) });
            free(buffer);
            destroy(stream);
            ok(unsafe { aclrtDestroyContext(context) });
        });
        scope.spawn(|| {
            ok(unsafe { aclrtSetDevice(1) });
            let mut comm = null_mut();
            fine(unsafe { HcclCommInitRootInfo(2, &info, 1, &mut comm) });
            ok(unsafe { aclrtResetDevice(1) });
            fine(unsafe { HcclCommDestroy(comm) });
        });
    });
}
