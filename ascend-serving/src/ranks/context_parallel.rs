//! Which rank holds which key of a step, and what each rank computes of it.

use std::ops::Range;
use std::sync::Arc;

use ascend_attention::attention::{CallLengths, Cumulative, PerRequest};
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::Layout;
use ascend_attention::spec::ops::attention_update::UpdateCall;
use ascend_attention::{CausalOrigin, Element, Plan, Stream, Tensor, Violation};

use crate::backends::AttentionShape;
use crate::batch::{AttentionMetadata, BatchRequest};
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{CopiesIn, Interleave, MAX_INT32, PadPolicy, PageTable, check_slots, uncopied, written_over};
use crate::rules::{self, room};

use super::paged_rows::PagedRows;
use super::zigzag::chunks;

/// Divides contexts that are too long for one cache over ranks, each with a cache of its own.
///
/// [`ContextAttention`](crate::ContextAttention) computes with it. Every rank has the query heads of all ranks and the
/// keys that [`Interleave`] assigns to it. It attends over these, without a mask, and the merge of the ranks' results
/// by their log-sum-exps is attention over all keys, exactly:
///
/// | step | call of each rank | one more call |
/// |---|---|---|
/// | every request adds one token | over its keys, the new ones among them | |
/// | prompts, chunks, drafts | over its keys of what was cached before | the new tokens among themselves, causally |
///
/// A row for which a rank has no keys takes no part in the merge, nor does a rank without any keys. All of this
/// follows from the lengths, which every rank knows, so that no data goes through the host.
///
/// All ranks use one block table, an entry of which means a block on each: the table of a
/// [`BlockPool`](crate::kv::BlockPool) whose blocks have [`ContextParallel::pool_block_size`] tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextParallel {
    share: Interleave,
    block_size: usize,
}

/// A step divided over ranks. From [`ContextParallel::split`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextSplit {
    ranks: Vec<RankStep>,
    new: NewTokens,
    /// Whether each row sees its own key in the call of the rank that holds it.
    single: bool,
    parts: Vec<PartsOfRows>,
}

/// The slots, lengths and table of one rank in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStep {
    rank: usize,
    slots: Vec<i32>,
    /// The table of all ranks.
    table: Arc<PageTable>,
    rows: PagedRows,
}

/// The call of new tokens among themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NewTokens {
    q_ends: Cumulative,
}

impl ContextParallel {
    /// The most ranks: together with the call of the new tokens they are as many parts as the operator merges.
    pub const MAX_RANKS: usize = UpdateCall::MAX_PARTS - 1;

    /// Divides contexts by `share` over caches with blocks of `block_size` tokens.
    ///
    /// # Errors
    /// [`RANKS_PARTS`](crate::rules::RANKS_PARTS) for more than [`ContextParallel::MAX_RANKS`] ranks,
    /// [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) if a block does not hold whole runs.
    pub fn new(share: Interleave, block_size: usize) -> Result<Self, Violation> {
        if share.ranks() > Self::MAX_RANKS {
            return Err(rules::RANKS_PARTS
                .broken(format_args!("{} ranks", share.ranks()), format_args!("1 to {}", Self::MAX_RANKS)));
        }
        share.check(block_size)?;
        Ok(Self { share, block_size })
    }

    /// How the keys are divided over the ranks.
    pub fn share(&self) -> Interleave {
        self.share
    }

    /// Tokens that an entry of the block table means: a block on each rank.
    pub fn pool_block_size(&self) -> usize {
        self.block_size * self.share.ranks()
    }

    /// Refuses a sequence whose blocks have another size than the table's entries.
    fn check_pool(&self, index: usize, request: &BatchRequest<'_>) -> Result<(), Violation> {
        let own = request.sequence.map(|sequence| sequence.pool().block_size());
        match own {
            Some(own) if own != self.pool_block_size() => Err(Violation::new(
                &rules::TABLE_POOL,
                format_args!("a sequence of a pool with blocks of {own} tokens for request {index}"),
                format_args!("blocks of {} tokens", self.pool_block_size()),
                "make the pool with blocks of `ContextParallel::pool_block_size` tokens",
            )),
            _ => Ok(()),
        }
    }

