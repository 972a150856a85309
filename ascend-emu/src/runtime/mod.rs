//! The runtime: devices and their contexts, streams and what they run, events, notifies, captured graphs.
//!
//! Modules use those above them in this list: tasks; the queue of a stream; events, graphs and captures; streams; contexts.

pub(crate) mod callback;
pub(crate) mod capturable_event;
pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod core_limits;
pub(crate) mod device_limits;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod notify;
mod queue;
pub(crate) mod stream;
mod stream_faults;
pub(crate) mod stream_value;
pub(crate) mod task;
