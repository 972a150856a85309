//! Growth: blocks and slots for the new tokens of a sequence.

use ascend_attention::Violation;

use crate::rules::{self, room};

use super::Sequence;
use crate::kv::block_copy::BlockCopy;
use crate::kv::pool::Block;
use crate::kv::slot::{check_tokens, fill_slots};

/// The slots of the new tokens of a sequence that grew, and the copies to queue before they are written.
#[derive(Debug, Default)]
#[must_use = "new tokens go to these slots, after these copies"]
#[non_exhaustive]
pub struct Growth {
    /// The slot of each new token, in order: INT32, as in the list of a step's slots on the device.
    pub slots: Vec<i32>,
    /// Blocks to copy first, because the sequence shared them.
    pub copies: Vec<BlockCopy>,
}

/// Blocks that are reserved for more tokens of a sequence.
#[derive(Debug)]
pub(crate) struct Room {
    len: usize,
    /// The index of a shared block, and the block that replaces it.
    replaced: Option<(usize, Block)>,
    new: Vec<Block>,
    /// The copies to queue.
    pub(crate) copies: Vec<BlockCopy>,
    /// Memory for the slots.
    slots: Vec<i32>,
}

impl Sequence {
    /// Makes room for `tokens` more tokens. After an error the sequence is unchanged.
    ///
    /// [`PagedKvCache::grow`](crate::kv::PagedKvCache::grow) does this and queues the copies, so that none is
    /// forgotten.
    ///
    /// # Errors
    /// [`POOL_EXHAUSTED`](crate::rules::POOL_EXHAUSTED); [`POOL_WAITING`](crate::rules::POOL_WAITING) if there will
    /// be enough blocks when the steps in flight are over; [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for
    /// a sequence of more than INT32 tokens, or more than the host has memory for;
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for one in the caches of several groups of layers.
    pub fn grow(&mut self, tokens: usize) -> Result<Growth, Violation> {
        self.check_groups(1)?;
        let room = self.reserve(tokens)?;
        self.settle(room)
    }

    /// Reserves blocks and host memory for `tokens` more tokens. Dropping them gives the blocks back.
    pub(crate) fn reserve(&mut self, tokens: usize) -> Result<Room, Violation> {
        let block_size = self.pool.block_size();
        let len = check_tokens(self.len, tokens, "a sequence")?;
        let first_written = self.len / block_size;
        // The sequence has a block for each of its tokens, and no others.
        let missing = len.div_ceil(block_size) - self.blocks.len();
        let written = self.blocks.get(first_written).and_then(Option::as_ref);
        let shared = written.filter(|block| tokens > 0 && block.is_shared());
        let own = usize::from(shared.is_some());
        let mut new = self.pool.take(missing + own)?.into_iter();
        let mut copies = Vec::new();
        let mut replaced = None;
        if let Some(from) = shared
            && let Some(own) = new.next()
        {
            copies.push(BlockCopy { from: from.to_copy(), to: own.id(), number: self.pool.await_copy(from, &own) });
            replaced = Some((first_written, own));
        }
        let (rule, fix) = (&rules::LENGTHS_OVERFLOW, "grow by fewer tokens");
        let mut slots = Vec::new();
        room(&mut self.blocks, missing, rule, fix)?;
        room(&mut self.row, missing, rule, fix)?;
        room(&mut slots, tokens, rule, fix)?;
        let new = new.collect();
        Ok(Room { len, replaced, new, copies, slots })
    }

    /// Reserves blocks for `tokens` more tokens. Waits for blocks that steps in flight may still read.
    pub(crate) fn reserve_in_time(&mut self, tokens: usize) -> Result<Room, Violation> {
        loop {
            match self.reserve(tokens) {
                Err(full) if full.rule == &rules::POOL_WAITING && self.pool.await_step() => {}
                outcome => return outcome,
            }
        }
    }

    /// Adds reserved blocks to the sequence.
    pub(crate) fn settle(&mut self, room: Room) -> Result<Growth, Violation> {
        let Room { len, replaced, new, copies, mut slots } = room;
        if let Some((column, own)) = replaced {
            self.row[column] = own.id();
            let replaced = self.blocks[column].replace(own);
            self.entry.give_up(replaced.into_iter());
            self.forget_written();
            self.entry.replace_block();
        }
        self.row.extend(new.iter().map(Block::id));
        self.blocks.extend(new.into_iter().map(Some));
        let block_size = self.pool.block_size();
        fill_slots(&self.row, self.len..len, block_size, &mut slots)?;
        if len > self.len {
            self.entry.change();
        }
        self.len = len;
        Ok(Growth { slots, copies })
    }
}
