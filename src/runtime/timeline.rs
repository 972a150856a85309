//! How far a stream has come, and what is still used by its queued work.
//!
//! Each operation that this crate queues gets the stream's next number *after* it was queued. Whoever knows that the
//! stream passed a number therefore knows that the operation of that number, and all before it, are over.

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ascend_sys::{Api, bindings as sys};
use smallvec::SmallVec;

use crate::error::{Result, acl};
use crate::runtime::lock;

/// Recorded events kept for reuse.
const SPARE: usize = 4;

/// The numbers of one stream's operations.
pub(crate) struct Timeline {
    issued: AtomicU64,
    completed: AtomicU64,
    state: Mutex<State>,
}

struct State {
    stream: sys::aclrtStream,
    /// Whether the stream may still be used to record.
    open: bool,
    /// Recorded after the operations up to a number; the numbers ascend.
    markers: VecDeque<(u64, sys::aclrtEvent)>,
    spare: Vec<sys::aclrtEvent>,
}

// SAFETY: the handles are names that CANN lets any thread use; the mutex orders their uses and their end.
unsafe impl Send for Timeline {}
// SAFETY: as above.
unsafe impl Sync for Timeline {}

impl Timeline {
    pub(crate) fn new(stream: sys::aclrtStream) -> Self {
        Self {
            issued: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            state: Mutex::new(State {
                stream,
                open: true,
                markers: VecDeque::new(),
                spare: Vec::new(),
            }),
        }
    }

    /// The number of an operation that was queued just now.
    #[inline]
    pub(crate) fn advance(&self) -> u64 {
        self.issued.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The number of the latest operation.
    pub(crate) fn issued(&self) -> u64 {
        self.issued.load(Ordering::Acquire)
    }

    /// Takes note that the operations up to a number are over.
    pub(crate) fn finish(&self, number: u64) {
        self.completed.fetch_max(number, Ordering::AcqRel);
    }

    /// Whether an operation is known to be over, without asking the device.
    fn passed(&self, number: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= number
    }

    /// Whether an operation is over. The device must be bound.
    pub(super) fn is_complete(&self, api: &Api, number: u64) -> bool {
        if self.passed(number) {
            return true;
        }
        let mut state = lock(&self.state);
        while let Some(&(upto, event)) = state.markers.front() {
            if !is_reached(api, event) {
                break;
            }
            state.markers.pop_front();
            self.finish(upto);
            state.recycle(api, event);
        }
        self.passed(number)
    }

    /// Records an event behind an operation, unless one is there, so that [`Timeline::is_complete`] can tell later.
    /// On failure, or once the stream is gone, synchronising or dropping the stream tells. The device must be bound.
    pub(super) fn mark(&self, api: &Api, number: u64) {
        let mut state = lock(&self.state);
        let marked = state
            .markers
            .back()
            .is_some_and(|&(upto, _)| upto >= number);
        if marked || !state.open || self.passed(number) {
            return;
        }
        let upto = self.issued();
        match state.record(api) {
            Ok(event) => state.markers.push_back((upto, event)),
            Err(error) => tracing::warn!(
                "no event can be recorded, so that memory is freed only when its stream is synchronised: {error}"
            ),
        }
    }

    /// Records an event behind everything queued so far and takes no more: the stream is its owner's alone from now on.
    pub(super) fn hand_back(&self, api: &Api) -> bool {
        let number = self.issued();
        self.mark(api, number);
        let mut state = lock(&self.state);
        state.open = false;
        let last = state.markers.back().map_or(0, |&(upto, _)| upto);
        self.passed(number) || last >= number
    }

    /// Takes no more markers: the stream is about to end.
    pub(super) fn seal(&self) {
        lock(&self.state).open = false;
    }

    /// Takes note that the stream is gone, and with it all its work. The device must be bound.
    pub(super) fn end(&self, api: &Api) {
        let mut state = lock(&self.state);
        state.open = false;
        self.finish(u64::MAX);
        while let Some((_, event)) = state.markers.pop_front() {
            destroy(api, event);
        }
        while let Some(event) = state.spare.pop() {
            destroy(api, event);
        }
    }
}

impl State {
    fn record(&mut self, api: &Api) -> Result<sys::aclrtEvent> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => {
                let mut event = ptr::null_mut();
                let flag = sys::ACL_EVENT_CAPTURE_STREAM_PROGRESS;
                // SAFETY: `event` is a place for the result.
                unsafe { acl!(api, aclrtCreateEventExWithFlag(&mut event, flag)) }?;
                event
            }
        };
        let record = || -> Result<()> {
            // SAFETY: the event was made above or is a spare one; the stream is there as long as `open`.
            unsafe { acl!(api, aclrtRecordEvent(event, self.stream)) }
        };
        match record() {
            Ok(()) => Ok(event),
            Err(error) => {
                destroy(api, event);
                Err(error)
            }
        }
    }

    fn recycle(&mut self, api: &Api, event: sys::aclrtEvent) {
        if self.open && self.spare.len() < SPARE {
            self.spare.push(event);
        } else {
            destroy(api, event);
        }
    }
}

