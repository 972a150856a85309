//! Communicators, and how the calls of their ranks meet.

use super::call::Call;
use super::listener::Listener;
use super::payload::Payload;
use crate::lock::{Lock, Signal};
use crate::status::{COLLECTIVE_FAILED, Failure, Outcome};
use ascend_spec::DType;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// The time after which a waiting rank looks again at what only time changes: an abort, a deadlock, its limit.
pub(super) const POLL: Duration = Duration::from_millis(20);

/// How long ranks that wait for each other may make no other call until they count as waiting for ever.
const DEADLOCK_AFTER: Duration = Duration::from_secs(1);

/// Says why a call has to end before the others have come: how a sentence about it goes on.
pub(super) type Interrupt<'a> = &'a dyn Fn() -> Option<&'static str>;

/// Why no more calls of a rank can come: how a sentence about it goes on.
pub(super) const GONE: [&str; 3] =
    ["its communicator was destroyed", "its device was reset", "its process has ended, or has closed its connection"];

/// The places in [`GONE`].
pub(super) const DESTROYED: usize = 0;
pub(super) const RESET: usize = 1;
pub(super) const ENDED: usize = 2;

/// A call that has come, with its payloads in the order of [`Call::sends`].
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub call: Arc<Call>,
    pub payloads: Vec<Payload>,
}

/// The calls of one collective.
#[derive(Debug)]
struct PendingCollective {
    arrivals: Vec<Option<Arrival>>,
    /// Ranks that have taken what came.
    left: usize,
}

/// What a rank waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The collective with this number.
    Collective(u64),
    /// A message from this rank.
    Message(usize),
    /// The receipt of a message by this rank.
    Receipt(usize),
}

#[derive(Debug, Default)]
struct RankState {
    /// Why no more calls of this rank can come.
    gone: Option<&'static str>,
    /// The number of calls that have begun.
    calls: u64,
    /// The number of collectives among them.
    collectives: u64,
    /// What the latest of them was.
    last: Option<String>,
    /// What its streams wait in.
    waits: Vec<Wait>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Why every call fails from now on.
    failed: Option<String>,
    ranks: Vec<RankState>,
    collectives: BTreeMap<u64, PendingCollective>,
    /// By sender and receiver.
    channels: BTreeMap<(usize, usize), Channel>,
    /// Communicators of some of the ranks, by their numbers.
    pub splits: BTreeMap<u64, Split>,
}

/// What one rank sends to another, in its order.
#[derive(Debug, Default)]
struct Channel {
    /// Messages that were sent and not received.
    waiting: VecDeque<(DType, Payload)>,
    sent: u64,
    received: u64,
}

/// A communicator that some ranks of another one make.
#[derive(Debug)]
pub(super) struct Split {
    pub ranks: Vec<u32>,
    pub communicator: Weak<Communicator>,
    /// The communicator, until each of the ranks has taken its part, or is gone.
    pub kept: Option<Arc<Communicator>>,
    /// By the index of a rank: whether it has taken its part, or is gone.
    pub taken: Vec<bool>,
}

/// A communicator, in the process of its root.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub name: String,
    pub size: usize,
    /// How long a rank waits for the others.
    pub(super) limit: Duration,
    /// Where ranks of other processes come in, if any can.
    pub(super) listener: Option<Arc<Listener>>,
    /// The ranks of this process.
    pub(super) local_ranks: Vec<usize>,
    /// Whether it is one of some ranks of another communicator.
    pub(super) is_split: bool,
    pub(super) state: Lock<State>,
    changed: Signal,
}

impl Communicator {
    pub(super) fn new(name: String, size: usize, limit: Duration) -> Self {
        let state = State { ranks: (0..size).map(|_| RankState::default()).collect(), ..State::default() };
        let (state, changed) = (Lock::new(state), Signal::new());
        Communicator {
            name,
            size,
            limit,
            listener: None,
            local_ranks: (0..size).collect(),
            is_split: false,
            state,
            changed,
        }
    }
}

impl State {
    /// Fails every call that has not met the others; the first reason counts.
    fn fail(&mut self, message: String) {
        self.failed.get_or_insert(message);
        self.channels.clear();
        self.collectives.retain(|_, pending| pending.arrivals.iter().all(Option::is_some));
    }

    /// Drops the calls that have come: they hold the communicator.
    fn clear(&mut self) {
        self.collectives.clear();
        self.channels.clear();
        self.splits.clear();
    }

