//! Devices, streams, graphs, releases, and what goes wrong with them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

#[cfg(all(feature = "emulation", not(target_feature = "crt-static")))]
mod check_mode;
mod deterministic;
mod errors;
mod faults;
mod graph;
mod graph_failures;
mod graph_launches;
mod graph_threads;
mod ordering;
mod ownership;
mod threads;
mod versions;

use ascend_testing::harness;
