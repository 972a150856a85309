//! Collectives (HCCL).

use super::communicator::not_null;
use super::rank_call::{Buffer, Caller, element, reduction};
use crate::collectives::{COMMUNICATORS, Call, Kind};
use crate::runtime::context;
use crate::status::{HCCL_NOT_SUPPORTED, HCCL_PARA, Outcome, failure, hccl};
use ascend_spec::collective::{Collective, Root, reduces};
use ascend_sys::bindings::{HcclComm, HcclDataType, HcclReduceOp, HcclResult, aclrtStream};
use std::ffi::c_void;

/// One call of a collective, as its C function was given it.
struct Arguments<'a> {
    collective: Collective,
    send: Buffer<'a>,
    receive: Buffer<'a>,
    dtype: HcclDataType,
    op: Option<HcclReduceOp>,
    root: Option<u32>,
}

impl<'a> Arguments<'a> {
    fn new(collective: Collective, send: Buffer<'a>, receive: Buffer<'a>, dtype: HcclDataType) -> Self {
        Arguments { collective, send, receive, dtype, op: None, root: None }
    }

    /// Checks the call and queues it on the stream.
    fn call(self, comm: HcclComm, stream: aclrtStream) -> Outcome {
        let Arguments { collective, send, receive, dtype, op, root } = self;
        let name = collective.function();
        let caller = Caller::new(name, comm, stream)?;
        let soc = context::machine().target.soc;
        if !collective.runs_on(soc) {
            return Err(failure!(HCCL_NOT_SUPPORTED, "{name}: {soc} does not have it"));
        }
        let dtype = element(name, dtype)?;
        let reduction = op.map(|op| reduction(name, op)).transpose()?;
        if let Some(reduction) = reduction.filter(|one| !reduces(soc, collective, dtype, *one)) {
            let (op, dtype) = (reduction.name(), dtype.name());
            return Err(failure!(HCCL_NOT_SUPPORTED, "{name}: dataType and op: {soc} has no {op} of {dtype} there"));
        }
        let root = root.map(|root| caller.peer(name, "root", root)).transpose()?;
        if collective.forbids_in_place() && send.address == receive.address && send.address != 0 {
            return Err(failure!(HCCL_PARA, "{name}: sendBuf and recvBuf are the same, and have to differ"));
        }
        let (size, rank) = (caller.member.size, caller.member.rank);
        let is_root = root == Some(rank);
        let (sends, receives) = match collective.root() {
            Root::Nothing => (true, true),
            Root::Sends => (is_root, true),
            Root::Receives => (true, is_root),
        };
        let segments = |part: bool, buffer: Buffer<'_>, share| match part {
            true => buffer.segments(share, size, dtype),
            false => Ok(Vec::new()),
        };
        let mut send_segments = segments(sends, send, collective.sent())?;
        let mut receive_segments = segments(receives, receive, collective.received())?;
        match (collective.root(), root) {
            (Root::Sends, Some(root)) => receive_segments.retain(|segment| segment.peer == root),
            (Root::Receives, Some(root)) => send_segments.retain(|segment| segment.peer == root),
            _ => {}
        }
        if is_root && send.address == receive.address && collective.root() == Root::Sends {
            // What the root sends stands where it would receive it.
            send_segments.retain(|segment| segment.peer != rank);
            receive_segments.clear();
        }
        // Arrays that belong to all ranks; those of exchanges are compared pair by pair.
        let lists = match collective {
            Collective::AlltoAllV | Collective::AlltoAllVC => Vec::new(),
            _ => {
                let shared = [send.parts, receive.parts].into_iter().flatten();
                shared.flat_map(|(counts, places)| counts.iter().chain(places)).copied().collect()
            }
        };
        let even = send.parts.is_none() && receive.parts.is_none();
        caller.submit(Call {
            rank,
            kind: Kind::Collective(collective),
            dtype,
            reduction,
            root: root.map(|root| root as u32),
            count: even.then_some(receive.count),
            lists,
            sends: send_segments,
            receives: receive_segments,
        })
    }
}

/// Refuses a null array of one number for each rank; otherwise copies it.
///
/// # Safety
///
/// `array` is null or valid for reading `len` numbers.
unsafe fn array(name: &str, array: *const c_void, len: usize) -> Outcome<Vec<u64>> {
    not_null(name, array)?;
    // SAFETY: not null, so valid for reading; C may give it any alignment.
    Ok((0..len).map(|at| unsafe { array.cast::<u64>().add(at).read_unaligned() }).collect())
}

