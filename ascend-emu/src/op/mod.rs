//! Operators.

pub(crate) mod fia;
pub(crate) mod owned_call;
