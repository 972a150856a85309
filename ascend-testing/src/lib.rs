//! The harness, data and references that the tests of this workspace share. Each crate's tests take the features for
//! what is below that crate.

#![allow(
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

pub mod allocations;
pub mod alone;
#[cfg(feature = "spec")]
pub mod calls;
#[cfg(feature = "attention")]
pub mod case_files;
#[cfg(feature = "attention")]
pub mod draw;
#[cfg(all(feature = "emulation", feature = "serving"))]
pub mod faults;
#[cfg(feature = "attention")]
pub mod harness;
#[cfg(feature = "attention")]
pub mod limits;
#[cfg(feature = "spec")]
pub mod lints;
#[cfg(feature = "serving")]
pub mod llama;
#[cfg(feature = "serving")]
pub mod step_memory;
#[cfg(feature = "serving")]
pub mod steps;
#[cfg(feature = "serving")]
pub mod tokens;
#[cfg(feature = "emu")]
pub mod workbench;
