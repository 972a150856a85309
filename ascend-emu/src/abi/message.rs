//! Messages between two ranks (HCCL).

use super::communicator::not_null;
use super::rank_call::{Buffer, Caller, element};
use crate::collectives::{Call, Kind, Segment};
use crate::status::{HCCL_PARA, Outcome, failure, hccl};
use ascend_spec::DType;
use ascend_spec::collective::Share;
use ascend_sys::bindings::{HcclComm, HcclDataType, HcclResult, HcclSendRecvItem, HcclSendRecvType, aclrtStream};
use std::cell::RefCell;
use std::ffi::c_void;

/// One message of a call between ranks.
#[derive(Clone, Copy)]
struct Message {
    outwards: bool,
    buffer: Buffer<'static>,
    dtype: HcclDataType,
    peer: u32,
}

/// The groups that a thread has begun, one in the other, and what they send and receive: by communicator and stream.
#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<(HcclComm, aclrtStream, Vec<Message>)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub unsafe extern "C" fn HcclGroupStart() -> HcclResult {
    hccl(|| {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    })
}

pub unsafe extern "C" fn HcclGroupEnd() -> HcclResult {
    const NAME: &str = "HcclGroupEnd";
    hccl(|| {
        let calls = GROUP.with_borrow_mut(|group| -> Outcome<_> {
            let Some(depth) = group.depth.checked_sub(1) else {
                let fix = "call HcclGroupStart before, on this thread";
                return Err(failure!(HCCL_PARA, "{NAME}: this thread has begun no group; {fix}"));
            };
            group.depth = depth;
            Ok(if depth == 0 { std::mem::take(&mut group.calls) } else { Vec::new() })
        })?;
        // Each is queued, whatever is said of another.
        let outcomes =
            calls.iter().map(|(comm, stream, messages)| exchange(NAME, &Caller::new(NAME, *comm, *stream)?, messages));
        let outcomes: Vec<Outcome> = outcomes.collect();
        outcomes.into_iter().collect()
    })
}

/// Sends or receives one message, now or when the thread's group ends.
fn single(name: &'static str, message: Message, comm: HcclComm, stream: aclrtStream) -> Outcome {
    let caller = Caller::new(name, comm, stream)?;
    GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return exchange(name, &caller, &[message]);
        }
        segment(name, &caller, &message)?;
        match group.calls.iter_mut().find(|(known, on, _)| (*known, *on) == (comm, stream)) {
            Some((_, _, messages)) => messages.push(message),
            None => group.calls.push((comm, stream, vec![message])),
        }
        Ok(())
    })
}

/// Checks a message of a rank: what goes to a rank, or comes from it.
fn segment(name: &'static str, caller: &Caller, message: &Message) -> Outcome<Option<Segment>> {
    let dtype = element(name, message.dtype)?;
    let peer = caller.peer(name, "the other rank", message.peer)?;
    let segments = message.buffer.segments(Share::Whole, 1, dtype)?;
    Ok(segments.into_iter().next().map(|segment| Segment { peer, ..segment }))
}

/// Checks messages and queues them on the stream as one call. To itself a rank sends only what it also receives there.
fn exchange(name: &'static str, caller: &Caller, messages: &[Message]) -> Outcome {
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for message in messages {
        let side = if message.outwards { &mut sends } else { &mut receives };
        side.extend(segment(name, caller, message)?);
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
        if count == 0 { Ok(()) } else { single("HcclSend", message, comm, stream) }
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
        if count == 0 { Ok(()) } else { single("HcclRecv", message, comm, stream) }
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
        exchange(NAME, &Caller::new(NAME, comm, stream)?, &messages)
    })
}