    /// Why no more calls of a rank can come, if none can.
    pub(super) fn gone(&self, rank: u32) -> Option<&'static str> {
        self.ranks.get(rank as usize)?.gone
    }

    /// The ranks that a wait is for.
    fn awaited(&self, wait: Wait) -> Vec<usize> {
        match wait {
            Wait::Message(peer) | Wait::Receipt(peer) => vec![peer],
            Wait::Collective(number) => {
                let arrivals = self.collectives.get(&number).map_or(&[][..], |pending| &pending.arrivals);
                arrivals.iter().enumerate().filter(|(_, arrival)| arrival.is_none()).map(|(rank, _)| rank).collect()
            }
        }
    }

    /// Describes what a rank did last.
    fn history(&self, rank: usize) -> String {
        let Some(rank_state) = self.ranks.get(rank) else {
            return String::new();
        };
        let did = match &rank_state.last {
            None => "has made no call".to_owned(),
            Some(call) if rank_state.waits.is_empty() => format!("has made {} calls, {call} last", rank_state.calls),
            Some(call) => format!("waits in its call {}, {call}", rank_state.calls),
        };
        match rank_state.gone {
            None => format!("rank {rank} {did}"),
            Some(why) => format!("rank {rank} {did}, and {why}"),
        }
    }

    fn histories(&self) -> String {
        let all: Vec<String> = (0..self.ranks.len()).map(|rank| self.history(rank)).collect();
        all.join("; ")
    }

    /// The ranks in a circle of waits that contains `rank`, which nothing but another call of one of them breaks, and
    /// how many calls each has begun.
    fn deadlock(&self, rank: usize) -> Option<(Vec<usize>, Vec<u64>)> {
        /// Follows the waits from the end of `path` back to its beginning.
        fn follow(state: &State, path: &mut Vec<usize>, seen: &mut [bool]) -> bool {
            let (Some(&first), Some(&last)) = (path.first(), path.last()) else {
                return false;
            };
            let waits = state.ranks.get(last).map_or(&[][..], |rank_state| &rank_state.waits);
            for next in waits.iter().flat_map(|wait| state.awaited(*wait)) {
                if next == first {
                    return true;
                }
                let Some(known) = seen.get_mut(next) else { continue };
                if std::mem::replace(known, true) {
                    continue;
                }
                path.push(next);
                if follow(state, path, seen) {
                    return true;
                }
                path.pop();
            }
            false
        }
        let (mut path, mut seen) = (vec![rank], vec![false; self.ranks.len()]);
        follow(self, &mut path, &mut seen).then(|| {
            let calls =
                path.iter().filter_map(|rank| self.ranks.get(*rank)).map(|rank_state| rank_state.calls).collect();
            (path, calls)
        })
    }
}

/// What hardware does with a call that the other ranks do not make.
const ON_HARDWARE: &str = "on hardware the streams wait here for HCCL_EXEC_TIMEOUT; let every rank make the same calls \
                           in the same order";

/// Advice for ranks of this process that share the thread on which one of them waits.
pub(super) const THREAD_EACH: &str = "if ranks of one process share a thread, give each its own: a rank that waits \
                                      keeps the thread from the rank that it waits for";

impl Communicator {
    /// The reason for which the communicator has failed.
    pub(super) fn failed(&self) -> Option<String> {
        self.state.lock().failed.clone()
    }

    fn fail(&self, mut state: MutexGuard<'_, State>, message: String) -> Failure {
        state.fail(message);
        let message = state.failed.clone().unwrap_or_default();
        drop(state);
        self.changed.notify_all();
        Failure::new(COLLECTIVE_FAILED, message)
    }

