//! What most engines use, for `use ascend_serving::prelude::*`: [`ascend_attention::prelude`], and the parts of a
//! step.
//!
//! `Error`, `Result`, `Violation` and `rules` are not in it: `ascend_attention` has some of the same names.
//!
//! ```
//! use ascend_serving::prelude::*;
//!
//! # fn main() -> ascend_serving::Result<()> {
//! let pool = BlockPool::new(8, 128, PadPolicy::SkipNegative)?;
//! let mut sequence = Sequence::new(&pool);
//! sequence.grow(130)?;
//! let settings = BatchSettings::of(&pool, Causality::Causal);
//! let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 130)], settings)?;
//! assert_eq!(metadata.state(), AttentionState::PrefillNoCache);
//! # Ok(())
//! # }
//! ```

pub use ascend_attention::prelude::*;

pub use crate::kv::{
    BlockPool, CacheShape, ChannelScales, PadPolicy, PageTable, PagedKvCache, Sequence,
};
pub use crate::{
    Attention, AttentionBackend, AttentionGraphs, AttentionMetadata, AttentionShape,
    AttentionState, Backends, BatchRequest, BatchSettings, Causality, DraftTree, Drafting, Fused,
    FusedInTwo, GraphLimits, GroupedAttention, GroupedRequest, GroupedSequence, Hybrid, LayerGroup,
    LayerInputs, MaskKind, Mla, PagedDecode, PrefixCache, QuantisedDecode, QuantisedPrefill,
    RecordedBatch, SplitDecode, StatePolicy, Step,
};
