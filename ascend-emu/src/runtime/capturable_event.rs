//! Events as programs hold them: an event, and the capture that its latest record may belong to.

use super::capture::{Capture, Position};
use super::event::{Event, Mark, microseconds_until};
use super::stall::StallWatch;
use crate::config::Check;
use crate::fault::StreamFaults;
use crate::handle::{Id, Kind, Table};
use crate::lock::Lock;
use crate::sanitizer::StreamId;
use crate::status::{EVENT_CAPTURED, Outcome, TIMESTAMP_REVERSAL, failure};
use std::sync::{Arc, Weak};
use std::time::Instant;

pub(crate) static EVENTS: Table<CapturableEvent> = Table::new(Kind::Event);

/// An event that can be recorded in a stream or in a capture.
#[derive(Debug)]
pub(crate) struct CapturableEvent {
    event: Arc<Event>,
    /// Set while the latest record belongs to a capture.
    captured: Lock<Option<(Weak<Capture>, Position)>>,
}

impl CapturableEvent {
    /// Makes an event for the uses that the flags name; `None` is `aclrtCreateEvent`.
    pub(crate) fn create(flags: Option<u32>) -> Outcome<Id> {
        let id = EVENTS.reserve();
        let event =
            CapturableEvent { event: Arc::new(Event::new(flags, id.raw::<()>().addr())?), captured: Lock::new(None) };
        EVENTS.insert_at(id, Arc::new(event));
        Ok(id)
    }

    /// The event itself, without its records in captures.
    pub(crate) fn event(&self) -> &Arc<Event> {
        &self.event
    }

    /// Queues a record after the work of a stream.
    pub(crate) fn queue_record(&self, stream: StreamId, faults: &Arc<StreamFaults>) -> Mark {
        *self.captured.lock() = None;
        self.event.queue_record(stream, faults)
    }

    /// Queues a reset and returns its ticket.
    pub(crate) fn queue_reset(&self) -> u64 {
        *self.captured.lock() = None;
        self.event.queue_reset()
    }

    /// Notes that the latest record belongs to a capture.
    pub(crate) fn record_captured(&self, capture: &Arc<Capture>, position: Position) {
        *self.captured.lock() = Some((Arc::downgrade(capture), position));
    }

    /// The capture that the latest record belongs to, if the capture is not over.
    pub(crate) fn capture(&self) -> Option<(Arc<Capture>, Position)> {
        let (capture, position) = self.captured.lock().clone()?;
        let capture = capture.upgrade().filter(|capture| capture.active())?;
        Some((capture, position))
    }

    /// Whether the latest record is outside of captures.
    pub(crate) fn recorded_eagerly(&self) -> bool {
        self.captured.lock().is_none() && self.event.recorded()
    }

    /// Refuses a query of an event whose record is part of a capture; the capture becomes invalid.
    fn refuse_captured(&self, name: &str) -> Outcome {
        let Some((capture, _)) = self.capture() else {
            return Ok(());
        };
        let failure = failure!(EVENT_CAPTURED, "{name}: the event was recorded in a stream that is being captured");
        capture.invalidate(&failure.message);
        Err(failure)
    }

    /// Whether the latest record was reached.
    pub(crate) fn query(&self, name: &str) -> Outcome<bool> {
        self.refuse_captured(name)?;
        Ok(self.event.query())
    }

    /// Whether all waits for the event are over.
    pub(crate) fn query_waits(&self, name: &str) -> Outcome<bool> {
        self.refuse_captured(name)?;
        Ok(self.event.query_waits())
    }

    /// Waits for the latest record, and reports a fault of the work before it.
    pub(crate) fn synchronize(&self, check: Check, deadline: Option<Instant>) -> Outcome {
        const NAME: &str = "aclrtSynchronizeEvent";
        self.refuse_captured(NAME)?;
        let mut watch = StallWatch::default();
        let look = |stream| {
            watch.look(NAME, stream)?;
            Ok(StallWatch::next_look())
        };
        self.event.synchronize(NAME, check, deadline, look)
    }

    fn time(&self, name: &str, which: &str) -> Outcome<Instant> {
        self.event.check_timed(name, which)?;
        self.refuse_captured(name)?;
        self.event.time(name, which)
    }

    /// Milliseconds from one event to another.
    pub(crate) fn elapsed_ms(start: &Self, end: &Self) -> Outcome<f32> {
        const NAME: &str = "aclrtEventElapsedTime";
        let (from, to) = (start.time(NAME, "start ")?, end.time(NAME, "end ")?);
        let elapsed = to
            .checked_duration_since(from)
            .ok_or_else(|| failure!(TIMESTAMP_REVERSAL, "the end event was reached before the start event"))?;
        Ok(elapsed.as_secs_f32() * 1e3)
    }

    /// Microseconds from the start of the device to the latest record.
    pub(crate) fn timestamp(&self) -> Outcome<u64> {
        Ok(microseconds_until(self.time("aclrtEventGetTimestamp", "")?))
    }
}
