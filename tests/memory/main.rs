//! Device memory: how much is free, and when what is dropped is freed.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[cfg(feature = "emulation")]
mod deferred_frees;
mod free_memory;

use ascend_testing::harness;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// These tests look at how much memory is free, and at handles that functions of theirs count, so they take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
