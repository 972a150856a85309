//! The sanitizer: which allocation each byte belongs to, which queued work accesses it, and which of that is misuse.

pub(crate) mod access_lock;
pub(crate) mod allocation_table;
mod finding;
mod vector_clock;

pub use allocation_table::{Allocation, MemoryLocation, allocation_at};
pub use finding::{Finding, findings};
pub(crate) use finding::{Suspicion, report};
pub(crate) use vector_clock::{Operation, StreamId, StreamProgress, VectorClock, merge};
