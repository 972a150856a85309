//! Events: marks in streams that other streams and the host wait for.

use crate::config::Check;
use crate::lock::{Lock, Signal, expired};
use crate::runtime::stream_faults::StreamFaults;
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::sanitizer::{StreamId, VectorClock, allocation_table};
use crate::status::{EVENT_SYNC_TIMEOUT, Outcome, PARAM_INVALID, TIMESTAMP_INVALID, failure};
use ascend_sys::bindings as sys;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

/// When the devices started: before the first event was made.
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Seconds that a wait in a stream may last, 0 for ever.
static WAIT_LIMIT: AtomicU32 = AtomicU32::new(0);

/// `aclrtSetOpWaitTimeout`.
pub(crate) fn limit_waits(seconds: u32) {
    WAIT_LIMIT.store(seconds, Ordering::Relaxed);
}

/// How long a wait that is queued now may last.
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

/// One queued record. Every record and reset of an event has a ticket, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    lane: StreamId,
    ticket: u64,
}

/// What was queued last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Last {
    #[default]
    Nothing,
    Record(Mark),
    Reset,
}

/// Records of one stream that are queued: it reaches them in order.
#[derive(Clone, Copy, Debug)]
struct Pending {
    lane: StreamId,
    /// Ticket of the last one queued.
    queued: u64,
    /// Ticket of the last one reached.
    reached: u64,
}

#[derive(Debug, Default)]
struct State {
    tickets: u64,
    last: Last,
    /// Streams with records queued and not reached.
    pending: SmallVec<[Pending; 4]>,
    /// When the record with a ticket was reached.
    reached: Option<(u64, Instant)>,
    /// For waits inside graphs: whether the latest record or reset *reached* was a record.
    raised: bool,
    /// Waits queued and not over.
    waits: u32,
    /// What the latest record comes after.
    clock: VectorClock,
    /// Faults of the stream of the latest record.
    faults: Weak<StreamFaults>,
}

impl State {
    fn is_pending(&self, mark: Mark) -> bool {
        let of_lane = self.pending.iter().find(|p| p.lane == mark.lane);
        of_lane.is_some_and(|pending| pending.reached < mark.ticket)
    }

    fn queue(&mut self, mark: Mark) {
        match self.pending.iter_mut().find(|p| p.lane == mark.lane) {
            Some(pending) => pending.queued = mark.ticket,
            None => self.pending.push(Pending {
                lane: mark.lane,
                queued: mark.ticket,
                // Without an entry, the lane has reached all it had queued.
                reached: mark.ticket - 1,
            }),
        }
    }

    fn reach(&mut self, mark: Mark) {
        if let Some(at) = self.pending.iter().position(|p| p.lane == mark.lane)
            && let Some(pending) = self.pending.get_mut(at)
        {
            pending.reached = pending.reached.max(mark.ticket);
            if pending.reached == pending.queued {
                self.pending.swap_remove(at);
            }
        }
    }

    fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    external: bool,
    timed: bool,
    state: Lock<State>,
    changed: Signal,
}

impl Event {
    /// An event for the uses that the flags name; `None` is `aclrtCreateEvent`, which can order and measure time.
    pub(crate) fn new(flags: Option<u32>) -> Outcome<Self> {
        if let Some(unknown) = flags.map(|flags| flags & !FLAGS).filter(|&bits| bits != 0) {
            return Err(failure!(
                PARAM_INVALID,
                "event flag: unknown bits {unknown:#x}, allowed: {FLAGS:#x}"
            ));
        }
        LazyLock::force(&STARTED);
        let has = |flag| flags.is_some_and(|flags| flags & flag != 0);
        Ok(Event {
            external: has(sys::ACL_EVENT_EXTERNAL),
            timed: flags.is_none() || has(sys::ACL_EVENT_TIME_LINE),
            state: Lock::new(State {
                clock: VectorClock::with_capacity(8),
                ..State::default()
            }),
            changed: Signal::new(),
        })
    }

    /// Whether the event crosses the border of a graph.
    pub(crate) fn external(&self) -> bool {
        self.external
    }

    // What a stream queues.

    /// A record of the present end of a stream is being queued.
    pub(crate) fn queue_record(&self, stream: StreamId, faults: &Arc<StreamFaults>) -> Mark {
        let mut state = self.state.lock();
        let mark = Mark {
            lane: stream,
            ticket: state.next_ticket(),
        };
        state.last = Last::Record(mark);
        state.queue(mark);
        allocation_table::snapshot_clock(mark.lane, &mut state.clock);
        state.faults = Arc::downgrade(faults);
        mark
    }

    /// A wait is being queued in a lane: the record to wait for, or `None` if there is none.
    pub(crate) fn queue_wait(&self, lane: StreamId) -> Option<Mark> {
        let mut state = self.state.lock();
        let Last::Record(mark) = state.last else {
            return None;
        };
        state.waits += 1;
        allocation_table::order_after(lane, &state.clock);
        Some(mark)
    }

