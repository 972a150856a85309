//! What a step has to do: requests, what all of them share, and what kind of step they make.

mod layer_mask;
mod mask_text;
mod metadata;
mod multi_item;
mod padding;
mod recorded;
mod request;
mod state;
mod step_part;

use serde::{Deserialize, Serialize};

use ascend_attention::Violation;

use crate::causality::Causality;
use crate::kv::{BlockPool, PadPolicy, count_slots};
use crate::rules;

pub(crate) use layer_mask::MaskedRequest;
pub use layer_mask::{LayerMask, NamedMask};
pub use metadata::AttentionMetadata;
pub use multi_item::MultiItemPrompt;
pub use recorded::RecordedBatch;
pub use request::BatchRequest;
pub use state::{AttentionState, Drafting, StatePolicy};
pub(crate) use step_part::StepPart;

/// What all requests of a step share: the blocks of the cache that it reads, which keys a token sees, and how the
/// step is classified.
///
/// The settings are made from the cache, and [`Attention::begin`](crate::Attention::begin) compares them with its own
/// cache: other block sizes would put tokens into the blocks of other requests.
///
/// ```
/// use ascend_serving::kv::{BlockPool, PadPolicy};
/// use ascend_serving::{BatchSettings, Causality, StatePolicy};
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// let pool = BlockPool::new(32, 128, PadPolicy::SkipNegative)?; // or a `PagedKvCache`
/// let settings = BatchSettings::of(&pool, Causality::Causal).policy(StatePolicy::new(true, None));
/// assert_eq!((settings.blocks(), settings.block_size()), (32, 128));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SettingsFields")]
pub struct BatchSettings {
    pub(crate) blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) pad: PadPolicy,
    /// Which keys a token sees.
    pub causality: Causality,
    /// How the step is classified.
    pub policy: StatePolicy,
}

/// Settings as they are recorded.
#[derive(Deserialize)]
struct SettingsFields {
    blocks: usize,
    block_size: usize,
    pad: PadPolicy,
    causality: Causality,
    policy: StatePolicy,
}

impl TryFrom<SettingsFields> for BatchSettings {
    type Error = Violation;

    /// Refuses sizes that no cache has, and padding outside of the cache.
    fn try_from(fields: SettingsFields) -> Result<Self, Violation> {
        let SettingsFields { blocks, block_size, pad, causality, policy } = fields;
        pad.check(count_slots(blocks, block_size)?)?;
        Ok(Self { blocks, block_size, pad, causality, policy })
    }
}

impl BatchSettings {
    /// Settings for steps over a cache, or over the pool of one, of a model without chunked prefill and drafts.
    pub fn of(cache: &impl AsRef<BlockPool>, causality: Causality) -> Self {
        let pool = cache.as_ref();
        Self {
            blocks: pool.blocks(),
            block_size: pool.block_size(),
            pad: pool.pad_policy(),
            causality,
            policy: StatePolicy::default(),
        }
    }

    /// Sets another way to classify steps.
    pub fn policy(mut self, policy: StatePolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Blocks of the cache.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// What padding tokens write.
    pub fn pad(&self) -> PadPolicy {
        self.pad
    }

    /// Refuses settings that were made from another cache.
    pub(crate) fn check(&self, pool: &BlockPool) -> Result<(), Violation> {
        let own = Self::of(pool, self.causality).policy(self.policy);
        if *self == own {
            return Ok(());
        }
        Err(rules::SETTINGS_CACHE.broken(self.geometry(), own.geometry()))
    }

    fn geometry(&self) -> String {
        let pad = match self.pad {
            PadPolicy::SkipNegative => "padding skipped".to_owned(),
            PadPolicy::DumpSlot(slot) => format!("padding in slot {slot}"),
        };
        format!("{} blocks of {} tokens, {pad}", self.blocks, self.block_size)
    }
}

#[cfg(test)]
mod example {
    //! The settings and requests of this folder's tests.

    use super::*;

    /// Chunks beside decodes, over 64 blocks of 4 tokens.
    pub(super) fn settings() -> BatchSettings {
        BatchSettings {
            blocks: 64,
            block_size: 4,
            pad: PadPolicy::SkipNegative,
            causality: Causality::Causal,
            policy: StatePolicy { chunked_prefill: true, drafting: None },
        }
    }

    /// A request with these numbers and nothing else set.
    pub(super) fn request(cached: usize, new: usize, row: &[usize]) -> BatchRequest<'_> {
        BatchRequest::in_row(row, cached, new)
    }
}