fn is_reached(api: &Api, event: sys::aclrtEvent) -> bool {
    let mut status = sys::aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY;
    let query = |status| -> Result<()> {
        // SAFETY: the event is alive while it stands among the markers; `status` is a place for the result.
        unsafe { acl!(api, aclrtQueryEventStatus(event, status)) }
    };
    // A query fails after a fault of the device, or while the stream is being captured: not known, so not reached.
    query(&mut status).is_ok()
        && status == sys::aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE
}

fn destroy(api: &Api, event: sys::aclrtEvent) {
    let destroy = || -> Result<()> {
        // SAFETY: the caller took the event out of the only place that knows it.
        unsafe { acl!(api, aclrtDestroyEvent(event)) }
    };
    if let Err(error) = destroy() {
        tracing::error!("cannot destroy an event: {error}");
    }
}

impl std::fmt::Debug for Timeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timeline")
            .field("issued", &self.issued)
            .field("completed", &self.completed)
            .finish_non_exhaustive()
    }
}

/// An operation, by stream and number.
pub(super) type Use = (Arc<Timeline>, u64);

/// The latest operation of each stream that uses something.
///
/// Nearly everything is used by one stream only, the first: its uses are noted without a lock. Two more streams fit
/// without heap memory.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    first: OnceLock<Arc<Timeline>>,
    /// Of the first stream; 0 for none.
    number: AtomicU64,
    others: Mutex<SmallVec<[Use; 2]>>,
}

impl Uses {
    /// Takes note of a use.
    #[inline]
    pub(crate) fn mark(&self, timeline: &Arc<Timeline>, number: u64) {
        let first = self.first.get_or_init(|| Arc::clone(timeline));
        if Arc::ptr_eq(first, timeline) {
            self.number.fetch_max(number, Ordering::AcqRel);
        } else {
            self.mark_other(timeline, number);
        }
    }

    fn mark_other(&self, timeline: &Arc<Timeline>, number: u64) {
        let mut others = lock(&self.others);
        if let Some((_, known)) = others.iter_mut().find(|(of, _)| Arc::ptr_eq(of, timeline)) {
            *known = number.max(*known);
            return;
        }
        others.retain(|(of, number)| !of.passed(*number));
        others.push((Arc::clone(timeline), number));
    }

    /// Whether all uses are known to be over; behind the others an event is recorded, so that it will be known. The device
    /// must be bound.
    pub(crate) fn are_over(&self, api: &Api) -> bool {
        let mut all = true;
        let mut look = |timeline: &Timeline, number: u64| {
            if !timeline.is_complete(api, number) {
                timeline.mark(api, number);
                all = false;
            }
        };
        if let Some(first) = self.first.get() {
            look(first, self.number.load(Ordering::Acquire));
        }
        for (timeline, number) in lock(&self.others).iter() {
            look(timeline, *number);
        }
        all
    }

    /// Takes out the uses that are not over. The device must be bound.
    pub(super) fn take_pending(&mut self, api: &Api) -> SmallVec<[Use; 2]> {
        let others = self.others.get_mut();
        let mut uses = std::mem::take(others.unwrap_or_else(PoisonError::into_inner));
        if let Some(first) = self.first.take() {
            uses.push((first, std::mem::take(self.number.get_mut())));
        }
        uses.retain(|(timeline, number)| !timeline.is_complete(api, *number));
        uses
    }
}
