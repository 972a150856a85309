//! The state of a request in layers of linear attention: slots of a pool, which go back with their last holder.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use ascend_attention::Violation;
use ascend_attention::spec::ops::delta_rule::MOST_TOKENS;

use crate::rules;
use crate::sharing::lock;

/// Most drafts of a request in a step, with which it has a slot for each token that the operator takes of a sequence.
pub(super) const MOST_DRAFTS: usize = MOST_TOKENS as usize - 1;

/// The free slots of a pool: those that were given back, the next one last, and all from `unused` on.
#[derive(Debug)]
struct FreeSlots {
    /// Drafts of a request in a step, behind each of which a state is kept.
    drafts: usize,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    given_back: Vec<usize>,
    unused: Range<usize>,
}

impl Free {
    fn count(&self) -> usize {
        self.given_back.len() + self.unused.len()
    }
}

impl FreeSlots {
    /// Takes slots, or none where there are fewer.
    fn take(self: &Arc<Self>, wanted: usize) -> Result<Vec<StateSlot>, Violation> {
        let mut free = lock(&self.free);
        let count = free.count();
        if count < wanted {
            return Err(rules::STATE_EXHAUSTED.broken(
                format_args!("{wanted} slots for a request"),
                format_args!("at most {count}, which are free"),
            ));
        }
        let next = || free.given_back.pop().or_else(|| free.unused.next());
        let slot = |number| StateSlot(Arc::new(HeldSlot { pool: Arc::clone(self), number }));
        Ok(iter::from_fn(next).take(wanted).map(slot).collect())
    }
}

/// A slot that is held. Cloning shares it; dropping the last handle gives it back.
#[derive(Clone, Debug)]
pub(super) struct StateSlot(Arc<HeldSlot>);

#[derive(Debug)]
struct HeldSlot {
    pool: Arc<FreeSlots>,
    number: usize,
}

impl StateSlot {
    pub(super) fn number(&self) -> usize {
        self.0.number
    }

    /// Whether another handle holds it too, so that it must not be written.
    fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        lock(&self.pool.free).given_back.push(self.number);
    }
}

/// The state of the tokens of a sequence in every layer of linear attention.
///
/// Before its first growth it has no slot, and then `1 + drafts`. A step of no more tokens than that keeps the state
/// behind each of them, so that rejected drafts are taken back without computing anything. A fork shares the slot of
/// the present state, which whoever grows first copies into one of its own.
#[derive(Debug)]
pub(crate) struct RequestState(Arc<Mutex<HeldState>>);

/// A state as the metadata of a step knows it, which holds nothing.
#[derive(Clone, Debug)]
pub(crate) struct WeakState(Weak<Mutex<HeldState>>);

#[derive(Debug)]
struct HeldState {
    pool: Arc<FreeSlots>,
    /// The states behind the last tokens, the present one last; none of a state that has not begun.
    kept: Vec<StateSlot>,
    /// Slots whose states are not wanted any more, held by this state alone.
    spare: Vec<StateSlot>,
    /// Tokens that the present state has taken.
    tokens: usize,
    /// Whether a step is in progress, or has ended without some layers.
    torn: bool,
    /// Whether that step is still in progress.
    leased: bool,
}

impl WeakState {
    /// The state, unless its sequence is gone or has begun anew.
    pub(crate) fn upgrade(&self) -> Option<RequestState> {
        self.0.upgrade().map(RequestState)
    }
}

impl RequestState {
    /// A state without tokens, which has no slot, of a new pool of `slots` slots.
    pub(super) fn of_pool(slots: usize, drafts: usize) -> Self {
        let free = Mutex::new(Free { given_back: Vec::new(), unused: 0..slots });
        Self::new(&Arc::new(FreeSlots { drafts, free }))
    }

    /// A state without tokens, which has no slot.
    fn new(pool: &Arc<FreeSlots>) -> Self {
        Self(Arc::new(Mutex::new(HeldState::new(pool))))
    }

    pub(crate) fn downgrade(&self) -> WeakState {
        WeakState(Arc::downgrade(&self.0))
    }

    /// The number of tokens that every layer has taken: 0 while a step is in progress, or has left layers out.
    pub(crate) fn computed(&self) -> usize {
        let held = lock(&self.0);
        if held.torn { 0 } else { held.tokens }
    }

