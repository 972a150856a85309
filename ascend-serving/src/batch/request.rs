//! What a step has to do, as an engine knows it.

use serde::{Deserialize, Serialize};

use crate::kv::{BlockPool, GroupId, PadPolicy, Sequence};
use crate::refusal::{Refused, Rule, refused};

use super::causality::Causality;
use super::state::StatePolicy;

/// One request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRequest<'a> {
    /// Tokens whose keys were cached before the step.
    pub cached: usize,
    /// Query tokens of the step; their keys are cached by it.
    pub new: usize,
    /// How many of the query tokens are drafts to verify, the last ones.
    pub drafts: usize,
    /// The request's row of the block table, with room for the new tokens.
    pub row: &'a [usize],
    /// The pool that the row's blocks are of, where that is known. A step refuses rows of several pools, and a cache
    /// those of another one.
    pub group: Option<GroupId>,
    /// Tokens of the whole prompt, of which the query tokens may be a chunk, where that is known. What depends on where
    /// a prompt ends, such as TriangleMix, asks for it; the same for every chunk of a prompt.
    pub prompt_len: Option<usize>,
    /// What is known of the sequence that the request is of, to be compared with the step.
    pub sequence: Option<SequenceExtent>,
}

/// How far a sequence reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceExtent {
    /// Its tokens, those in front that were given back included.
    pub len: usize,
    /// Tokens in front that were given back, whole blocks.
    pub given_back: usize,
    /// A block that had not got the tokens of the shared one that it replaces ([`Grown::copies`](crate::kv::Grown::copies)).
    pub uncopied: Option<usize>,
}

impl<'a> BatchRequest<'a> {
    /// The last `new` tokens of a sequence, which were made room for by
    /// [`Attention::grow`](crate::Attention::grow). More new tokens than the sequence has are refused when the step's
    /// metadata is made.
    ///
    /// **Grow before every step.** Without it the last `new` tokens are those of the step before, and their keys and values
    /// are written over: nobody can tell that from computing the same tokens once more, which is allowed.
    ///
    /// Tokens in front of a window that were given back ([`Sequence::drop_before`]) are left out: `cached` and `row` begin
    /// with the first token that is left, which shows the same keys to a layer with that window, and a layer with a larger
    /// one is refused.
    pub fn of(sequence: &'a Sequence, new: usize) -> Self {
        let (len, given_back) = (sequence.len(), sequence.given_back());
        let block_size = sequence.pool().block_size();
        let blocks = given_back.checked_div(block_size).unwrap_or(0);
        Self {
            cached: len.saturating_sub(new).saturating_sub(given_back),
            new,
            drafts: 0,
            row: sequence.row().get(blocks..).unwrap_or(&[]),
            group: Some(sequence.pool().group()),
            prompt_len: None,
            sequence: Some(SequenceExtent {
                len,
                given_back,
                uncopied: sequence.uncopied(),
            }),
        }
    }

    /// The same, with the length of the whole prompt.
    pub fn prompt_len(mut self, tokens: usize) -> Self {
        self.prompt_len = Some(tokens);
        self
    }

    /// The same, the last `drafts` tokens being drafts.
    pub fn drafts(mut self, drafts: usize) -> Self {
        self.drafts = drafts;
        self
    }
}

/// What all requests of a step share: how the cache lies that it reads, which keys a token sees, and how the step is
/// classified.
///
/// It is made from the cache, and [`Attention::begin`](crate::Attention::begin) compares: block sizes that differ would
/// put tokens into the blocks of other requests.
///
/// ```
/// use ascend_serving::kv::{BlockPool, PadPolicy};
/// use ascend_serving::{BatchSettings, Causality, StatePolicy};
///
/// # fn main() -> Result<(), ascend_serving::Refused> {
/// let pool = BlockPool::new(32, 128, PadPolicy::SkipNegative)?; // or a `PagedKvCache`
/// let settings = BatchSettings::of(&pool, Causality::Causal).policy(StatePolicy {
///     chunked_prefill: true,
///     drafting: None,
/// });
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

    /// The same with another way to classify steps.
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
    pub(crate) fn check(&self, pool: &BlockPool) -> Result<(), Refused> {
        let own = Self::of(pool, self.causality).policy(self.policy);
        if *self == own {
            return Ok(());
        }
        Err(refused(
            Rule::SettingsCache,
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

/// A step as a file: a production batch that becomes a test.
///
/// ```
/// use ascend_serving::kv::{BlockPool, PadPolicy};
/// use ascend_serving::{
///     AttentionMetadata, AttentionState, BatchRequest, BatchSettings, Causality, RecordedBatch,
/// };
///
/// # fn main() -> Result<(), ascend_serving::Refused> {
/// let pool = BlockPool::new(8, 128, PadPolicy::SkipNegative)?;
/// let settings = BatchSettings::of(&pool, Causality::Causal);
/// let decode = BatchRequest { cached: 130, new: 1, drafts: 0, row: &[4, 2], group: None, prompt_len: None, sequence: None };
/// let json = RecordedBatch::new(settings, &[decode]).to_json();
///
/// let again = RecordedBatch::from_json(&json)?;
/// let metadata = AttentionMetadata::new(&again.requests(), again.settings)?;
/// assert_eq!(metadata.state(), AttentionState::DecodeOnly);
/// assert_eq!(metadata.slots(), [2 * 128 + 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedBatch {
    version: u32,
    /// What the requests share.
    pub settings: BatchSettings,
    requests: Vec<RecordedRequest>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedRequest {
    cached: usize,
    new: usize,
    drafts: usize,
    row: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prompt_len: Option<usize>,
}

impl RecordedBatch {
    /// Version of the format that this crate writes and reads.
    pub const VERSION: u32 = 1;

    /// A copy of a batch.
    pub fn new(settings: BatchSettings, requests: &[BatchRequest<'_>]) -> Self {
        let copy = |request: &BatchRequest<'_>| RecordedRequest {
            cached: request.cached,
            new: request.new,
            drafts: request.drafts,
            row: request.row.to_vec(),
            prompt_len: request.prompt_len,
        };
        Self {
            version: Self::VERSION,
            settings,
            requests: requests.iter().map(copy).collect(),
        }
    }

    /// The requests.
    pub fn requests<'a>(&'a self) -> Vec<BatchRequest<'a>> {
        let view = |request: &'a RecordedRequest| BatchRequest {
            cached: request.cached,
            new: request.new,
            drafts: request.drafts,
            row: &request.row,
            group: None,
            prompt_len: request.prompt_len,
            sequence: None,
        };
        self.requests.iter().map(view).collect()
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        // Integers, sequences and names alone: nothing that JSON could refuse.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// From JSON.
    ///
    /// # Errors
    /// [`Rule::BatchFormat`] for anything but what [`RecordedBatch::to_json`] writes. Whether the batch itself is right
    /// is said by [`AttentionMetadata::new`](crate::AttentionMetadata::new).
    pub fn from_json(json: &str) -> Result<Self, Refused> {
        let wrong = |given: String| {
            refused(
                Rule::BatchFormat,
                given,
                format_args!("a recorded batch of version {}", Self::VERSION),
                "record the batch again with this version of the crate",
            )
        };
        let batch: Self = serde_json::from_str(json).map_err(|error| wrong(error.to_string()))?;
        if batch.version != Self::VERSION {
            return Err(wrong(format!("version {}", batch.version)));
        }
        Ok(batch)
    }
}
