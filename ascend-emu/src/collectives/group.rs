//! Communicators, and how the calls of their ranks meet.

use super::call::Call;
use crate::fault::Fault;
use crate::handle::{self, Table};
use crate::lock::{Lock, Signal};
use crate::status::{COLLECTIVE_FAILED, HCCL_INTERNAL, Outcome, failure};
use ascend_spec::DType;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

pub(crate) static COMMUNICATORS: Table<Member> = Table::new(handle::Kind::Communicator);

/// The time after which a waiting rank looks again at what only time changes: an abort, a circle of waits, its limit.
const LOOK: Duration = Duration::from_millis(20);

/// How long ranks that wait for each other may make no other call until they count as waiting for ever.
const CIRCLE: Duration = Duration::from_secs(1);

/// What one rank hands to another: bytes, shared by those who get the same.
pub(super) type Payload = Arc<[u8]>;

/// A call that has come, with its payloads in the order of [`Call::sends`].
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub call: Arc<Call>,
    pub payloads: Vec<Payload>,
}

/// The calls of one collective.
#[derive(Debug)]
struct Round {
    arrivals: Vec<Option<Arrival>>,
    /// Ranks that have taken what came.
    left: usize,
}

/// What a rank waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The collective with this number.
    Round(u64),
    /// A message from this rank.
    Message(usize),
    /// The receipt of a message by this rank.
    Receipt(usize),
}

#[derive(Debug, Default)]
struct Seat {
    /// Why no more calls of this rank can come.
    lost: Option<&'static str>,
    /// The number of calls that have begun.
    calls: u64,
    /// The number of collectives among them.
    rounds: u64,
    /// What the latest of them was.
    last: Option<String>,
    /// What its streams wait in.
    waits: Vec<Wait>,
}

#[derive(Debug, Default)]
struct Meeting {
    /// Why every call fails from now on.
    failed: Option<String>,
    seats: Vec<Seat>,
    rounds: BTreeMap<u64, Round>,
    /// By sender and receiver.
    channels: BTreeMap<(usize, usize), Channel>,
}

/// What one rank sends to another, in its order.
#[derive(Debug, Default)]
struct Channel {
    /// Messages that were sent and not received.
    waiting: VecDeque<(DType, Payload)>,
    sent: u64,
    received: u64,
}

/// A communicator.
#[derive(Debug)]
pub(crate) struct Group {
    pub name: String,
    pub size: usize,
    /// How long a rank waits for the others.
    limit: Duration,
    meeting: Lock<Meeting>,
    moved: Signal,
}

/// One rank's part in a communicator.
#[derive(Debug)]
pub(crate) struct Member {
    pub group: Arc<Group>,
    pub rank: usize,
    pub device: i32,
}

/// A call with the member that makes it.
#[derive(Clone, Debug)]
pub(crate) struct MemberCall {
    pub member: Arc<Member>,
    pub call: Arc<Call>,
}

impl Group {
    pub(super) fn new(name: String, size: usize, limit: Duration) -> Arc<Self> {
        let meeting = Meeting { seats: (0..size).map(|_| Seat::default()).collect(), ..Meeting::default() };
        Arc::new(Group { name, size, limit, meeting: Lock::new(meeting), moved: Signal::new() })
    }
}

impl Meeting {
    /// Fails every call that has not met the others; the first reason counts.
    fn fail(&mut self, message: String) {
        self.failed.get_or_insert(message);
        self.channels.clear();
        self.rounds.retain(|_, round| round.arrivals.iter().all(Option::is_some));
    }

    /// Drops the calls that have come: they hold the communicator.
    fn clear(&mut self) {
        self.rounds.clear();
        self.channels.clear();
    }

    /// The ranks that a wait is for.
    fn awaited(&self, wait: Wait) -> Vec<usize> {
        match wait {
            Wait::Message(peer) | Wait::Receipt(peer) => vec![peer],
            Wait::Round(number) => {
                let arrivals = self.rounds.get(&number).map_or(&[][..], |round| &round.arrivals);
                arrivals.iter().enumerate().filter(|(_, arrival)| arrival.is_none()).map(|(rank, _)| rank).collect()
            }
        }
    }

