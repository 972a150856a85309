//! ScatterPaKvCache: new keys and values into a paged cache, each token into the slot that a mapping names.
//!
//! Slot `s` is row `s % block_size` of block `s / block_size`. What shapes and attributes have to be, [`ScatterCall`]
//! checks; what the slots say is content, for which there is [`slot_faults`].

mod arguments;
mod problem;
pub mod rules;
mod slots;

pub use arguments::{Argument, Arguments, Parameter, ScatterCall};
pub use problem::{Pieces, ScatterProblem};
pub use slots::{SlotFault, slot_faults};

/// Name of [`ScatterCall::cache_mode`] for caches `[blocks, block size, N, D]`.
pub const NORM: &str = "Norm";
/// Name of [`ScatterCall::cache_mode`] for caches in the NZ order.
pub const PA_NZ: &str = "PA_NZ";
