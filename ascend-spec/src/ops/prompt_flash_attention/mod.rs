//! PromptFlashAttention: attention of several query rows over dense keys, with the rules of FusedInferAttentionScore's
//! prefill path behind its own.
//!
//! It is the fused attention of the Atlas inference series (310P) for prefill, and runs on Atlas A2 and A3. What its tiling
//! refuses ends with 561103; the refusal names the rule of FusedInferAttentionScore.

mod arguments;
mod call;
pub mod rules;
mod version;

pub use crate::operator_version::prompt_flash_attention::Version;
pub use arguments::{Argument, Arguments, Parameter, PromptCall};
