//! Lanes, and what comes after what.

use super::hazards::Use;
use super::{Books, settle, with};
use crate::handle::IdHasher;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of a stream, never used twice.
pub(crate) type LaneId = u64;

/// For each lane, the last operation known to be over.
pub(crate) type Clock = Vec<(LaneId, u64)>;

/// Raises the entries of `clock` to those of `other`.
fn merge(clock: &mut Clock, other: &[(LaneId, u64)]) {
    for &(lane, seq) in other {
        match clock.iter_mut().find(|(id, _)| *id == lane) {
            Some((_, known)) => *known = (*known).max(seq),
            None => clock.push((lane, seq)),
        }
    }
}

/// How many operations of a lane are over; shared with the stream's thread.
pub(crate) type Progress = Arc<AtomicU64>;

#[derive(Debug)]
pub(super) struct Lane {
    /// Operations queued so far.
    pub(super) queued: u64,
    /// Operations that the host has waited for.
    pub(super) synced: u64,
    pub(super) progress: Progress,
    pub(super) clock: Clock,
    /// Operations from this one on come after something of which nobody knows: they are taken for ordered.
    pub(super) unknown_from: Option<u64>,
}

impl Books {
    /// Whether the host has waited for a use, or the use's stream is gone.
    pub(super) fn synced(
        lanes: &HashMap<LaneId, Lane, BuildHasherDefault<IdHasher>>,
        of: &Use,
    ) -> bool {
        lanes.get(&of.lane).is_none_or(|lane| lane.synced >= of.seq)
    }

    pub(super) fn in_flight(&self, of: &Use) -> bool {
        self.lanes
            .get(&of.lane)
            .is_some_and(|lane| lane.progress.load(Ordering::Acquire) < of.seq)
    }

    /// Whether a use comes before the next operation of a lane.
    pub(super) fn ordered(&self, of: &Use, lane: LaneId) -> bool {
        let after = || {
            let clock = self.lanes.get(&lane).map(|lane| &lane.clock);
            clock.is_some_and(|clock| {
                clock
                    .iter()
                    .any(|&(id, seq)| id == of.lane && seq >= of.seq)
            })
        };
        of.lane == lane
            || Self::synced(&self.lanes, of)
            || after()
            || self.unknown(lane, u64::MAX)
            || self.unknown(of.lane, of.seq)
    }

    /// Whether an operation of a lane comes after something of which nobody knows.
    fn unknown(&self, lane: LaneId, seq: u64) -> bool {
        let from = self.lanes.get(&lane).and_then(|lane| lane.unknown_from);
        from.is_some_and(|from| seq > from)
    }

    pub(super) fn mark_synced(&mut self, lane: LaneId, seq: u64) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.synced = lane.synced.max(seq);
        }
    }
}

/// Registers a stream.
pub(crate) fn open_lane(lane: LaneId, progress: Progress) {
    with(|books| {
        books.lanes.insert(
            lane,
            Lane {
                queued: 0,
                synced: 0,
                progress,
                clock: Vec::with_capacity(8),
                unknown_from: None,
            },
        );
    });
}

/// Forgets a stream whose work is over: everybody is known to come after it.
pub(crate) fn close_lane(lane: LaneId) {
    with(|books| {
        books.lanes.remove(&lane);
        for other in books.lanes.values_mut() {
            other.clock.retain(|&(id, _)| id != lane);
        }
    });
    settle();
}

/// Takes a picture of a lane's clock, its own queued work included.
pub(crate) fn snapshot(lane: LaneId, into: &mut Clock) {
    into.clear();
    with(|books| {
        if let Some(found) = books.lanes.get(&lane) {
            into.extend_from_slice(&found.clock);
            merge(into, &[(lane, found.queued)]);
        }
    });
}

/// Lets a lane's next operation come after everything in a clock.
pub(crate) fn follow(lane: LaneId, clock: &[(LaneId, u64)]) {
    with(|books| {
        // Entries of streams that are gone would only pile up.
        let Books { lanes, .. } = books;
        let alive = |id: LaneId| lanes.contains_key(&id);
        let gone = clock.iter().any(|&(id, _)| !alive(id));
        let kept: Clock;
        let clock = if gone {
            kept = clock.iter().copied().filter(|&(id, _)| alive(id)).collect();
            kept.as_slice()
        } else {
            clock
        };
        if let Some(lane) = lanes.get_mut(&lane) {
            merge(&mut lane.clock, clock);
        }
    });
}

/// Lets a lane's next operation come after something of which nobody knows.
pub(crate) fn follow_unknown(lane: LaneId) {
    with(|books| {
        if let Some(lane) = books.lanes.get_mut(&lane) {
            lane.unknown_from.get_or_insert(lane.queued);
        }
    });
}

/// The host has waited for everything in a clock.
pub(crate) fn host_waited(clock: &[(LaneId, u64)]) {
    with(|books| {
        for &(lane, seq) in clock {
            books.mark_synced(lane, seq);
        }
    });
    settle();
}

/// The host has waited for the first `seq` operations of a lane, and with them for what they come after.
pub(crate) fn host_waited_for_lane(lane: LaneId, seq: u64) {
    with(|books| {
        let Some(found) = books.lanes.get_mut(&lane) else {
            return;
        };
        let clock = std::mem::take(&mut found.clock);
        for &(other, seq) in &clock {
            books.mark_synced(other, seq);
        }
        if let Some(found) = books.lanes.get_mut(&lane) {
            found.clock = clock;
            found.synced = found.synced.max(seq);
            if found.synced >= found.queued {
                // What was not known is over.
                found.unknown_from = None;
            }
        }
    });
    settle();
}
