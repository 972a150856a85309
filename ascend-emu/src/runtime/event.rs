//! Events: records in streams that other streams and the host wait for.

use crate::config::Check;
use crate::fault::{self, StreamFaults};
use crate::finding_kind::FindingKind;
use crate::lock::{Lock, Signal, expired};
use crate::sanitizer::{StreamId, VectorClock, allocation_table};
use crate::sanitizer::{Suspicion, report};
use crate::status::{EVENT_SYNC_TIMEOUT, Outcome, PARAM_INVALID, TIMESTAMP_INVALID, failure};
use ascend_sys::bindings as sys;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

/// The origin of timestamps, which comes before the first event.
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Seconds that a wait in a stream may last; 0 is no limit.
static WAIT_LIMIT: AtomicU32 = AtomicU32::new(0);

/// `aclrtSetOpWaitTimeout`.
pub(crate) fn limit_waits(seconds: u32) {
    WAIT_LIMIT.store(seconds, Ordering::Relaxed);
}

/// The limit of a wait that is queued now.
pub(crate) fn wait_limit() -> Option<Duration> {
    let seconds = WAIT_LIMIT.load(Ordering::Relaxed);
    (seconds > 0).then(|| Duration::from_secs(u64::from(seconds)))
}

/// Flags that `aclrtCreateEventWithFlag` takes.
const FLAGS: u32 = sys::ACL_EVENT_SYNC
    | sys::ACL_EVENT_CAPTURE_STREAM_PROGRESS
    | sys::ACL_EVENT_TIME_LINE
    | sys::ACL_EVENT_DEVICE_USE_ONLY
    | sys::ACL_EVENT_EXTERNAL
    | sys::ACL_EVENT_IPC;

/// One queued record. Each record and reset of an event has a ticket of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub stream: StreamId,
    ticket: u64,
}

/// The record or reset that was queued last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LastCommand {
    #[default]
    Nothing,
    Record(Mark),
    Reset,
}

/// The queued records of one stream, which reaches them in order.
#[derive(Clone, Copy, Debug)]
struct PendingRecords {
    stream: StreamId,
    /// Ticket of the last record queued.
    queued: u64,
    /// Ticket of the last record reached.
    reached: u64,
}

#[derive(Debug, Default)]
struct State {
    tickets: u64,
    last: LastCommand,
    /// Streams with records that are queued and not reached.
    pending: SmallVec<[PendingRecords; 4]>,
    /// When the record with a ticket was reached.
    reached: Option<(u64, Instant)>,
    /// Whether the latest record or reset that was reached is a record. Waits within graphs read this.
    raised: bool,
    /// The number of records that were reached since the last reset.
    records: u64,
    /// The number of records that the last reset cleared, less the one that counts.
    lost: u64,
    /// The number of waits that are queued and not over.
    waits: u32,
    /// What happens before the latest record.
    clock: VectorClock,
    /// Faults of the stream of the latest record.
    faults: Weak<StreamFaults>,
}

impl State {
    fn is_pending(&self, mark: Mark) -> bool {
        let pending = self.pending.iter().find(|p| p.stream == mark.stream);
        pending.is_some_and(|pending| pending.reached < mark.ticket)
    }

    fn queue(&mut self, mark: Mark) {
        match self.pending.iter_mut().find(|p| p.stream == mark.stream) {
            Some(pending) => pending.queued = mark.ticket,
            None => self.pending.push(PendingRecords {
                stream: mark.stream,
                queued: mark.ticket,
                // A stream without an entry has reached all records that it had queued.
                reached: mark.ticket - 1,
            }),
        }
    }

    fn reach(&mut self, mark: Mark) {
        if let Some(at) = self.pending.iter().position(|p| p.stream == mark.stream)
            && let Some(pending) = self.pending.get_mut(at)
        {
            pending.reached = pending.reached.max(mark.ticket);
            if pending.reached == pending.queued {
                self.pending.swap_remove(at);
            }
        }
    }

    fn raise(&mut self, ticket: u64) {
        self.reached = Some((ticket, Instant::now()));
        self.raised = true;
        self.records = self.records.saturating_add(1);
    }

    fn lower(&mut self) {
        self.reached = None;
        self.raised = false;
        self.lost = std::mem::take(&mut self.records).saturating_sub(1);
    }

    fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    /// The handle by which programs and their traces know the event.
    pub handle: usize,
    external: bool,
    timed: bool,
    state: Lock<State>,
    changed: Signal,
}

