//! GatherPaKvCache: the keys and values of sequences, from the blocks of a paged cache into rows one behind the other.
//!
//! Row `t` of sequence `b` is row `t % block_size` of the block that the table names in row `b`, column
//! `first(b) + t / block_size`. Shapes and attributes [`GatherCall`] checks; what table, lengths and offsets say is content,
//! for which there is [`GatherProblem::sources`].

mod arguments;
mod problem;
pub mod rules;

pub use arguments::{Argument, Arguments, GatherCall, Parameter};
pub use problem::{GatherProblem, Source};
