//! Whatever numbers a public function gets, it answers: no panic, no allocation of absurd size, no call that never
//! ends.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../../../tests/extremes/draw.rs"]
mod draw;
#[path = "../../../tests/harness/mod.rs"]
mod harness;
mod kv;
#[path = "../../../tests/extremes/limits.rs"]
mod limits;
mod named;
mod quantised;
mod serving;

use limits::{Call, device, stream, try_all, turn};

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
