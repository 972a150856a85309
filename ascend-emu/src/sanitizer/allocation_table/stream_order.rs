//! The order of streams in the whole process. A wait of the host may end a deferred free.

use super::{settle, with};
use crate::sanitizer::vector_clock::{StreamId, StreamProgress, VectorClock};

/// Adds a stream, whose thread counts its finished operations in `progress`.
pub(crate) fn add_stream(stream: StreamId, progress: StreamProgress) {
    with(|table| table.order.add_stream(stream, progress));
}

/// Removes a stream whose work is over.
pub(crate) fn remove_stream(stream: StreamId) {
    with(|table| table.order.remove_stream(stream));
    settle();
}

/// Streams with tasks that are queued and not over.
pub(crate) fn busy_streams() -> Vec<StreamId> {
    with(|table| table.order.busy_streams())
}

/// Writes the clock of a stream, with the stream's own queued work, into `into`.
pub(crate) fn snapshot_clock(stream: StreamId, into: &mut VectorClock) {
    with(|table| table.order.snapshot(stream, into));
}

/// Orders the next operation of a stream after everything in a clock.
pub(crate) fn order_after(stream: StreamId, clock: &[(StreamId, u64)]) {
    with(|table| table.order.order_after(stream, clock));
}

/// Notes that the next operation of a stream waits for something that the sanitizer does not know.
pub(crate) fn order_after_unknown(stream: StreamId) {
    with(|table| table.order.order_after_unknown(stream));
}

/// Notes that the host has waited for everything in a clock.
pub(crate) fn host_waited(clock: &[(StreamId, u64)]) {
    with(|table| table.order.host_waited(clock));
    settle();
}

/// Notes that the host has waited for the first `number` operations of a stream, and so for the stream's clock.
pub(crate) fn host_waited_for_stream(stream: StreamId, number: u64) {
    with(|table| table.order.host_waited_for_stream(stream, number));
    settle();
}
