//! FusedInferAttentionScore: the description of a call, its rules, and what a call that holds them asks to compute.

mod call;
mod check;
mod problem;
pub mod rules;
mod version;

pub use call::FiaCall;
pub use problem::{Cache, KeyValue, MaskTensor, MaskUse, Operand, Problem, Route, Work};
pub use version::Version;
