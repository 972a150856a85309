//! The operators through their C functions.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to live objects"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod atb;
mod atb_masks;
mod batch_mat_mul;
mod block_sparse;
mod causal_conv1d;
mod delta_rule;
mod flash_family;
mod found;
mod fused_causal_conv1d;
mod garbage;
mod gather;
#[cfg(feature = "glue")]
mod glue;
mod indexer;
mod native_sparse;
mod rms_norm;
mod scatter;
mod sparse_flash;
mod update;

use ascend_testing::workbench as bench;
