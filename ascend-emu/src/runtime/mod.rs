//! The runtime: devices and their contexts, streams and what they run, events, notifies, captured graphs.
//!
//! Each module uses only modules named before it: callbacks, values in memory, limits of cores;
//! events and notifies; streams that stall; tasks; graphs; queues of streams, captures; events in captures; streams;
//! contexts.

pub(crate) mod callback;
pub(crate) mod capturable_event;
pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod core_limits;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod notify;
mod queue;
mod stall;
pub(crate) mod stream;
pub(crate) mod stream_value;
pub(crate) mod task;
