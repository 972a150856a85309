//! Every mask is what its definition says, as a tensor and as attention.

mod attention;
mod builders;
mod causal_square;
mod host;
mod tensors;

use ascend_attention::SlidingWindow;

fn window(keys: usize) -> SlidingWindow {
    SlidingWindow::new(keys).unwrap()
}
