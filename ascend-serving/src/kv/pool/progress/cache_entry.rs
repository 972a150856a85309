//! The entry of a cache in the table of its pool, and what a pool says of all its caches.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ascend_attention::Violation;

use crate::kv::pool::BlockPool;
use crate::sharing::lock;

use super::{CacheProgress, Progress, SequenceStamp, StepTokens, spanning};

/// The entry of a cache in the table of its pool, freed on drop.
pub(crate) struct CacheEntry {
    pool: BlockPool,
    place: usize,
    /// Whether tokens move in this cache together with another one alone.
    paired: AtomicBool,
}

impl CacheEntry {
    /// A cache that has no token of any sequence.
    pub(crate) fn new(pool: &BlockPool) -> Arc<Self> {
        let mut table = lock(pool.progress_table());
        let none =
            Some(CacheProgress { joined: table.tick(), sequences: vec![Progress::default(); table.sequences.len()] });
        let place = match table.caches.iter().position(Option::is_none) {
            Some(place) => place,
            None => table.caches.len(),
        };
        match table.caches.get_mut(place) {
            Some(free) => *free = none,
            None => table.caches.push(none),
        }
        drop(table);
        Arc::new(Self { pool: pool.clone(), place, paired: AtomicBool::new(false) })
    }

    pub(in crate::kv) fn place(&self) -> usize {
        self.place
    }

    /// Its pool.
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Records that tokens move in this cache together with another one alone.
    pub(crate) fn pair(&self) {
        self.paired.store(true, Ordering::Relaxed);
    }

    /// Whether tokens move in this cache together with another one alone.
    pub(in crate::kv) fn is_paired(&self) -> bool {
        self.paired.load(Ordering::Relaxed)
    }

    /// The number of first tokens of a sequence that this cache has.
    pub(crate) fn computed_tokens(&self, sequence: SequenceStamp) -> usize {
        let mut table = lock(self.pool.progress_table());
        let progress = table.progress(Some(self.place), sequence.place).next();
        progress.map_or(0, |progress| progress.settled())
    }

    /// Records that this cache has the first `tokens` tokens of a sequence.
    pub(crate) fn mark_computed(&self, sequence: SequenceStamp, tokens: usize) {
        let mut table = lock(self.pool.progress_table());
        for progress in table.progress(Some(self.place), sequence.place) {
            if progress.computed < tokens {
                progress.computed = tokens;
                progress.missing = None;
            }
        }
    }

    /// The positions of a sequence, from the first to the last one, that tokens have moved to in this cache since the
    /// sequence was cut.
    pub(in crate::kv) fn moved(&self, sequence: SequenceStamp) -> Range<usize> {
        let mut table = lock(self.pool.progress_table());
        let progress = table.progress(Some(self.place), sequence.place).next();
        progress.map_or(0..0, |progress| progress.moved.clone())
    }

    /// Records that tokens of a sequence have moved to positions among these in this cache.
    pub(in crate::kv) fn note_moved(&self, sequence: SequenceStamp, targets: &Range<usize>) {
        let mut table = lock(self.pool.progress_table());
        for Progress { moved, .. } in table.progress(Some(self.place), sequence.place) {
            *moved = spanning(moved, targets);
        }
    }

    /// Records that this cache has lost the tokens of a sequence from `kept` on.
    pub(in crate::kv) fn lose(&self, sequence: SequenceStamp, kept: usize) {
        let mut table = lock(self.pool.progress_table());
        for progress in table.progress(Some(self.place), sequence.place) {
            progress.lose(kept);
        }
    }

    /// Records that this cache has lost the tokens of all sequences, those of steps in progress among them.
    pub(crate) fn lose_all(&self) {
        let mut table = lock(self.pool.progress_table());
        let own = table.caches.get_mut(self.place).and_then(Option::as_mut);
        own.into_iter().flat_map(|cache| &mut cache.sequences).for_each(|progress| progress.lose(0));
    }

    /// Refuses a step if this cache does not have all tokens of the sequence before it.
    pub(crate) fn check(&self, whose: &dyn fmt::Display, tokens: StepTokens) -> Result<(), Violation> {
        lock(self.pool.progress_table()).check(Some(self.place), whose, &tokens)
    }
}

impl Drop for CacheEntry {
    fn drop(&mut self) {
        lock(self.pool.progress_table()).caches[self.place] = None;
        self.pool.forget_copies(self.place);
    }
}

impl fmt::Debug for CacheEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CacheEntry").field(&self.place).finish()
    }
}

impl BlockPool {
    /// The number of caches that have the pool.
    pub(crate) fn caches(&self) -> usize {
        lock(self.progress_table()).caches().len()
    }

    /// Refuses tokens that do not continue what every cache of the pool has. A pool without a cache of this crate has
    /// no progress.
    pub(crate) fn check_tokens(&self, whose: &dyn fmt::Display, tokens: StepTokens) -> Result<(), Violation> {
        lock(self.progress_table()).check(None, whose, &tokens)
    }

    /// The number of first tokens of a sequence that every cache of the pool has. `None` for a pool without a cache
    /// of this crate, for which it is not known.
    pub(crate) fn computed_tokens(&self, sequence: SequenceStamp) -> Option<usize> {
        let mut table = lock(self.progress_table());
        let each = table.progress(None, sequence.place);
        each.map(|progress| progress.settled()).min()
    }
}
