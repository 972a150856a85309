//! Stream progress: which operations of a stream are over, and which streams still use something.
//!
//! Each operation that this crate queues gets the stream's next number *after* it was queued. That the stream passed a
//! number therefore proves that the operation of that number, and all before it, are over. Proof is a synchronisation
//! that succeeded or an event that was reached, never a failure: by default CANN goes on with a stream after a fault.

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use ascend_sys::{Api, bindings as sys};
use smallvec::SmallVec;

use crate::error::{Error, Result, acl};
use crate::runtime::lock;

/// Recorded events kept for reuse.
const SPARE: usize = 4;

/// Called after each wait for a stream, with the number that was waited for and the outcome.
type Watcher = fn(&Arc<StreamProgress>, u64, &Result<()>);

static WATCHER: OnceLock<Watcher> = OnceLock::new();

/// Sets the function that is called after each wait for a stream. A process has one: later calls change nothing.
pub(crate) fn on_wait(watcher: Watcher) {
    let _ = WATCHER.set(watcher);
}

/// The numbers of one stream's operations.
pub(crate) struct StreamProgress {
    issued: AtomicU64,
    completed: AtomicU64,
    state: Mutex<State>,
    /// Read-locked while a thread waits for the stream itself, so that it is not destroyed meanwhile.
    waited_for: RwLock<()>,
}

struct State {
    stream: sys::aclrtStream,
    /// Whether the stream may still be used to record and to wait.
    open: bool,
    /// Events, each recorded after the operations up to a number; the numbers ascend.
    markers: VecDeque<(u64, sys::aclrtEvent)>,
    spare: Vec<sys::aclrtEvent>,
    /// A fault that [`StreamProgress::wait`] received: the next synchronisation of the stream reports it.
    fault: Option<Error>,
}

// SAFETY: the handles are names that CANN lets any thread use; the mutex orders their uses and their end.
unsafe impl Send for StreamProgress {}
// SAFETY: as for `Send`.
unsafe impl Sync for StreamProgress {}

impl StreamProgress {
    /// Calls the watcher after a wait for the stream.
    #[inline]
    pub(crate) fn waited(self: &Arc<Self>, number: u64, outcome: &Result<()>) {
        if let Some(watcher) = WATCHER.get() {
            watcher(self, number, outcome);
        }
    }

    pub(crate) fn new(stream: sys::aclrtStream) -> Self {
        Self {
            issued: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            state: Mutex::new(State { stream, open: true, markers: VecDeque::new(), spare: Vec::new(), fault: None }),
            waited_for: RwLock::new(()),
        }
    }

