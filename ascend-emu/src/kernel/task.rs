//! The tasks that a call is cut into.

use super::attention::Attention;
use super::scratch::Scratch;
use super::sequence::Sequence;
use std::ops::Range;

/// Some queries of one key head, and the keys that they attend to.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Task {
    pub(super) fn work(&self) -> u64 {
        (self.queries.len() as u64).saturating_mul(self.keys.len() as u64)
    }
}

/// A task, and the arguments of its computation.
pub(super) struct TaskContext<'a, 's> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    pub(super) scratch: &'s mut Scratch,
}