    /// The state behind the first `tokens` tokens of a sequence, in the same slot. Without that state it is one which
    /// nothing goes on from.
    pub(crate) fn fork(&self, tokens: usize) -> Self {
        let held = lock(&self.0);
        let mut fork = HeldState::new(&held.pool);
        match held.kept_behind(tokens).filter(|_| !held.torn) {
            _ if tokens == 0 => {}
            Some(kept) => {
                fork.tokens = tokens.min(held.tokens);
                fork.kept.extend(kept.checked_sub(1).map(|last| held.kept[last].clone()));
            }
            None => (fork.torn, fork.tokens) = (true, tokens),
        }
        Self(Arc::new(Mutex::new(fork)))
    }

    /// Refuses to go back to the first `tokens` tokens of a sequence, if the state behind them is not kept.
    pub(crate) fn check_kept(&self, tokens: usize) -> Result<(), Violation> {
        let held = lock(&self.0);
        if tokens == 0 || held.tokens == 0 && !held.torn {
            return Ok(());
        }
        held.check_whole()?;
        match held.kept_behind(tokens) {
            Some(_) => Ok(()),
            None => {
                let (last, first) = (held.tokens, held.tokens.saturating_sub(held.kept.len().saturating_sub(1)));
                let given = format_args!("the state after {tokens} tokens, of a sequence of {last}");
                Err(match first == last {
                    true => rules::STATE_KEPT.broken(given, format_args!("0 or {last} tokens")),
                    false => rules::STATE_KEPT.broken(given, format_args!("0, or {first} to {last} tokens")),
                })
            }
        }
    }

    /// Goes back to the first `tokens` tokens of the sequence, which is checked.
    pub(super) fn cut(&mut self, tokens: usize) {
        if tokens == 0 {
            let pool = Arc::clone(&lock(&self.0).pool);
            // A step in progress goes on with the old one.
            *self = Self::new(&pool);
            return;
        }
        let mut held = lock(&self.0);
        if let Some(kept) = held.kept_behind(tokens).filter(|_| !held.torn) {
            let rejected = held.kept.split_off(kept);
            held.spare.extend(rejected.into_iter().filter(|slot| !slot.is_shared()));
            held.tokens = held.tokens.min(tokens);
        }
    }

    /// The slot of the present state, and how many hold it.
    pub(crate) fn holders(&self) -> Option<(usize, usize)> {
        lock(&self.0).kept.last().map(|slot| (slot.number(), Arc::strong_count(&slot.0)))
    }

    /// Refuses a sequence without a state of the same pool.
    pub(crate) fn check_same_pool(&self, sequence: Option<&Self>) -> Result<(), Violation> {
        let Some(other) = sequence else {
            return Err(rules::STATE_REQUESTS.broken("a sequence without a state", "one of `Attention::sequence`"));
        };
        // One lock at a time: the two may be one.
        let pool = Arc::clone(&lock(&self.0).pool);
        match Arc::ptr_eq(&pool, &lock(&other.0).pool) {
            true => Ok(()),
            false => Err(rules::STATE_POOL.broken("a state of another pool", "a state of this pool")),
        }
    }

    /// Refuses a state that a step has written in some layers alone.
    pub(crate) fn check_whole(&self) -> Result<(), Violation> {
        lock(&self.0).check_whole()
    }

    /// Free slots of the pool.
    pub(super) fn free_slots(&self) -> usize {
        let pool = Arc::clone(&lock(&self.0).pool);
        lock(&pool.free).count()
    }

