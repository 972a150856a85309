//! What all requests of a step share.

use serde::{Deserialize, Serialize};

use ascend_attention::Violation;

use crate::kv::{BlockPool, PadPolicy};
use crate::rules;

use super::causality::Causality;
use super::state::StatePolicy;

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
pub struct BatchSettings {
    pub(crate) blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) pad: PadPolicy,
    /// Which keys a token sees.
    pub causality: Causality,
    /// How the step is classified.
    pub policy: StatePolicy,
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
        Err(Violation::new(
            &rules::SETTINGS_CACHE,
            self.geometry(),
            own.geometry(),
            "make the settings with `BatchSettings::of(&cache, ...)`, from the cache that the step begins on",
        ))
    }

    fn geometry(&self) -> String {
        let pad = match self.pad {
            PadPolicy::SkipNegative => "padding skipped".to_owned(),
            PadPolicy::DumpSlot(slot) => format!("padding in slot {slot}"),
        };
        format!(
            "{} blocks of {} tokens, {pad}",
            self.blocks, self.block_size
        )
    }
}
