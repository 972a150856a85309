//! Whatever numbers a public function gets, it answers: no panic, no allocation of absurd size, no call that never
//! ends.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod kv;
mod named;
mod quantised;
mod serving;

use ascend_testing::limits::{Call, Limited, device, stream, try_all, turn};
use ascend_testing::{draw, harness};

#[global_allocator]
static ALLOCATOR: Limited = Limited;

#[test]
fn kv_answers_any_numbers() {
    try_all(kv::CALLS);
}

#[test]
fn serving_answers_any_numbers() {
    try_all(serving::CALLS);
}

#[test]
fn quantised_caches_answer_any_numbers() {
    try_all(quantised::CALLS);
}