    /// Counts an operation that was queued just now, and returns its number.
    #[inline]
    pub(crate) fn advance(&self) -> u64 {
        self.issued.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The number of the latest operation.
    pub(crate) fn issued(&self) -> u64 {
        self.issued.load(Ordering::Acquire)
    }

    /// Notes that the operations up to a number are over.
    pub(crate) fn finish(&self, number: u64) {
        self.completed.fetch_max(number, Ordering::AcqRel);
    }

    /// Whether an operation is known to be over, without a query of the device.
    fn passed(&self, number: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= number
    }

    /// Whether an operation is over. The device must be bound.
    pub(crate) fn is_complete(&self, api: &Api, number: u64) -> bool {
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

    /// Records an event after an operation, unless there is one, so that [`StreamProgress::is_complete`] can answer
    /// later. On failure, and once the stream is gone, nothing is recorded: the answer then comes from a later mark,
    /// a successful synchronisation or the end of the stream. The device must be bound.
    pub(crate) fn mark(&self, api: &Api, number: u64) {
        let mut state = lock(&self.state);
        if state.open {
            self.record_behind(api, &mut state, number);
        }
    }

    fn record_behind(&self, api: &Api, state: &mut State, number: u64) {
        let marked = state.markers.back().is_some_and(|&(upto, _)| upto >= number);
        if marked || self.passed(number) {
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

    /// Waits until an operation is over. Returns whether it is known to be over. A fault of the stream is kept for
    /// its next synchronisation. The device must be bound.
    pub(crate) fn wait(&self, api: &Api, number: u64) -> bool {
        if self.is_complete(api, number) {
            return true;
        }
        self.mark(api, number);
        let marker = lock(&self.state).take_marker(number);
        let Some((upto, event)) = marker else {
            return self.wait_for_stream(api, number);
        };
        // The event is not among the markers now, so that no other thread records or destroys it meanwhile.
        let outcome = synchronise_event(api, event);
        let over = outcome.is_ok() || is_reached(api, event);
        if over {
            self.finish(upto);
        }
        let mut state = lock(&self.state);
        match over {
            true => state.recycle(api, event),
            false => state.put_back(upto, event),
        }
        state.keep_fault(outcome);
        over
    }

    /// Waits for the stream itself, where no event could be recorded. Returns whether the operation is known to be
    /// over.
    fn wait_for_stream(&self, api: &Api, number: u64) -> bool {
        let _stays = self.waited_for.read().unwrap_or_else(PoisonError::into_inner);
        let stream = {
            let state = lock(&self.state);
            if !state.open {
                return self.passed(number);
            }
            state.stream
        };
        let upto = self.issued();
        let outcome = synchronise_stream(api, stream);
        if outcome.is_ok() {
            self.finish(upto);
        }
        lock(&self.state).keep_fault(outcome);
        self.passed(number)
    }

    /// Stops recording events, and returns when no other thread waits for the stream: before it ends, or is given to
    /// its owner.
    pub(super) fn seal(&self) {
        lock(&self.state).open = false;
        drop(self.waited_for.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Records events again, for a stream that cannot end yet.
    pub(super) fn unseal(&self) {
        lock(&self.state).open = true;
    }

    /// Records an event after everything queued so far, for a sealed stream that is still there. Returns whether the
    /// end of its work can be known without the stream from now on. The device must be bound.
    pub(super) fn mark_end(&self, api: &Api) -> bool {
        let number = self.issued();
        let mut state = lock(&self.state);
        self.record_behind(api, &mut state, number);
        let last = state.markers.back().map_or(0, |&(upto, _)| upto);
        self.passed(number) || last >= number
    }

    /// Keeps a fault that somebody else has received for the stream's next synchronisation.
    pub(crate) fn keep_fault(&self, fault: Error) {
        lock(&self.state).keep_fault(Err(fault));
    }

    /// Takes the fault that [`StreamProgress::wait`] received.
    pub(super) fn take_fault(&self) -> Option<Error> {
        lock(&self.state).fault.take()
    }

    /// Notes that the stream is gone, and with it all its work. The device must be bound.
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

    /// Removes the first marker that was recorded after an operation.
    fn take_marker(&mut self, number: u64) -> Option<(u64, sys::aclrtEvent)> {
        let mut markers = self.markers.iter();
        let at = markers.position(|&(upto, _)| upto >= number)?;
        self.markers.remove(at)
    }

    fn put_back(&mut self, upto: u64, event: sys::aclrtEvent) {
        let at = self.markers.partition_point(|&(other, _)| other < upto);
        self.markers.insert(at, (upto, event));
    }

    /// Keeps a fault of the device for the stream's next synchronisation.
    fn keep_fault(&mut self, outcome: Result<()>) {
        match outcome {
            Err(error) if is_device_fault(&error) => {
                self.fault.get_or_insert(error);
            }
            Err(error) => tracing::warn!("cannot wait for the work on a stream: {error}"),
            Ok(()) => {}
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

/// Whether a failure is a fault of work that was queued earlier, and not of the call that returned it.
fn is_device_fault(error: &Error) -> bool {
    matches!(error, Error::Acl { status, .. } if (507_000..508_000).contains(&status.0))
}

fn synchronise_event(api: &Api, event: sys::aclrtEvent) -> Result<()> {
    // SAFETY: the caller has taken the event out of the only place that knows it.
    unsafe { acl!(api, aclrtSynchronizeEvent(event)) }
}

pub(super) fn synchronise_stream(api: &Api, stream: sys::aclrtStream) -> Result<()> {
    // SAFETY: the caller keeps the stream alive meanwhile.
    unsafe { acl!(api, aclrtSynchronizeStream(stream)) }
}

fn is_reached(api: &Api, event: sys::aclrtEvent) -> bool {
    let mut status = sys::aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY;
    let query = |status| -> Result<()> {
        // SAFETY: the event is alive while it stands among the markers; `status` is a place for the result.
        unsafe { acl!(api, aclrtQueryEventStatus(event, status)) }
    };
    // A query may fail after a fault of the device: not known, so not reached.
    query(&mut status).is_ok() && status == sys::aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE
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

impl std::fmt::Debug for StreamProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamProgress")
            .field("issued", &self.issued)
            .field("completed", &self.completed)
            .finish_non_exhaustive()
    }
}

/// An operation, by stream and number.
pub(super) type Use = (Arc<StreamProgress>, u64);

/// The latest operation of each stream that uses something.
///
/// Nearly everything is used by one stream only, the first: its uses are noted without a lock. Two more streams fit
/// without heap memory.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    first: OnceLock<Arc<StreamProgress>>,
    /// The latest operation of the first stream; 0 is none.
    number: AtomicU64,
    others: Mutex<SmallVec<[Use; 2]>>,
}

impl Uses {
    /// Notes a use.
    #[inline]
    pub(crate) fn mark(&self, progress: &Arc<StreamProgress>, number: u64) {
        let first = self.first.get_or_init(|| Arc::clone(progress));
        if Arc::ptr_eq(first, progress) {
            self.number.fetch_max(number, Ordering::AcqRel);
        } else {
            self.mark_other(progress, number);
        }
    }

    fn mark_other(&self, progress: &Arc<StreamProgress>, number: u64) {
        let mut others = lock(&self.others);
        if let Some((_, known)) = others.iter_mut().find(|(other, _)| Arc::ptr_eq(other, progress)) {
            *known = number.max(*known);
            return;
        }
        others.retain(|(other, number)| !other.passed(*number));
        others.push((Arc::clone(progress), number));
    }

    /// Whether all uses are known to be over. For each one that is not, an event is recorded after it, so that a
    /// later call knows. The device must be bound.
    pub(crate) fn are_over(&self, api: &Api) -> bool {
        let mut all = true;
        let mut look = |progress: &StreamProgress, number: u64| {
            if !progress.is_complete(api, number) {
                progress.mark(api, number);
                all = false;
            }
        };
        if let Some(first) = self.first.get() {
            look(first, self.number.load(Ordering::Acquire));
        }
        for (progress, number) in lock(&self.others).iter() {
            look(progress, *number);
        }
        all
    }

    /// Takes the uses that are not over. The device must be bound.
    pub(super) fn take_pending(&mut self, api: &Api) -> SmallVec<[Use; 2]> {
        let others = self.others.get_mut();
        let mut uses = std::mem::take(others.unwrap_or_else(PoisonError::into_inner));
        if let Some(first) = self.first.take() {
            uses.push((first, std::mem::take(self.number.get_mut())));
        }
        uses.retain(|(progress, number)| !progress.is_complete(api, *number));
        uses
    }
}
