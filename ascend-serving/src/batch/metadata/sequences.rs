//! The sequences of a step: their blocks and tokens, and the record of what the step computes.

use std::sync::Arc;

use ascend_attention::Violation;

use crate::kv::{
    BlockPool, BlocksOfRequest, CacheEntry, CopiesIn, RequestState, Sequence, SequenceStamp, StepProgress, StepTokens,
    UnusableBlock, WeakState, uncopied,
};
use crate::rules;

use super::AttentionMetadata;
use crate::batch::request::shared_block;

/// A request as layers of linear attention see it.
pub(crate) struct RecurrentRequest<'a> {
    pub(crate) new: usize,
    /// Drafts among the new tokens.
    pub(crate) drafts: usize,
    /// All tokens in front of the new ones, also those that were given back.
    pub(crate) cached: usize,
    /// The state of its sequence, if that has one.
    pub(crate) state: Option<&'a WeakState>,
}

/// For each request its sequence as it was when the step was made, or none. It takes no part in comparing steps: all
/// compare equal.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequences {
    /// The pool of the latest sequences.
    pub(super) pool: Option<BlockPool>,
    pub(super) states: Vec<Option<SequenceState>>,
}

/// A sequence as it was when a step was made.
#[derive(Clone, Debug)]
pub(super) struct SequenceState {
    stamp: SequenceStamp,
    pub(super) given_back: usize,
    /// Whether the step may compute tokens that are computed already.
    recompute: bool,
    /// The pool's count of departures ([`BlockPool::departures`]) at that time.
    pool_departures: u64,
    /// Its state in layers of linear attention.
    state: Option<WeakState>,
}

impl SequenceState {
    pub(super) fn new(sequence: &Sequence, recompute: bool) -> Self {
        Self {
            stamp: sequence.stamp(),
            given_back: sequence.given_back(),
            recompute,
            pool_departures: sequence.pool().departures(),
            state: sequence.state().map(RequestState::downgrade),
        }
    }
}

impl PartialEq for Sequences {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Sequences {}

impl AttentionMetadata {
    /// Refuses a step whose blocks are of another pool, and settings of another cache.
    pub(crate) fn check_pool(&self, pool: &BlockPool) -> Result<(), Violation> {
        self.settings.check(pool)?;
        let own = pool.id();
        match self.pool.filter(|other| *other != own) {
            None => Ok(()),
            Some(other) => Err(rules::TABLE_POOL.broken(format_args!("a step of {other}"), own)),
        }
    }

    /// Refuses a step whose sequences gave up blocks since it was made, or share blocks that the step writes.
    pub(crate) fn check_blocks(&self, pool: &BlockPool) -> Result<(), Violation> {
        let sequences = self.sequences.states.iter();
        let rows = sequences.zip(self.used_blocks()).zip(self.new_and_cached());
        let rows = rows.enumerate();
        let rows = rows.filter_map(|(request, ((sequence, used), (_, cached)))| {
            let (read, written) = used.split_at(cached / self.settings.block_size);
            let sequence = sequence.as_ref()?;
            Some(BlocksOfRequest {
                request,
                departures: sequence.pool_departures,
                recompute: sequence.recompute,
                read,
                written,
            })
        });
        match pool.unusable(rows) {
            None => Ok(()),
            Some(UnusableBlock { request, block, is_shared: true }) => {
                let mut all = self.step_tokens();
                let tokens = all.find_map(|(place, tokens)| (place == request).then_some(tokens));
                Err(shared_block(pool, request, block, tokens.as_ref()))
            }
            Some(UnusableBlock { block, .. }) => Err(rules::BLOCK_GIVEN_BACK.broken(
                format_args!("block {block}, which a sequence gave up since the metadata was made"),
                "blocks that the step's sequences hold",
            )),
        }
    }

