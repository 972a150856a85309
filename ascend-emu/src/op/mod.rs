//! Operators.

pub(crate) mod declared;
pub(crate) mod fia;
mod overlap;
pub(crate) mod scatter;
pub(crate) mod update;
