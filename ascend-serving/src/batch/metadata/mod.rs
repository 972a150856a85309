//! The lengths, slots and block table that the attention calls of one step share.

mod sequences;

use std::iter;
use std::ops::Range;

use ascend_attention::Violation;
use ascend_attention::attention::{CallLengths, Cumulative, PerRequest};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;

use crate::causality::Causality;
use crate::kv::{BlockPool, CachedRows, PadPolicy, PageTable, PoolId, Sequence, check_slots, fill_slots, written_over};
use crate::rules;

use super::BatchSettings;
use super::layer_mask::{LayerMask, MaskedRequest};
use super::request::{BatchRequest, columns};
use super::state::{AttentionState, StatePolicy};
use sequences::{SequenceState, Sequences};

/// What the attention calls of one step share: made once a step from the batch, so that lengths, table and slots
/// cannot belong to different batches.
///
/// Tokens are packed request after request. After the requests there may be dummy ones
/// ([`pad_to`](AttentionMetadata::pad_to)), whose tokens write nothing and whose results mean nothing.
///
/// The metadata of a model with several groups of layers ([`Attention::metadata`](crate::Attention::metadata)) has the
/// same requests in the cache of each: lengths, table and slots are those of the first group, and
/// [`group`](AttentionMetadata::group) has the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionMetadata {
    pub(super) settings: BatchSettings,
    pub(super) state: AttentionState,
    pub(super) requests: usize,
    pub(super) actual_tokens: usize,
    decodes: usize,
    decodes_lead: bool,
    decode_tokens: usize,
    pub(super) q_ends: Cumulative,
    pub(super) kv_lengths: PerRequest,
    pub(super) slots: Vec<i32>,
    pub(super) table: PageTable,
    pool: Option<PoolId>,
    prompt_lens: Vec<Option<usize>>,
    /// Drafts among the new tokens of each request.
    drafts: Vec<usize>,
    mask: LayerMask,
    /// Whether some request gave back tokens.
    given_back: bool,
    sequences: Sequences,
    /// The metadata of the other groups of layers.
    pub(super) others: Vec<AttentionMetadata>,
}

impl AttentionMetadata {
    /// Most query tokens of a step, padding included: no call takes more packed rows.
    pub const MAX_TOKENS: usize = FiaCall::MOST_PACKED_ROWS as usize;

