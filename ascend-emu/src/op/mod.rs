//! Operators.

pub(crate) mod fia;
mod overlap;
pub(crate) mod owned_call;
pub(crate) mod scatter;
pub(crate) mod update;
