//! Events: marks in streams that other streams and the host wait for.

use crate::capture::{Capture, Position};
use crate::config::Check;
use crate::handle::{Id, Kind, Table};
use crate::ledger::{self, Clock, LaneId};
use crate::lock::{Lock, Signal, expired};
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::{
    EVENT_CAPTURED, EVENT_SYNC_TIMEOUT, Outcome, PARAM_INVALID, TIMESTAMP_INVALID,
    TIMESTAMP_REVERSAL, failure,
};
use crate::stream::Stream;
use ascend_sys::bindings as sys;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

pub(crate) static EVENTS: Table<Event> = Table::new(Kind::Event);

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
    lane: LaneId,
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
    lane: LaneId,
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
    clock: Clock,
    /// Stream of the latest record.
    source: Weak<Stream>,
    /// Set while the latest record belongs to a capture.
    captured: Option<(Weak<Capture>, Position)>,
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
    pub(crate) fn create(flags: Option<u32>) -> Outcome<Id> {
        if let Some(unknown) = flags.map(|flags| flags & !FLAGS).filter(|&bits| bits != 0) {
            return Err(failure!(
                PARAM_INVALID,
                "event flag: unknown bits {unknown:#x}, allowed: {FLAGS:#x}"
            ));
        }
        LazyLock::force(&STARTED);
        let has = |flag| flags.is_some_and(|flags| flags & flag != 0);
        Ok(EVENTS.insert(Event {
            external: has(sys::ACL_EVENT_EXTERNAL),
            timed: flags.is_none() || has(sys::ACL_EVENT_TIME_LINE),
            state: Lock::new(State {
                clock: Clock::with_capacity(8),
                ..State::default()
            }),
            changed: Signal::new(),
        }))
    }

    /// Whether the event crosses the border of a graph.
    pub(crate) fn external(&self) -> bool {
        self.external
    }

    // What a stream queues.

    /// A record of the present end of a stream is being queued.
    pub(crate) fn queue_record(&self, stream: &Arc<Stream>) -> Mark {
        let mut state = self.state.lock();
        let mark = Mark {
            lane: stream.lane(),
            ticket: state.next_ticket(),
        };
        state.last = Last::Record(mark);
        state.queue(mark);
        ledger::snapshot(mark.lane, &mut state.clock);
        state.source = Arc::downgrade(stream);
        state.captured = None;
        mark
    }

    /// A wait is being queued in a lane: the record to wait for, or `None` if there is none.
    pub(crate) fn queue_wait(&self, lane: LaneId) -> Option<Mark> {
        let mut state = self.state.lock();
        let Last::Record(mark) = state.last else {
            return None;
        };
        state.waits += 1;
        ledger::follow(lane, &state.clock);
        Some(mark)
    }

    /// A reset is being queued; its ticket.
    pub(crate) fn queue_reset(&self) -> u64 {
        let mut state = self.state.lock();
        state.last = Last::Reset;
        state.captured = None;
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
    pub(crate) fn raise(&self, lane: LaneId) {
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

    // Captures.

    /// The latest record belongs to a capture from now on.
    pub(crate) fn capture_record(&self, capture: &Arc<Capture>, position: Position) {
        self.state.lock().captured = Some((Arc::downgrade(capture), position));
    }

    /// The capture that the latest record belongs to, if it goes on.
    pub(crate) fn capture(&self) -> Option<(Arc<Capture>, Position)> {
        // Not asked while holding the state: a capture holds its own when it changes an event's.
        let (capture, position) = self.state.lock().captured.clone()?;
        let capture = capture.upgrade().filter(|capture| capture.active())?;
        Some((capture, position))
    }

    /// Whether a record outside of captures is the latest.
    pub(crate) fn recorded_eagerly(&self) -> bool {
        let state = self.state.lock();
        state.captured.is_none() && matches!(state.last, Last::Record(_))
    }

    /// Refuses a question about an event whose record is part of a capture; the capture becomes invalid.
    fn refuse_captured(&self, name: &str) -> Outcome {
        let Some((capture, _)) = self.capture() else {
            return Ok(());
        };
        let failure = failure!(
            EVENT_CAPTURED,
            "{name}: the event was recorded in a stream that is being captured"
        );
        capture.invalidate(&failure.message);
        Err(failure)
    }

    // What the host asks.

    /// Whether the latest record is reached.
    pub(crate) fn query(&self, name: &str) -> Outcome<bool> {
        self.refuse_captured(name)?;
        let state = self.state.lock();
        let Last::Record(mark) = state.last else {
            return Ok(false);
        };
        if state.is_pending(mark) {
            return Ok(false);
        }
        ledger::host_waited(&state.clock);
        Ok(true)
    }

    /// Whether all waits for the event are over.
    pub(crate) fn query_waits(&self, name: &str) -> Outcome<bool> {
        self.refuse_captured(name)?;
        Ok(self.state.lock().waits == 0)
    }

    /// Waits for the latest record, and reports a fault of what comes before it.
    pub(crate) fn synchronize(&self, check: Check, deadline: Option<Instant>) -> Outcome {
        const NAME: &str = "aclrtSynchronizeEvent";
        self.refuse_captured(NAME)?;
        let mut state = self.state.lock();
        let Last::Record(mark) = state.last else {
            drop(state);
            let suspicion = Suspicion {
                kind: FindingKind::UnrecordedEvent,
                site: (NAME, "event"),
                message: format!(
                    "{NAME}: the event was never recorded, or reset since; nothing is waited for"
                ),
            };
            return report(check, PARAM_INVALID, suspicion);
        };
        while state.is_pending(mark) {
            if expired(deadline) {
                return Err(failure!(
                    EVENT_SYNC_TIMEOUT,
                    "{NAME}: the event was not reached in time"
                ));
            }
            state = self.changed.wait(state, deadline);
        }
        ledger::host_waited(&state.clock);
        let source = state.source.upgrade();
        drop(state);
        match source.and_then(|stream| stream.take_fault()) {
            Some(fault) => Err(fault.into()),
            None => Ok(()),
        }
    }

    fn time(&self, name: &str, which: &str) -> Outcome<Instant> {
        if !self.timed {
            return Err(failure!(
                TIMESTAMP_INVALID,
                "{name}: the {which}event has no timestamp: create it with ACL_EVENT_TIME_LINE or aclrtCreateEvent"
            ));
        }
        self.refuse_captured(name)?;
        let state = self.state.lock();
        match (state.last, state.reached) {
            (Last::Record(mark), Some((latest, at))) if latest == mark.ticket => Ok(at),
            _ => Err(failure!(
                TIMESTAMP_INVALID,
                "{name}: the {which}event has no timestamp: it was not recorded, or its record is not reached"
            )),
        }
    }

    /// Milliseconds from one event to another.
    pub(crate) fn elapsed_ms(start: &Event, end: &Event) -> Outcome<f32> {
        const NAME: &str = "aclrtEventElapsedTime";
        let (from, to) = (start.time(NAME, "start ")?, end.time(NAME, "end ")?);
        let elapsed = to.checked_duration_since(from).ok_or_else(|| {
            failure!(
                TIMESTAMP_REVERSAL,
                "the end event was reached before the start event"
            )
        })?;
        Ok(elapsed.as_secs_f32() * 1e3)
    }

    /// Microseconds from the start of the device to the latest record.
    pub(crate) fn timestamp(&self) -> Outcome<u64> {
        let at = self.time("aclrtEventGetTimestamp", "")?;
        let elapsed = at.saturating_duration_since(*STARTED);
        Ok(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(lane: LaneId, ticket: u64) -> Mark {
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
