//! Which rank holds which key of a step, and what each rank computes of it.

use std::num::NonZeroU64;
use std::ops::Range;

use ascend_attention::attention::{CallLengths, Cumulative, PerRequest};
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::Layout;
use ascend_attention::spec::geometry::ContextShard;
use ascend_attention::spec::ops::attention_update::UpdateCall;
use ascend_attention::{CausalOrigin, Element, Plan, Stream, Tensor, Violation};

use crate::backends::AttentionShape;
use crate::batch::{AttentionMetadata, BatchRequest};
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{
    CopiesIn, MAX_INT32, PadPolicy, PageTable, check_block_size, check_slots, slot, uncopied, written_over,
};
use crate::rules::{self, room};

use super::paged_rows::PagedRows;
use super::zigzag::chunks;

/// Divides contexts that are too long for one cache over ranks, each with a cache of its own.
///
/// [`ContextAttention`](crate::ContextAttention) computes with it. Every rank has the query heads of all ranks and the
/// keys of its tokens: runs of tokens go to one rank after the other. It attends over these, without a mask, and the
/// merge of the ranks' results by their log-sum-exps is attention over all keys, exactly:
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
    ranks: NonZeroU64,
    run: NonZeroU64,
    block_size: usize,
}

/// A step divided over ranks. From [`ContextParallel::split`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextSplit {
    /// Of each rank the slots of the step's tokens.
    slots: Vec<Vec<i32>>,
    /// Of each rank the keys by row of the table.
    kv_lengths: Vec<PerRequest>,
    table: PageTable,
    /// Where the rows of each request end.
    q_ends: Cumulative,
    /// Whether each row sees its own key in the call of the rank that holds it.
    single: bool,
    parts: Vec<PartsOfRows>,
}

impl ContextParallel {
    /// The most ranks: together with the call of the new tokens they are as many parts as the operator merges.
    pub const MAX_RANKS: usize = UpdateCall::MAX_PARTS - 1;

    /// Divides contexts over the caches of `ranks` ranks, with blocks of `block_size` tokens: runs of `run` consecutive
    /// tokens go to one rank after the other.
    ///
    /// # Errors
    /// [`RANKS_INTERLEAVE`](crate::rules::RANKS_INTERLEAVE) for no rank or a run of no token, and if a block does not
    /// hold whole runs; [`RANKS_PARTS`](crate::rules::RANKS_PARTS) for more than [`ContextParallel::MAX_RANKS`] ranks;
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a block size that no cache has.
    pub fn new(ranks: usize, run: usize, block_size: usize) -> Result<Self, Violation> {
        let sizes = NonZeroU64::new(ranks as u64).zip(NonZeroU64::new(run as u64));
        let Some((ranks, run)) = sizes else {
            return Err(Violation::new(
                &rules::RANKS_INTERLEAVE,
                format_args!("{ranks} ranks, runs of {run}"),
                "1 or more of each",
                "use 1 rank where the context is not divided",
            ));
        };
        let division = Self { ranks, run, block_size };
        if division.ranks() > Self::MAX_RANKS {
            return Err(
                rules::RANKS_PARTS.broken(format_args!("{ranks} ranks"), format_args!("1 to {}", Self::MAX_RANKS))
            );
        }
        check_block_size(block_size)?;
        if !block_size.is_multiple_of(division.tokens_in_run()) {
            return Err(Violation::new(
                &rules::RANKS_INTERLEAVE,
                format_args!("blocks of {block_size} tokens, runs of {run}"),
                "a block size that is a multiple of the run",
                "choose a run that divides the block size",
            ));
        }
        Ok(division)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.get() as usize
    }

    /// The number of tokens of a run: consecutive tokens on one rank.
    pub fn tokens_in_run(&self) -> usize {
        self.run.get() as usize
    }

    /// Tokens that an entry of the block table means: a block on each rank.
    pub fn pool_block_size(&self) -> usize {
        self.block_size * self.ranks()
    }

    /// The rank that holds a position.
    pub fn rank_of(&self, position: usize) -> usize {
        (position as u64 / self.run % self.ranks) as usize
    }

