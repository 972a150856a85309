//! Blocks that wait for copies from other blocks, in each cache of the pool.

use std::sync::atomic::Ordering;

use crate::sharing::lock;

use super::block::Holder;
use super::{Block, BlockPool, CacheEntry};

/// A copy that is still to be queued.
pub(super) struct AwaitedCopy {
    number: u64,
    /// The caches in which it is still to be queued; empty for a pool without a cache of this crate.
    caches: Vec<usize>,
    /// The block that is copied from, where several caches share the pool. The copy holds it for caches that copy
    /// later.
    pub(super) from: Option<u32>,
}

impl AwaitedCopy {
    fn is_in(&self, cache: usize) -> bool {
        self.caches.is_empty() || self.caches.contains(&cache)
    }
}

/// The copies that are asked for.
#[derive(Clone, Copy)]
pub(crate) enum CopiesIn<'a> {
    Cache(&'a CacheEntry),
    AnyCache,
    /// Those of a pool that one cache has. Where several share it, each asks for its own when a step begins.
    OnlyCache,
}

/// A copy that a cache still has to queue: from, to, and its number.
pub(in crate::kv) type CopyOfBlock = (usize, usize, u64);

impl BlockPool {
    /// Records that a block gets the tokens of another one by copies that are still to be queued. Returns the number
    /// of the copy, which is valid for as long as the block is held.
    pub(in crate::kv) fn await_copy(&self, from: &Block, to: &Block) -> u64 {
        let caches = lock(self.progress_table()).caches();
        let mut state = lock(&self.0.state);
        let number = state.next_copy;
        state.next_copy += 1;
        let kept = (caches.len() > 1).then_some(from.id);
        if let Some(from) = kept {
            state.block(from).join(Holder::Copy);
        }
        let copy = AwaitedCopy { number, caches, from: kept };
        state.uncopied.insert(to.id(), copy);
        self.0.may_lack_copies.store(true, Ordering::Release);
        number
    }

    /// Whether a copy is still to be queued, in a cache or in any, while its block is still held by the sequence that
    /// grew, or a fork of it.
    pub(in crate::kv) fn awaits(&self, block: usize, copy: u64, cache: Option<&CacheEntry>) -> bool {
        let state = lock(&self.0.state);
        let awaited = state.uncopied.get(&block);
        awaited.is_some_and(|awaited| awaited.number == copy && cache.is_none_or(|cache| awaited.is_in(cache.place())))
    }

    /// Records that a copy was queued, in a cache of the pool or in one of the caller's. Returns whether no other cache
    /// waits for it.
    pub(in crate::kv) fn copied(&self, block: usize, copy: u64, cache: Option<&CacheEntry>) -> bool {
        let mut state = lock(&self.0.state);
        let Some(awaited) = state.uncopied.get_mut(&block) else {
            return true;
        };
        if awaited.number != copy {
            return true;
        }
        if let Some(cache) = cache {
            awaited.caches.retain(|place| *place != cache.place());
        }
        if !awaited.caches.is_empty() {
            return false;
        }
        if let Some(copy) = state.uncopied.remove(&block)
            && let Some(from) = copy.from
        {
            self.leave(&mut state, from, Holder::Copy);
        }
        true
    }

    /// Records that a cache was dropped, and drops the copies that it still had to queue.
    pub(super) fn forget_copies(&self, cache: usize) {
        let mut state = lock(&self.0.state);
        let mut copied_from = Vec::new();
        state.uncopied.retain(|_, copy| {
            let awaited = copy.is_in(cache) && !copy.caches.is_empty();
            copy.caches.retain(|place| *place != cache);
            let over = awaited && copy.caches.is_empty();
            copied_from.extend(copy.from.filter(|_| over));
            !over
        });
        for from in copied_from {
            self.leave(&mut state, from, Holder::Copy);
        }
    }

    /// The first of these blocks whose copy is still to be queued.
    pub(crate) fn first_uncopied(
        &self,
        mut blocks: impl Iterator<Item = usize>,
        copies: CopiesIn<'_>,
    ) -> Option<usize> {
        if !self.may_lack_copies() {
            return None;
        }
        let state = lock(&self.0.state);
        blocks.find(|block| {
            let awaited = state.uncopied.get(block);
            awaited.is_some_and(|copy| match copies {
                CopiesIn::Cache(cache) => copy.is_in(cache.place()),
                CopiesIn::AnyCache => true,
                CopiesIn::OnlyCache => copy.from.is_none(),
            })
        })
    }

    /// The copies that a cache still has to queue before it reads these blocks, in order. There are none unless
    /// several caches share the pool.
    pub(in crate::kv) fn awaited_copies(
        &self,
        blocks: impl Iterator<Item = usize>,
        cache: &CacheEntry,
    ) -> Vec<CopyOfBlock> {
        let mut all = Vec::new();
        if !self.may_lack_copies() {
            return all;
        }
        let state = lock(&self.0.state);
        for block in blocks {
            let (mut to, first) = (block, all.len());
            while let Some(copy) = state.uncopied.get(&to)
                && copy.is_in(cache.place())
                && let Some(from) = copy.from
            {
                all.push((from as usize, to, copy.number));
                to = from as usize;
            }
            // The source of a copy may be the target of an earlier one.
            all[first..].reverse();
        }
        all
    }

    /// Whether blocks may wait for copies; usually none does.
    fn may_lack_copies(&self) -> bool {
        if !self.0.may_lack_copies.load(Ordering::Acquire) {
            return false;
        }
        let state = lock(&self.0.state);
        let any = !state.uncopied.is_empty();
        if !any {
            self.0.may_lack_copies.store(false, Ordering::Release);
        }
        any
    }
}
