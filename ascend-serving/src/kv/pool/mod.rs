//! Blocks of a paged cache: who holds them, and when one may be handed out again.

mod block;
mod copies;
mod progress;
mod state;
mod steps_in_flight;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ascend_attention::Violation;
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;

use crate::rules::{self, room};
use crate::sharing::lock;

use super::pad::PadPolicy;
use super::slot::{MAX_INT32, count_slots};

pub use block::Block;
use block::Holder;
pub(crate) use copies::CopiesIn;
use progress::ProgressTable;
pub(crate) use progress::{CacheEntry, SequenceStamp, StepProgress, StepTokens};
pub(in crate::kv) use progress::{SequenceEntry, spanning};
use state::{BlockRecord, State};
pub use steps_in_flight::StepLease;

/// The identity of a pool in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(u64);

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.0)
    }
}

/// The blocks of a request in a step.
pub(crate) struct BlocksOfRequest<'r> {
    pub(crate) request: usize,
    /// The pool's count of departures ([`BlockPool::departures`]) when the request was made.
    pub(crate) departures: u64,
    /// Whether the step may compute tokens that are computed already.
    pub(crate) recompute: bool,
    /// The blocks that the step only reads.
    pub(crate) read: &'r [usize],
    pub(crate) written: &'r [usize],
}

/// A block that a step must not use.
pub(crate) struct UnusableBlock {
    pub(crate) request: usize,
    pub(crate) block: usize,
    /// Whether the block would be written though another sequence holds it too; otherwise it was given back.
    pub(crate) is_shared: bool,
}

struct SharedPool {
    id: PoolId,
    block_size: usize,
    blocks: usize,
    reserved: usize,
    pad: PadPolicy,
    state: Mutex<State>,
    /// Whether there may be blocks that wait for copies, which steps check for every sequence. Written under the lock
    /// alone.
    may_lack_copies: AtomicBool,
    /// How often holders have left blocks so far, which requests read. Written under the lock alone.
    departures: AtomicU64,
    /// How many tokens of each sequence are computed. Never locked together with the state.
    progress: Mutex<ProgressTable>,
}

/// The blocks of a paged cache.
///
/// A [`Block`] is held, shared by cloning, and given back by dropping it. A block that was given back is handed out
/// again when every step that began before is over, so that no launch in flight reads tokens of its next holder:
/// begin each step with [`BlockPool::begin_step`], before the first launch that reads the cache.
///
/// Cloning shares the pool.
#[derive(Clone)]
pub struct BlockPool(Arc<SharedPool>);

impl BlockPool {
    /// The most blocks of a pool. It keeps 28 bytes of host memory for each, and 16 more for those that wait for
    /// steps in flight.
    pub const MAX_BLOCKS: usize = 1 << 26;

    /// Most requests of a packed call, which has at most this number of query rows and one or more for each request.
    pub const MAX_REQUESTS: usize = FiaCall::MOST_PACKED_ROWS as usize;

    /// A pool of `blocks` blocks of `block_size` tokens. The blocks that padding is written to are never handed out.
    ///
    /// # Errors
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a pool without blocks, one of more than
    /// [`MAX_BLOCKS`](Self::MAX_BLOCKS), or one whose slots do not fit INT32; [`PAD_SLOT`](crate::rules::PAD_SLOT)
    /// for a dump slot that is not one of them.
    pub fn new(blocks: usize, block_size: usize, pad: PadPolicy) -> Result<Self, Violation> {
        static POOLS: AtomicU64 = AtomicU64::new(0);
        let reserved = pad.reserved_blocks(block_size);
        let slots = count_slots(blocks, block_size).ok();
        let slots = slots.filter(|_| blocks <= Self::MAX_BLOCKS);
        if let Some(slots) = slots {
            pad.check(slots)?;
        }
        let fix = match (pad, slots) {
            (PadPolicy::DumpSlot(_), Some(_)) => {
                "choose more blocks, or a small dump slot such as 0: each block up to that of the slot is reserved"
            }
            _ => "choose another number of blocks, or another block size",
        };
        if slots.is_none() || reserved >= blocks {
            return Err(Violation::new(
                &rules::POOL_SIZE,
                format_args!("{blocks} blocks of {block_size} tokens, {reserved} reserved for padding ({pad:?})"),
                format_args!(
                    "more than {reserved} blocks and at most {}, 1 or more tokens in each, at most {} slots in all",
                    Self::MAX_BLOCKS,
                    MAX_INT32
                ),
                fix,
            ));
        }
        // Blocks are handed out from the end of the list: lowest numbers first.
        let numbers = (reserved..blocks).rev();
        let (mut records, mut free) = (Vec::new(), Vec::new());
        let fix = "choose fewer blocks";
        room(&mut records, blocks, &rules::POOL_SIZE, fix)?;
        room(&mut free, blocks, &rules::POOL_SIZE, fix)?;
        records.resize(blocks, BlockRecord::default());
        // `MAX_BLOCKS` is far below the numbers of 32 bits.
        free.extend(numbers.map(|block| block as u32));
        let state = State { blocks: records, free, ..State::default() };
        Ok(Self(Arc::new(SharedPool {
            id: PoolId(POOLS.fetch_add(1, Ordering::Relaxed)),
            block_size,
            blocks,
            reserved,
            pad,
            state: Mutex::new(state),
            may_lack_copies: AtomicBool::new(false),
            departures: AtomicU64::new(0),
            progress: Mutex::default(),
        })))
    }

