//! Operators.

pub(crate) mod declared;
pub(crate) mod fia;
pub(crate) mod gather;
mod overlap;
pub(crate) mod scatter;
pub(crate) mod update;
