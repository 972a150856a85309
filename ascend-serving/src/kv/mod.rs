//! The paged KV cache: blocks, the sequences that hold them, and the slot of each token.
//!
//! [`BlockPool`] hands out blocks and takes them back when no launch in flight can read them any more. A [`Sequence`]
//! is the cached tokens of a request; sequences share the blocks of a common prefix and copy a block before writing
//! to it. [`slot`] computes the slot of a token; [`PageTable`] is what the operators read;
//! [`ScatterPaKvCache`](ascend_attention::scatter::ScatterPaKvCache) writes new keys and values into the slots of a
//! [`SlotMapping`](ascend_attention::scatter::SlotMapping), and copies do where the product has no such operator.
//! [`PagedKvCache`] combines them: the tensors of every layer, and their pool. [`StatePool`] has the states of layers
//! of linear attention, which a sequence holds beside its blocks.
//!
//! Sizes, counts, lengths, positions and the numbers of blocks and slots are `usize`. What CANN's integers do not hold
//! is refused where it enters: a pool has no more slots than INT32 counts, a sequence no more tokens, and a layer no
//! more bytes than memory has, so that sums and products of accepted numbers cannot overflow. Lists of a step's slots
//! alone are what the device gets: integers of its width, among which padding may be negative.

mod audit;
mod block_copy;
mod cache;
mod cache_shape;
mod cached_rows;
mod compressed_rows;
mod copied_writes;
mod fence;
mod kernel_blocks;
mod latent_cache;
mod moved_tokens;
mod pad;
mod pool;
mod quantised;
mod quantised_cache;
mod queued_layers;
mod request_state;
mod sequence;
mod slot;
mod slot_check;
mod slot_runs;
mod slot_write;
mod sparse_caches;
mod state_pool;
mod stored;
mod table;

pub use ascend_attention::attention::Cache;
pub use audit::{Audit, AuditRequest};
pub use block_copy::BlockCopy;
pub(crate) use block_copy::uncopied;
pub use cache::{CacheWrite, PagedKvCache};
pub(crate) use cache_shape::no_layer;
pub use cache_shape::{CacheShape, LayerCache};
pub use cached_rows::CachedRows;
pub(crate) use compressed_rows::CompressedRows;
pub use kernel_blocks::kernel_blocks;
pub(crate) use kernel_blocks::kernel_blocks_of;
pub(crate) use moved_tokens::move_in_caches;
pub use pad::PadPolicy;
pub(crate) use pad::written_over;
pub use pool::{Block, BlockPool, PoolId, StepLease};
pub(crate) use pool::{BlocksOfRequest, CacheEntry, CopiesIn, SequenceStamp, StepProgress, StepTokens, UnusableBlock};
pub use quantised::{ChannelScales, LatentScale, QuantisedLayer, QuantisedType};
pub(crate) use quantised::{
    DeviceQuantisers, GROUP, GroupScales, bytes_of, host_numbers, one_key_each, quantise_index_queries,
    quantise_latent_queries, quantise_mxfp8, quantised_rows, split,
};
pub(crate) use queued_layers::{QueuedLayers, STEP_AGAIN};
pub(crate) use request_state::{RequestState, StateLease, WeakState, slots_of_tokens};
pub use sequence::{Growth, Sequence};
pub use slot::slot;
pub(crate) use slot::{MAX_INT32, check_block_size, check_tokens, count_slots, fill_slots};
pub use slot_check::check_slots;
pub(crate) use slot_write::{SlotWrite, WriteViews, scattered_slots, slot_mapping};
pub(crate) use state_pool::state_in;
pub use state_pool::{Convolution, StatePool, StateShape};
pub(crate) use stored::{check_outside_caches, stored};
pub use table::PageTable;
pub(crate) use table::{check_blocks_of, used_of_row};
