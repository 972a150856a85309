//! Every mask is what its definition says, as a tensor and as attention.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod attention;
mod builders;
#[path = "../harness/mod.rs"]
mod harness;
mod host;
mod tensors;

use ascend_attention::SlidingWindow;

fn window(keys: usize) -> SlidingWindow {
    SlidingWindow::new(keys).unwrap()
}
