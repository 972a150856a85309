//! Calls that are refused before they are queued, by HCCL's codes, and calls that do nothing.

use crate::*;
use ascend_sys::bindings::{HcclDataType, HcclReduceOp};
use std::ptr::null;

const PARA: HcclResult = HcclResult::HCCL_E_PARA;
const PTR: HcclResult = HcclResult::HCCL_E_PTR;
const UNSUPPORTED: HcclResult = HcclResult::HCCL_E_NOT_SUPPORT;
const F32: HcclDataType = HcclDataType::HCCL_DATA_TYPE_FP32;
const SUM: HcclReduceOp = HcclReduceOp::HCCL_REDUCE_SUM;

#[test]
fn a_wrong_argument_is_refused_and_the_communicator_goes_on() {
    let _alone = alone();
    world(2, |one| {
        let Rank { comm, stream, rank, .. } = *one;
        let (a, b) = (Memory::new(1024), Memory::new(1024));
        let (a, b) = (a.at, b.at);
        let none = null_mut();
        let reduce = |send, receive, count, dtype: HcclDataType, op: HcclReduceOp, comm, stream| unsafe {
            HcclAllReduce(send, receive, count, dtype, op, comm, stream)
        };
        let rooted = |root| unsafe { HcclBroadcast(a, 4, F32, root, comm, stream) };
        let list = [4u64, 4];
        let (counts, list2) = (list.as_ptr().cast::<c_void>(), list.as_ptr().cast::<c_void>());
        let far = [0, u64::MAX];
        let far = far.as_ptr().cast::<c_void>();
        unsafe {
            refused(reduce(a, b, 4, F32, SUM, none, stream), PTR, &["communicator handle is null"]);
            refused(reduce(a, b, 4, F32, SUM, nowhere(), stream), PARA, &["no communicator"]);
            refused(reduce(a, b, 4, F32, SUM, stream, stream), PARA, &["(stream)", "not of a communicator"]);
            refused(reduce(a, b, 4, F32, SUM, comm, none), PTR, &["stream is null"]);
            refused(reduce(none, b, 4, F32, SUM, comm, stream), PTR, &["sendBuf is null"]);
            refused(reduce(a, none, 4, F32, SUM, comm, stream), PTR, &["recvBuf is null"]);
            refused(reduce(a, b, 1 << 35, F32, SUM, comm, stream), PARA, &["34359738368", "at most 34359738367"]);
            refused(reduce(a.byte_add(2), b, 4, F32, SUM, comm, stream), PARA, &["sendBuf", "multiples of 4"]);
            refused(reduce(a, b, 4, HcclDataType(12), SUM, comm, stream), UNSUPPORTED, &["dataType", "12"]);
            refused(reduce(a, b, 4, HcclDataType(255), SUM, comm, stream), UNSUPPORTED, &["dataType", "255"]);
            refused(reduce(a, b, 4, HcclDataType(15), SUM, comm, stream), UNSUPPORTED, &["dataType", "15"]);
            refused(reduce(a, b, 4, HcclDataType(9), SUM, comm, stream), UNSUPPORTED, &["SUM of UINT32"]);
            refused(reduce(a, b, 4, HcclDataType(11), HcclReduceOp(1), comm, stream), UNSUPPORTED, &["PROD of BF16"]);
            refused(reduce(a, b, 4, F32, HcclReduceOp(4), comm, stream), UNSUPPORTED, &["op: given 4"]);
            refused(rooted(2), PARA, &["root: given 2", "0 to 1"]);
            refused(HcclSend(a, 4, F32, 2, comm, stream), PARA, &["given 2"]);
            refused(HcclSend(a, 4, F32, rank, comm, stream), PARA, &["sends to itself"]);
            refused(HcclAlltoAll(a, 4, F32, a, 4, F32, comm, stream), PARA, &["have to differ"]);
            refused(HcclAlltoAll(a, 4, F32, b, 5, F32, comm, stream), PARA, &["recvCount: given 5"]);
            let other = HcclDataType::HCCL_DATA_TYPE_INT32;
            refused(HcclAlltoAll(a, 4, F32, b, 4, other, comm, stream), PARA, &["recvType"]);
            refused(HcclAllGatherV(a, 4, a, counts, list2, F32, comm, stream), PARA, &["have to differ"]);
            refused(HcclAllGatherV(a, 4, b, null(), list2, F32, comm, stream), PTR, &["recvCounts is null"]);
            refused(HcclAllGatherV(a, 4, b, counts, far, F32, comm, stream), PARA, &["rank 1", "address space"]);
            let prod = HcclReduceOp(1);
            let product = HcclReduceScatterV(a, counts, list2, b, 4, F32, prod, comm, stream);
            refused(product, UNSUPPORTED, &["PROD of FLOAT"]);
            // What has nothing to do looks at nothing else.
            fine(reduce(none, none, 0, HcclDataType(99), SUM, none, none));
            fine(HcclSend(none, 0, F32, 7, none, none));
            fine(HcclBatchSendRecv(null_mut(), 0, comm, stream));
            fine(reduce(a, b, 4, F32, SUM, comm, stream));
        }
        one.sync();
    });
}

#[test]
fn memory_that_a_call_reaches_past_is_a_fault_that_every_rank_is_told_of() {
    let _alone = alone();
    let queued = std::sync::Barrier::new(2);
    world(2, |one| {
        let (send, receive) = (Memory::new(1 << 20), Memory::new(1 << 20));
        if one.rank == 1 {
            // Afterwards the other rank's call would be refused.
            queued.wait();
        }
        // Rank 1 sends 32 kB more than it has.
        let at = if one.rank == 1 { unsafe { send.at.byte_add((1 << 20) - 16) } } else { send.at };
        fine(unsafe { HcclAllReduce(at, receive.at, 1 << 13, F32, SUM, one.comm, one.stream) });
        if one.rank == 0 {
            queued.wait();
        }
        let status = unsafe { aclrtSynchronizeStream(one.stream) };
        match one.rank {
            1 => fails(status, 507_015, &["sendBuf"]),
            _ => fails(status, 507_048, &["HcclAllReduce", "rank 1", "never run"]),
        }
    });
}
