//! The state of a request: slots of a pool, which go back when it is dropped.

use std::iter;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use ascend_attention::Violation;
use ascend_attention::spec::ops::delta_rule::MOST_TOKENS;

use crate::batch::RecurrentRequest;
use crate::error::Result;
use crate::kv::{PoolId, SequenceStamp};
use crate::rules;
use crate::sharing::lock;

/// The slots of a pool that no request holds: those that were given back, the next one last, and all from `unused` on.
#[derive(Debug)]
pub(super) struct FreeSlots(Mutex<Free>);

#[derive(Debug)]
struct Free {
    given_back: Vec<usize>,
    unused: Range<usize>,
}

impl FreeSlots {
    pub(super) fn new(slots: usize) -> Self {
        Self(Mutex::new(Free { given_back: Vec::new(), unused: 0..slots }))
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.0).count()
    }

    /// Takes slots, or none where there are fewer.
    fn take(&self, wanted: usize) -> Result<Vec<usize>, Violation> {
        let mut free = lock(&self.0);
        let count = free.count();
        if count < wanted {
            return Err(rules::STATE_EXHAUSTED.broken(
                format_args!("{wanted} slots for a request"),
                format_args!("at most {count}, which are free"),
            ));
        }
        let next = || free.given_back.pop().or_else(|| free.unused.next());
        Ok(iter::from_fn(next).take(wanted).collect())
    }
}

impl Free {
    fn count(&self) -> usize {
        self.given_back.len().saturating_add(self.unused.len())
    }
}

/// The state of one request in every layer of linear attention, as its tokens so far have left it. From
/// [`StatePool::admit`](crate::StatePool::admit) and [`StatePool::fork`](crate::StatePool::fork).
///
/// It has `1 + drafts` slots of its pool. A step of no more tokens than that keeps the state behind each of them, so
/// that [`truncate`](Self::truncate) takes rejected drafts back without computing anything. Dropping it gives the slots
/// back; a step on its stream that still reads them comes before whatever the next request writes.
///
/// A state that is kept and never given to a step, such as that behind a prefix which many requests share, stays as it
/// is: a fork of it is a copy.
#[derive(Debug)]
pub struct RequestState {
    free: Arc<FreeSlots>,
    /// The slots; the first `kept` ones, at least 1, hold the states behind the last `kept` tokens.
    slots: Vec<usize>,
    kept: usize,
    tokens: usize,
    /// The sequence of its first step that had one: the same tokens in the layers of full attention.
    sequence: Option<(PoolId, SequenceStamp)>,
    /// Whether a step has written some layers and not all.
    torn: bool,
}

impl RequestState {
    /// A state of `1 + drafts` slots, with this number of tokens, whose contents are still to be written.
    pub(super) fn new(free: &Arc<FreeSlots>, drafts: usize, tokens: usize) -> Result<Self, Violation> {
        let most = Self::MOST_DRAFTS;
        if drafts > most {
            return Err(rules::STATE_DRAFTS.broken(format_args!("{drafts} drafts"), format_args!("0 to {most}")));
        }
        let slots = free.take(drafts.saturating_add(1))?;
        Ok(Self { free: Arc::clone(free), slots, kept: 1, tokens, sequence: None, torn: false })
    }

    /// Most drafts of a request in a step, with which it has a slot for each token that the operator takes of a
    /// sequence.
    pub const MOST_DRAFTS: usize = MOST_TOKENS as usize - 1;

    /// The number of tokens that the state has.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The slot of its pool with the state behind the last token.
    pub(super) fn slot(&self) -> usize {
        self.slots[self.kept - 1]
    }

    /// Takes the tokens behind the first `tokens` back, such as rejected drafts: the next step goes on behind these.
    ///
    /// # Errors
    /// [`STATE_KEPT`](crate::rules::STATE_KEPT) for a number of tokens whose state is not kept: those are the states
    /// behind the tokens of the last step, if it had no more than the request has slots, and otherwise the present one;
    /// [`STATE_TORN`](crate::rules::STATE_TORN) for a state that a step has written in some layers alone.
    pub fn truncate(&mut self, tokens: usize) -> Result<()> {
        self.check_whole()?;
        let back = self.tokens.checked_sub(tokens);
        match back.and_then(|back| self.kept.checked_sub(back)).filter(|kept| *kept > 0) {
            Some(kept) => (self.kept, self.tokens) = (kept, tokens),
            None => {
                let (last, first) = (self.tokens, self.tokens.saturating_sub(self.kept.saturating_sub(1)));
                let given = format_args!("the state behind {tokens} tokens, of a request of {last}");
                return Err(rules::STATE_KEPT.broken(given, format_args!("{first} to {last} tokens")).into());
            }
        }
        Ok(())
    }

