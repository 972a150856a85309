//! What allocates nothing on the host: launches in steady state, masks that are there already.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

mod mask_cache;
mod nouns;
mod steady_state;

use ascend_testing::allocations;
use ascend_testing::harness;

#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;
