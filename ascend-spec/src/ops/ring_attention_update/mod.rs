//! RingAttentionUpdate: merges two outputs of FlashAttentionScore over parts of the keys into that over both.
//!
//! Each part has the maximum and the sum of each row beside its attention, in the orders in which FlashAttentionScore writes
//! them ([`SoftmaxOrder`](crate::ops::flash_attention_score::SoftmaxOrder)).

mod arguments;
mod merge;
mod problem;
pub mod rules;
mod version;

pub use crate::operator_version::ring_attention_update::Version;
pub use arguments::{Argument, Arguments, Parameter, RingUpdateCall};
pub use merge::{Merged, Part, admits, merge};
pub use problem::RingUpdateProblem;
