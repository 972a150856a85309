//! The mask tensor, and a summary of it.

pub(crate) mod summary;
pub(crate) mod tensor;
