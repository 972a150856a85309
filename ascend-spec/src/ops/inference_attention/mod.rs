//! What PromptFlashAttention and IncreFlashAttention share: each is one path of FusedInferAttentionScore, with fewer
//! arguments and a few rules of its own.
//!
//! An operator's folder has its arguments, its versions and its own rules. From a table of which parameter stands for
//! which of FusedInferAttentionScore, `path_operator!` makes the rest.

mod path_call;
mod path_operator;

pub(crate) use path_call::path_version;
pub use path_call::{PathCall, PathRules};
pub(crate) use path_operator::path_operator;
pub(crate) use path_operator::path_rules;
