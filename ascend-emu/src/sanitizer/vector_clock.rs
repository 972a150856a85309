//! Happens-before between queued operations, by a vector clock for each stream.
//!
//! The operations of a stream are numbered from 1. A stream's clock has, for each other stream, the number of its
//! last operation that happens before the next operation of the stream; recording and waiting for an event copies
//! clocks between streams. Operations that the host has waited for happen before everything that is queued from then
//! on. (Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System"; Mattern, "Virtual Time and
//! Global States of Distributed Systems".)

use crate::handle::IdHasher;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of a stream, unique in the process.
pub(crate) type StreamId = u64;

/// For each stream, the number of its last operation that is known to happen before.
pub(crate) type VectorClock = Vec<(StreamId, u64)>;

/// The number of finished operations of a stream; the stream's thread counts them.
pub(crate) type StreamProgress = Arc<AtomicU64>;

/// One operation of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    pub stream: StreamId,
    pub number: u64,
}

/// Raises each entry of `clock` to that of `other`.
pub(crate) fn merge(clock: &mut VectorClock, other: &[(StreamId, u64)]) {
    for &(stream, number) in other {
        match clock.iter_mut().find(|(id, _)| *id == stream) {
            Some((_, known)) => *known = (*known).max(number),
            None => clock.push((stream, number)),
        }
    }
}

#[derive(Debug)]
struct Stream {
    /// Operations queued so far.
    queued: u64,
    /// Operations that the host has waited for.
    host_waited: u64,
    progress: StreamProgress,
    clock: VectorClock,
    /// Operations after this one wait for something that the sanitizer does not know: they count as ordered.
    unknown_after: Option<u64>,
}

/// The clocks of all streams.
#[derive(Debug, Default)]
pub(super) struct StreamOrder {
    streams: HashMap<StreamId, Stream, BuildHasherDefault<IdHasher>>,
}

impl StreamOrder {
    pub(super) fn add_stream(&mut self, stream: StreamId, progress: StreamProgress) {
        self.streams.insert(
            stream,
            Stream { queued: 0, host_waited: 0, progress, clock: Vec::with_capacity(8), unknown_after: None },
        );
    }

    /// Removes a stream whose work is over: all of it happens before every later operation.
    pub(super) fn remove_stream(&mut self, stream: StreamId) {
        self.streams.remove(&stream);
        for other in self.streams.values_mut() {
            other.clock.retain(|&(id, _)| id != stream);
        }
    }

    /// Counts an operation as queued.
    pub(super) fn queue(&mut self, operation: Operation) {
        if let Some(stream) = self.streams.get_mut(&operation.stream) {
            stream.queued = stream.queued.max(operation.number);
        }
    }

    /// Whether the host has waited for an operation, or its stream is gone.
    pub(super) fn host_has_waited(&self, operation: Operation) -> bool {
        let stream = self.streams.get(&operation.stream);
        stream.is_none_or(|stream| stream.host_waited >= operation.number)
    }

    /// Whether an operation is queued and not over.
    pub(super) fn in_flight(&self, operation: Operation) -> bool {
        let stream = self.streams.get(&operation.stream);
        stream.is_some_and(|stream| stream.progress.load(Ordering::Acquire) < operation.number)
    }

    /// Streams with operations that are queued and not over.
    pub(super) fn busy_streams(&self) -> Vec<StreamId> {
        let busy = |stream: &Stream| stream.progress.load(Ordering::Acquire) < stream.queued;
        let streams = self.streams.iter().filter(|(_, stream)| busy(stream));
        streams.map(|(id, _)| *id).collect()
    }

    /// Whether an operation happens before the next one of a stream.
    pub(super) fn happens_before(&self, operation: Operation, stream: StreamId) -> bool {
        let in_clock = || {
            let clock = self.streams.get(&stream).map(|stream| &stream.clock);
            clock.is_some_and(|clock| {
                clock.iter().any(|&(id, number)| id == operation.stream && number >= operation.number)
            })
        };
        let next = Operation { stream, number: u64::MAX };
        operation.stream == stream
            || self.host_has_waited(operation)
            || in_clock()
            || self.waits_for_unknown(next)
            || self.waits_for_unknown(operation)
    }

    fn waits_for_unknown(&self, operation: Operation) -> bool {
        let stream = self.streams.get(&operation.stream);
        let after = stream.and_then(|stream| stream.unknown_after);
        after.is_some_and(|after| operation.number > after)
    }

    /// Writes the clock of a stream, with the stream's own queued work, into `into`.
    pub(super) fn snapshot(&self, stream: StreamId, into: &mut VectorClock) {
        into.clear();
        if let Some(found) = self.streams.get(&stream) {
            into.extend_from_slice(&found.clock);
            merge(into, &[(stream, found.queued)]);
        }
    }

    /// Orders the next operation of a stream after everything in a clock.
    pub(super) fn order_after(&mut self, stream: StreamId, clock: &[(StreamId, u64)]) {
        // Entries of removed streams would only pile up.
        let alive = |id: StreamId| self.streams.contains_key(&id);
        let kept: VectorClock;
        let clock = if clock.iter().any(|&(id, _)| !alive(id)) {
            kept = clock.iter().copied().filter(|&(id, _)| alive(id)).collect();
            kept.as_slice()
        } else {
            clock
        };
        if let Some(stream) = self.streams.get_mut(&stream) {
            merge(&mut stream.clock, clock);
        }
    }

    /// Notes that the next operation of a stream waits for something that the sanitizer does not know.
    pub(super) fn order_after_unknown(&mut self, stream: StreamId) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.unknown_after.get_or_insert(stream.queued);
        }
    }

    /// Notes that the host has waited for everything in a clock.
    pub(super) fn host_waited(&mut self, clock: &[(StreamId, u64)]) {
        for &(stream, number) in clock {
            if let Some(stream) = self.streams.get_mut(&stream) {
                stream.host_waited = stream.host_waited.max(number);
            }
        }
    }

    /// Notes that the host has waited for the first `number` operations of a stream, and so for the stream's clock.
    pub(super) fn host_waited_for_stream(&mut self, stream: StreamId, number: u64) {
        let Some(found) = self.streams.get_mut(&stream) else {
            return;
        };
        let clock = std::mem::take(&mut found.clock);
        self.host_waited(&clock);
        if let Some(found) = self.streams.get_mut(&stream) {
            found.clock = clock;
            found.host_waited = found.host_waited.max(number);
            if found.host_waited >= found.queued {
                // The unknown wait is over.
                found.unknown_after = None;
            }
        }
    }
}
