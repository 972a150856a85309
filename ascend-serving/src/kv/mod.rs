//! The paged KV cache: blocks, the sequences that hold them, and where each token lies.
//!
//! [`BlockPool`] hands out blocks and takes them back when no launch in flight can read them any more. A [`Sequence`] is the
//! cached tokens of a request; sequences share the blocks of a common prefix and copy a block before writing to it. [`slot`]
//! says where a token lies; [`PageTable`] is what the operators read;
//! [`ScatterPaKvCache`](ascend_attention::scatter::ScatterPaKvCache) writes new keys and values into the slots of a
//! [`SlotMapping`](ascend_attention::scatter::SlotMapping), and copies do where the product has no such operator.
//! [`PagedKvCache`] puts them together: the tensors of every layer, and their pool.
//!
//! Sizes, counts, lengths, positions and the numbers of blocks and slots are `usize`; they become CANN's integers where they
//! are copied to the device or given to an operator, and what does not fit is refused there. Lists of a step's slots alone
//! are what the device gets: integers of its width, among which padding may be negative.

mod audit;
mod cache;
mod cache_layers;
mod cache_shape;
mod cached_rows;
mod channel_quantiser;
mod copied_writes;
mod fence;
mod group_floats;
mod host_numbers;
mod moved_tokens;
mod one_key_each;
mod pad;
mod pool;
mod quantised_by_group;
mod quantised_by_token;
mod quantised_cache;
mod quantised_layer;
mod quantised_scales;
mod quantised_type;
mod quantised_write;
mod query_type;
mod sequence;
mod slot;
mod slot_runs;
mod slot_write;
mod table;
mod whole_tokens;

pub use ascend_attention::attention::Cache;
pub use audit::{Audit, AuditRequest};
pub use cache::{CacheWrite, PagedKvCache};
pub(crate) use cache_shape::no_layer;
pub use cache_shape::{CacheShape, LayerCache};
pub use cached_rows::CachedRows;
pub(crate) use channel_quantiser::ChannelQuantiser;
pub use fence::{Fence, Lane};
pub(crate) use group_floats::{GROUP, rows_in_groups};
pub(crate) use host_numbers::host_numbers;
pub(crate) use one_key_each::one_key_each;
pub use pad::PadPolicy;
pub(crate) use pool::too_many_blocks;
pub use pool::{Block, BlockPool, GroupId, StepLease};
pub(crate) use quantised_by_group::GroupScales;
pub use quantised_layer::QuantisedLayer;
pub(crate) use quantised_layer::{quantised_rows, split};
pub use quantised_scales::ChannelScales;
pub use quantised_type::QuantisedType;
pub(crate) use sequence::uncopied;
pub use sequence::{BlockCopy, Grown, Sequence};
pub use slot::{Interleave, KernelBlocks, check_slots, slot};
pub(crate) use slot::{MOST_BLOCK, capacity, fill_slots, on_device};
pub(crate) use slot_write::{WriteViews, scattered_slots, slot_mapping};
pub use table::PageTable;
