//! Streams that do not go on by themselves: a replayed graph waits for an event that no queued work records, or for a
//! value that no queued work writes.

use crate::config::check;
use crate::finding_kind::FindingKind;
use crate::lock::Lock;
use crate::runtime::event::Event;
use crate::sanitizer::{StreamId, Suspicion, allocation_table, report};
use crate::status::{Outcome, STREAM_SYNC_TIMEOUT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the thread of a stream waits for.
#[derive(Clone, Debug)]
pub(crate) enum Wait {
    /// An external event, within a replayed graph.
    Event(Arc<Event>),
    /// A record that is queued on this stream.
    Record(StreamId),
    /// A value at this address, within a replayed graph.
    Value(usize),
}

/// For each stream whose thread waits, what it waits for.
static WAITS: Lock<BTreeMap<StreamId, Wait>> = Lock::new(BTreeMap::new());

/// Marks the thread of a stream as waiting until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting(StreamId);

impl Waiting {
    pub(crate) fn begin(stream: StreamId, wait: Wait) -> Self {
        WAITS.lock().insert(stream, wait);
        Waiting(stream)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITS.lock().remove(&self.0);
    }
}

/// Whether a stream goes on only if the program queues more work: whether no way along the streams that it waits for
/// leads to one that goes on. `seen` are the streams that were looked at, none of which goes on by itself.
fn waits_forever(waits: &BTreeMap<StreamId, Wait>, stream: StreamId, seen: &mut BTreeSet<StreamId>) -> bool {
    if seen.contains(&stream) {
        return true;
    }
    let Some(wait) = waits.get(&stream) else {
        return false;
    };
    seen.insert(stream);
    let mut all_wait = |streams: &[StreamId]| {
        let mut streams = streams.iter();
        streams.all(|other| waits_forever(waits, *other, seen))
    };
    match wait {
        Wait::Record(recording) => all_wait(&[*recording]),
        Wait::Event(event) => match event.awaited_streams() {
            Some(streams) => all_wait(&streams),
            None => false,
        },
        // Any task of any stream may write the value.
        Wait::Value(_) => all_wait(&allocation_table::busy_streams()),
    }
}

/// Describes the wait that keeps a stream from going on, its own or that of a stream it waits for, and how to end it.
/// `None` for a stream that goes on by itself.
fn stalled_by(stream: StreamId) -> Option<String> {
    let waits = WAITS.lock();
    if !waits_forever(&waits, stream, &mut BTreeSet::new()) {
        return None;
    }
    let mut stream = stream;
    for _ in 0..waits.len() {
        match waits.get(&stream)? {
            Wait::Record(recording) => stream = *recording,
            Wait::Event(event) => return Some(missing_record(event)),
            Wait::Value(address) => {
                return Some(format!(
                    "a value at {address:#x} (aclrtValueWait), and no other stream has work queued that could write \
                     it; call aclrtValueWrite"
                ));
            }
        }
    }
    None
}

/// Describes the record that a replayed graph waits for.
fn missing_record(event: &Event) -> String {
    let queued = match event.awaited_streams() {
        Some(streams) if !streams.is_empty() => "of which the only record queued comes after this wait itself",
        _ => "of which no stream has a record queued",
    };
    let lost = match event.lost_records() {
        0 => String::new(),
        lost => format!(
            " ({} records came before its latest reset, and count as one: let a record wait until the replay before \
             has reset the event)",
            lost.saturating_add(1)
        ),
    };
    format!("an ACL_EVENT_EXTERNAL event, {:#x}, {queued}{lost}; record it", event.handle)
}

/// Measures how long the host has been waiting, without a deadline, for a stalled stream.
#[derive(Debug, Default)]
pub(crate) struct StallWatch {
    since: Option<Instant>,
    reported: bool,
}

impl StallWatch {
    /// The time after which a wait for a stalled stream is a finding.
    const LIMIT: Duration = Duration::from_secs(1);

    /// The time of the next call of [`StallWatch::look`].
    pub(crate) fn next_look() -> Option<Instant> {
        Instant::now().checked_add(Duration::from_millis(100))
    }

    /// Checks the stream that the host waits for. A stalled stream is reported once in a wait, after a second: other
    /// threads may queue the record, but a program whose only thread waits here would wait for ever.
    pub(crate) fn look(&mut self, name: &'static str, stream: StreamId) -> Outcome {
        let Some(missing) = stalled_by(stream) else {
            self.since = None;
            return Ok(());
        };
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.reported || since.elapsed() < Self::LIMIT {
            return Ok(());
        }
        self.reported = true;
        let suspicion = Suspicion {
            kind: FindingKind::StalledReplay,
            site: (name, "stream"),
            tensor: 0,
            message: format!(
                "{name}: a replayed graph on the stream, or on one that it waits for, waits for {missing} on another \
                 stream after aclmdlRIExecuteAsync and the task updates"
            ),
        };
        report(check(), STREAM_SYNC_TIMEOUT, suspicion)
    }
}
