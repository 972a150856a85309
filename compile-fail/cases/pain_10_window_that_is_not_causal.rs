//! A window in a layer that is not causal.

use std::num::NonZeroU32;

use ascend_attention::serving::Causality;

fn main() {
    let _ = Causality::Bidirectional(NonZeroU32::MIN);
}