    /// Looks for a fault in the slots of these states, of the same pool of `slots` slots. Returns how many slots others
    /// hold.
    pub(super) fn audit<'a>(&self, states: impl Iterator<Item = &'a Self>, slots: usize) -> Result<usize, Violation> {
        let fault = |slot: usize, given: &str| {
            Err(rules::STATE_SLOTS.broken(format_args!("slot {slot}, {given}"), "one that is free, or held once"))
        };
        let mut held = HashMap::new();
        for state in states {
            let state = lock(&state.0);
            for slot in state.kept.iter().chain(&state.spare) {
                // Who shares a slot has the same handle.
                let handle = Arc::as_ptr(&slot.0);
                if *held.entry(slot.number()).or_insert(handle) != handle {
                    return fault(slot.number(), "held twice");
                }
            }
        }
        let pool = Arc::clone(&lock(&self.0).pool);
        let free = lock(&pool.free);
        let mut known = HashSet::new();
        for slot in free.given_back.iter().copied().chain(free.unused.clone()) {
            if held.contains_key(&slot) {
                return fault(slot, "free and held");
            } else if !known.insert(slot) {
                return fault(slot, "free twice");
            }
        }
        Ok(slots.saturating_sub(held.len()).saturating_sub(known.len()))
    }

    /// Refuses a request of other tokens than the state's, and drafts for which there are no slots.
    pub(crate) fn check_request(&self, at: usize, cached: usize, new: usize, drafts: usize) -> Result<(), Violation> {
        let held = lock(&self.0);
        if held.tokens != cached {
            return Err(rules::STATE_TOKENS.broken(
                format_args!("a state of {} tokens for request {at}", held.tokens),
                format_args!("one of the {cached} tokens in front of its new ones"),
            ));
        }
        if drafts > 0 && !held.keeps(new) {
            return Err(rules::STATE_DRAFTS.broken(
                format_args!("{new} new tokens of request {at}, {drafts} of them drafts"),
                format_args!("at most {}, for each of which its state has a slot", held.pool.drafts + 1),
            ));
        }
        Ok(())
    }

    /// Makes the slots of a next step its own: takes those that it lacks, and has `fill` write the present state where
    /// that goes to another slot, from the one it was in, or zeros.
    pub(super) fn make_ready<E: From<Violation>>(
        &self,
        fill: impl FnOnce(Option<&StateSlot>, &StateSlot) -> Result<(), E>,
    ) -> Result<(), E> {
        lock(&self.0).make_ready(fill)
    }

    /// Makes the slots of a step of `new` tokens the state's own, by `fill` as in [`make_ready`](Self::make_ready), and
    /// begins it: until its end nothing else goes on from the state, nor shares it.
    pub(super) fn begin<E: From<Violation>>(
        self,
        new: usize,
        fill: impl FnOnce(Option<&StateSlot>, &StateSlot) -> Result<(), E>,
    ) -> Result<StateLease, E> {
        // One lock for both, so that the present state is not shared in between.
        let mut held = lock(&self.0);
        held.make_ready(fill)?;
        (held.torn, held.leased) = (true, true);
        let wanted = if held.keeps(new) { new } else { 1 };
        let row = held.own_slots().take(wanted).cloned().collect();
        drop(held);
        Ok(StateLease { state: self, row, new })
    }
}

impl HeldState {
    fn new(pool: &Arc<FreeSlots>) -> Self {
        Self { pool: Arc::clone(pool), kept: Vec::new(), spare: Vec::new(), tokens: 0, torn: false, leased: false }
    }

    fn make_ready<E: From<Violation>>(
        &mut self,
        fill: impl FnOnce(Option<&StateSlot>, &StateSlot) -> Result<(), E>,
    ) -> Result<(), E> {
        let missing = (self.pool.drafts + 1).saturating_sub(self.own_slots().count());
        let moves = self.kept.last().is_none_or(StateSlot::is_shared);
        let mut taken = self.pool.take(missing.max(usize::from(moves)))?;
        if moves && let Some(present) = taken.pop() {
            fill(self.kept.last(), &present)?;
            match self.kept.last_mut() {
                Some(last) => *last = present,
                None => self.kept.push(present),
            }
        }
        self.spare.append(&mut taken);
        Ok(())
    }

    fn check_whole(&self) -> Result<(), Violation> {
        match (self.torn, self.leased) {
            (false, _) => Ok(()),
            (true, true) => Err(rules::SEQUENCE_IN_PROGRESS.broken(
                format_args!("a state of {} tokens, of whose sequence a step is in progress", self.tokens),
                "one step of a sequence at a time",
            )),
            (true, false) => Err(rules::STATE_TORN.broken(
                format_args!("a state of {} tokens, which a step has written in some layers", self.tokens),
                "a state that its last step has written in every layer",
            )),
        }
    }

