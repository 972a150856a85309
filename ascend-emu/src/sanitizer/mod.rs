//! The sanitizer: who owns which bytes, which queued work touches them, and what is wrong with that.

pub(crate) mod access_lock;
pub(crate) mod allocation_table;
mod finding;
mod vector_clock;

pub use allocation_table::{Allocation, MemoryLocation, allocation_at};
pub use finding::{Finding, FindingKind, findings};
pub(crate) use finding::{Suspicion, report};
pub(crate) use vector_clock::{StreamId, StreamProgress, VectorClock, merge};
