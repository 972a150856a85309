//! What calls between ranks have in common: buffers, element types, the rank and its stream.

use super::communicator::not_null;
use crate::collectives::{COMMUNICATORS, Call, Member, MemberCall, Segment};
use crate::runtime::context::{self, stream};
use crate::runtime::stream::Stream;
use crate::runtime::task::Task;
use crate::status::{HCCL_NOT_SUPPORTED, HCCL_PARA, HCCL_PTR, Outcome, failure};
use ascend_spec::DType;
use ascend_spec::collective::{MOST_ELEMENTS, Reduction, Share, dtype_of_hccl, moves};
use ascend_sys::bindings::{HcclComm, HcclDataType, HcclReduceOp, aclrtStream};
use std::ffi::c_void;
use std::sync::Arc;

/// A rank's buffer in a call.
#[derive(Clone, Copy)]
pub(super) struct Buffer<'a> {
    pub name: &'static str,
    pub address: usize,
    /// The count of elements of the whole, or of each part.
    pub count: u64,
    /// The counts and displacements of parts of their own sizes.
    pub parts: Option<(&'a [u64], &'a [u64])>,
}

impl Buffer<'static> {
    pub(super) fn new(name: &'static str, address: *const c_void, count: u64) -> Self {
        // Exposed, since streams access it by its address.
        Buffer { name, address: address.expose_provenance(), count, parts: None }
    }
}

impl Buffer<'_> {
    /// The bytes for each rank.
    pub(super) fn segments(&self, share: Share, size: usize, dtype: DType) -> Outcome<Vec<Segment>> {
        let Buffer { name, address, count, parts } = *self;
        let width = dtype.size().unwrap_or(1) as u64;
        let mut segments = Vec::with_capacity(size);
        for peer in 0..size {
            let (count, place) = match (share, parts) {
                (Share::Nothing, _) => return Ok(Vec::new()),
                (Share::Whole, _) => (count, Some(0)),
                (Share::Parts, None) => (count, count.checked_mul(peer as u64)),
                (Share::Parts, Some((counts, places))) => {
                    (counts.get(peer).copied().unwrap_or(0), places.get(peer).copied())
                }
            };
            check_count(name, count)?;
            let start = place.and_then(|place| usize::try_from(place.checked_mul(width)?).ok());
            let bytes = count.checked_mul(width).and_then(|bytes| usize::try_from(bytes).ok());
            let range = start.zip(bytes).and_then(|(start, bytes)| {
                let start = address.checked_add(start)?;
                start.checked_add(bytes).map(|_| (start, bytes))
            });
            let Some((start, bytes)) = range else {
                return Err(failure!(
                    HCCL_PARA,
                    "{name}: {count} elements for rank {peer} at a displacement of {} do not fit the address space",
                    place.map_or_else(|| "more than 2^64".to_owned(), |place| place.to_string())
                ));
            };
            segments.push(Segment { peer, address: start, bytes, dtype });
        }
        let empty = segments.iter().all(|segment| segment.bytes == 0);
        if address == 0 && !empty {
            return Err(failure!(HCCL_PTR, "{name} is null"));
        }
        if !empty && !(address as u64).is_multiple_of(width) {
            return Err(failure!(HCCL_PARA, "{name}: given {address:#x}, allowed: multiples of {width}, an element"));
        }
        Ok(segments)
    }
}

fn check_count(name: &str, count: u64) -> Outcome {
    if count > MOST_ELEMENTS {
        return Err(failure!(HCCL_PARA, "{name}: count: given {count}, allowed: at most {MOST_ELEMENTS}"));
    }
    Ok(())
}

pub(super) fn reduction(name: &str, op: HcclReduceOp) -> Outcome<Reduction> {
    let known = Reduction::ALL.get(op.0 as usize).copied();
    known.ok_or_else(|| failure!(HCCL_NOT_SUPPORTED, "{name}: op: given {}, allowed: an HcclReduceOp, 0 to 3", op.0))
}

/// The element type, which the machine's product moves between ranks.
pub(super) fn element(name: &str, number: HcclDataType) -> Outcome<DType> {
    let soc = context::machine().target.soc;
    let dtype = dtype_of_hccl(number.0).filter(|dtype| moves(soc, *dtype));
    dtype.ok_or_else(|| {
        failure!(HCCL_NOT_SUPPORTED, "{name}: dataType: {soc} moves no elements of HcclDataType {}", number.0)
    })
}

/// The rank and the stream of a call.
pub(super) struct Caller {
    pub member: Arc<Member>,
    stream: Arc<Stream>,
}

impl Caller {
    pub(super) fn new(name: &str, comm: HcclComm, raw: aclrtStream) -> Outcome<Self> {
        let member = COMMUNICATORS.get(comm)?;
        not_null("stream", raw)?;
        let stream = stream(name, raw)?;
        if stream.device() != member.device {
            return Err(failure!(
                HCCL_PARA,
                "{name}: the stream is of device {}, and rank {} of the communicator is on device {}",
                stream.device(),
                member.rank,
                member.device
            ));
        }
        member.check(name)?;
        Ok(Caller { member, stream })
    }

    pub(super) fn peer(&self, name: &str, what: &str, rank: u32) -> Outcome<usize> {
        let size = self.member.size;
        match rank as usize {
            rank if rank < size => Ok(rank),
            rank => Err(failure!(HCCL_PARA, "{name}: {what}: given {rank}, allowed: 0 to {}", size - 1)),
        }
    }

    pub(super) fn submit(&self, call: Call) -> Outcome {
        let call = MemberCall { member: Arc::clone(&self.member), call: Arc::new(call) };
        self.stream.submit(Task::Collective(call), None, HCCL_PARA)
    }
}
