//! Whatever numbers a public function gets, it answers: no panic, no allocation of absurd size, no call that never
//! ends.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod calls;
mod geometry;
mod mask;
mod named;
mod tensors;

use ascend_testing::draw;
use ascend_testing::limits::{Call, Limited, device, stream, try_all, turn};

#[global_allocator]
static ALLOCATOR: Limited = Limited;

#[test]
fn calls_answer_any_numbers() {
    try_all(calls::CALLS);
}

#[test]
fn geometry_answers_any_numbers() {
    try_all(geometry::CALLS);
}

#[test]
fn masks_answer_any_numbers() {
    try_all(mask::CALLS);
}

#[test]
fn tensors_answer_any_numbers() {
    try_all(tensors::CALLS);
}
