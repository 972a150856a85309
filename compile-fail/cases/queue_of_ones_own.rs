//! A queue that this crate knows nothing of.

use ascend_attention::Queue;

struct Nowhere;

impl Queue for Nowhere {}

fn main() {}
