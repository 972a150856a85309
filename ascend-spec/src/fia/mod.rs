//! FusedInferAttentionScore: the description of a call, its rules, and what a call that holds them asks to compute.
//!
//! The rules are those of the operator's own checks in four releases of CANN ([`Cann`](crate::Cann)) on Atlas A2 and A3, and
//! of 9.1 on Ascend 950; each says where it holds ([`Rule::scope`](crate::Rule::scope)). Which of the operator's checkers
//! judges a call depends on the release ([`Checker`]): most differences follow from it. What a release takes and no kernel
//! here computes is [`Unsupported`](crate::Unsupported), as the INT8 output that 9.0 takes without a scale.

mod antiquant_mode;
mod arguments;
mod cache;
mod call;
mod check;
mod checked_call;
mod checker;
mod head_shape;
mod implied;
mod mxfp8;
mod operand;
mod portability;
mod quantisation;
mod resolve;
mod roles;
pub mod rules;
mod unread;
mod version;

pub use crate::operator_version::fused_infer_attention_score::Version;
pub use antiquant_mode::AntiquantMode;
pub use arguments::{Argument, Arguments, FiaCall, Parameter};
pub use cache::Cache;
pub use checked_call::{CheckedCall, Route};
pub use checker::Checker;
pub use head_shape::HeadShape;
pub use operand::Operand;
pub use rules::contents::Places;
pub use unread::UnreadLengths;
