//! Steps whose launches may still read blocks that were given back.

use std::fmt;

use ascend_attention::Stream;

use crate::kv::fence::FencedQueue;
use crate::sharing::lock;

use super::BlockPool;
use super::state::Step;

impl BlockPool {
    /// Begins a step, whose launches that read the cache are about to be queued on a stream. Until the lease is
    /// dropped, and the stream has passed that point, no block given back meanwhile is handed out again.
    pub fn begin_step<'a>(&self, stream: &'a Stream) -> StepLease<'a> {
        self.begin_on(stream)
    }

    /// Begins a step on a stream, or on what stands in for one.
    pub(super) fn begin_on<'a>(&self, queue: &'a dyn FencedQueue) -> StepLease<'a> {
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

    /// Queries the fences of steps whether they are over, without holding the lock: a fence may be slow.
    pub(super) fn reclaim(&self) {
        loop {
            let ending = lock(&self.0.state).ending();
            let Some((step, fence)) = ending.filter(|(_, fence)| fence.is_passed()) else {
                return;
            };
            let over = lock(&self.0.state).finish(step);
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
pub struct StepLease<'a> {
    pool: BlockPool,
    queue: &'a dyn FencedQueue,
    number: u64,
}

impl Drop for StepLease<'_> {
    fn drop(&mut self) {
        let fence = self.queue.fence();
        let mut state = lock(&self.pool.0.state);
        // No step is removed before it has ended.
        let place = (self.number - state.first_step) as usize;
        state.steps[place] = Step::Ending(fence);
    }
}

impl fmt::Debug for StepLease<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepLease").field("step", &self.number).finish_non_exhaustive()
    }
}
