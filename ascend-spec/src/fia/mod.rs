//! FusedInferAttentionScore: the description of a call, its rules, and what a call that holds them asks to compute.

mod antiquant_mode;
mod cache;
mod call;
mod check;
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
pub use head_shape::HeadShape;
pub use operand::{Operand, Parameter, Place};
pub use problem::{
    Int8Query, KeyValue, MaskTensor, MaskUse, Padding, Pages, Prefix, Problem, Route, Rows,
    Sequence, Work,
};
pub use quantisation::{Affine, Grid};
pub use slopes::Slopes;
pub use version::Version;
