//! RingAttentionUpdate: merges what [`FlashAttention`](crate::flash::FlashAttention) computed over two parts of the
//! keys.
//!
//! A ring of ranks passes keys and values on from rank to rank; each rank attends with its own rows to what arrives,
//! and merges the result with what it has: [`RingUpdate`], planned once and launched for each part as a [`RingPlan`].

mod builder;
mod plan;
mod versions;

pub use builder::RingUpdate;
pub use plan::{RingOperation, RingPlan};
pub(crate) use versions::phases_of;