    /// Waits until `look` breaks with a value. Otherwise it says what the call waits for; where that cannot come, or
    /// calls differ, every rank fails.
    fn wait<T>(
        &self,
        call: &Call,
        interrupt: Interrupt<'_>,
        mut look: impl FnMut(&mut State) -> Result<ControlFlow<T, Vec<Wait>>, String>,
    ) -> Outcome<T> {
        let rank = call.rank;
        let begun = Instant::now();
        // The deadlock that was seen last, and since when it has been the same.
        let (mut deadlock, mut since) = (None, begun);
        let mut state = self.state.lock();
        let mut kept: Vec<Wait> = Vec::new();
        loop {
            if let Some(rank_state) = state.ranks.get_mut(rank) {
                for wait in kept.drain(..) {
                    if let Some(at) = rank_state.waits.iter().position(|known| *known == wait) {
                        rank_state.waits.swap_remove(at);
                    }
                }
            }
            let looked = look(&mut state);
            if let Ok(ControlFlow::Break(value)) = looked {
                drop(state);
                self.changed.notify_all();
                return Ok(value);
            }
            if let Some(message) = &state.failed {
                return Err(Failure::new(COLLECTIVE_FAILED, message.clone()));
            }
            let awaited = match looked {
                Ok(ControlFlow::Break(_)) => Vec::new(),
                Ok(ControlFlow::Continue(awaited)) => awaited,
                Err(difference) => {
                    let message = format!(
                        "communicator {}: ranks make different calls: {difference}; {}; {ON_HARDWARE}",
                        self.name,
                        state.histories()
                    );
                    return Err(self.fail(state, message));
                }
            };
            let missing: Vec<usize> = awaited.iter().flat_map(|wait| state.awaited(*wait)).collect();
            let gone = missing.iter().copied().find(|peer| {
                let rank_state = state.ranks.get(*peer);
                rank_state.is_none_or(|rank_state| rank_state.gone.is_some())
            });
            if let Some(rank_state) = state.ranks.get_mut(rank) {
                rank_state.waits.extend_from_slice(&awaited);
            }
            kept = awaited;
            let reason = if let Some(gone) = gone {
                Some(format!("{call} of rank {rank} waits for rank {gone}, which cannot come"))
            } else if let Some(why) = interrupt() {
                // A stream is aborted before its rank goes, which is then the reason.
                Some(format!("{call} of rank {rank} {why}"))
            } else if state.ranks.get(rank).is_some_and(|rank_state| rank_state.gone.is_some()) {
                Some(format!("{call} of rank {rank} is not over, and its rank is gone"))
            } else if begun.elapsed() >= self.limit {
                let is_here = missing.iter().any(|rank| self.local_ranks.contains(rank));
                let advice = if is_here { format!("; {THREAD_EACH}") } else { String::new() };
                let missing: Vec<String> = missing.iter().map(usize::to_string).collect();
                Some(format!(
                    "{call} of rank {rank} has waited for {} s (ASCEND_EMU_COLLECTIVE_TIMEOUT, or the communicator's \
                     hcclExecTimeOut) for rank {}{advice}",
                    self.limit.as_secs(),
                    missing.join(", ")
                ))
            } else {
                // A circle may be there for a moment, until another stream of one of its ranks goes on.
                let seen = state.deadlock(rank);
                if seen != deadlock {
                    (deadlock, since) = (seen, Instant::now());
                }
                let lasts = deadlock.as_ref().filter(|_| since.elapsed() >= DEADLOCK_AFTER);
                lasts.map(|(ranks, _)| {
                    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                    format!("ranks {} wait for each other", ranks.join(", "))
                })
            };
            if let Some(reason) = reason {
                let message = format!("communicator {}: {reason}; {}; {ON_HARDWARE}", self.name, state.histories());
                return Err(self.fail(state, message));
            }
            state = self.changed.wait(state, Instant::now().checked_add(POLL));
        }
    }

    /// Begins a call: numbers it, unless its rank is gone.
    fn begin<T>(&self, call: &Arc<Call>, first: impl FnOnce(&mut State) -> Result<T, String>) -> Outcome<T> {
        let rank = call.rank;
        let mut state = self.state.lock();
        if let Some(message) = &state.failed {
            return Err(Failure::new(COLLECTIVE_FAILED, message.clone()));
        }
        let Some(rank_state) = state.ranks.get_mut(rank) else {
            return Err(self.fail(state, format!("communicator {} has no rank {rank}", self.name)));
        };
        if rank_state.gone.is_some() {
            let message = format!(
                "communicator {}: {call} of rank {rank} runs too late; {}; wait for the stream before",
                self.name,
                state.history(rank)
            );
            return Err(self.fail(state, message));
        }
        rank_state.calls += 1;
        rank_state.last = Some(call.to_string());
        match first(&mut state) {
            Ok(value) => {
                drop(state);
                self.changed.notify_all();
                Ok(value)
            }
            Err(difference) => {
                let number = state.ranks.get(rank).map_or(0, |rank_state| rank_state.calls);
                let message = format!(
                    "communicator {}: ranks make different calls: call {number} of rank {rank}: {difference}; {}; \
                     {ON_HARDWARE}",
                    self.name,
                    state.histories()
                );
                Err(self.fail(state, message))
            }
        }
    }

