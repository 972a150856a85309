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
mod checker;
mod grid;
mod head_shape;
mod implied;
mod mask_use;
mod mxfp8;
mod operand;
mod portability;
mod problem;
mod quantisation;
mod resolve;
pub mod rules;
mod slopes;
mod touches;
mod unread;
mod version;

pub use antiquant_mode::AntiquantMode;
pub use arguments::{Argument, Arguments, FiaCall, Parameter};
pub use cache::Cache;
pub use checker::Checker;
pub use grid::{Affine, Counts, Cut, Cuts, Grid};
pub use head_shape::HeadShape;
pub use mask_use::{MaskRows, MaskTensor, MaskUse, TreeMask};
pub use operand::Operand;
pub use problem::{
    Int8Query, KeyValue, Padding, Pages, Prefix, Problem, Route, Rows, Sequence, Work,
};
pub use rules::contents::Places;
pub use slopes::Slopes;
pub use unread::UnreadLengths;
pub use version::Version;