    /// A reset is being queued; its ticket.
    pub(crate) fn queue_reset(&self) -> u64 {
        let mut state = self.state.lock();
        state.last = Last::Reset;
        state.next_ticket()
    }

    // What a stream's thread reaches.

    /// A record is reached, or will never be.
    pub(crate) fn reach_record(&self, mark: Mark) {
        let mut state = self.state.lock();
        state.reach(mark);
        if state.reached.is_none_or(|(latest, _)| latest < mark.ticket) {
            state.reached = Some((mark.ticket, Instant::now()));
            state.raised = true;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A reset is reached.
    pub(crate) fn reach_reset(&self, ticket: u64) {
        let mut state = self.state.lock();
        if state.reached.is_some_and(|(latest, _)| latest < ticket) {
            state.reached = None;
            state.raised = false;
        }
    }

    /// Waits until a record is reached, or `abort` is set and [`Event::wake`] called; `false` if that took longer than
    /// the limit.
    pub(crate) fn wait_reached(
        &self,
        mark: Mark,
        limit: Option<Duration>,
        abort: &AtomicBool,
    ) -> bool {
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

    /// A queued wait is over.
    pub(crate) fn end_wait(&self) {
        let mut state = self.state.lock();
        state.waits = state.waits.saturating_sub(1);
    }

    /// A record inside a graph that a stream replays.
    pub(crate) fn raise(&self, lane: StreamId) {
        let mut state = self.state.lock();
        let ticket = state.next_ticket();
        state.last = Last::Record(Mark { lane, ticket });
        state.reached = Some((ticket, Instant::now()));
        state.raised = true;
        drop(state);
        self.changed.notify_all();
    }

    /// A reset inside a graph that a stream replays.
    pub(crate) fn lower(&self) {
        let mut state = self.state.lock();
        state.tickets += 1;
        state.last = Last::Reset;
        state.reached = None;
        state.raised = false;
    }

    /// A wait inside a graph that is being replayed: for a record reached since the last reset.
    pub(crate) fn wait_raised(&self, abort: &AtomicBool) {
        let mut state = self.state.lock();
        while !state.raised && !abort.load(Ordering::Acquire) {
            state = self.changed.wait(state, None);
        }
    }

    /// Whether a wait inside a graph would end without anything more being queued.
    pub(crate) fn will_be_raised(&self) -> bool {
        let state = self.state.lock();
        state.raised || !state.pending.is_empty()
    }

    /// Lets waiting threads look at their abort flags.
    pub(crate) fn wake(&self) {
        drop(self.state.lock());
        self.changed.notify_all();
    }

    /// Whether a record was queued after the last reset.
    pub(crate) fn recorded(&self) -> bool {
        matches!(self.state.lock().last, Last::Record(_))
    }

    // What the host asks.

    /// Whether the latest record is reached.
    pub(crate) fn query(&self) -> bool {
        let state = self.state.lock();
        let Last::Record(mark) = state.last else {
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

    /// Waits for the latest record, and reports a fault of what comes before it.
    pub(crate) fn synchronize(
        &self,
        name: &'static str,
        check: Check,
        deadline: Option<Instant>,
    ) -> Outcome {
        let mut state = self.state.lock();
        let Last::Record(mark) = state.last else {
            drop(state);
            let suspicion = Suspicion {
                kind: FindingKind::UnrecordedEvent,
                site: (name, "event"),
                message: format!(
                    "{name}: the event was never recorded, or reset since; nothing is waited for"
                ),
            };
            return report(check, PARAM_INVALID, suspicion);
        };
        while state.is_pending(mark) {
            if expired(deadline) {
                return Err(failure!(
                    EVENT_SYNC_TIMEOUT,
                    "{name}: the event was not reached in time"
                ));
            }
            state = self.changed.wait(state, deadline);
        }
        allocation_table::host_waited(&state.clock);
        let faults = state.faults.upgrade();
        drop(state);
        match faults.and_then(|faults| faults.take()) {
            Some(fault) => Err(fault.into()),
            None => Ok(()),
        }
    }

    /// Refuses to ask an event for times that was created without them.
    pub(crate) fn check_timed(&self, name: &str, which: &str) -> Outcome {
        if self.timed {
            return Ok(());
        }
        Err(failure!(
            TIMESTAMP_INVALID,
            "{name}: the {which}event has no timestamp: create it with ACL_EVENT_TIME_LINE or aclrtCreateEvent"
        ))
    }

    /// When the latest record was reached.
    pub(crate) fn time(&self, name: &str, which: &str) -> Outcome<Instant> {
        let state = self.state.lock();
        match (state.last, state.reached) {
            (Last::Record(mark), Some((latest, at))) if latest == mark.ticket => Ok(at),
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

    fn mark(lane: StreamId, ticket: u64) -> Mark {
        Mark { lane, ticket }
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
