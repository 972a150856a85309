//! The contracts of the attention operators: their verdicts, and a call for every rule.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests end them by a panic")]

mod atb;
mod batch_mat_mul;
mod block_sparse;
mod causal_conv1d;
mod corners;
mod delta_rule;
mod described;
mod facts;
mod fixes;
mod flash;
mod fused_causal_conv1d;
mod gather;
mod indexer;
mod lints;
mod nsa_attention;
mod nsa_compression;
mod paged;
mod portable;
mod prompt_incre;
mod prompt_incre_golden;
mod quant_indexer;
mod quant_sparse_flash;
mod quantised;
mod recorded;
mod release_9_2;
mod ring;
mod rms_norm;
mod rules;
mod scatter;
mod sparse;
mod sparse_flash;
mod targets;
mod update;
mod verdicts;
