//! FlashAttentionScore and FlashAttentionVarLenScore: the attention operators of training, forward.
//!
//! All their versions are one operator with a growing list of arguments, so that one [`FlashAttentionCall`] describes a call
//! of any of them. The rules are those of CANN 9.1 on Atlas A2 and A3; older releases are held to the same, and Ascend 950
//! too, whose own checks are not known. Whatever the operator's shape inference or tiling refuses ends with 161001, as a
//! null pointer does.

mod arguments;
mod bias;
mod call;
mod check;
mod facts;
mod layout;
mod lengths;
mod mask_use;
mod problem;
pub mod rules;
mod softmax_order;
mod version;

pub use crate::operator_version::flash_attention_score::Version;
pub use arguments::{Argument, Arguments, FlashAttentionCall, Parameter};
pub use bias::Bias;
pub use layout::InputLayout;
pub use lengths::{PackedLengths, Sequence};
pub use mask_use::{FullMask, MaskUse};
pub use problem::{FlashAttentionProblem, Work};
pub use softmax_order::SoftmaxOrder;
