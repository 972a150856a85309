//! Which rank holds which key of a step, and what each rank computes of it.

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, FusedInferAttention, Inputs, PerRequest};
use ascend_attention::graph::Capturing;
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::Layout;
use ascend_attention::spec::ops::attention_update::UpdateCall;
use ascend_attention::{CausalOrigin, Element, Mask, Output, Plan, Queue, Stream, Tensor, Violation};

use crate::backends::{AttentionShape, size};
use crate::batch::{AttentionMetadata, BatchRequest};
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{
    CopiesIn, Interleave, LayerCache, MAX_INT32, PadPolicy, PageTable, check_slots, uncopied, written_over,
};
use crate::rules::{self, room};

/// Divides contexts that are too long for one cache over ranks, each with a cache of its own.
///
/// [`ContextAttention`](crate::ContextAttention) computes with it. Every rank has the query heads of all ranks and the
/// keys that [`Interleave`] assigns to it. It attends over these, without a mask, and the merge of the ranks' results by
/// their log-sum-exps is attention over all keys, exactly:
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
    new: Option<NewTokens>,
    rows: Vec<PartsOfRows>,
}

/// The slots, lengths and table of one rank in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStep {
    rank: usize,
    slots: Vec<i32>,
    kv_lengths: PerRequest,
    q_ends: Cumulative,
    table: PageTable,
    /// Tokens in a block of the rank's cache.
    block_size: usize,
    single: bool,
}

/// The queries of a layer; over latents with their rotary parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries<'a, T: Element> {
    pub(super) query: &'a Tensor<T>,
    pub(super) rope: Option<&'a Tensor<T>>,
}

/// The call of new tokens among themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NewTokens {
    q_ends: Cumulative,
}

/// The prepared call of a rank over its keys. From [`RankStep::plan`].
#[derive(Debug)]
pub(super) struct RankPlan {
    call: Plan,
    /// Whether each request has one query row, so that the call is batched.
    single: bool,
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
        let split = self.divide(requests, pad)?;
        requests.iter().enumerate().try_for_each(|(index, request)| check_progress(index, request))?;
        Ok(split)
    }

    /// Divides a step without asking what was computed of its sequences.
    pub(super) fn divide(&self, requests: &[BatchRequest<'_>], pad: PadPolicy) -> Result<ContextSplit, Violation> {
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
        let single = requests.iter().all(|request| request.new == 1);
        // Blocks after the last one in use are left out: the table is as wide as the calls need.
        let mut rows = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let columns = (request.cached + request.new).div_ceil(self.pool_block_size());
            let used = &request.row[..columns.min(request.row.len())];
            request.check_repeated(index, used, Causality::Causal)?;
            rows.push(used);
        }
        let table = PageTable::from_rows(&rows)?;
        let any_blocks = MAX_INT32 / self.block_size;
        let ranks = (0..self.share.ranks()).map(|rank| {
            let mut step = RankStep {
                rank,
                slots: Vec::new(),
                kv_lengths: PerRequest::default(),
                q_ends: ends.clone(),
                table: table.clone(),
                block_size: self.block_size,
                single,
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
                let seen = if single { keys } else { request.cached };
                step.kv_lengths.push(self.share.local_len(seen, rank))?;
            }
            // Blocks outside of a rank's cache are found where its table goes to the device.
            check_slots(&step.slots, any_blocks, self.block_size, pad)?;
            Ok(step)
        });
        let ranks: Vec<RankStep> = ranks.collect::<Result<_, Violation>>()?;
        let own = if single { 0 } else { 1 << ranks.len() };
        let parts = |request: usize| {
            let ranks = ranks.iter().enumerate();
            ranks
                .fold(own, |parts: u16, (rank, step)| parts | u16::from(step.kv_lengths.lengths()[request] > 0) << rank)
        };
        let rows = requests.iter().enumerate();
        let rows = rows.map(|(index, request)| PartsOfRows { rows: request.new, parts: parts(index) });
        Ok(ContextSplit { rows: rows.collect(), new: (!single).then_some(NewTokens { q_ends: ends }), ranks })
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

    /// Which ranks (bit `rank`) have keys for which rows; the bit after the last rank's is for the new tokens among
    /// themselves, which are a part of their own unless every request adds a single one.
    pub fn parts(&self) -> &[PartsOfRows] {
        &self.rows
    }

    /// The number of the step's tokens.
    pub fn tokens(&self) -> usize {
        self.ranks.first().map_or(0, |rank| rank.slots.len())
    }

    /// The call of the new tokens among themselves, unless every request adds a single one.
    pub(super) fn new_tokens(&self) -> Option<&NewTokens> {
        self.new.as_ref()
    }
}