impl Event {
    /// An event for the uses that the flags name; `None` is `aclrtCreateEvent`, which can order and measure time.
    pub(crate) fn new(flags: Option<u32>, handle: usize) -> Outcome<Self> {
        if let Some(unknown) = flags.map(|flags| flags & !FLAGS).filter(|&bits| bits != 0) {
            return Err(failure!(PARAM_INVALID, "event flag: unknown bits {unknown:#x}, allowed: {FLAGS:#x}"));
        }
        LazyLock::force(&STARTED);
        let has = |flag| flags.is_some_and(|flags| flags & flag != 0);
        Ok(Event {
            handle,
            external: has(sys::ACL_EVENT_EXTERNAL),
            timed: flags.is_none() || has(sys::ACL_EVENT_TIME_LINE),
            state: Lock::new(State { clock: VectorClock::with_capacity(8), ..State::default() }),
            changed: Signal::new(),
        })
    }

    /// Whether the event is recorded and waited for across the border of a graph (`ACL_EVENT_EXTERNAL`).
    pub(crate) fn external(&self) -> bool {
        self.external
    }

    // Called when a stream queues.

    /// Queues a record after the work of a stream.
    pub(crate) fn queue_record(&self, stream: StreamId, faults: &Arc<StreamFaults>) -> Mark {
        let mut state = self.state.lock();
        let mark = Mark { stream, ticket: state.next_ticket() };
        state.last = LastCommand::Record(mark);
        state.queue(mark);
        allocation_table::snapshot_clock(mark.stream, &mut state.clock);
        state.faults = Arc::downgrade(faults);
        mark
    }

    /// Queues a wait in a stream and returns the record to wait for, or `None` if nothing was recorded.
    pub(crate) fn queue_wait(&self, stream: StreamId) -> Option<Mark> {
        let mut state = self.state.lock();
        let LastCommand::Record(mark) = state.last else {
            return None;
        };
        state.waits += 1;
        allocation_table::order_after(stream, &state.clock);
        Some(mark)
    }

    /// Queues a reset and returns its ticket.
    pub(crate) fn queue_reset(&self) -> u64 {
        let mut state = self.state.lock();
        state.last = LastCommand::Reset;
        state.next_ticket()
    }

    // Called by a stream's thread.