    /// Its identity, which clones of it share.
    pub fn id(&self) -> PoolId {
        self.0.id
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.0.block_size
    }

    /// Number of blocks, reserved ones included.
    pub fn blocks(&self) -> usize {
        self.0.blocks
    }

    /// What padding tokens write.
    pub fn pad_policy(&self) -> PadPolicy {
        self.0.pad
    }

    /// Number of blocks that can be handed out now.
    pub fn free_blocks(&self) -> usize {
        self.reclaim();
        lock(&self.0.state).free.len()
    }

    /// Number of blocks that were given back and may still be read by a step in flight.
    pub fn waiting_blocks(&self) -> usize {
        self.reclaim();
        lock(&self.0.state).waiting.len()
    }

    /// Number of blocks that are held.
    pub fn held_blocks(&self) -> usize {
        let state = lock(&self.0.state);
        state.blocks.iter().filter(|record| record.holders > 0).count()
    }

    fn progress_table(&self) -> &Mutex<ProgressTable> {
        &self.0.progress
    }

    /// How often a holder has left a block so far.
    pub(crate) fn departures(&self) -> u64 {
        self.0.departures.load(Ordering::Acquire)
    }

    /// The first block of these rows that a step must not use: one that was given back after the count of departures
    /// in its row, or one that is written though somebody else reads it.
    pub(crate) fn unusable<'r>(&self, rows: impl IntoIterator<Item = BlocksOfRequest<'r>>) -> Option<UnusableBlock> {
        let now = self.departures();
        let state = lock(&self.0.state);
        let record = |block: usize| state.blocks.get(block).copied().unwrap_or_default();
        rows.into_iter().find_map(|row| {
            // Most steps begin directly after their metadata was made, with no departure in between.
            let departed = (row.departures != now).then(|| row.read.iter().chain(row.written));
            let mut departed = departed.into_iter().flatten();
            let given_back = departed.find(|block| record(**block).given_back > row.departures);
            let mut written = row.written.iter();
            let shared = || written.find(|block| record(**block).is_read_by_others(row.recompute));
            Some(UnusableBlock {
                request: row.request,
                is_shared: given_back.is_none(),
                block: *given_back.or_else(shared)?,
            })
        })
    }

    /// Checks that any packed call can read requests of these lengths: for prompts the operator requires that the cache
    /// has as many blocks as they need together, and counts a block that several share for each of them. A request of
    /// padding takes one.
    ///
    /// A scheduler calls it before it grows sequences. Steps of prompts that are too large are refused when their first
    /// layer is queued, by the same rule ([`Error::breaks`](crate::Error::breaks)); decoding steps whose requests share
    /// blocks may be served though this refuses them.
    ///
    /// # Errors
    /// [`BATCH_BLOCKS`](crate::rules::BATCH_BLOCKS), [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for more
    /// than [`MAX_REQUESTS`](Self::MAX_REQUESTS).
    pub fn admits(&self, lengths: impl IntoIterator<Item = usize>) -> Result<(), Violation> {
        let size = self.0.block_size;
        let mut needed = 0u128;
        for (request, len) in lengths.into_iter().enumerate() {
            if request >= Self::MAX_REQUESTS {
                return Err(Violation::new(
                    &rules::LENGTHS_OVERFLOW,
                    format_args!("more than {request} requests"),
                    format_args!("at most {}, the rows of a packed call", Self::MAX_REQUESTS),
                    "split the batch",
                ));
            }
            needed += len.div_ceil(size) as u128;
            if needed > self.0.blocks as u128 {
                return Err(rules::BATCH_BLOCKS.broken(
                    format_args!(
                        "{needed} blocks of {size} tokens for the first {} requests, shared ones counted for each",
                        request + 1
                    ),
                    format_args!("at most {}, those of the cache", self.0.blocks),
                ));
            }
        }
        Ok(())
    }

    /// Hands out a free block, which no launch in flight reads.
    ///
    /// # Errors
    /// [`POOL_WAITING`](crate::rules::POOL_WAITING) if blocks were given back that a step in flight may still read:
    /// synchronise its stream and call again. [`POOL_EXHAUSTED`](crate::rules::POOL_EXHAUSTED) if that would not
    /// help: preempt a request.
    pub fn allocate(&self) -> Result<Block, Violation> {
        let mut state = self.with_free(1)?;
        match state.free.pop() {
            Some(id) => Ok(self.hand_out(&mut state, id)),
            None => Err(self.too_few(&state, 1)),
        }
    }

    /// Hands out `wanted` blocks, or none.
    pub(in crate::kv) fn take(&self, wanted: usize) -> Result<Vec<Block>, Violation> {
        let mut taken = Vec::new();
        if wanted == 0 {
            return Ok(taken);
        }
        let mut state = self.with_free(wanted)?;
        // The pool has this number of free blocks, so that this takes no more memory than the pool keeps for them.
        room(&mut taken, wanted, &rules::LENGTHS_OVERFLOW, "grow by fewer tokens")?;
        while taken.len() < wanted
            && let Some(id) = state.free.pop()
        {
            taken.push(self.hand_out(&mut state, id));
        }
        Ok(taken)
    }

    /// Locks the state, with at least `wanted` free blocks.
    fn with_free(&self, wanted: usize) -> Result<MutexGuard<'_, State>, Violation> {
        let mut state = lock(&self.0.state);
        if state.free.len() < wanted || !state.waiting.is_empty() {
            drop(state);
            self.reclaim();
            state = lock(&self.0.state);
        }
        match state.free.len() < wanted {
            false => Ok(state),
            true => Err(self.too_few(&state, wanted)),
        }
    }

    fn hand_out(&self, state: &mut State, id: u32) -> Block {
        let holder = Holder::Handle;
        state.block(id).join(holder);
        Block { pool: self.clone(), id, holder }
    }

    #[cold]
    fn too_few(&self, state: &State, wanted: usize) -> Violation {
        let (free, waiting) = (state.free.len(), state.waiting.len());
        let held = self.0.blocks - self.0.reserved - free - waiting;
        let (rule, fix) = match free + waiting < wanted {
            true => (
                &rules::POOL_EXHAUSTED,
                "evict cached prefixes (`PrefixCache::evict`), finish or preempt a request, grow by fewer tokens, or \
                 make a larger cache",
            ),
            false => (&rules::POOL_WAITING, rules::POOL_WAITING.fix),
        };
        Violation::new(
            rule,
            format_args!("asked for {wanted} blocks; {free} free, {held} held, {waiting} waiting for steps in flight"),
            format_args!("at most {free} now"),
            fix,
        )
    }

    /// Refuses a pool in the place of this one of a cache: one of other sizes, and while a block of either is held.
    pub(crate) fn check_replaced(&self, by: &BlockPool) -> Result<(), Violation> {
        let sizes = |pool: &BlockPool| (pool.blocks(), pool.block_size(), pool.pad_policy());
        let (own, other) = (sizes(self), sizes(by));
        let (own_held, held) = (self.held_blocks(), by.held_blocks());
        if own == other && own_held == 0 && held == 0 {
            return Ok(());
        }
        Err(rules::POOL_SHARED.broken(
            format_args!(
                "a pool of {} blocks of {} tokens with padding {:?}, {held} held, for a cache of whose own {own_held} \
                 are held",
                other.0, other.1, other.2
            ),
            format_args!("{} blocks of {} tokens with padding {:?}, none held", own.0, own.1, own.2),
        ))
    }

    /// Whether two handles are of one pool.
    pub fn is_same(&self, other: &BlockPool) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Refuses an object of another pool.
    pub(crate) fn check_same(
        &self,
        other: &BlockPool,
        what: impl fmt::Display,
        fix: &'static str,
    ) -> Result<(), Violation> {
        if self.is_same(other) {
            return Ok(());
        }
        let given = format_args!("{what} of {}", other.id());
        Err(Violation::new(&rules::BLOCK_POOL, given, self.id(), fix))
    }

    /// Records that a holder leaves a block.
    fn leave(&self, state: &mut State, block: u32, holder: Holder) {
        state.release(block, holder);
        let departures = state.departures;
        self.0.departures.store(departures, Ordering::Release);
    }
}

impl AsRef<BlockPool> for BlockPool {
    fn as_ref(&self) -> &BlockPool {
        self
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockPool")
            .field("id", &self.0.id)
            .field("blocks", &self.0.blocks)
            .field("block_size", &self.0.block_size)
            .field("held", &self.held_blocks())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
