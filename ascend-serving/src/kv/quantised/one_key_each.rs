//! Attention that gives the rows of its value.

use ascend_attention::{FusedInferAttention, Layout};

/// A call with a sequence for each row: it attends to its own key alone, so that it gives the rows of the value.
pub(crate) fn one_key_each(heads: usize) -> FusedInferAttention {
    FusedInferAttention::new(Layout::Bsh)
        .heads(heads)
        .kv_heads(heads)
        .scale(1.0)
}