    /// How many of the states that are kept go on to the last of the first `tokens` tokens of the sequence: all where
    /// the state has no more tokens, 0 where it has none, and `None` where that state is not kept.
    fn kept_behind(&self, tokens: usize) -> Option<usize> {
        let back = self.tokens.saturating_sub(tokens);
        self.kept.len().checked_sub(back).filter(|kept| *kept > 0 || self.tokens == 0)
    }

    /// Whether a step of this number of tokens has a slot for the state behind each.
    fn keeps(&self, new: usize) -> bool {
        new <= self.pool.drafts + 1
    }

    /// The slots without another holder, in the order in which a step writes them: the present state is in the first.
    fn own_slots(&self) -> impl Iterator<Item = &StateSlot> {
        let present = self.kept.last();
        let earlier = self.kept.iter().take(self.kept.len().saturating_sub(1));
        let all = present.into_iter().chain(&self.spare).chain(earlier);
        all.filter(|slot| !slot.is_shared())
    }
}

/// The slots that the states of `tokens` tokens are written to in turn, of a step that writes this row of slots.
pub(crate) fn slots_of_tokens(row: &[usize], tokens: usize) -> Vec<usize> {
    row.iter().copied().cycle().take(tokens).collect()
}

/// A state that a step in progress writes. Unless the step ends by [`advance`](Self::advance) or
/// [`restore`](Self::restore), nothing goes on from it.
#[derive(Debug)]
pub(crate) struct StateLease {
    state: RequestState,
    /// The slots that the step writes: one for each token, or one alone.
    row: Vec<StateSlot>,
    new: usize,
}

impl StateLease {
    /// New tokens of the request.
    pub(crate) fn new_tokens(&self) -> usize {
        self.new
    }

    /// The slots in the order in which the step writes them; the present state is in the first.
    pub(crate) fn row(&self) -> Vec<usize> {
        self.row.iter().map(StateSlot::number).collect()
    }

    /// The slot that each new token's state is written to; all of them one alone where the step keeps the last state.
    pub(crate) fn slots_of_tokens(&self) -> Vec<usize> {
        slots_of_tokens(&self.row(), self.new)
    }

    /// Whether the step keeps the state behind each of its tokens.
    pub(crate) fn is_kept(&self) -> bool {
        lock(&self.state.0).keeps(self.new)
    }

    /// The end of a step that has written nothing.
    pub(crate) fn restore(&mut self) {
        self.row.clear();
        let mut held = lock(&self.state.0);
        (held.torn, held.leased) = (false, false);
    }

    /// The end of a step that has written every layer.
    pub(crate) fn advance(&mut self) {
        let row = mem::take(&mut self.row);
        let mut guard = lock(&self.state.0);
        let held = &mut *guard;
        let others = mem::take(&mut held.spare).into_iter().chain(mem::take(&mut held.kept));
        let others = others.filter(|slot| row.iter().all(|own| own.number() != slot.number()));
        held.spare = others.filter(|slot| !slot.is_shared()).collect();
        held.kept = row;
        held.tokens += self.new;
        (held.torn, held.leased) = (false, false);
    }
}

