//! What allocates nothing on the host: launches in steady state, masks that are there already.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

#[path = "../../ascend-spec/tests/allocations/mod.rs"]
mod allocations;
#[path = "../harness/mod.rs"]
mod harness;
mod mask_cache;
mod nouns;
mod steady_state;