    /// Divides a step. The requests' rows of the table are those of a pool with blocks of
    /// [`ContextParallel::pool_block_size`] tokens; tokens that another rank holds have the slots of `pad`.
    ///
    /// # Errors
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) without requests; for a request, as for [`AttentionMetadata::new`]
    /// of layers that see every key before their own: [`TABLE_POOL`](crate::rules::TABLE_POOL),
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED), [`TABLE_SHARED`](crate::rules::TABLE_SHARED),
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH), [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW),
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY), [`DRAFT_COUNT`](crate::rules::DRAFT_COUNT),
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW); for a sequence of a pool that a cache has, as one rank
    /// may, [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP), [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) and
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED);
    /// [`TABLE_REPEATED`](crate::rules::TABLE_REPEATED); [`TABLE_ROW`](crate::rules::TABLE_ROW),
    /// [`SLOT_RANGE`](crate::rules::SLOT_RANGE), [`PAD_SLOT`](crate::rules::PAD_SLOT);
    /// [`SLOT_DUPLICATE`](crate::rules::SLOT_DUPLICATE) if two tokens go to the same slot,
    /// [`SLOT_DUMP`](crate::rules::SLOT_DUMP) if one goes to a slot of padding; [`PAD_SLOT`](crate::rules::PAD_SLOT)
    /// for a dump slot after the first block. Keep the sequences of the requests until the calls of all ranks are
    /// queued ([`ContextAttention::begin`](crate::ContextAttention::begin) does).
    ///
    /// [`AttentionMetadata::new`]: crate::AttentionMetadata::new
    pub fn split(&self, requests: &[BatchRequest<'_>], pad: PadPolicy) -> Result<ContextSplit, Violation> {
        let split = self.divide(requests, pad, false)?;
        requests.iter().enumerate().try_for_each(|(index, request)| check_progress(index, request))?;
        Ok(split)
    }

    /// Divides a step without asking what was computed of its sequences; where `by_row`, each new token is a row of the
    /// table, which sees the keys up to its own, as if it were a request that adds it alone.
    pub(super) fn divide(
        &self,
        requests: &[BatchRequest<'_>],
        pad: PadPolicy,
        by_row: bool,
    ) -> Result<ContextSplit, Violation> {
        if let PadPolicy::DumpSlot(slot) = pad
            && slot as usize >= self.block_size
        {
            return Err(Violation::new(
                &rules::PAD_SLOT,
                format_args!("dump slot {slot} over blocks of {} tokens", self.block_size),
                format_args!("below {}", self.block_size),
                "write padding to the first block of each rank, which the pool reserves by one block of its own",
            ));
        }
        let mut end = 0;
        let mut ends = Cumulative::default();
        let mut pool = None;
        for (index, request) in requests.iter().enumerate() {
            pool = request.join_pool(index, pool)?;
            request.check_sequence(index, Causality::Causal)?;
            self.check_pool(index, request)?;
            request.check_lengths(index)?;
            end = request.add_tokens(index, end, AttentionMetadata::MAX_TOKENS)?;
            ends.push_end(end)?;
        }
        if requests.is_empty() {
            return Err(rules::no_requests());
        }
        let single = by_row || requests.iter().all(|request| request.new == 1);
        // The keys that the rows of the table see, before they are divided.
        let seen = |request: &BatchRequest<'_>| match single {
            true => request.cached + 1..request.cached + request.new + 1,
            false => request.cached..request.cached + 1,
        };
        // Blocks after the last one in use are left out: the table is as wide as the calls need.
        let mut rows = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let columns = (request.cached + request.new).div_ceil(self.pool_block_size());
            let used = &request.row[..columns.min(request.row.len())];
            request.check_repeated(index, used, Causality::Causal)?;
            rows.extend(seen(request).map(|_| used));
        }
        let table = Arc::new(PageTable::from_rows(&rows)?);
        let any_blocks = MAX_INT32 / self.block_size;
        let ranks = (0..self.share.ranks()).map(|rank| {
            let mut step = RankStep {
                rank,
                slots: Vec::new(),
                table: Arc::clone(&table),
                rows: PagedRows { q_ends: ends.clone(), kv_lengths: PerRequest::default(), single },
            };
            let mut padded = 0;
            for request in requests {
                let keys = request.cached + request.new;
                let (rule, fix) = (&rules::LENGTHS_OVERFLOW, "split the batch");
                room(&mut step.slots, request.new, rule, fix)?;
                for position in request.cached..keys {
                    let slot = self.share.slot(request.row, position, self.block_size, rank)?;
                    // Every slot is an INT32.
                    let slot = match slot.map(|slot| slot as i32) {
                        Some(slot) if pad.is_padding(slot, self.block_size) => {
                            return Err(written_over(pad, step.slots.len()));
                        }
                        Some(slot) => slot,
                        None => {
                            padded += 1;
                            pad.slot_of(padded - 1, self.block_size)?
                        }
                    };
                    step.slots.push(slot);
                }
                for keys in seen(request) {
                    step.rows.kv_lengths.push(self.share.local_len(keys, rank))?;
                }
            }
            // Blocks outside of a rank's cache are found where its table goes to the device.
            check_slots(&step.slots, any_blocks, self.block_size, pad)?;
            Ok(step)
        });
        let ranks: Vec<RankStep> = ranks.collect::<Result<_, Violation>>()?;
        let own = if single { 0 } else { 1 << ranks.len() };
        let lengths = requests.iter().flat_map(|request| match single {
            true => std::iter::repeat_n(1, request.new),
            false => std::iter::repeat_n(request.new, 1),
        });
        let parts = lengths.enumerate().map(|(row, rows)| {
            let of_rank = |(rank, step): (usize, &RankStep)| u16::from(step.kv_lengths().lengths()[row] > 0) << rank;
            PartsOfRows { rows, parts: ranks.iter().enumerate().map(of_rank).fold(own, |parts, rank| parts | rank) }
        });
        Ok(ContextSplit { parts: parts.collect(), single, new: NewTokens { q_ends: ends }, ranks })
    }
}

