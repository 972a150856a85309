//! A call on the thread of its stream: what is sent is copied, the ranks meet, what comes is written.

use super::call::{Call, Segment};
use super::communicator::{Arrival, Communicator, Interrupt};
use super::member::MemberCall;
use super::payload::{Payload, copied};
use super::reduce::reduce;
use crate::memory::DeviceMemory;
use crate::operator::Access;
use crate::sanitizer::access_lock::lock_accesses;
use crate::sanitizer::allocation_table;
use crate::status::Outcome;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

impl MemberCall {
    /// Runs the call.
    ///
    /// # Safety
    ///
    /// Every range that [`Call::accesses`] names is valid memory until the call is over.
    pub(crate) unsafe fn run(&self, abort: &AtomicBool) -> Outcome {
        let MemberCall { member, call } = self;
        let memory = DeviceMemory::get()?;
        // SAFETY: the caller's promise.
        let payloads = unsafe { call.payloads(memory) };
        let arrival = Arrival { call: Arc::clone(call), payloads };
        let result = member.perform(arrival, abort)?;
        // SAFETY: the caller's promise.
        unsafe { call.write(result, memory) };
        Ok(())
    }
}

impl Communicator {
    /// Meets the other ranks in a call, and returns what it writes, in the order of [`Call::receives`]; a reduction
    /// has one result.
    pub(super) fn perform(&self, arrival: Arrival, interrupt: Interrupt<'_>) -> Outcome<Vec<Payload>> {
        let call = Arc::clone(&arrival.call);
        let received = match call.is_collective() {
            true => call.addressed(&self.meet(arrival, interrupt)?),
            false => return self.exchange(arrival, interrupt),
        };
        let Some(reduction) = call.reduction.filter(|_| !call.receives.is_empty()) else {
            return Ok(received);
        };
        let mut payloads = received.iter();
        let mut sum: Vec<u8> = payloads.next().map(|first| copied(first)).unwrap_or_default();
        payloads.for_each(|payload| reduce(call.dtype, reduction, &mut sum, payload));
        Ok(vec![sum.into()])
    }
}

impl Call {
    /// Writes the result of [`Communicator::perform`].
    ///
    /// # Safety
    ///
    /// As for [`MemberCall::run`].
    unsafe fn write(&self, result: Vec<Payload>, memory: &DeviceMemory) {
        let written: Vec<(Segment, Payload)> = self.receives.iter().copied().zip(result).collect();
        let accesses: Vec<Access> = written.iter().map(|(segment, _)| access(segment, true)).collect();
        let locked = lock_accesses(&accesses);
        for (segment, payload) in &written {
            debug_assert_eq!(segment.bytes, payload.len());
            let bytes = segment.bytes.min(payload.len());
            // SAFETY: the range is valid (the caller's promise) and locked, so no other thread touches it; the payload
            // is memory of its own.
            unsafe { memory.host(segment.address).copy_from_nonoverlapping(payload.as_ptr(), bytes) };
            allocation_table::wrote(segment.address..segment.address.saturating_add(bytes));
        }
        allocation_table::written(accesses.iter().map(|access| access.address));
        drop(locked);
    }

    /// Copies of what is sent, in the order of [`Call::sends`]; what all ranks get is copied once.
    ///
    /// # Safety
    ///
    /// As for [`MemberCall::run`].
    unsafe fn payloads(&self, memory: &DeviceMemory) -> Vec<Payload> {
        let accesses: Vec<Access> = self.sends.iter().map(|segment| access(segment, false)).collect();
        let _locked = lock_accesses(&accesses);
        let mut payloads: Vec<Payload> = Vec::with_capacity(self.sends.len());
        let mut before: Option<Segment> = None;
        for &segment in &self.sends {
            let same = before.is_some_and(|b| (b.address, b.bytes) == (segment.address, segment.bytes));
            let payload = match payloads.last().filter(|_| same) {
                Some(last) => last.clone(),
                None if segment.bytes == 0 => Vec::new().into(),
                // SAFETY: the range is valid (the caller's promise) and locked, so no other thread writes it.
                None => unsafe { slice::from_raw_parts(memory.host(segment.address), segment.bytes) }.into(),
            };
            payloads.push(payload);
            before = Some(segment);
        }
        payloads
    }

    /// What the ranks of a collective have for this one, in the order of [`Call::receives`].
    fn addressed(&self, arrivals: &[Arrival]) -> Vec<Payload> {
        let own = |segment: &Segment| {
            let sender = arrivals.get(segment.peer)?;
            let at = sender.call.sends.iter().position(|sent| sent.peer == self.rank)?;
            sender.payloads.get(at).cloned()
        };
        // The ranks have compared their counts, so that each segment has its payload.
        self.receives.iter().map(|segment| own(segment).unwrap_or_else(|| Vec::new().into())).collect()
    }
}

fn access(segment: &Segment, write: bool) -> Access {
    let what = if write { "recvBuf" } else { "sendBuf" };
    Access { address: segment.address, bytes: segment.bytes as u64, write, what }
}
