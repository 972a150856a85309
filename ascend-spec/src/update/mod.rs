//! AttentionUpdate: attention over parts of the keys, merged by the log-sum-exps of the parts.
//!
//! With `L = ln sum(exp(lse_i))` the merged row is `sum(exp(lse_i - L) * out_i)`, which is attention over all the keys.

mod arguments;
mod problem;
pub mod rules;
mod weights;

pub use arguments::{Argument, Arguments, Parameter, UpdateCall};
pub use problem::UpdateProblem;
pub use weights::{Real, visible, weigh};
