//! Messages between two ranks.

use crate::*;
use ascend_sys::bindings::{HcclDataType, HcclSendRecvItem, HcclSendRecvType};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const I32: HcclDataType = HcclDataType::HCCL_DATA_TYPE_INT32;
const COUNT: usize = 300;

fn item(sends: bool, buf: *mut c_void, remote: u32) -> HcclSendRecvItem {
    let kind = if sends { HcclSendRecvType::HCCL_SEND } else { HcclSendRecvType::HCCL_RECV };
    HcclSendRecvItem { sendRecvType: kind, buf, count: COUNT as u64, dataType: I32, remoteRank: remote }
}

fn numbers_of(rank: u32, place: i32) -> Vec<i32> {
    (0..COUNT as i32).map(|at| at + 1000 * place + 100_000 * rank as i32).collect()
}

#[test]
fn messages_arrive_in_the_order_in_which_they_were_sent() {
    let _alone = alone();
    world(4, |one| {
        let Rank { rank, comm, stream, .. } = *one;
        let buffers: Vec<Memory> = (0..3).map(|place| Memory { at: upload(&numbers_of(rank, place)) }).collect();
        // Even ranks send three messages to the next one.
        for buffer in &buffers {
            fine(unsafe {
                match rank % 2 {
                    0 => HcclSend(buffer.at, COUNT as u64, I32, rank + 1, comm, stream),
                    _ => HcclRecv(buffer.at, COUNT as u64, I32, rank - 1, comm, stream),
                }
            });
        }
        fine(unsafe { HcclBarrier(comm, stream) });
        one.sync();
        for (buffer, place) in buffers.iter().zip(0..) {
            assert_eq!(download::<i32>(buffer.at, COUNT), numbers_of(rank - rank % 2, place));
        }
    });
}

#[test]
fn a_ring_of_batches_turns_and_a_rank_may_send_to_itself() {
    let _alone = alone();
    for size in 1..=RANKS {
        world(size, |one| {
            let Rank { rank, comm, stream, .. } = *one;
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            let [out, own] = [0, 1].map(|place| Memory { at: upload(&numbers_of(rank, place)) });
            let (from, back) = (Memory::new(4 * COUNT), Memory::new(4 * COUNT));
            let mut items = vec![
                item(true, out.at, next),
                item(true, own.at, rank),
                item(false, from.at, previous),
                item(false, back.at, rank),
                item(true, null_mut(), 99),
            ];
            if size == 1 {
                // Both messages have one channel, and come in their order.
                items.swap(1, 2);
            }
            fine(unsafe { HcclBatchSendRecv(items.as_mut_ptr(), items.len() as u32, comm, stream) });
            one.sync();
            assert_eq!(download::<i32>(from.at, COUNT), numbers_of(previous, 0));
            assert_eq!(download::<i32>(back.at, COUNT), numbers_of(rank, 1));
        });
    }
}

#[test]
fn ranks_that_both_send_first_are_told_that_they_wait_for_each_other() {
    let _alone = alone();
    let (begun, told) = (Instant::now(), Barrier::new(3));
    world(3, |one| {
        let Rank { rank, comm, stream, .. } = *one;
        let buffer = Memory::new(4 * COUNT);
        if rank < 2 {
            fine(unsafe { HcclSend(buffer.at, COUNT as u64, I32, 1 - rank, comm, stream) });
            fine(unsafe { HcclRecv(buffer.at, COUNT as u64, I32, 1 - rank, comm, stream) });
            one.fails(&["wait for each other", "rank 0 waits in its call 1, HcclSend", "rank 2 has made no call"]);
            told.wait();
        } else {
            // Rank 2 has no part in it, and its next call is refused.
            told.wait();
            refused(unsafe { HcclBarrier(comm, stream) }, HcclResult::HCCL_E_INTERNAL, &["wait for each other"]);
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_message_and_a_collective_that_wait_for_each_other_are_found() {
    let _alone = alone();
    world(2, |one| {
        let Rank { rank, comm, stream, .. } = *one;
        let buffer = Memory::new(4 * COUNT);
        fine(unsafe {
            match rank {
                0 => HcclBarrier(comm, stream),
                _ => HcclRecv(buffer.at, COUNT as u64, I32, 0, comm, stream),
            }
        });
        one.fails(&["wait for each other", "HcclBarrier", "HcclRecv"]);
    });
}

#[test]
fn a_message_of_another_size_or_type_is_named_on_both_ranks() {
    let _alone = alone();
    let other = HcclDataType::HCCL_DATA_TYPE_FP32;
    for (count, dtype, part) in [(7, I32, "expects 7 INT32"), (COUNT as u64, other, "expects 300 FLOAT")] {
        world(2, |one| {
            let Rank { rank, comm, stream, .. } = *one;
            let buffer = Memory::new(4 * COUNT);
            fine(unsafe {
                match rank {
                    0 => HcclSend(buffer.at, COUNT as u64, I32, 1, comm, stream),
                    _ => HcclRecv(buffer.at, count, dtype, 0, comm, stream),
                }
            });
            one.fails(&["rank 0 sends 300 INT32 to rank 1", part]);
        });
    }
}

#[test]
fn a_group_turns_a_ring_and_is_queued_when_its_outermost_one_ends() {
    let _alone = alone();
    refused(unsafe { HcclGroupEnd() }, HcclResult::HCCL_E_PARA, &["begun no group"]);
    world(3, |one| {
        let Rank { rank, size, comm, stream, .. } = *one;
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let (out, from) = (Memory { at: upload(&numbers_of(rank, 0)) }, Memory::new(4 * COUNT));
        let count = COUNT as u64;
        unsafe {
            fine(HcclGroupStart());
            // Each would wait for the other outside of a group.
            fine(HcclSend(out.at, count, I32, next, comm, stream));
            fine(HcclGroupStart());
            fine(HcclRecv(from.at, count, I32, previous, comm, stream));
            fine(HcclGroupEnd());
            // What is refused is not in the group.
            refused(HcclSend(out.at, count, I32, size, comm, stream), HcclResult::HCCL_E_PARA, &["given 3"]);
            refused(HcclSend(null_mut(), count, I32, next, comm, stream), HcclResult::HCCL_E_PTR, &["sendBuf is null"]);
            // Nothing is queued yet.
            one.sync();
            fine(HcclGroupEnd());
            one.sync();
            refused(HcclGroupEnd(), HcclResult::HCCL_E_PARA, &["HcclGroupStart"]);
        }
        assert_eq!(download::<i32>(from.at, COUNT), numbers_of(previous, 0));
        unsafe {
            // A rank sends to itself only what it receives; the group ends all the same.
            fine(HcclGroupStart());
            fine(HcclSend(out.at, count, I32, rank, comm, stream));
            refused(HcclGroupEnd(), HcclResult::HCCL_E_PARA, &["sends to itself"]);
            fine(HcclBarrier(comm, stream));
        }
        one.sync();
    });
}
