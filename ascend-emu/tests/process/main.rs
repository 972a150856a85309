//! What concerns a whole process, in one test and in this order: before `aclInit`, the memory of refusals, launches
//! that allocate nothing, a capture that every thread minds, the end.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to live objects"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod global_capture;
mod lifecycle;
mod refusals;
mod steady_state;

use ascend_testing::allocations;
use ascend_testing::workbench as bench;

#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;

#[test]
fn a_process_from_begin_to_end() {
    lifecycle::begin();
    refusals::a_launch_without_an_executor_tells_what_phase_one_said();
    steady_state::launches_addresses_and_events_allocate_nothing();
    global_capture::every_thread_is_kept_from_disturbing();
    lifecycle::end();
}