    /// Number of the first `len` tokens that `rank` holds: 0 for ranks that do not exist.
    pub fn local_len(&self, len: usize, rank: usize) -> usize {
        let shard = ContextShard::new(self.ranks, self.run, rank as u64);
        shard.map_or(0, |shard| shard.local_len(len as u64) as usize)
    }

    /// The positions among the first `len` that `rank` holds, in order.
    pub(super) fn positions(&self, len: usize, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (ranks, run) = (self.ranks(), self.tokens_in_run());
        (0..self.local_len(len, rank)).map(move |local| (local / run * ranks + rank) * run + local % run)
    }

    /// The slot of `position` on `rank`, or `None` where another rank holds it.
    ///
    /// # Errors
    /// As for [`slot`](crate::kv::slot()) for the position among the tokens of the rank.
    pub fn slot(&self, row: &[usize], position: usize, rank: usize) -> Result<Option<usize>, Violation> {
        if self.rank_of(position) != rank {
            return Ok(None);
        }
        // The rank has every `ranks`-th run, one after the other, as if they were a context of their own.
        let run = self.tokens_in_run();
        let local = position / run / self.ranks() * run + position % run;
        slot(row, local, self.block_size).map(Some)
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
        let table = PageTable::from_rows(&rows)?;
        let any_blocks = MAX_INT32 / self.block_size;
        let (mut all_slots, mut all_lengths) = (Vec::new(), Vec::new());
        for rank in 0..self.ranks() {
            let (mut slots, mut kv_lengths) = (Vec::new(), PerRequest::default());
            let mut padded = 0;
            for request in requests {
                let keys = request.cached + request.new;
                let (rule, fix) = (&rules::LENGTHS_OVERFLOW, "split the batch");
                room(&mut slots, request.new, rule, fix)?;
                for position in request.cached..keys {
                    let slot = self.slot(request.row, position, rank)?;
                    // Every slot is an INT32.
                    let slot = match slot.map(|slot| slot as i32) {
                        Some(slot) if pad.is_padding(slot, self.block_size) => {
                            return Err(written_over(pad, slots.len()));
                        }
                        Some(slot) => slot,
                        None => {
                            padded += 1;
                            pad.slot_of(padded - 1, self.block_size)?
                        }
                    };
                    slots.push(slot);
                }
                for keys in seen(request) {
                    kv_lengths.push(self.local_len(keys, rank))?;
                }
            }
            // Blocks outside of a rank's cache are found where its table goes to the device.
            check_slots(&slots, any_blocks, self.block_size, pad)?;
            all_slots.push(slots);
            all_lengths.push(kv_lengths);
        }
        let own = if single { 0 } else { 1 << self.ranks() };
        let lengths = requests.iter().flat_map(|request| match single {
            true => std::iter::repeat_n(1, request.new),
            false => std::iter::repeat_n(request.new, 1),
        });
        let parts = lengths.enumerate().map(|(row, rows)| {
            let of_rank = |(rank, keys): (usize, &PerRequest)| u16::from(keys.lengths()[row] > 0) << rank;
            PartsOfRows { rows, parts: all_lengths.iter().enumerate().map(of_rank).fold(own, |all, rank| all | rank) }
        });
        let parts = parts.collect();
        Ok(ContextSplit { slots: all_slots, kv_lengths: all_lengths, table, q_ends: ends, single, parts })
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
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.slots.len()
    }