pub unsafe extern "C" fn HcclBarrier(comm: HcclComm, stream: aclrtStream) -> HcclResult {
    let nothing = Buffer::new("no buffer", std::ptr::null(), 0);
    let float = HcclDataType::HCCL_DATA_TYPE_FP32;
    hccl(|| Arguments::new(Collective::Barrier, nothing, nothing, float).call(comm, stream))
}

/// Defines collectives whose buffers have one count.
macro_rules! collectives {
    ($(
        $collective:ident $name:ident ( $send:ident, $receive:ident, $count:ident, $dtype:ident
            $(, op $op:ident)? $(, root $root:ident)? )
            = ( $($argument:ident : $type:ty),* );
    )*) => {
        $(
            pub unsafe extern "C" fn $name($($argument: $type,)* comm: HcclComm, stream: aclrtStream) -> HcclResult {
                hccl(|| {
                    if $count == 0 {
                        return Ok(());
                    }
                    let send = Buffer::new(stringify!($send), $send, $count);
                    let receive = Buffer::new(stringify!($receive), $receive, $count);
                    #[allow(unused_mut, reason = "not every collective has an operation or a root")]
                    let mut arguments = Arguments::new(Collective::$collective, send, receive, $dtype);
                    $( arguments.op = Some($op); )?
                    $( arguments.root = Some($root); )?
                    arguments.call(comm, stream)
                })
            }
        )*
    };
}

collectives! {
    AllReduce HcclAllReduce(sendBuf, recvBuf, count, dataType, op op) = (
        sendBuf: *mut c_void, recvBuf: *mut c_void, count: u64, dataType: HcclDataType, op: HcclReduceOp
    );
    Reduce HcclReduce(sendBuf, recvBuf, count, dataType, op op, root root) = (
        sendBuf: *mut c_void, recvBuf: *mut c_void, count: u64, dataType: HcclDataType, op: HcclReduceOp, root: u32
    );
    Broadcast HcclBroadcast(buf, buf, count, dataType, root root) = (
        buf: *mut c_void, count: u64, dataType: HcclDataType, root: u32
    );
    AllGather HcclAllGather(sendBuf, recvBuf, sendCount, dataType) = (
        sendBuf: *mut c_void, recvBuf: *mut c_void, sendCount: u64, dataType: HcclDataType
    );
    ReduceScatter HcclReduceScatter(sendBuf, recvBuf, recvCount, dataType, op op) = (
        sendBuf: *mut c_void, recvBuf: *mut c_void, recvCount: u64, dataType: HcclDataType, op: HcclReduceOp
    );
    Scatter HcclScatter(sendBuf, recvBuf, recvCount, dataType, root root) = (
        sendBuf: *mut c_void, recvBuf: *mut c_void, recvCount: u64, dataType: HcclDataType, root: u32
    );
}

pub unsafe extern "C" fn HcclAllGatherV(
    sendBuf: *mut c_void,
    sendCount: u64,
    recvBuf: *mut c_void,
    recvCounts: *const c_void,
    recvDispls: *const c_void,
    dataType: HcclDataType,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    hccl(|| {
        let size = COMMUNICATORS.get(comm)?.size;
        // SAFETY: the caller's promise.
        let counts = unsafe { array("recvCounts", recvCounts, size) }?;
        // SAFETY: the caller's promise.
        let places = unsafe { array("recvDispls", recvDispls, size) }?;
        let send = Buffer::new("sendBuf", sendBuf, sendCount);
        let receive = Buffer { parts: Some((&counts, &places)), ..Buffer::new("recvBuf", recvBuf, 0) };
        Arguments::new(Collective::AllGatherV, send, receive, dataType).call(comm, stream)
    })
}

pub unsafe extern "C" fn HcclReduceScatterV(
    sendBuf: *mut c_void,
    sendCounts: *const c_void,
    sendDispls: *const c_void,
    recvBuf: *mut c_void,
    recvCount: u64,
    dataType: HcclDataType,
    op: HcclReduceOp,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    hccl(|| {
        let size = COMMUNICATORS.get(comm)?.size;
        // SAFETY: the caller's promise.
        let counts = unsafe { array("sendCounts", sendCounts, size) }?;
        // SAFETY: the caller's promise.
        let places = unsafe { array("sendDispls", sendDispls, size) }?;
        let send = Buffer { parts: Some((&counts, &places)), ..Buffer::new("sendBuf", sendBuf, 0) };
        let receive = Buffer::new("recvBuf", recvBuf, recvCount);
        let mut arguments = Arguments::new(Collective::ReduceScatterV, send, receive, dataType);
        arguments.op = Some(op);
        arguments.call(comm, stream)
    })
}