    /// Meets the other ranks in a collective, and returns their calls in the order of the ranks.
    pub(super) fn meet(&self, arrival: Arrival, interrupt: Interrupt<'_>) -> Outcome<Vec<Arrival>> {
        let call = Arc::clone(&arrival.call);
        let rank = call.rank;
        let number = self.begin(&call, |state| {
            let Some(rank_state) = state.ranks.get_mut(rank) else {
                return Err(format!("there is no rank {rank}"));
            };
            let number = rank_state.collectives;
            rank_state.collectives += 1;
            let none = || PendingCollective { arrivals: (0..self.size).map(|_| None).collect(), left: 0 };
            let pending = state.collectives.entry(number).or_insert_with(none);
            let first = pending.arrivals.iter().flatten().next();
            if let Some(difference) = first.and_then(|first| call.difference(&first.call)) {
                return Err(difference);
            }
            if let Some(place) = pending.arrivals.get_mut(rank) {
                *place = Some(arrival);
            }
            let come: Vec<&Arrival> = pending.arrivals.iter().flatten().collect();
            if come.len() == self.size {
                let pairs = come.iter().flat_map(|one| come.iter().map(move |two| (one, two)));
                let mut mismatches = pairs.filter_map(|(one, two)| one.call.count_mismatch(&two.call));
                let count_mismatch = mismatches.next();
                drop(mismatches);
                if let Some(count_mismatch) = count_mismatch {
                    // Nobody takes what has come.
                    state.collectives.remove(&number);
                    return Err(count_mismatch);
                }
            }
            Ok(number)
        })?;
        self.wait(&call, interrupt, |state| {
            let complete = |pending: &&mut PendingCollective| pending.arrivals.iter().all(Option::is_some);
            let Some(pending) = state.collectives.get_mut(&number).filter(complete) else {
                return Ok(ControlFlow::Continue(vec![Wait::Collective(number)]));
            };
            let arrivals = pending.arrivals.iter().flatten().cloned().collect();
            pending.left += 1;
            if pending.left == self.size {
                state.collectives.remove(&number);
            }
            Ok(ControlFlow::Break(arrivals))
        })
    }

    /// Sends messages to ranks and receives messages from ranks, and returns those received in the order of
    /// [`Call::receives`].
    pub(super) fn exchange(&self, arrival: Arrival, interrupt: Interrupt<'_>) -> Outcome<Vec<Payload>> {
        let Arrival { call, payloads } = arrival;
        let rank = call.rank;
        // The number of its channel that each message has, counted from 1.
        let tickets = self.begin(&call, |state| {
            let mut tickets = Vec::new();
            for (segment, payload) in call.sends.iter().zip(payloads) {
                let channel = state.channels.entry((rank, segment.peer)).or_default();
                channel.waiting.push_back((segment.dtype, payload));
                channel.sent += 1;
                tickets.push((segment.peer, channel.sent));
            }
            Ok(tickets)
        })?;
        let mut received: Vec<Option<Payload>> = vec![None; call.receives.len()];
        self.wait(&call, interrupt, |state| {
            let mut missing = Vec::new();
            for (segment, place) in call.receives.iter().zip(&mut received) {
                if place.is_some() {
                    continue;
                }
                // Messages of one channel come in order: a later one does not overtake.
                let channel = state.channels.get_mut(&(segment.peer, rank));
                let channel = channel.filter(|_| !missing.contains(&segment.peer));
                let come = channel.and_then(|channel| {
                    let come = channel.waiting.pop_front()?;
                    channel.received += 1;
                    Some(come)
                });
                let Some((dtype, payload)) = come else {
                    missing.push(segment.peer);
                    continue;
                };
                if dtype != segment.dtype || payload.len() != segment.bytes {
                    let elements = |bytes: usize, dtype: DType| {
                        format!("{} {}", bytes / dtype.size().unwrap_or(1).max(1), dtype.name())
                    };
                    return Err(format!(
                        "count and dataType: rank {} sends {} to rank {rank}, which expects {}",
                        segment.peer,
                        elements(payload.len(), dtype),
                        elements(segment.bytes, segment.dtype)
                    ));
                }
                self.changed.notify_all();
                *place = Some(payload);
            }
            let mut waits: Vec<Wait> = missing.into_iter().map(Wait::Message).collect();
            for &(peer, ticket) in &tickets {
                let channel = state.channels.get(&(rank, peer));
                if channel.is_none_or(|channel| channel.received < ticket) {
                    waits.push(Wait::Receipt(peer));
                }
            }
            Ok(if waits.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(waits) })
        })?;
        Ok(received.into_iter().flatten().collect())
    }

    /// Notes that a rank makes no more calls, for a reason of [`GONE`]. Ranks that wait for it fail at once.
    pub(super) fn mark_gone(&self, rank: usize, why: &'static str) {
        let mut state = self.state.lock();
        if let Some(rank_state) = state.ranks.get_mut(rank) {
            rank_state.gone.get_or_insert(why);
        }
        for split in state.splits.values_mut() {
            split.mark_gone(rank, why);
        }
        if state.ranks.iter().all(|rank_state| rank_state.gone.is_some()) {
            state.clear();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Fails the communicator: a call of a rank was queued and will never run.
    pub(super) fn give_up(&self, rank: usize, call: &str) {
        let message = format!("communicator {}: {call} of rank {rank} was queued, and will never run", self.name);
        self.fail(self.state.lock(), message);
    }
}