    /// Checks a batch and computes the metadata that its calls need.
    ///
    /// # Errors
    /// For the first request at fault: [`TABLE_POOL`](crate::rules::TABLE_POOL),
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for more new tokens than the sequence has,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) for a sequence whose copies were not queued when the request
    /// was made, [`TABLE_SHARED`](crate::rules::TABLE_SHARED) for tokens in a block that another sequence
    /// holds, [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for layers that see tokens which the sequence gave
    /// back, [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY), [`DRAFT_COUNT`](crate::rules::DRAFT_COUNT),
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW), [`TABLE_ROW`](crate::rules::TABLE_ROW) for a row
    /// without a block for each token, or of another sequence than the request's,
    /// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK) for a block outside the cache,
    /// [`TABLE_REPEATED`](crate::rules::TABLE_REPEATED) for a block that a row names twice. For the step:
    /// [`SLOT_DUPLICATE`](crate::rules::SLOT_DUPLICATE) if two tokens go to the same place,
    /// [`SLOT_DUMP`](crate::rules::SLOT_DUMP) if one goes where padding goes;
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for sequences of another number of groups of layers.
    pub fn new(requests: &[BatchRequest<'_>], settings: BatchSettings) -> Result<Self, Violation> {
        Self::of_groups(requests, settings, iter::empty())
    }

    /// The metadata of a model whose first group of layers has these settings, and the others theirs.
    pub(crate) fn of_groups(
        requests: &[BatchRequest<'_>],
        first: BatchSettings,
        others: impl Iterator<Item = BatchSettings>,
    ) -> Result<Self, Violation> {
        let mut metadata = Self { others: others.map(Self::empty).collect(), ..Self::empty(first) };
        metadata.renew(requests)?;
        Ok(metadata)
    }

    /// The metadata of a group of layers, 0 for the first.
    pub fn group(&self, group: usize) -> Option<&Self> {
        match group.checked_sub(1) {
            None => Some(self),
            Some(other) => self.others.get(other),
        }
    }

    /// The metadata of each group.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &Self> + Clone {
        iter::once(self).chain(&self.others)
    }

    /// A step without requests.
    pub(super) fn empty(settings: BatchSettings) -> Self {
        Self {
            settings,
            state: AttentionState::PrefillNoCache,
            requests: 0,
            actual_tokens: 0,
            decodes: 0,
            decodes_lead: true,
            decode_tokens: 0,
            q_ends: Cumulative::default(),
            kv_lengths: PerRequest::default(),
            slots: Vec::new(),
            table: PageTable::default(),
            pool: None,
            prompt_lens: Vec::new(),
            drafts: Vec::new(),
            mask: settings.causality.into(),
            given_back: false,
            sequences: Sequences::default(),
            others: Vec::new(),
        }
    }

    /// Computes the metadata of the next step, as [`AttentionMetadata::new`] does, in the same memory. After an error
    /// the metadata has no request.
    ///
    /// # Errors
    /// As for [`AttentionMetadata::new`].
    pub fn renew(&mut self, requests: &[BatchRequest<'_>]) -> Result<(), Violation> {
        let (mut longest, mut widest) = (0, 0);
        for request in requests {
            // Tokens that cannot be counted are refused below.
            if let Some(tokens) = request.cached.checked_add(request.new) {
                longest = longest.max(tokens);
            }
            widest = widest.max(request.row.len());
        }
        // The table is no wider than the longest row; a row that is too short is refused.
        self.clear(self.columns(longest).min(widest));
        let outcome = self.fill(requests).and_then(|()| self.renew_others(requests));
        if outcome.is_err() {
            self.forget();
        }
        outcome
    }

    /// Renews the metadata of the other groups. Sequences of other groups are refused.
    fn renew_others(&mut self, requests: &[BatchRequest<'_>]) -> Result<(), Violation> {
        let groups = self.others.len().saturating_add(1);
        let sequences = requests.iter().filter_map(|request| request.sequence);
        sequences.clone().try_for_each(|sequence| sequence.check_groups(groups))?;
        for (other, group) in self.others.iter_mut().zip(1..) {
            let requests = requests.iter().map(|request| request.in_group(group));
            other.renew(&requests.collect::<Result<Vec<_>, _>>()?)?;
        }
        Ok(())
    }

    /// Removes all requests.
    fn forget(&mut self) {
        self.clear(0);
        self.others.iter_mut().for_each(Self::forget);
    }

    fn clear(&mut self, columns: usize) {
        (self.requests, self.actual_tokens) = (0, 0);
        (self.decodes, self.decode_tokens, self.decodes_lead) = (0, 0, true);
        self.q_ends.clear();
        self.kv_lengths.clear();
        self.slots.clear();
        self.table.reset(columns);
        self.pool = None;
        self.prompt_lens.clear();
        self.drafts.clear();
        self.given_back = false;
        self.sequences.states.clear();
    }

    /// Blocks that `len` tokens of a request need, at least one.
    pub(super) fn columns(&self, len: usize) -> usize {
        columns(len, self.settings.block_size)
    }

    fn fill(&mut self, requests: &[BatchRequest<'_>]) -> Result<(), Violation> {
        let BatchSettings { blocks, block_size, pad, policy, .. } = self.settings;
        if requests.is_empty() {
            return Err(rules::no_requests());
        }
        self.table.room(requests.len())?;
        let mut tokens = 0;
        for (index, request) in requests.iter().enumerate() {
            self.pool = request.join_pool(index, self.pool)?;
            request.check_sequence(index, self.settings.causality)?;
            let sequence = (request.sequence).map(|sequence| SequenceState::new(sequence, request.recompute));
            self.given_back |= sequence.as_ref().is_some_and(|sequence| sequence.given_back > 0);
            self.sequences.states.push(sequence);
            let len = request.check_lengths(index)?;
            let used = request.used_blocks(index, len, blocks, block_size)?;
            request.check_repeated(index, used, self.settings.causality)?;
            tokens = request.add_tokens(index, tokens, Self::MAX_TOKENS)?;
            fill_slots(used, request.cached..len, block_size, &mut self.slots)?;
            self.table.push_cut(used);
            self.q_ends.push_end(tokens)?;
            self.kv_lengths.push(len)?;
            self.prompt_lens.push(request.prompt_len);
            self.drafts.push(request.drafts);
            if request.new - request.drafts == 1 {
                self.decodes_lead &= self.decodes == index;
                self.decodes += 1;
                self.decode_tokens += request.new;
            }
        }
        if let Some(token) = self.slots.iter().position(|slot| pad.is_padding(*slot, block_size)) {
            return Err(written_over(pad, token));
        }
        check_slots(&self.slots, blocks, block_size, PadPolicy::SkipNegative)?;
        self.state = policy.state(requests);
        self.requests = requests.len();
        self.actual_tokens = tokens;
        let pool = requests.iter().find_map(|request| request.sequence);
        let pool = pool.map(Sequence::pool);
        let known = self.sequences.pool.as_ref();
        if known.map(BlockPool::id) != pool.map(BlockPool::id) {
            self.sequences.pool = pool.cloned();
        }
        Ok(())
    }

    /// Refuses metadata of another number of groups of layers than `groups`.
    pub(crate) fn check_groups(&self, groups: usize) -> Result<(), Violation> {
        let own = self.others.len().saturating_add(1);
        match own == groups {
            true => Ok(()),
            false => Err(Violation::new(
                &rules::GROUP_LAYERS,
                format_args!("metadata of {own} groups of layers"),
                format_args!("{groups}"),
                "make the metadata of a step with the attention that computes it or was captured",
            )),
        }
    }

    /// Refuses metadata without requests, such as that which could not be renewed.
    pub(crate) fn check_requests(&self) -> Result<(), Violation> {
        if self.requests() == 0 {
            return Err(Violation::new(
                &rules::BATCH_EMPTY,
                "metadata that could not be renewed",
                "that of 1 request or more",
                "make the metadata anew from the requests of the step, or skip it",
            ));
        }
        Ok(())
    }

    /// The settings that all requests share.
    pub fn settings(&self) -> &BatchSettings {
        &self.settings
    }

    /// The mask of the step's layers, unless a layer has its own ([`LayerInputs::mask`](crate::LayerInputs::mask)):
    /// the mask of the settings' causality, until [`set_mask`](Self::set_mask) sets another one.
    pub fn mask(&self) -> &LayerMask {
        &self.mask
    }

    /// Sets the mask of the step's layers, for this step and those that it is renewed for.
    ///
    /// The settings' causality decides which tokens the sequences keep, so that a mask may show fewer keys. It may
    /// show more in steps alone whose sequences gave no tokens back: layers are refused otherwise
    /// ([`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW)). Of several groups of layers those get the mask whose causality
    /// shows all that it shows; the others keep theirs.
    pub fn set_mask(&mut self, mask: impl Into<LayerMask>) {
        let mask = mask.into();
        let admits = |group: &Self| mask.is_within(group.settings.causality);
        for other in self.others.iter_mut().filter(|other| admits(other)) {
            other.mask = mask.clone();
        }
        if self.others.is_empty() || admits(self) {
            self.mask = mask;
        }
    }

    /// Refuses a step of another causality than that of its layers, where they have one.
    pub(crate) fn check_causality(&self, layers: Option<Causality>) -> Result<(), Violation> {
        let given = self.settings.causality;
        match layers.filter(|own| *own != given) {
            None => Ok(()),
            Some(own) => Err(Violation::new(
                &rules::STEP_CAUSALITY,
                format_args!("a step of {}", LayerMask::from(given)),
                LayerMask::from(own),
                "make the metadata by `Attention::metadata` of this attention",
            )),
        }
    }

    /// Refuses a mask that may show tokens which a sequence gave back.
    pub(crate) fn check_mask(&self, mask: &LayerMask) -> Result<(), Violation> {
        let kept = self.settings.causality;
        let chunk = |causality| matches!(causality, Causality::Chunk(_));
        // After tokens that were given back, chunks begin where they do only if whole chunks were given back.
        let placed = chunk(kept) || !matches!(mask, LayerMask::Causality(own) if chunk(*own));
        let shows_less = kept.window().is_some() && mask.is_within(kept) && placed;
        if !self.given_back || shows_less {
            return Ok(());
        }
        Err(Violation::new(
            &rules::BLOCK_WINDOW,
            format_args!("{mask} over sequences that gave tokens back"),
            format_args!("{kept:?}, or what shows less of each token's past"),
            "give layers that see more sequences of their own, which keep all that these layers see",
        ))
    }

    /// The kind of the step.
    pub fn state(&self) -> AttentionState {
        self.state
    }

    /// Number of real requests.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// Number of query tokens of the real requests (`num_actual_tokens`).
    pub fn actual_tokens(&self) -> usize {
        self.actual_tokens
    }

    /// Number of query tokens, padding included.
    pub fn tokens(&self) -> usize {
        self.q_ends.total()
    }

    /// Requests that add one certain token (`num_decodes`).
    pub fn decodes(&self) -> usize {
        self.decodes
    }

    /// Whether all decodes come before the other requests.
    pub fn decodes_lead(&self) -> bool {
        self.decodes_lead
    }

    /// Whether latent attention can compute the step with absorbed queries: no request has more than
    /// [`StatePolicy::MAX_VERIFIED`] tokens. Prompts are seldom that short, so absorb the queries where this is true.
    pub fn absorbs_queries(&self) -> bool {
        let rows = self.q_ends.per_request();
        rows.lengths().iter().all(|rows| *rows <= StatePolicy::MAX_VERIFIED)
    }

    /// Query tokens of the decodes, drafts included.
    pub fn decode_tokens(&self) -> usize {
        self.decode_tokens
    }

    /// The requests that are no decodes (`num_prefills`).
    pub fn prefills(&self) -> usize {
        self.requests - self.decodes
    }

    /// Query tokens of the prefills.
    pub fn prefill_tokens(&self) -> usize {
        self.actual_tokens - self.decode_tokens
    }

    /// Where the query tokens of each request end, dummies included.
    pub fn q_ends(&self) -> &Cumulative {
        &self.q_ends
    }

    /// Keys of each request, dummies included.
    pub fn kv_lengths(&self) -> &PerRequest {
        &self.kv_lengths
    }

    /// New tokens of each request, and those that are cached already, dummies included.
    pub fn new_and_cached(&self) -> impl Iterator<Item = (usize, usize)> {
        self.q_ends.new_and_cached(&self.kv_lengths)
    }

    /// Whether each request, dummies included, has one query token.
    pub(crate) fn is_single(&self) -> bool {
        self.tokens() == self.table.requests()
    }

    /// The cache rows of tokens, each given by its request and positions among the request's keys.
    pub(crate) fn cached_rows(
        &self,
        tokens: impl IntoIterator<Item = (usize, Range<usize>)>,
    ) -> Result<CachedRows, Violation> {
        let mut rows = CachedRows::new(self.settings.block_size);
        for (request, positions) in tokens {
            rows.push(self.table.row(request).unwrap_or_default(), positions)?;
        }
        Ok(rows)
    }

    /// Keys of the longest request.
    pub fn longest(&self) -> usize {
        self.kv_lengths.lengths().iter().copied().fold(0, usize::max)
    }

    /// Query tokens of the request with the most.
    pub fn longest_rows(&self) -> usize {
        self.new_and_cached().map(|(new, _)| new).max().unwrap_or(0)
    }

    /// The requests of the step, dummies included, as the rows of a named mask.
    pub(crate) fn masked_requests(&self) -> impl Iterator<Item = MaskedRequest> {
        let all = self.new_and_cached().enumerate();
        all.map(|(index, (new, cached))| MaskedRequest { place: (index < self.requests).then_some(index), new, cached })
    }

    /// The slot of each query token's key and value, padding included, as the device gets them: INT32, where padding
    /// may be negative.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// The block table, dummies included.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The pool that the blocks are of, where the requests name it.
    pub fn pool(&self) -> Option<PoolId> {
        self.pool
    }

    /// The length of a request's whole prompt, where it is known; dummies have none.
    pub fn prompt_len(&self, request: usize) -> Option<usize> {
        self.prompt_lens.get(request).copied().flatten()
    }

    /// The lengths of a packed call over the cache; where no token was cached before, over this step's keys, which
    /// end where the query tokens end.
    pub fn call_lengths(&self) -> CallLengths<'_> {
        match self.state.reads_cache() {
            true => CallLengths::PackedPaged { q: &self.q_ends, kv: &self.kv_lengths },
            false => CallLengths::PackedDense { q: &self.q_ends, kv: &self.q_ends },
        }
    }
}

#[cfg(test)]
mod tests;
