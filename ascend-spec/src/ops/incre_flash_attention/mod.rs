//! IncreFlashAttention: attention of one query row a sequence, with the rules of FusedInferAttentionScore's decode path
//! behind its own few.
//!
//! It is the fused attention of the Atlas inference series (310P) for decode, and runs on Atlas A2 and A3.

mod arguments;
mod call;
pub mod rules;
mod version;

pub use crate::operator_version::incre_flash_attention::Version;
pub use arguments::{Argument, Arguments, IncreCall, Parameter};
