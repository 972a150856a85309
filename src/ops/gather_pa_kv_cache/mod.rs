//! GatherPaKvCache: copies the keys and values of sequences out of a paged cache, into rows one after the other.
//!
//! [`GatherPaKvCache`] describes a call, which is planned once and launched per layer as a [`GatherPlan`]. Which
//! blocks hold the sequences is a [`SequenceBlocks`], checked on the host before it reaches the device.

mod plan;
mod sequence_blocks;

pub(crate) use plan::phases_of;
pub use plan::{GatherOperation, GatherPaKvCache, GatherPlan};
pub use sequence_blocks::SequenceBlocks;
