//! IncreFlashAttention: attention of one query row a sequence, with the rules of FusedInferAttentionScore's decode path
//! behind its own few.
//!
//! It is the fused attention of the Atlas inference series (310P) for decode, and runs on Atlas A2 and A3.

mod call;
pub mod rules;
mod version;

pub use call::IncreCall;
pub use version::Version;
