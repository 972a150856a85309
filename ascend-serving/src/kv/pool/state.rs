//! Who holds each block, and which steps may still read those that were given back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::kv::fence::Fence;

use super::block::Holder;
use super::copies::AwaitedCopy;

/// A step whose launches may be reading blocks.
pub(super) enum Step {
    Open,
    Ending(Arc<dyn Fence>),
}

/// The holders of a block, and when it was given back, as a count of departures; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockRecord {
    /// The number of handles and copies that hold the block.
    pub(super) holders: u64,
    /// How many of them are copies.
    copies: u64,
    pub(super) given_back: u64,
}

impl BlockRecord {
    /// Records one more holder.
    pub(super) fn join(&mut self, holder: Holder) {
        self.holders += 1;
        self.copies += u64::from(holder == Holder::Copy);
    }

    /// Whether the holders are more than the one that writes to the block, where copies count if tokens that are
    /// computed are `rewritten`.
    pub(super) fn is_read_by_others(&self, rewritten: bool) -> bool {
        let counted = match rewritten {
            true => self.holders,
            false => self.holders - self.copies,
        };
        counted > 1
    }
}

#[derive(Default)]
pub(super) struct State {
    /// The record of each block, by its number.
    pub(super) blocks: Vec<BlockRecord>,
    pub(super) free: Vec<u32>,
    /// Blocks that were given back while steps were in flight, with the number of the last step that may read them.
    pub(super) waiting: VecDeque<(u64, u32)>,
    pub(super) steps: VecDeque<Step>,
    /// Number of the first step in `steps`.
    pub(super) first_step: u64,
    /// Held blocks whose tokens still have to be copied from another one.
    pub(super) uncopied: HashMap<usize, AwaitedCopy>,
    /// Number of the next copy.
    pub(super) next_copy: u64,
    /// How often holders have left blocks so far: the clock of the records.
    pub(super) departures: u64,
}

impl State {
    /// The number of the first step in flight and its fence, if it has ended.
    pub(super) fn ending(&self) -> Option<(u64, Arc<dyn Fence>)> {
        match self.steps.front() {
            Some(Step::Ending(fence)) => Some((self.first_step, Arc::clone(fence))),
            Some(Step::Open) | None => None,
        }
    }

    /// Removes the first step in flight, unless another thread did, and moves blocks that no later step can read to
    /// the free ones.
    pub(super) fn finish(&mut self, step: u64) -> Option<Step> {
        if step != self.first_step {
            return None;
        }
        let over = self.steps.pop_front()?;
        self.first_step += 1;
        while let Some(&(step, block)) = self.waiting.front() {
            if step >= self.first_step {
                break;
            }
            self.waiting.pop_front();
            self.free.push(block);
        }
        Some(over)
    }

    /// Records that a holder leaves a block; with the last holder, the copy that the block waits for leaves its
    /// source.
    pub(super) fn release(&mut self, block: u32, holder: Holder) {
        let mut next = self.leave(block, holder);
        while let Some(block) = next {
            next = self.leave(block, Holder::Copy);
        }
    }

    /// Records that a holder leaves a block. Returns the block that a dropped copy held.
    fn leave(&mut self, block: u32, holder: Holder) -> Option<u32> {
        self.departures += 1;
        let now = self.departures;
        let record = self.block(block);
        record.holders -= 1;
        record.copies -= u64::from(holder == Holder::Copy);
        if record.holders > 0 {
            return None;
        }
        record.given_back = now;
        let copy = self.uncopied.remove(&(block as usize));
        match self.steps.len() as u64 {
            0 => self.free.push(block),
            steps => {
                let last = self.first_step + steps - 1;
                self.waiting.push_back((last, block));
            }
        }
        copy?.from
    }

    /// The record of a block, whose number its pool has chosen.
    pub(super) fn block(&mut self, block: u32) -> &mut BlockRecord {
        &mut self.blocks[block as usize]
    }
}
