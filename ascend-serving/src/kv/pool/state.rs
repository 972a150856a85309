//! Who holds each block, and which steps may still read those that were given back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use crate::kv::fence::Fence;

use super::block::Holder;
use super::copies::AwaitedCopy;

/// A step whose launches may be reading blocks.
pub(super) enum Step {
    Open,
    Ending(Arc<dyn Fence>),
}

/// When a block changed hands, as a count of departures; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockChanges {
    pub(super) given_back: u64,
    /// When a handle left the block.
    pub(super) left: u64,
}

#[derive(Default)]
pub(super) struct State {
    /// Holders of each block.
    pub(super) holders: Vec<u32>,
    pub(super) free: Vec<u32>,
    /// Blocks that were given back while steps were in flight, with the number of the last step that may read them.
    pub(super) waiting: VecDeque<(u64, u32)>,
    pub(super) steps: VecDeque<Step>,
    /// Number of the first step in `steps`.
    pub(super) first_step: u64,
    /// Threads that are querying fences.
    pub(super) asking: Vec<ThreadId>,
    /// Held blocks whose tokens still have to be copied from another one.
    pub(super) uncopied: HashMap<usize, AwaitedCopy>,
    /// Number of the next copy.
    pub(super) next_copy: u64,
    /// For each block, when it changed hands.
    pub(super) changed_at: Vec<BlockChanges>,
    /// How often holders have left blocks so far: the clock of `changed_at`.
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
        self.first_step = self.first_step.saturating_add(1);
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
        let holders = self.held(block)?;
        // A count that has reached its maximum is not exact any more: the block is never handed out again.
        if *holders == u32::MAX {
            return None;
        }
        *holders = holders.saturating_sub(1);
        let last = *holders == 0;
        self.departures = self.departures.saturating_add(1);
        if let Some(at) = self.changed_at.get_mut(block as usize) {
            if holder == Holder::Handle {
                at.left = self.departures;
            }
            if last {
                at.given_back = self.departures;
            }
        }
        if !last {
            return None;
        }
        let copy = self.uncopied.remove(&(block as usize));
        match self.steps.len().checked_sub(1) {
            None => self.free.push(block),
            Some(last) => {
                let last = self.first_step.saturating_add(last as u64);
                self.waiting.push_back((last, block));
            }
        }
        copy?.from
    }

    pub(super) fn held(&mut self, block: u32) -> Option<&mut u32> {
        let at = usize::try_from(block).ok()?;
        self.holders.get_mut(at)
    }
}
