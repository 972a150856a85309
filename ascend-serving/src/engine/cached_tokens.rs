//! The tokens of a sequence in the caches of all groups of layers: counted, marked as computed, moved and copied.

use ascend_attention::{Element, Stream, Violation};

use crate::error::Result;
use crate::kv::{RequestState, Sequence, move_in_caches};
use crate::rules;

use super::attention::Attention;

impl<T: Element> Attention<T> {
    /// Refuses a sequence of other groups of layers, or of other pools, and one whose state nothing goes on from.
    pub(super) fn check_sequence(&self, sequence: &Sequence) -> Result<(), Violation> {
        self.check_parts(sequence)?;
        self.states.as_ref().map_or(Ok(()), |states| states.check_state(sequence.state()))
    }

    /// Refuses a sequence of other groups of layers, or of other pools.
    fn check_parts(&self, sequence: &Sequence) -> Result<(), Violation> {
        sequence.check_groups(self.groups.len())?;
        let mut parts = self.groups.iter().zip(sequence.groups());
        parts.try_for_each(|(group, part)| group.cache.holds(part))
    }

    /// The number of a sequence's first tokens that the caches of all groups have:
    /// [`PagedKvCache::computed_tokens`](crate::kv::PagedKvCache::computed_tokens), the least of them. With layers of
    /// linear attention no more than its state has taken, and 0 while a step of it is in progress.
    ///
    /// # Errors
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence of other groups,
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for one of other pools.
    pub fn computed_tokens(&self, sequence: &Sequence) -> Result<usize, Violation> {
        self.check_parts(sequence)?;
        let parts = self.groups.iter().zip(sequence.groups());
        let computed = parts.map(|(group, part)| group.cache.entry().computed_tokens(part.stamp()));
        let state = self.states.as_ref().map(|_| sequence.state().map_or(0, RequestState::computed));
        Ok(computed.chain(state).min().unwrap_or(0))
    }

    /// Marks the first `tokens` tokens of a sequence as computed in the cache of each group:
    /// [`PagedKvCache::mark_computed`](crate::kv::PagedKvCache::mark_computed).
    ///
    /// # Errors
    /// As for [`PagedKvCache::mark_computed`](crate::kv::PagedKvCache::mark_computed), and
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence of other groups: nothing is marked then, nor more
    /// tokens than its state has taken in layers of linear attention ([`STATE_TOKENS`](crate::rules::STATE_TOKENS)).
    pub fn mark_computed(&self, sequence: &Sequence, tokens: usize) -> Result<(), Violation> {
        self.check_sequence(sequence)?;
        let taken = sequence.state().filter(|_| self.states.is_some()).map(RequestState::computed);
        if let Some(taken) = taken.filter(|taken| *taken < tokens) {
            return Err(rules::STATE_TOKENS.broken(
                format_args!("{tokens} tokens to be marked, of which the state has taken {taken}"),
                format_args!("at most {taken}: a step alone computes tokens in layers of linear attention"),
            ));
        }
        let parts = self.groups.iter().zip(sequence.groups());
        parts.clone().try_for_each(|(group, part)| group.cache.check_marked(part, tokens))?;
        parts.for_each(|(group, part)| group.cache.entry().mark_computed(part.stamp(), tokens));
        Ok(())
    }

    /// Queues copies of cached tokens of a sequence to other positions of it, in every layer of the model:
    /// [`PagedKvCache::move_tokens`](crate::kv::PagedKvCache::move_tokens). Where a copy fails on the device, the
    /// tokens from the first target on do not count as computed any more in any group.
    ///
    /// # Errors
    /// As for [`PagedKvCache::move_tokens`](crate::kv::PagedKvCache::move_tokens), and
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence of other groups: nothing is moved then, but by
    /// errors of the device. With layers of linear attention [`STATE_KEPT`](crate::rules::STATE_KEPT) for any move: a
    /// state has taken its tokens in their order.
    pub fn move_tokens(
        &mut self,
        stream: &Stream,
        sequence: &Sequence,
        moves: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<()> {
        self.check_sequence(sequence)?;
        let parts = self.groups.iter().zip(sequence.groups());
        move_in_caches(stream, sequence, moves, parts.map(|(group, part)| (&group.cache, part)))
    }

    /// Queues the copies that blocks of a sequence still wait for, in the cache of each group:
    /// [`PagedKvCache::queue_pending_copies`](crate::kv::PagedKvCache::queue_pending_copies).
    ///
    /// # Errors
    /// As for [`PagedKvCache::queue_pending_copies`](crate::kv::PagedKvCache::queue_pending_copies);
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence of other groups.
    pub fn queue_pending_copies(&mut self, stream: &Stream, sequence: &Sequence) -> Result<()> {
        self.check_sequence(sequence)?;
        let mut parts = self.groups.iter_mut().zip(sequence.groups());
        parts.try_for_each(|(group, part)| group.cache.queue_copies_of(stream, part))
    }
}