    /// Whether the slots are of this pool.
    pub(super) fn is_of(&self, free: &Arc<FreeSlots>) -> bool {
        Arc::ptr_eq(&self.free, free)
    }

    /// Whether a step of this number of tokens has a slot for the state behind each.
    pub(super) fn keeps(&self, new: usize) -> bool {
        new <= self.slots.len()
    }

    /// The slots in the order in which a step writes them: the present state is in the first.
    pub(super) fn row(&self, new: usize) -> Vec<usize> {
        let present = self.kept - 1;
        self.slots.iter().cycle().skip(present).take(new).copied().collect()
    }

    /// Refuses a request of other tokens than the state's, of another sequence than before, and of drafts for which
    /// there are no slots.
    pub(super) fn check_request(&self, at: usize, pool: Option<PoolId>, request: &RecurrentRequest) -> Result<()> {
        let RecurrentRequest { new, drafts, cached, sequence } = *request;
        if self.tokens != cached {
            return Err(rules::STATE_TOKENS
                .broken(
                    format_args!("a state of {} tokens for request {at}", self.tokens),
                    format_args!("one of the {cached} tokens in front of its new ones"),
                )
                .into());
        }
        let is_other = |(pool, stamp): (PoolId, SequenceStamp)| {
            self.sequence.is_some_and(|(own, first)| own != pool || !first.is_same_sequence(&stamp))
        };
        if pool.zip(sequence).is_some_and(is_other) {
            return Err(rules::STATE_SEQUENCE
                .broken(
                    format_args!("request {at} with the state of another sequence"),
                    "the state of its own sequence",
                )
                .into());
        }
        if drafts > 0 && !self.keeps(new) {
            return Err(rules::STATE_DRAFTS
                .broken(
                    format_args!("{new} new tokens of request {at}, {drafts} of them drafts"),
                    format_args!("at most {}, for each of which its state has a slot", self.slots.len()),
                )
                .into());
        }
        Ok(())
    }

    /// Refuses a state that a step has written in some layers alone.
    pub(super) fn check_whole(&self) -> Result<(), Violation> {
        match self.torn {
            false => Ok(()),
            true => Err(rules::STATE_TORN.broken(
                format_args!("a state of {} tokens, which a step has written in some layers", self.tokens),
                "a state that its last step has written in every layer",
            )),
        }
    }

    /// Counts it as torn until the step that has it is over.
    pub(super) fn begin(&mut self, sequence: Option<(PoolId, SequenceStamp)>) {
        self.torn = true;
        self.sequence = self.sequence.or(sequence);
    }

    /// The end of a step that has written nothing.
    pub(super) fn restore(&mut self) {
        self.torn = false;
    }

    /// The end of a step that has written every layer.
    pub(super) fn advance(&mut self, new: usize) {
        self.torn = false;
        if new == 0 {
            return;
        }
        self.slots.rotate_left(self.kept - 1);
        self.kept = if self.keeps(new) { new } else { 1 };
        self.tokens = self.tokens.saturating_add(new);
    }
}

impl Drop for RequestState {
    fn drop(&mut self) {
        lock(&self.free.0).given_back.append(&mut self.slots);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn rows_go_on_from_the_state_that_was_kept() {
        let free = Arc::new(FreeSlots::new(6));
        let mut state = RequestState::new(&free, 3, 0).unwrap();
        assert_eq!((state.row(4), free.count()), (vec![0, 1, 2, 3], 2));
        state.advance(4);
        assert_eq!((state.slot(), state.tokens()), (3, 4));
        // Two of the four are taken back, twice as well as once.
        for _ in 0..2 {
            state.truncate(2).unwrap();
            assert_eq!((state.slot(), state.row(4)), (1, vec![1, 2, 3, 0]));
        }
        state.advance(3);
        assert_eq!((state.slot(), state.tokens()), (3, 5));
        // Before the first token of the last step nothing is kept, nor behind tokens that there are not.
        for tokens in [0, 2, 6, usize::MAX] {
            assert!(state.truncate(tokens).unwrap_err().breaks(&rules::STATE_KEPT), "{tokens}");
        }
        state.truncate(3).unwrap();
        // A prompt leaves one state.
        state.advance(100);
        assert!(state.truncate(102).is_err());
        state.truncate(103).unwrap();
        assert_eq!(RequestState::new(&free, 2, 0).unwrap_err().rule, &rules::STATE_EXHAUSTED);
        assert_eq!(RequestState::new(&free, 8, 0).unwrap_err().rule, &rules::STATE_DRAFTS);
        drop(state);
        assert_eq!(free.count(), 6);
    }
}