    /// Describes what a rank did last.
    fn history(&self, rank: usize) -> String {
        let Some(seat) = self.seats.get(rank) else {
            return String::new();
        };
        let did = match &seat.last {
            None => "has made no call".to_owned(),
            Some(call) if seat.waits.is_empty() => format!("has made {} calls, {call} last", seat.calls),
            Some(call) => format!("waits in its call {}, {call}", seat.calls),
        };
        match seat.lost {
            None => format!("rank {rank} {did}"),
            Some(why) => format!("rank {rank} {did}, and {why}"),
        }
    }

    fn histories(&self) -> String {
        let all: Vec<String> = (0..self.seats.len()).map(|rank| self.history(rank)).collect();
        all.join("; ")
    }

    /// The ranks in a circle of waits that contains `rank`, which nothing but another call of one of them breaks, and
    /// how many calls each has begun.
    fn circle(&self, rank: usize) -> Option<(Vec<usize>, Vec<u64>)> {
        /// Follows the waits from the end of `path` back to its beginning.
        fn follow(meeting: &Meeting, path: &mut Vec<usize>, seen: &mut [bool]) -> bool {
            let (Some(&first), Some(&last)) = (path.first(), path.last()) else {
                return false;
            };
            let waits = meeting.seats.get(last).map_or(&[][..], |seat| &seat.waits);
            for next in waits.iter().flat_map(|wait| meeting.awaited(*wait)) {
                if next == first {
                    return true;
                }
                let Some(known) = seen.get_mut(next) else { continue };
                if std::mem::replace(known, true) {
                    continue;
                }
                path.push(next);
                if follow(meeting, path, seen) {
                    return true;
                }
                path.pop();
            }
            false
        }
        let (mut path, mut seen) = (vec![rank], vec![false; self.seats.len()]);
        follow(self, &mut path, &mut seen).then(|| {
            let calls = path.iter().filter_map(|rank| self.seats.get(*rank)).map(|seat| seat.calls).collect();
            (path, calls)
        })
    }
}

/// What hardware does with a call that the other ranks do not make.
const ON_HARDWARE: &str = "on hardware the streams wait here for HCCL_EXEC_TIMEOUT; let every rank make the same calls \
                           in the same order";

impl Group {
    pub(crate) fn has_failed(&self) -> bool {
        self.meeting.lock().failed.is_some()
    }

    /// The reason for which the communicator has failed.
    pub(crate) fn check(&self, name: &str) -> Outcome {
        match &self.meeting.lock().failed {
            None => Ok(()),
            Some(message) => Err(failure!(
                HCCL_INTERNAL,
                "{name}: the communicator {} has failed, and takes no more calls; make another one: {message}",
                self.name
            )),
        }
    }

    fn fail(&self, mut meeting: MutexGuard<'_, Meeting>, message: String) -> Fault {
        meeting.fail(message);
        let message = meeting.failed.clone().unwrap_or_default();
        drop(meeting);
        self.moved.notify_all();
        Fault { code: COLLECTIVE_FAILED, message }
    }

