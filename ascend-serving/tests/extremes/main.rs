//! Whatever numbers a public function gets, it answers: no panic, no allocation of absurd size, no call that never
//! ends.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod kv;
mod named;
mod quantised;
mod serving;

use std::sync::atomic::{AtomicUsize, Ordering};

use ascend_testing::limits::{Call, Limited, device, stream, try_all, turn};
use ascend_testing::{draw, harness};

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// The number of draws of a call that reached `forward`: most are refused before.
struct Forwards(AtomicUsize);

impl Forwards {
    const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Fails unless draws of each of these calls reached `forward`; with another number of draws than usual none has to.
fn assert_forwards<const N: usize>(calls: [(&str, &Forwards); N]) {
    for (call, forwards) in calls {
        let reached = forwards.0.load(Ordering::Relaxed) > 0;
        assert!(reached || std::env::var_os("PROPTEST_CASES").is_some(), "{call}");
    }
}

#[test]
fn kv_answers_any_numbers() {
    try_all(kv::CALLS);
}

#[test]
fn serving_answers_any_numbers() {
    try_all(serving::CALLS);
    assert_forwards([
        ("cross attention", &serving::CROSS_STEPS),
        ("a step of an engine", &serving::STEPS),
        ("a step by graphs", &serving::GRAPH_STEPS),
        ("a step over latents by graphs", &serving::LATENT_GRAPH_STEPS),
        ("trees", &serving::TREE_STEPS),
        ("trees by graphs", &serving::TREE_GRAPH_STEPS),
    ]);
}

#[test]
fn quantised_caches_answer_any_numbers() {
    try_all(quantised::CALLS);
    assert_forwards([("steps", &quantised::STEPS), ("steps by graphs", &quantised::GRAPH_STEPS)]);
}
