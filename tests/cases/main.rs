//! Case files: what they hold, whatever bytes they have, and that each passes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

mod format;
mod format_errors;
#[cfg(feature = "emulation")]
mod golden;
mod mutations;
#[cfg(feature = "emulation")]
mod operators;
mod recorded;
mod robustness;

use ascend_testing::case_files;
use ascend_testing::harness;
