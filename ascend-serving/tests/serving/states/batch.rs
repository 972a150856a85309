//! Batches of up to three requests with two blocks each.

use ascend_serving::kv::{BlockPool, PadPolicy};
use ascend_serving::{AttentionMetadata, BatchRequest, BatchSettings, Causality, Drafting, Result, StatePolicy};

pub const BLOCKS: usize = 6;
pub const BLOCK_SIZE: usize = 128;

pub const CHUNKED: StatePolicy = StatePolicy::new(true, None);
pub const WHOLE: StatePolicy = StatePolicy::new(false, None);
pub const MTP: StatePolicy = StatePolicy::new(true, Some(Drafting::Mtp));

/// Of each request the cached tokens, the new ones and how many of these are drafts.
pub type Requests = [(usize, usize, usize)];

/// The metadata of a step, perhaps padded to a number of tokens.
pub fn metadata(
    causality: Causality,
    policy: StatePolicy,
    padded: Option<usize>,
    requests: &Requests,
) -> Result<AttentionMetadata> {
    let rows: Vec<[usize; 2]> = (0..3).map(|r| [2 * r, 2 * r + 1]).collect();
    let batch: Vec<_> = (requests.iter().zip(&rows))
        .map(|(&(cached, new, drafts), row)| BatchRequest::in_row(row, cached, new).drafts(drafts))
        .collect();
    let pool = BlockPool::new(BLOCKS, BLOCK_SIZE, PadPolicy::SkipNegative)?;
    let settings = BatchSettings::of(&pool, causality).policy(policy);
    let mut metadata = AttentionMetadata::new(&batch, settings)?;
    if let Some(tokens) = padded {
        metadata.pad_to(tokens)?;
    }
    Ok(metadata)
}
