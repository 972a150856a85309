//! What PromptFlashAttention and IncreFlashAttention have in common: description, inputs and plans.
//!
//! Both compute what FusedInferAttentionScore does, for fewer kinds of [`Inputs`](crate::attention::Inputs). An
//! operator states which of its parameters reads an input ([`InferenceParameter`]), how its newest version takes a
//! call ([`InferenceCall`]), and which call a description makes ([`InferenceOperator`]); the rest is the same for both.

mod builder;
mod inputs;
mod plan;

pub use builder::InferenceAttention;
pub(crate) use builder::InferenceOperator;
pub(crate) use inputs::{Described, InferenceCall, InferenceParameter, no_such_input};
pub use plan::{InferenceOperation, InferencePlan};