    /// Waits until `look` breaks with a value. Otherwise it says what the call waits for; where that cannot come, or
    /// calls differ, every rank fails.
    fn wait<T>(
        &self,
        call: &Call,
        abort: &AtomicBool,
        mut look: impl FnMut(&mut Meeting) -> Result<ControlFlow<T, Vec<Wait>>, String>,
    ) -> Result<T, Fault> {
        let rank = call.rank;
        let begun = Instant::now();
        // The circle of waits that was seen last, and since when it has been the same.
        let (mut circle, mut since) = (None, begun);
        let mut meeting = self.meeting.lock();
        let mut kept: Vec<Wait> = Vec::new();
        loop {
            if let Some(seat) = meeting.seats.get_mut(rank) {
                for wait in kept.drain(..) {
                    if let Some(at) = seat.waits.iter().position(|known| *known == wait) {
                        seat.waits.swap_remove(at);
                    }
                }
            }
            let looked = look(&mut meeting);
            if let Ok(ControlFlow::Break(value)) = looked {
                drop(meeting);
                self.moved.notify_all();
                return Ok(value);
            }
            if let Some(message) = &meeting.failed {
                return Err(Fault { code: COLLECTIVE_FAILED, message: message.clone() });
            }
            let awaited = match looked {
                Ok(ControlFlow::Break(_)) => Vec::new(),
                Ok(ControlFlow::Continue(awaited)) => awaited,
                Err(difference) => {
                    let message = format!(
                        "communicator {}: ranks make different calls: {difference}; {}; {ON_HARDWARE}",
                        self.name,
                        meeting.histories()
                    );
                    return Err(self.fail(meeting, message));
                }
            };
            let missing: Vec<usize> = awaited.iter().flat_map(|wait| meeting.awaited(*wait)).collect();
            let lost = missing.iter().copied().find(|peer| {
                let seat = meeting.seats.get(*peer);
                seat.is_none_or(|seat| seat.lost.is_some())
            });
            if let Some(seat) = meeting.seats.get_mut(rank) {
                seat.waits.extend_from_slice(&awaited);
            }
            kept = awaited;
            let reason = if let Some(lost) = lost {
                Some(format!("{call} of rank {rank} waits for rank {lost}, which cannot come"))
            } else if meeting.seats.get(rank).is_some_and(|seat| seat.lost.is_some()) {
                Some(format!("{call} of rank {rank} is not over, and its rank is gone"))
            } else if abort.load(Ordering::Acquire) {
                Some(format!("{call} of rank {rank} was aborted with its stream"))
            } else if begun.elapsed() >= self.limit {
                let missing: Vec<String> = missing.iter().map(usize::to_string).collect();
                Some(format!(
                    "{call} of rank {rank} has waited for {} s (ASCEND_EMU_COLLECTIVE_TIMEOUT, or the communicator's \
                     hcclExecTimeOut) for rank {}",
                    self.limit.as_secs(),
                    missing.join(", ")
                ))
            } else {
                // A circle may be there for a moment, until another stream of one of its ranks goes on.
                let seen = meeting.circle(rank);
                if seen != circle {
                    (circle, since) = (seen, Instant::now());
                }
                let lasts = circle.as_ref().filter(|_| since.elapsed() >= CIRCLE);
                lasts.map(|(ranks, _)| {
                    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                    format!("ranks {} wait for each other", ranks.join(", "))
                })
            };
            if let Some(reason) = reason {
                let message = format!("communicator {}: {reason}; {}; {ON_HARDWARE}", self.name, meeting.histories());
                return Err(self.fail(meeting, message));
            }
            meeting = self.moved.wait(meeting, Instant::now().checked_add(LOOK));
        }
    }

    /// Begins a call: numbers it, unless its rank is gone.
    fn begin<T>(&self, call: &Arc<Call>, first: impl FnOnce(&mut Meeting) -> Result<T, String>) -> Result<T, Fault> {
        let rank = call.rank;
        let mut meeting = self.meeting.lock();
        if let Some(message) = &meeting.failed {
            return Err(Fault { code: COLLECTIVE_FAILED, message: message.clone() });
        }
        let Some(seat) = meeting.seats.get_mut(rank) else {
            return Err(self.fail(meeting, format!("communicator {} has no rank {rank}", self.name)));
        };
        if seat.lost.is_some() {
            let message = format!(
                "communicator {}: {call} of rank {rank} runs too late; {}; wait for the stream before",
                self.name,
                meeting.history(rank)
            );
            return Err(self.fail(meeting, message));
        }
        seat.calls += 1;
        seat.last = Some(call.to_string());
        match first(&mut meeting) {
            Ok(value) => {
                drop(meeting);
                self.moved.notify_all();
                Ok(value)
            }
            Err(difference) => {
                let number = meeting.seats.get(rank).map_or(0, |seat| seat.calls);
                let message = format!(
                    "communicator {}: ranks make different calls: call {number} of rank {rank}: {difference}; {}; \
                     {ON_HARDWARE}",
                    self.name,
                    meeting.histories()
                );
                Err(self.fail(meeting, message))
            }
        }
    }

