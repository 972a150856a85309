//! ScatterPaKvCache: writes new keys and values into the slots of a paged cache.
//!
//! [`ScatterPaKvCache`] describes a call, which is planned once and launched per layer as a [`ScatterPlan`]. The
//! slots are a [`SlotMapping`], checked on the host before they reach the device.

mod plan;
mod slot_mapping;

pub(crate) use plan::phases_of;
pub use plan::{CacheOrder, ScatterInputs, ScatterOperation, ScatterPaKvCache, ScatterPlan};
pub use slot_mapping::SlotMapping;