    /// Begins to record what the step computes, in one cache of a pool. Call it after
    /// [`begin_step`](BlockPool::begin_step), which keeps blocks that go back later.
    ///
    /// # Errors
    /// [`BLOCK_GIVEN_BACK`](crate::rules::BLOCK_GIVEN_BACK), [`TABLE_SHARED`](crate::rules::TABLE_SHARED),
    /// [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED), [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP),
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS),
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING).
    pub(crate) fn begin_progress(&self, cache: &Arc<CacheEntry>) -> Result<StepProgress, Violation> {
        self.begin_progress_in(cache.pool(), Some(cache))
    }

    /// Refuses a step that cannot begin in a cache now: what [`begin_progress`](Self::begin_progress) would refuse of
    /// its sequences, and blocks whose copies are still to be queued.
    pub(crate) fn check_begins(&self, cache: &Arc<CacheEntry>) -> Result<(), Violation> {
        let mut requests = self.step_tokens();
        requests.try_for_each(|(request, tokens)| cache.check(&format_args!("request {request}"), tokens))?;
        self.check_copies_queued(cache.pool(), CopiesIn::Cache(cache))
    }

    /// The pool of the sequences; `None` for requests without sequences.
    pub(crate) fn pool_of_sequences(&self) -> Option<&BlockPool> {
        self.sequences.pool.as_ref()
    }

    /// Begins to record what the step computes in every cache of the sequences' pool. Requests without sequences are
    /// left out.
    ///
    /// # Errors
    /// As for [`begin_progress`](Self::begin_progress) and [`check_copies_queued`](Self::check_copies_queued).
    pub(crate) fn begin_progress_in_all(&self) -> Result<Option<StepProgress>, Violation> {
        let Some(pool) = self.pool_of_sequences() else {
            return Ok(None);
        };
        let progress = self.begin_progress_in(pool, None)?;
        self.check_copies_queued(pool, CopiesIn::AnyCache)?;
        Ok(Some(progress))
    }

    fn begin_progress_in(&self, pool: &BlockPool, cache: Option<&Arc<CacheEntry>>) -> Result<StepProgress, Violation> {
        // First, since a sequence that was dropped has given its blocks back, and that refusal says more than the one
        // of the progress table.
        self.check_blocks(pool)?;
        StepProgress::begin(pool, cache, self.step_tokens())
    }

    /// Refuses a step with blocks whose copies are still to be queued.
    pub(crate) fn check_copies_queued(&self, pool: &BlockPool, copies: CopiesIn<'_>) -> Result<(), Violation> {
        match pool.first_uncopied(self.sequence_blocks(), copies) {
            None => Ok(()),
            Some(block) => Err(uncopied(format_args!("block {block} of the step"))),
        }
    }

    /// The blocks of the requests with sequences.
    pub(crate) fn sequence_blocks(&self) -> impl Iterator<Item = usize> {
        let rows = self.sequences.states.iter().zip(self.used_blocks());
        let rows = rows.filter_map(|(sequence, used)| sequence.as_ref().and(Some(used)));
        rows.flatten().copied()
    }

    /// The blocks of each request, dummies included.
    fn used_blocks(&self) -> impl Iterator<Item = &[usize]> {
        let rows = self.table.rows().zip(self.kv_lengths.lengths());
        rows.map(|(row, len)| &row[..self.columns(*len)])
    }

    /// The tokens of each request with a sequence, counted from the sequence's first one.
    pub(crate) fn step_tokens(&self) -> impl Iterator<Item = (usize, StepTokens)> {
        let lengths = self.kv_lengths.lengths().iter().zip(self.new_and_cached());
        let all = self.sequences.states.iter().zip(lengths).enumerate();
        all.filter_map(|(request, (sequence, (len, (_, cached))))| {
            let &SequenceState { stamp, given_back, recompute, .. } = sequence.as_ref()?;
            let tokens = StepTokens { stamp, cached: given_back + cached, len: given_back + len, recompute };
            Some((request, tokens))
        })
    }

    /// What layers of linear attention compute of each request, without the dummies.
    pub(crate) fn recurrent_requests(&self) -> impl Iterator<Item = RecurrentRequest<'_>> {
        let requests = self.sequences.states.iter().zip(&self.drafts).zip(self.new_and_cached());
        requests.map(|((sequence, &drafts), (new, cached))| RecurrentRequest {
            new,
            drafts,
            cached: sequence.as_ref().map_or(0, |sequence| sequence.given_back) + cached,
            state: sequence.as_ref().and_then(|sequence| sequence.state.as_ref()),
        })
    }
}