    /// The slot in the cache of `rank` of each of the step's tokens, INT32 as the device has it; a slot of padding for
    /// tokens that another rank holds. None for a rank that does not exist.
    pub fn slots(&self, rank: usize) -> &[i32] {
        self.slots.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Keys that the call of `rank` reads, by the rows of the [table](Self::table), of steps whose heads are divided.
    /// None for a rank that does not exist.
    pub fn kv_lengths(&self, rank: usize) -> &[usize] {
        self.kv_lengths.get(rank).map_or(&[], PerRequest::lengths)
    }

    /// The block table, the same for all ranks: a row for each request, or for each token in a step of
    /// [`ContextAttention::begin`](crate::ContextAttention::begin) over latents.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// Which ranks (bit `rank`) have keys for which rows, of steps whose heads are divided; the bit after the last
    /// rank's is for the new tokens among themselves, which are a part of their own unless every request adds a single
    /// one, or the step is one of [`ContextAttention::begin`](crate::ContextAttention::begin) over latents.
    pub fn parts(&self) -> &[PartsOfRows] {
        &self.parts
    }

    /// The number of the step's tokens.
    pub fn tokens(&self) -> usize {
        self.slots(0).len()
    }

    /// The step's tokens whose rows `rank` computes where rows are divided over the ranks
    /// ([`ContextAttention::begin_rows`](crate::ContextAttention::begin_rows)), in the order in which it passes them:
    /// of each request chunk `rank` and chunk `2 P - 1 - rank` of `2 P` for `P` ranks (zigzag), so that all have as
    /// much to do. Chunks differ by one token where the new ones do not divide, and empty ones are left out.
    pub fn rows(&self, rank: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let ends = self.q_ends.ends().iter();
        let requests: Vec<Range<usize>> = ends.map(|end| std::mem::replace(&mut start, *end)..*end).collect();
        let chunks = chunks(self.ranks(), rank, requests.iter().map(Range::len));
        let in_step = |(request, rows): (usize, Range<usize>)| {
            let start = requests[request].start;
            start + rows.start..start + rows.end
        };
        chunks.map(in_step).collect()
    }

    /// The query rows of the call of `rank`, unless it does not exist.
    pub(super) fn paged_rows(&self, rank: usize) -> Option<PagedRows> {
        let kv_lengths = self.kv_lengths.get(rank)?.clone();
        Some(PagedRows { q_ends: self.q_ends.clone(), kv_lengths, single: self.single })
    }

    /// Prepares the call of the new tokens among themselves, unless each sees its own key in the call of a rank:
    /// causal, over the step's packed keys, `[tokens, Nkv, D]`, with log-sum-exps. One plan serves all layers.
    pub(super) fn plan_new_tokens<T: Element>(
        &self,
        stream: &Stream,
        shape: AttentionShape,
        inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<Option<Plan>> {
        if self.single {
            return Ok(None);
        }
        let causal = stream.device().masks().causal(CausalOrigin::RightDown)?;
        let lengths = CallLengths::PackedDense { q: &self.q_ends, kv: &self.q_ends };
        let call = shape.call(Layout::Tnd).mask(causal).softmax_lse(true);
        Ok(Some(lengths.apply(call).plan(inputs)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every token is on one rank, in a slot of its own, and the ranks' lengths are what their tokens count.
        #[test]
        fn ranks_divide_a_context(
            ranks in 1usize..6,
            run in 1usize..5,
            runs in 1usize..5,
            blocks in 1usize..4,
            cut in 0usize..1000,
        ) {
            let block_size = run * runs;
            let division = ContextParallel::new(ranks, run, block_size).unwrap();
            let row: Vec<usize> = (0..blocks).map(|b| b * 3 + 1).collect();
            let len = cut % (block_size * ranks * blocks + 1);
            let mut held = vec![Vec::new(); ranks];
            let mut positions = vec![Vec::new(); ranks];
            for position in 0..len {
                positions[division.rank_of(position)].push(position);
                let mut holders = 0;
                for (rank, held) in held.iter_mut().enumerate() {
                    if let Some(slot) = division.slot(&row, position, rank).unwrap() {
                        holders += 1;
                        prop_assert_eq!(rank, division.rank_of(position));
                        held.push(slot);
                    }
                }
                prop_assert_eq!(holders, 1);
            }
            for (rank, slots) in held.iter().enumerate() {
                prop_assert_eq!(slots.len(), division.local_len(len, rank));
                prop_assert_eq!(division.positions(len, rank).collect::<Vec<_>>(), &positions[rank][..]);
                // A rank's tokens are in order, as in a cache of their own.
                let own: Vec<usize> = (0..slots.len()).map(|p| slot(&row, p, block_size).unwrap()).collect();
                prop_assert_eq!(slots, &own);
            }
        }

        #[test]
        fn local_lengths_add_up(ranks in 1..=ContextParallel::MAX_RANKS, run in 1usize..2000, len in any::<usize>()) {
            let division = ContextParallel::new(ranks, run, run).unwrap();
            let sum: u128 = (0..ranks).map(|rank| division.local_len(len, rank) as u128).sum();
            prop_assert_eq!(sum, len as u128);
            prop_assert_eq!(division.local_len(len, ranks), 0);
        }
    }
}