/// Refuses an exchange whose sides have different types.
fn same_type(name: &str, sent: HcclDataType, received: HcclDataType) -> Outcome {
    if sent != received {
        return Err(failure!(
            HCCL_PARA,
            "{name}: recvType: given {}, allowed: sendType, which is {}",
            received.0,
            sent.0
        ));
    }
    Ok(())
}

pub unsafe extern "C" fn HcclAlltoAll(
    sendBuf: *const c_void,
    sendCount: u64,
    sendType: HcclDataType,
    recvBuf: *const c_void,
    recvCount: u64,
    recvType: HcclDataType,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    const NAME: &str = "HcclAlltoAll";
    hccl(|| {
        same_type(NAME, sendType, recvType)?;
        if sendCount != recvCount {
            return Err(failure!(HCCL_PARA, "{NAME}: recvCount: given {recvCount}, allowed: sendCount, {sendCount}"));
        }
        if sendCount == 0 {
            return Ok(());
        }
        let send = Buffer::new("sendBuf", sendBuf, sendCount);
        let receive = Buffer::new("recvBuf", recvBuf, recvCount);
        Arguments::new(Collective::AlltoAll, send, receive, sendType).call(comm, stream)
    })
}

pub unsafe extern "C" fn HcclAlltoAllV(
    sendBuf: *const c_void,
    sendCounts: *const c_void,
    sdispls: *const c_void,
    sendType: HcclDataType,
    recvBuf: *const c_void,
    recvCounts: *const c_void,
    rdispls: *const c_void,
    recvType: HcclDataType,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    hccl(|| {
        same_type("HcclAlltoAllV", sendType, recvType)?;
        let size = COMMUNICATORS.get(comm)?.size;
        let mut arrays =
            [("sendCounts", sendCounts), ("sdispls", sdispls), ("recvCounts", recvCounts), ("rdispls", rdispls)]
                .into_iter()
                // SAFETY: the caller's promise, for each.
                .map(|(name, pointer)| unsafe { array(name, pointer, size) })
                .collect::<Outcome<Vec<_>>>()?
                .into_iter();
        let mut next = || arrays.next().unwrap_or_default();
        let (send_counts, send_places, receive_counts, receive_places) = (next(), next(), next(), next());
        let send = Buffer { parts: Some((&send_counts, &send_places)), ..Buffer::new("sendBuf", sendBuf, 0) };
        let receive = Buffer { parts: Some((&receive_counts, &receive_places)), ..Buffer::new("recvBuf", recvBuf, 0) };
        Arguments::new(Collective::AlltoAllV, send, receive, sendType).call(comm, stream)
    })
}

pub unsafe extern "C" fn HcclAlltoAllVC(
    sendBuf: *const c_void,
    sendCountMatrix: *const c_void,
    sendType: HcclDataType,
    recvBuf: *const c_void,
    recvType: HcclDataType,
    comm: HcclComm,
    stream: aclrtStream,
) -> HcclResult {
    hccl(|| {
        same_type("HcclAlltoAllVC", sendType, recvType)?;
        let member = COMMUNICATORS.get(comm)?;
        let (size, rank) = (member.size, member.rank);
        // SAFETY: the caller's promise. There are at most as many ranks as devices.
        let matrix = unsafe { array("sendCountMatrix", sendCountMatrix, size * size) }?;
        let rows = || matrix.chunks_exact(size);
        let sent: Vec<u64> = rows().nth(rank).unwrap_or_default().to_vec();
        let received: Vec<u64> = rows().filter_map(|row| row.get(rank)).copied().collect();
        // The sum of what comes before; a wrapped sum belongs to a count that is refused.
        let places = |counts: &[u64]| -> Vec<u64> {
            let sum = |sum: &mut u64, count: &u64| Some(std::mem::replace(sum, sum.wrapping_add(*count)));
            counts.iter().scan(0, sum).collect()
        };
        let (send_places, receive_places) = (places(&sent), places(&received));
        let send = Buffer { parts: Some((&sent, &send_places)), ..Buffer::new("sendBuf", sendBuf, 0) };
        let receive = Buffer { parts: Some((&received, &receive_places)), ..Buffer::new("recvBuf", recvBuf, 0) };
        Arguments::new(Collective::AlltoAllVC, send, receive, sendType).call(comm, stream)
    })
}
