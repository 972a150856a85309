//! What PromptFlashAttention and IncreFlashAttention have in common: inputs, planning and launches.
//!
//! Both compute what FusedInferAttentionScore does, for fewer kinds of [`Inputs`](crate::attention::Inputs). An
//! operator states which of its parameters reads an input ([`InferenceParameter`]) and how its newest version takes a
//! call ([`InferenceCall`]); the rest is the same for both.

mod call;
mod inputs;
mod plan;

pub(crate) use call::InferenceCall;
pub(crate) use inputs::{Described, InferenceParameter, no_such_input};
pub use plan::InferencePlan;
