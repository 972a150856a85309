//! Steps whose launches may still read blocks that were given back.

use std::fmt;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use crate::kv::fence::{Fence, FencedQueue};
use crate::sharing::lock;

use super::BlockPool;
use super::state::Step;

impl BlockPool {
    /// Begins a step, whose launches that read the cache are about to be queued on a queue. Until the lease is
    /// dropped, and the queue has passed that point, no block given back meanwhile is handed out again.
    pub fn begin_step<'a, Q: FencedQueue>(&self, queue: &'a Q) -> StepLease<'a, Q> {
        let mut state = lock(&self.0.state);
        let number = state.first_step + state.steps.len() as u64;
        state.steps.push_back(Step::Open);
        StepLease { pool: self.clone(), queue, number }
    }

    /// Number of steps in flight.
    pub fn steps_in_flight(&self) -> usize {
        self.reclaim();
        lock(&self.0.state).steps.len()
    }

    /// Queries the fences of steps whether they are over, without holding the lock: a fence may be slow, or call the
    /// pool.
    pub(super) fn reclaim(&self) {
        let Some(query) = FenceQuery::begin(self) else {
            return;
        };
        loop {
            let ending = lock(&query.pool.0.state).ending();
            let Some((step, fence)) = ending.filter(|(_, fence)| fence.is_passed()) else {
                return;
            };
            let over = lock(&query.pool.0.state).finish(step);
            // Fences are dropped outside the lock too.
            drop((over, fence));
        }
    }

    /// Waits for the first step in flight if blocks wait for it and its last launch was queued; returns whether it is
    /// over now.
    pub(in crate::kv) fn await_step(&self) -> bool {
        let ending = {
            let state = lock(&self.0.state);
            state.ending().filter(|_| !state.waiting.is_empty())
        };
        let Some((step, fence)) = ending else {
            return false;
        };
        fence.wait();
        if !fence.is_passed() {
            return false;
        }
        let over = lock(&self.0.state).finish(step);
        // Fences are dropped outside the lock.
        drop((over, fence));
        true
    }
}

/// A step whose launches may read any block. From [`BlockPool::begin_step`]; drop it after the last launch is queued,
/// without waiting for it.
///
/// A lease that is forgotten keeps blocks that are given back from then on from being handed out for ever: the cache
/// shrinks, and stays correct.
#[must_use = "dropping the lease says that the step's last launch was queued"]
pub struct StepLease<'a, Q: FencedQueue> {
    pool: BlockPool,
    queue: &'a Q,
    number: u64,
}

impl<Q: FencedQueue> Drop for StepLease<'_, Q> {
    fn drop(&mut self) {
        let open = OpenStepReport(self.number);
        let fence: Arc<dyn Fence> = Arc::new(self.queue.fence());
        std::mem::forget(open);
        let mut state = lock(&self.pool.0.state);
        // No step is removed before it has ended.
        let place = (self.number - state.first_step) as usize;
        state.steps[place] = Step::Ending(fence);
    }
}

/// Logs that a step stays open, when its queue has panicked instead of returning a fence.
struct OpenStepReport(u64);

impl Drop for OpenStepReport {
    fn drop(&mut self) {
        tracing::error!(
            "step {} stays open: its queue panicked when it was asked for the end of the step, so that blocks given \
             back since the step began are not handed out again",
            self.0
        );
    }
}

impl<Q: FencedQueue> fmt::Debug for StepLease<'_, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepLease").field("step", &self.number).finish_non_exhaustive()
    }
}

/// Marks the calling thread as one that queries fences, until this is dropped.
struct FenceQuery<'a> {
    pool: &'a BlockPool,
    thread: ThreadId,
}

impl<'a> FenceQuery<'a> {
    /// `None` if there is no fence to query, or this thread is querying one already, which calls the pool in turn.
    fn begin(pool: &'a BlockPool) -> Option<Self> {
        let thread = thread::current().id();
        let mut state = lock(&pool.0.state);
        let ending = matches!(state.steps.front(), Some(Step::Ending(_)));
        if !ending || state.querying.contains(&thread) {
            return None;
        }
        state.querying.push(thread);
        drop(state);
        Some(Self { pool, thread })
    }
}

impl Drop for FenceQuery<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.0.state);
        state.querying.retain(|thread| *thread != self.thread);
    }
}
