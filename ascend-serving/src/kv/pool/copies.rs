//! Blocks that wait for the tokens of another one.

use std::sync::atomic::Ordering;

use crate::lock::lock;

use super::{Block, BlockPool};

impl BlockPool {
    /// Says that a block gets its tokens by a copy that is still to be queued. The number of the copy, which counts for as
    /// long as the block is held.
    pub(in crate::kv) fn await_copy(&self, block: &Block) -> u64 {
        let mut state = lock(&self.0.state);
        let number = state.next_copy;
        state.next_copy = number.saturating_add(1);
        state.uncopied.insert(block.id(), number);
        self.0.may_lack_copies.store(true, Ordering::Release);
        number
    }

    /// Whether a copy is still to be queued, and its block still held by the sequence that asked for it, or a fork.
    pub(in crate::kv) fn awaits(&self, block: usize, copy: u64) -> bool {
        lock(&self.0.state).uncopied.get(&block) == Some(&copy)
    }

    /// Says that a copy was queued.
    pub(in crate::kv) fn copied(&self, block: usize, copy: u64) {
        let mut state = lock(&self.0.state);
        if state.uncopied.get(&block) == Some(&copy) {
            state.uncopied.remove(&block);
        }
    }

    /// The first of these blocks whose copy is still to be queued.
    pub(in crate::kv) fn first_uncopied<'b>(
        &self,
        blocks: impl Iterator<Item = &'b Block>,
    ) -> Option<usize> {
        if !self.0.may_lack_copies.load(Ordering::Acquire) {
            return None;
        }
        let state = lock(&self.0.state);
        if state.uncopied.is_empty() {
            self.0.may_lack_copies.store(false, Ordering::Release);
            return None;
        }
        let mut ids = blocks.map(Block::id);
        ids.find(|id| state.uncopied.contains_key(id))
    }
}
