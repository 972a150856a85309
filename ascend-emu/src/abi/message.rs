//! Messages between two ranks (HCCL).

use super::communicator::not_null;
use super::rank_call::{Buffer, Caller, element};
use crate::collectives::{Call, Kind, Segment};
use crate::status::{HCCL_PARA, Outcome, failure, hccl};
use ascend_spec::DType;
use ascend_spec::collective::Share;
use ascend_sys::bindings::{HcclComm, HcclDataType, HcclResult, HcclSendRecvItem, HcclSendRecvType, aclrtStream};
use std::ffi::c_void;

/// One message of a call between ranks.
struct Message {
    outwards: bool,
    buffer: Buffer<'static>,
    dtype: HcclDataType,
    peer: u32,
}

/// Checks messages and queues them on the stream as one call. To itself a rank sends only what it also receives there.
fn exchange(name: &'static str, messages: &[Message], comm: HcclComm, stream: aclrtStream) -> Outcome {
    let caller = Caller::new(name, comm, stream)?;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for Message { outwards, buffer, dtype, peer } in messages {
        let dtype = element(name, *dtype)?;
        let peer = caller.peer(name, "the other rank", *peer)?;
        let segment = buffer.segments(Share::Whole, 1, dtype)?;
        let side = if *outwards { &mut sends } else { &mut receives };
        side.extend(segment.into_iter().map(|segment| Segment { peer, ..segment }));
    }
    let own = |side: &[Segment]| -> Vec<(DType, usize)> {
        let own = side.iter().filter(|segment| segment.peer == caller.member.rank);
        own.map(|segment| (segment.dtype, segment.bytes)).collect()
    };
    if own(&sends) != own(&receives) {
        return Err(failure!(
            HCCL_PARA,
            "{name}: what rank {} sends to itself has to be what it receives from itself, in the same call",
            caller.member.rank
        ));
    }
    let Some(dtype) = sends.iter().chain(&receives).next().map(|segment| segment.dtype) else {
        return Ok(());
    };
    let (root, reduction) = (None, None);
    let kind = Kind::PointToPoint(name);
    caller.submit(Call {
        rank: caller.member.rank,
        kind,
        dtype,
        reduction,
        root,
        count: None,
        lists: Vec::new(),
        sends,
        receives,
    })
}

pub unsafe extern "C" fn HcclSend(
    sendBuf: *mut c_void,
    count: u64,
    dataType: HcclDataType,
    destRank: u32,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    hccl(|| {
        let buffer = Buffer::new("sendBuf", sendBuf, count);
        let message = Message { outwards: true, buffer, dtype: dataType, peer: destRank };
        if count == 0 { Ok(()) } else { exchange("HcclSend", &[message], comm, stream) }
    })
}

pub unsafe extern "C" fn HcclRecv(
    recvBuf: *mut c_void,
    count: u64,
    dataType: HcclDataType,
    srcRank: u32,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    hccl(|| {
        let buffer = Buffer::new("recvBuf", recvBuf, count);
        let message = Message { outwards: false, buffer, dtype: dataType, peer: srcRank };
        if count == 0 { Ok(()) } else { exchange("HcclRecv", &[message], comm, stream) }
    })
}

pub unsafe extern "C" fn HcclBatchSendRecv(
    sendRecvInfo: *mut HcclSendRecvItem,
    itemNum: u32,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    const NAME: &str = "HcclBatchSendRecv";
    hccl(|| {
        if itemNum == 0 {
            return Ok(());
        }
        not_null("sendRecvInfo", sendRecvInfo)?;
        let mut messages = Vec::new();
        for at in 0..itemNum as usize {
            // SAFETY: not null, so valid for reading as many items.
            let item = unsafe { sendRecvInfo.add(at).read_unaligned() };
            let outwards = match item.sendRecvType {
                HcclSendRecvType::HCCL_SEND => true,
                HcclSendRecvType::HCCL_RECV => false,
                HcclSendRecvType(other) => {
                    let allowed = "HCCL_SEND (0), HCCL_RECV (1)";
                    return Err(failure!(HCCL_PARA, "{NAME}: sendRecvType: given {other}, allowed: {allowed}"));
                }
            };
            // HCCL leaves out items without a buffer.
            if item.buf.is_null() || item.count == 0 {
                continue;
            }
            let buffer = Buffer::new("buf", item.buf, item.count);
            messages.push(Message { outwards, buffer, dtype: item.dataType, peer: item.remoteRank });
        }
        exchange(NAME, &messages, comm, stream)
    })
}
