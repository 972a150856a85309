//! IncreFlashAttention: attention of one query row a sequence, the decoding of the Atlas inference series (310P).
//!
//! [`IncreFlashAttention`] describes a call, which is planned once and launched per layer as an [`IncrePlan`]. What a
//! call reads is given as the [`Inputs`](crate::attention::Inputs) of FusedInferAttention; it takes fewer kinds of
//! them.

mod builder;

pub use super::inference_attention::{InferenceAttention, InferenceOperation, InferencePlan};
pub use builder::{IncreFlashAttention, IncrePlan};
pub(crate) use builder::{phase_one, phases_of};
