//! Which keys a query sees.

mod cache;
mod value;

pub(crate) use cache::MaskCache;
pub use cache::{CausalOrigin, Masks};
pub use value::Mask;