    /// Meets the other ranks in a collective, and returns their calls in the order of the ranks.
    pub(super) fn meet(&self, arrival: Arrival, abort: &AtomicBool) -> Result<Vec<Arrival>, Fault> {
        let call = Arc::clone(&arrival.call);
        let rank = call.rank;
        let number = self.begin(&call, |meeting| {
            let Some(seat) = meeting.seats.get_mut(rank) else {
                return Err(format!("there is no rank {rank}"));
            };
            let number = seat.rounds;
            seat.rounds += 1;
            let none = || Round { arrivals: (0..self.size).map(|_| None).collect(), left: 0 };
            let round = meeting.rounds.entry(number).or_insert_with(none);
            let first = round.arrivals.iter().flatten().next();
            if let Some(difference) = first.and_then(|first| call.difference(&first.call)) {
                return Err(difference);
            }
            if let Some(place) = round.arrivals.get_mut(rank) {
                *place = Some(arrival);
            }
            let come: Vec<&Arrival> = round.arrivals.iter().flatten().collect();
            if come.len() == self.size {
                let pairs = come.iter().flat_map(|one| come.iter().map(move |two| (one, two)));
                let mut misfits = pairs.filter_map(|(one, two)| one.call.misfit(&two.call));
                let misfit = misfits.next();
                drop(misfits);
                if let Some(misfit) = misfit {
                    // Nobody takes what has come.
                    meeting.rounds.remove(&number);
                    return Err(misfit);
                }
            }
            Ok(number)
        })?;
        self.wait(&call, abort, |meeting| {
            let complete = |round: &&mut Round| round.arrivals.iter().all(Option::is_some);
            let Some(round) = meeting.rounds.get_mut(&number).filter(complete) else {
                return Ok(ControlFlow::Continue(vec![Wait::Round(number)]));
            };
            let arrivals = round.arrivals.iter().flatten().cloned().collect();
            round.left += 1;
            if round.left == self.size {
                meeting.rounds.remove(&number);
            }
            Ok(ControlFlow::Break(arrivals))
        })
    }

    /// Sends messages to ranks and receives messages from ranks, and returns those received in the order of
    /// [`Call::receives`].
    pub(super) fn exchange(&self, arrival: Arrival, abort: &AtomicBool) -> Result<Vec<Payload>, Fault> {
        let Arrival { call, payloads } = arrival;
        let rank = call.rank;
        // The number of its channel that each message has, counted from 1.
        let tickets = self.begin(&call, |meeting| {
            let mut tickets = Vec::new();
            for (segment, payload) in call.sends.iter().zip(payloads) {
                let channel = meeting.channels.entry((rank, segment.peer)).or_default();
                channel.waiting.push_back((segment.dtype, payload));
                channel.sent += 1;
                tickets.push((segment.peer, channel.sent));
            }
            Ok(tickets)
        })?;
        let mut received: Vec<Option<Payload>> = vec![None; call.receives.len()];
        self.wait(&call, abort, |meeting| {
            let mut missing = Vec::new();
            for (segment, place) in call.receives.iter().zip(&mut received) {
                if place.is_some() {
                    continue;
                }
                // Messages of one channel come in order: a later one does not overtake.
                let channel = meeting.channels.get_mut(&(segment.peer, rank));
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
                self.moved.notify_all();
                *place = Some(payload);
            }
            let mut waits: Vec<Wait> = missing.into_iter().map(Wait::Message).collect();
            for &(peer, ticket) in &tickets {
                let channel = meeting.channels.get(&(rank, peer));
                if channel.is_none_or(|channel| channel.received < ticket) {
                    waits.push(Wait::Receipt(peer));
                }
            }
            Ok(if waits.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(waits) })
        })?;
        Ok(received.into_iter().flatten().collect())
    }

    /// Notes that a rank makes no more calls. Ranks that wait for it fail at once.
    fn lose(&self, rank: usize, why: &'static str) {
        let mut meeting = self.meeting.lock();
        if let Some(seat) = meeting.seats.get_mut(rank) {
            seat.lost.get_or_insert(why);
        }
        if meeting.seats.iter().all(|seat| seat.lost.is_some()) {
            meeting.clear();
        }
        drop(meeting);
        self.moved.notify_all();
    }
}

impl Member {
    /// `HcclCommDestroy`: this rank makes no more calls.
    pub(crate) fn leave(&self) {
        self.group.lose(self.rank, "its communicator was destroyed");
    }

    /// Fails the communicator: a call of this rank was queued and will never run.
    pub(crate) fn give_up(&self, call: &Call) {
        let group = &self.group;
        let meeting = group.meeting.lock();
        let message =
            format!("communicator {}: {call} of rank {} was queued, and will never run", group.name, self.rank);
        group.fail(meeting, message);
    }
}

/// Notes that a device was reset: its ranks make no more calls.
pub(crate) fn lose_device(device: i32) {
    for member in COMMUNICATORS.all(|member| member.device == device) {
        member.group.lose(member.rank, "its device was reset");
    }
}