    /// Marks a record as reached, also a record whose stream was aborted.
    pub(crate) fn reach_record(&self, mark: Mark) {
        let mut state = self.state.lock();
        state.reach(mark);
        if state.reached.is_none_or(|(latest, _)| latest < mark.ticket) {
            state.raise(mark.ticket);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Marks a reset as reached.
    pub(crate) fn reach_reset(&self, ticket: u64) {
        let mut state = self.state.lock();
        if state.reached.is_some_and(|(latest, _)| latest < ticket) {
            state.lower();
        }
    }

    /// Waits until a record is reached, or `abort` is set and [`Event::wake`] called. Returns `false` when the limit
    /// is over.
    pub(crate) fn wait_reached(&self, mark: Mark, limit: Option<Duration>, abort: &AtomicBool) -> bool {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state.lock();
        while state.is_pending(mark) && !abort.load(Ordering::Acquire) {
            if expired(deadline) {
                return false;
            }
            state = self.changed.wait(state, deadline);
        }
        true
    }

    /// Counts a queued wait as over.
    pub(crate) fn end_wait(&self) {
        let mut state = self.state.lock();
        state.waits = state.waits.saturating_sub(1);
    }

    /// Records the event within a replayed graph.
    pub(crate) fn raise(&self, stream: StreamId) {
        let mut state = self.state.lock();
        let ticket = state.next_ticket();
        state.last = LastCommand::Record(Mark { stream, ticket });
        state.raise(ticket);
        drop(state);
        self.changed.notify_all();
    }

    /// Resets the event within a replayed graph.
    pub(crate) fn lower(&self) {
        let mut state = self.state.lock();
        state.tickets += 1;
        state.last = LastCommand::Reset;
        state.lower();
    }

    /// Waits within a replayed graph until a record was reached since the last reset, or `abort` is set.
    pub(crate) fn wait_raised(&self, abort: &AtomicBool) {
        let mut state = self.state.lock();
        while !state.raised && !abort.load(Ordering::Acquire) {
            state = self.changed.wait(state, None);
        }
    }

    /// The streams on which a record of this event is queued. A wait within a graph ends once one of them reaches its
    /// record. `None` if the event is raised, so that such a wait ends now.
    pub(crate) fn awaited_streams(&self) -> Option<SmallVec<[StreamId; 4]>> {
        let state = self.state.lock();
        (!state.raised).then(|| state.pending.iter().map(|pending| pending.stream).collect())
    }

    /// The number of records that the last reset cleared, less the one that counts.
    pub(crate) fn lost_records(&self) -> u64 {
        self.state.lock().lost
    }

    /// Wakes the threads that wait, so that they read their abort flags.
    pub(crate) fn wake(&self) {
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// Whether a record was queued after the last reset.
    pub(crate) fn recorded(&self) -> bool {
        matches!(self.state.lock().last, LastCommand::Record(_))
    }

    // Called by the host.

    /// Whether the latest record was reached.
    pub(crate) fn query(&self) -> bool {
        let state = self.state.lock();
        let LastCommand::Record(mark) = state.last else {
            return false;
        };
        if state.is_pending(mark) {
            return false;
        }
        allocation_table::host_waited(&state.clock);
        true
    }

    /// Whether all waits for the event are over.
    pub(crate) fn query_waits(&self) -> bool {
        self.state.lock().waits == 0
    }

    /// Waits for the latest record, and reports a fault of the work before it. Without a deadline it calls `look`
    /// repeatedly meanwhile, with the stream that has to reach the record.
    pub(crate) fn synchronize(
        &self,
        name: &'static str,
        check: Check,
        deadline: Option<Instant>,
        mut look: impl FnMut(StreamId) -> Outcome<Option<Instant>>,
    ) -> Outcome {
        let mut state = self.state.lock();
        let LastCommand::Record(mark) = state.last else {
            drop(state);
            let suspicion = Suspicion {
                kind: FindingKind::UnrecordedEvent,
                site: (name, "event"),
                tensor: 0,
                message: format!("{name}: the event was never recorded, or reset since; nothing is waited for"),
            };
            return report(check, PARAM_INVALID, suspicion);
        };
        while state.is_pending(mark) {
            if expired(deadline) {
                return Err(failure!(EVENT_SYNC_TIMEOUT, "{name}: the event was not reached in time"));
            }
            let mut until = deadline;
            if deadline.is_none() {
                drop(state);
                until = look(mark.stream)?;
                state = self.state.lock();
                if !state.is_pending(mark) {
                    break;
                }
            }
            state = self.changed.wait(state, until);
        }
        allocation_table::host_waited(&state.clock);
        let faults = state.faults.upgrade();
        drop(state);
        // Without its stream the event has no known device, so the thread's own device is checked.
        let Some(faults) = faults else {
            return fault::check_thread_device(name);
        };
        match faults.take() {
            Some(fault) => Err(fault),
            None => fault::check_device(name, Some(faults.device())),
        }
    }

    /// Refuses to return times of an event that was created without them.
    pub(crate) fn check_timed(&self, name: &str, which: &str) -> Outcome {
        if self.timed {
            return Ok(());
        }
        Err(failure!(
            TIMESTAMP_INVALID,
            "{name}: the {which}event has no timestamp: create it with ACL_EVENT_TIME_LINE or aclrtCreateEvent"
        ))
    }

    /// The time at which the latest record was reached.
    pub(crate) fn time(&self, name: &str, which: &str) -> Outcome<Instant> {
        let state = self.state.lock();
        match (state.last, state.reached) {
            (LastCommand::Record(mark), Some((latest, at))) if latest == mark.ticket => Ok(at),
            _ => Err(failure!(
                TIMESTAMP_INVALID,
                "{name}: the {which}event has no timestamp: it was not recorded, or its record is not reached"
            )),
        }
    }
}

/// Microseconds from the start of the devices to a time.
pub(crate) fn microseconds_until(time: Instant) -> u64 {
    let elapsed = time.saturating_duration_since(*STARTED);
    u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(stream: StreamId, ticket: u64) -> Mark {
        Mark { stream, ticket }
    }

    #[test]
    fn a_later_record_does_not_make_an_earlier_one_pending_again() {
        let mut state = State::default();
        state.queue(mark(1, 1));
        state.queue(mark(2, 2));
        assert!(state.is_pending(mark(1, 1)) && state.is_pending(mark(2, 2)));
        state.reach(mark(1, 1));
        assert!(!state.is_pending(mark(1, 1)) && state.is_pending(mark(2, 2)));
        state.queue(mark(1, 3));
        state.queue(mark(1, 4));
        assert!(!state.is_pending(mark(1, 1)));
        assert!(state.is_pending(mark(1, 3)));
        state.reach(mark(1, 3));
        assert!(!state.is_pending(mark(1, 3)) && state.is_pending(mark(1, 4)));
        state.reach(mark(1, 4));
        state.reach(mark(2, 2));
        assert!(state.pending.is_empty());
    }
}
