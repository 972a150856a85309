//! The record of what a step in progress computes.

use std::fmt;
use std::sync::Arc;

use ascend_attention::Violation;

use crate::kv::pool::BlockPool;
use crate::sharing::lock;

use super::{CacheEntry, SequenceStamp, StepTokens};

/// The sequences of a step or a move in progress, for one cache of their pool or all. Unless the step
/// [ends](StepProgress::end), the tokens of the step do not count as computed.
pub(crate) struct StepProgress {
    pool: BlockPool,
    cache: Option<Arc<CacheEntry>>,
    tokens: Vec<StepTokens>,
    /// When it began.
    began: u64,
    ended: bool,
    /// The layers that were left out, once any layer was written.
    missing: Option<Arc<str>>,
}

impl StepProgress {
    /// Begins a step of these sequences, each with its request, in one cache of the pool or in all.
    ///
    /// # Errors
    /// [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED), [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP),
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS),
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING).
    pub(crate) fn begin(
        pool: &BlockPool,
        cache: Option<&Arc<CacheEntry>>,
        tokens: impl Iterator<Item = (usize, StepTokens)>,
    ) -> Result<Self, Violation> {
        let place = cache.map(|cache| cache.place());
        let mut all = Vec::with_capacity(tokens.size_hint().0);
        let mut table = lock(pool.progress_table());
        for (request, tokens) in tokens {
            table.check(place, &format_args!("request {request}"), &tokens)?;
            all.push(tokens);
        }
        all.iter().for_each(|tokens| table.open(place, tokens));
        let began = table.tick();
        drop(table);
        Ok(Self { pool: pool.clone(), cache: cache.cloned(), tokens: all, began, ended: false, missing: None })
    }

    /// Begins to move tokens of a sequence in a cache to positions of which `first` is the least, unless a step of the
    /// sequence is in progress. No step of the sequence begins there that writes, or that reads from that position on,
    /// before this is dropped.
    pub(in crate::kv) fn begin_moves(cache: &Arc<CacheEntry>, stamp: SequenceStamp, first: usize) -> Option<Self> {
        let pool = cache.pool();
        let place = Some(cache.place());
        let mut table = lock(pool.progress_table());
        if table.progress(place, stamp.place).any(|progress| progress.open > 0) {
            return None;
        }
        let tokens = StepTokens { stamp, cached: first, len: usize::MAX, recompute: true };
        table.open(place, &tokens);
        let began = table.tick();
        drop(table);
        let cache = Some(Arc::clone(cache));
        Some(Self { pool: pool.clone(), cache, tokens: vec![tokens], began, ended: false, missing: None })
    }

    /// Whether the step writes tokens, and does not only read. Steps of no sequence are not known to read only.
    pub(crate) fn writes(&self) -> bool {
        self.tokens.is_empty() || self.tokens.iter().any(|tokens| tokens.len > tokens.cached)
    }

    /// Says that all layers are queued.
    pub(crate) fn end(&mut self) {
        self.close(true);
    }

    /// Records which layers are missing in a step that wrote some.
    pub(crate) fn record_missing(&mut self, missing: &Arc<str>) {
        self.missing = Some(Arc::clone(missing));
    }

    /// Records that a write of the step has lost tokens in front of it: those from the last multiple of `group` on.
    pub(crate) fn lose_group(&self, group: usize) {
        let place = self.cache.as_ref().map(|cache| cache.place());
        let mut table = lock(self.pool.progress_table());
        for tokens in &self.tokens {
            if !table.is_alive(&tokens.stamp) {
                continue;
            }
            let kept = tokens.cached - tokens.cached % group.max(1);
            for progress in table.progress_of_step(place, self.began, tokens.stamp.place) {
                progress.lose(kept);
            }
        }
    }

    fn close(&mut self, done: bool) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let place = self.cache.as_ref().map(|cache| cache.place());
        let mut given_back = Vec::new();
        let mut table = lock(self.pool.progress_table());
        for tokens in &self.tokens {
            let step = (place, self.began);
            table.close(step, tokens, done, &self.missing, &mut given_back);
        }
        drop(table);
    }
}

impl Drop for StepProgress {
    fn drop(&mut self) {
        self.close(false);
    }
}

impl fmt::Debug for StepProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepProgress")
            .field("sequences", &self.tokens.len())
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
