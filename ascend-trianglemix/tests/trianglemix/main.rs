//! TriangleMix: masks, prefill, the backend, samples on a device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod batches;
mod masks;
mod prefill;
mod weight_gradient;

use ascend_testing::harness;
