//! FusedInferAttentionScore: the description of a call, its rules, and what a call that holds them asks to compute.
//!
//! The rules are those of the operator's own checks up to V4 on Atlas A2 and A3, as CANN's release of late 2025 has them,
//! and of the arguments that V5 adds on Ascend 950. A later release checks all paths alike and takes more: layouts such as
//! `NTD` and `BSND_BNSD`, blocks of up to 1024 tokens in the decode path, FLOAT16 packed sequences, rotary parts with a
//! batch axis. Its contract (entries I1 to I13 of the check list) has no rules here: what it takes and the earlier one
//! refuses is refused. The types that Ascend 950 alone has are [`Unsupported`](crate::Unsupported).

mod antiquant_mode;
mod cache;
mod call;
mod check;
mod checker;
mod head_shape;
mod implied;
mod operand;
mod problem;
mod quantisation;
mod resolve;
pub mod rules;
mod slopes;
mod touches;
mod version;

pub use antiquant_mode::AntiquantMode;
pub use cache::Cache;
pub use call::FiaCall;
pub use checker::Checker;
pub use head_shape::HeadShape;
pub use operand::{Operand, Parameter, Place};
pub use problem::{
    Int8Query, KeyValue, MaskTensor, MaskUse, Padding, Pages, Prefix, Problem, Route, Rows,
    Sequence, Work,
};
pub use quantisation::{Affine, Grid};
pub use rules::contents::Places;
pub use slopes::Slopes;
pub use version::Version;
