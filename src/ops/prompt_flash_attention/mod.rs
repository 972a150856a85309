//! PromptFlashAttention: attention of several query rows a sequence, the prefill of the Atlas inference series (310P).
//!
//! [`PromptFlashAttention`] describes a call, which is planned once and launched per layer as a [`PromptPlan`]. What
//! a call reads is given as the [`Inputs`](crate::attention::Inputs) of FusedInferAttention; it takes fewer kinds of
//! them.

mod builder;

pub use super::inference_attention::{InferenceAttention, InferenceOperation, InferencePlan};
pub use builder::{PromptFlashAttention, PromptPlan};
pub(crate) use builder::{phase_one, phases_of};