/// Refuses a sequence whose tokens in front of the step are not in every cache of its pool. The pool of several ranks
/// is no cache's; that of a single one may be.
fn check_progress(index: usize, request: &BatchRequest<'_>) -> Result<(), Violation> {
    let Some(sequence) = request.sequence else {
        return Ok(());
    };
    let pool = sequence.pool();
    let blocks = sequence.row().iter().copied();
    if let Some(block) = pool.first_uncopied(blocks, CopiesIn::AnyCache) {
        return Err(uncopied(format_args!("block {block} of request {index}")));
    }
    pool.check_tokens(&format_args!("request {index}"), request.step_tokens(sequence))
}

impl ContextSplit {
    /// The part of each rank.
    pub fn ranks(&self) -> &[RankStep] {
        &self.ranks
    }

    /// Which ranks (bit `rank`) have keys for which rows, of steps whose heads are divided; the bit after the last
    /// rank's is for the new tokens among themselves, which are a part of their own unless every request adds a single
    /// one, or the step is one of [`ContextAttention::begin`](crate::ContextAttention::begin) over latents.
    pub fn parts(&self) -> &[PartsOfRows] {
        &self.parts
    }

    /// The number of the step's tokens.
    pub fn tokens(&self) -> usize {
        self.ranks.first().map_or(0, |rank| rank.slots.len())
    }

    /// The step's tokens whose rows `rank` computes where rows are divided over the ranks
    /// ([`ContextAttention::begin_rows`](crate::ContextAttention::begin_rows)), in the order in which it passes them:
    /// of each request chunk `rank` and chunk `2 P - 1 - rank` of `2 P` for `P` ranks (zigzag), so that all have as
    /// much to do. Chunks differ by one token where the new ones do not divide, and empty ones are left out.
    pub fn rows(&self, rank: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let ends = self.new.q_ends.ends().iter();
        let requests: Vec<Range<usize>> = ends.map(|end| std::mem::replace(&mut start, *end)..*end).collect();
        let chunks = chunks(self.ranks.len(), rank, requests.iter().map(Range::len));
        let in_step = |(request, rows): (usize, Range<usize>)| {
            let start = requests[request].start;
            start + rows.start..start + rows.end
        };
        chunks.map(in_step).collect()
    }

    /// The call of the new tokens among themselves, unless each sees its own key in the call of a rank.
    pub(super) fn new_tokens(&self) -> Option<&NewTokens> {
        (!self.single).then_some(&self.new)
    }
}

impl RankStep {
    /// The slot in the rank's cache of each of the step's tokens, INT32 as the device has it; a slot of padding for
    /// tokens that another rank holds.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// Keys that the rank's call reads, by the rows of the [table](Self::table), of steps whose heads are divided.
    pub fn kv_lengths(&self) -> &PerRequest {
        &self.rows.kv_lengths
    }

    /// The query rows of the rank's call.
    pub(super) fn rows(&self) -> &PagedRows {
        &self.rows
    }

    /// The block table, the same for all ranks: a row for each request, or for each token in a step of
    /// [`ContextAttention::begin`](crate::ContextAttention::begin) over latents.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl NewTokens {
    /// Prepares the call: causal, over the step's packed keys, `[tokens, Nkv, D]`, with log-sum-exps. One plan serves
    /// all layers.
    pub(super) fn plan<T: Element>(
        &self,
        stream: &Stream,
        shape: AttentionShape,
        inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<Plan> {
        let causal = stream.device().masks().causal(CausalOrigin::RightDown)?;
        let ends = &self.q_ends;
        let lengths = CallLengths::PackedDense { q: ends, kv: ends };
        let call = shape.call(Layout::Tnd).mask(causal).softmax_lse(true);
        Ok(lengths.apply(call).plan(inputs)?)
    }
}