impl RankStep {
    /// The slot in the rank's cache of each of the step's tokens, INT32 as the device has it; a slot of padding for
    /// tokens that another rank holds.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// Keys of each request that the rank's call reads.
    pub fn kv_lengths(&self) -> &PerRequest {
        &self.kv_lengths
    }

    /// The block table, the same for all ranks.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Prepares the rank's call, in sparse mode 0 without a mask, with log-sum-exps. Single rows are in BNSD, which
    /// every release takes in FLOAT16 too, other rows in TND. Query `[tokens, N, D]`. One plan serves all layers; none
    /// is needed without keys, where there is nothing to compute.
    pub(super) fn plan<T: Element>(
        &self,
        shape: AttentionShape,
        queries: Queries<'_, T>,
        cache: &LayerCache<T>,
        block_table: &BlockTable,
    ) -> Result<Option<RankPlan>> {
        if self.kv_lengths.lengths().iter().all(|len| *len == 0) {
            return Ok(None);
        }
        let call = |layout| over_keys(shape, layout);
        let (q, kv) = (&self.q_ends, &self.kv_lengths);
        let call = match self.single {
            true => {
                let single = SingleQueries::of(queries)?;
                let lengths = CallLengths::Batched { q: None, kv };
                lengths.apply(call(Layout::Bnsd)).plan(paged(single.queries(), cache, block_table))?
            }
            false => {
                let lengths = CallLengths::PackedPaged { q, kv };
                lengths.apply(call(Layout::Tnd)).plan(paged(queries, cache, block_table))?
            }
        };
        Ok(Some(RankPlan { call, single: self.single }))
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

/// The call of single rows over a rank's keys, with the heads of all ranks, recorded into a graph: the call of
/// [`RankStep::plan`], of lengths up to the longest.
pub(super) fn record_single_rows<T: Element>(
    capture: &Capturing<'_>,
    shape: AttentionShape,
    longest: CallLengths<'_>,
    (queries, cache, block_table): (Queries<'_, T>, &LayerCache<T>, &BlockTable),
    output: &Output<T>,
) -> Result<()> {
    let single = SingleQueries::of(queries)?;
    let inputs = paged(single.queries(), cache, block_table);
    let call = capture.attention(&over_keys(shape, Layout::Bnsd), longest, inputs)?;
    Ok(capture.launch_into(call, inputs, &mut single_output(output)?)?)
}

/// The call over a rank's keys, in sparse mode 0 without a mask, with log-sum-exps.
fn over_keys(shape: AttentionShape, layout: Layout) -> FusedInferAttention {
    shape.call(layout).mask(Mask::none()).softmax_lse(true)
}

fn paged<'a, T: Element>(queries: Queries<'a, T>, cache: &'a LayerCache<T>, table: &'a BlockTable) -> Inputs<'a, T> {
    cache.inputs(queries.query, queries.rope).paged(table)
}

/// Queries of single rows, in the shapes of [`single_rows`].
struct SingleQueries<T: Element>(Tensor<T>, Option<Tensor<T>>);

impl<T: Element> SingleQueries<T> {
    fn of(queries: Queries<'_, T>) -> Result<Self> {
        Ok(Self(single_rows(queries.query)?, queries.rope.map(single_rows).transpose()?))
    }

    fn queries(&self) -> Queries<'_, T> {
        Queries { query: &self.0, rope: self.1.as_ref() }
    }
}

/// Single rows, `[B, N, D]`, as `[B, N, 1, D]`: the same elements in the same order.
fn single_rows<T: Element>(tensor: &Tensor<T>) -> Result<Tensor<T>> {
    let [rows, heads, dim] = [0, 1, 2].map(|axis| size(tensor, axis));
    Ok(tensor.reshape([rows, heads, 1, dim])?)
}

/// Results of single rows in the shapes of [`single_rows`].
fn single_output<T: Element>(output: &Output<T>) -> Result<Output<T>> {
    let softmax_lse = output.softmax_lse.as_ref().map(single_rows).transpose()?;
    Ok(Output { attention: single_rows(&output.attention)?, softmax_lse })
}

impl RankPlan {
    /// Queues the call: attention `[tokens, N, D]` and log-sum-exps `[tokens, N, 1]` over the rank's keys. Rows without
    /// keys mean nothing.
    pub(super) fn launch_into<T: Element>(
        &self,
        queue: &impl Queue,
        (queries, cache, block_table): (Queries<'_, T>, &LayerCache<T>, &BlockTable),
        output: &mut Output<T>,
    ) -> Result<()> {
        if !self.single {
            return Ok(self.call.launch_into(queue, paged(queries, cache, block_table), output)?);
        }
        let single = SingleQueries::of(queries)?;
        Ok(self.call.launch_into(queue, paged(single.queries(), cache, block_table), &mut single_output(output)?)?)
    }
}
