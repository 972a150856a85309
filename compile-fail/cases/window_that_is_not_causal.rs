//! A window in a layer that is not causal.

use std::num::NonZeroUsize;

use ascend_serving::Causality;

fn main() {
    let _ = Causality::Bidirectional(NonZeroUsize::MIN);
}