impl Drop for StateLease {
    fn drop(&mut self) {
        // The row of a step that has ended is empty.
        if !self.row.is_empty() {
            lock(&self.state.0).leased = false;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// Takes the slots of a step, and says whether the present state was copied or made.
    fn ready(state: &RequestState) -> Result<Option<[Option<usize>; 2]>, Violation> {
        let mut filled = None;
        state.make_ready(|from, to| {
            filled = Some([from.map(StateSlot::number), Some(to.number())]);
            Ok::<_, Violation>(())
        })?;
        Ok(filled)
    }

    fn begun(state: &RequestState, new: usize) -> StateLease {
        state.downgrade().upgrade().unwrap().begin(new, |_, _| Ok::<_, Violation>(())).unwrap()
    }

    fn step(state: &RequestState, new: usize) -> Vec<usize> {
        let mut lease = begun(state, new);
        assert!(state.check_kept(1).is_err_and(|why| why.rule == &rules::SEQUENCE_IN_PROGRESS));
        let row = lease.row();
        lease.advance();
        row
    }

    #[test]
    fn rows_go_on_from_the_state_that_was_kept() {
        let mut state = RequestState::of_pool(6, 3);
        assert_eq!(state.free_slots(), 6);
        assert_eq!(ready(&state).unwrap(), Some([None, Some(3)]));
        assert_eq!((step(&state, 4), state.free_slots()), (vec![3, 0, 1, 2], 2));
        // Two of the four are taken back, twice as well as once.
        for _ in 0..2 {
            state.check_kept(2).unwrap();
            state.cut(2);
            assert_eq!((state.computed(), ready(&state).unwrap()), (2, None));
        }
        assert_eq!(step(&state, 3), vec![0, 1, 2]);
        // Before the first token of the last step nothing is kept but the beginning.
        for tokens in [1, 2] {
            assert_eq!(state.check_kept(tokens).unwrap_err().rule, &rules::STATE_KEPT, "{tokens}");
        }
        state.cut(3);
        // A prompt leaves one state.
        assert_eq!(step(&state, 100), vec![0]);
        assert!(state.check_kept(102).is_err());
        state.check_kept(103).unwrap();
        state.cut(0);
        assert_eq!((state.free_slots(), state.computed()), (6, 0));
    }

    #[test]
    fn a_shared_state_is_copied_by_whoever_grows_first() {
        let none = RequestState::of_pool(4, 1);
        let mut first = none.fork(0);
        ready(&first).unwrap();
        let row = step(&first, 2);
        let fork = first.fork(2);
        let earlier = first.fork(1);
        assert_eq!((none.free_slots(), fork.computed(), earlier.computed()), (2, 2, 1));
        assert_eq!(ready(&fork).unwrap().unwrap()[0], Some(row[1]));
        // The fork has two slots of its own, so that the other one is written in place, and the earlier state is not.
        assert_eq!(ready(&first).unwrap_err().rule, &rules::STATE_EXHAUSTED);
        drop(fork);
        assert_eq!(ready(&first).unwrap(), None);
        assert!(!step(&first, 2).contains(&row[0]));
        // Now that it has no other holder, the earlier state goes on in its slot.
        assert_eq!(ready(&earlier).unwrap(), None);
        first.cut(0);
        drop((first, earlier));
        assert_eq!(none.free_slots(), 4);
    }

    #[test]
    fn an_audit_finds_slots_that_two_hold() {
        let none = RequestState::of_pool(6, 1);
        let [first, second] = [(); 2].map(|()| none.fork(0));
        let audit = |states: &[&RequestState]| none.audit(states.iter().copied(), 6);
        for state in [&first, &second] {
            ready(state).unwrap();
            step(state, 2);
        }
        let fork = first.fork(1);
        assert_eq!((audit(&[&first, &second, &fork]), audit(&[&second]), audit(&[])), (Ok(0), Ok(2), Ok(4)));
        let pool = Arc::clone(&lock(&none.0).pool);
        let number = lock(&second.0).kept[0].number();
        let forged = StateSlot(Arc::new(HeldSlot { pool: Arc::clone(&pool), number }));
        lock(&fork.0).spare.push(forged);
        assert!(audit(&[&fork, &second]).is_err_and(|fault| fault.given.contains("held twice")));
        // Its drop gives back a slot that is held, and another one gives it back again.
        lock(&fork.0).spare.clear();
        assert!(audit(&[&second]).is_err_and(|fault| fault.given.contains("free and held")));
        lock(&pool.free).given_back.push(number);
        assert!(audit(&[]).is_err_and(|fault| fault.given.contains("free twice")));
    }

    #[test]
    fn nothing_goes_on_from_a_state_that_a_step_writes() {
        let mut state = RequestState::of_pool(4, 0);
        ready(&state).unwrap();
        let lease = begun(&state, 1);
        assert_eq!((state.computed(), state.fork(1).check_kept(1).unwrap_err().rule), (0, &rules::STATE_TORN));
        // The request begins anew, while its slot is still the step's.
        state.cut(0);
        assert_eq!((state.check_kept(1), state.free_slots()), (Ok(()), 3));
        drop(lease);
        assert_eq!(state.free_slots(), 4);
    }
}
