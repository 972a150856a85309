//! FlashAttentionScore: the attention of training, forward, with what its backward and a ring of ranks go on from.
//!
//! [`FlashAttention`] describes a call, which is planned once and launched as often as there are layers and steps of
//! its shapes. What a call reads beyond query, key and value (rotary parts, a [`PositionBias`], a [`Dropout`], sinks)
//! comes with them, as [`FlashInputs`]. Which keys a row sees is a [`FlashMask`]: only here are there sparse modes 5
//! to 8. Beside the attention a launch gives a [`SoftmaxState`], the maxima and sums of its rows, which
//! [`RingUpdate`](crate::ring::RingUpdate) merges with those over other keys.
//!
//! Its axis orders are an [`InputLayout`], since the operator has SBH and no packed order but TND, and none whose
//! output differs from the query; the operators of inference take a [`Layout`](crate::Layout).

mod builder;
mod dropout;
mod inputs;
mod mask;
mod plan;
mod position_bias;
mod softmax_state;
mod versions;

pub use crate::ops::fused_infer_attention_score::Distance;
pub use ascend_spec::geometry::{CutBatch, CutSide};
pub use ascend_spec::ops::flash_attention_score::{InputLayout, SoftmaxOrder};
pub use builder::FlashAttention;
pub use dropout::Dropout;
pub use inputs::FlashInputs;
pub use mask::FlashMask;
pub use plan::{FlashOperation, FlashPlan};
pub use position_bias::PositionBias;
pub use softmax_state::{FlashOutput, SoftmaxState};
pub(crate) use softmax_state::{Keyless, PlannedOutput, StateRows};
pub(crate) use versions::phases_of;
