//! The runtime through its C functions: memory, streams, events, graphs, executors, handles, and what the sanitizer
//! finds.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to live objects"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod batch_copies;
mod events;
mod executors;
mod exports;
mod faults;
mod findings;
mod graphs;
mod handles;
mod host_memory;
mod memory;
mod sanitizer;
mod stalls;
mod stream_order;
mod streams;

use ascend_testing::workbench as bench;
