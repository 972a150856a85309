//! What one call computes: numbers, inputs, masks, formats of caches, merging.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

#[cfg(feature = "emulation")]
mod ascend950;
mod block_sparse;
mod blockwise;
mod causal_conv1d;
mod contents;
mod delta_rule;
mod flash;
mod fused_causal_conv1d;
mod garbage;
mod gather;
mod indexer;
mod inputs;
mod masks;
mod matmul;
mod merge;
mod merge_rows;
mod native_sparse;
mod norm;
mod numbers;
mod overwritten_sequences;
mod prompt_and_incre;
mod quant_indexer;
mod quant_sparse;
mod refusals;
mod scatter;
mod soft_cap;
mod sparse;
mod sparse_batches;
mod typed_calls;

use ascend_testing::harness;
