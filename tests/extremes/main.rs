//! Whatever numbers a public function gets, it answers: no panic, no allocation of absurd size, no call that never
//! ends.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../harness/mod.rs"]
mod harness;

mod calls;
mod draw;
mod geometry;
mod limits;
mod mask;
mod named;
mod tensors;

use limits::{Call, device, stream, try_all, turn};

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
