//! The accesses of queued work, their order, and the findings about them.

use super::{AllocationTable, Owner, Region, settle, with};
use crate::config::Check;
use crate::finding_kind::FindingKind;
use crate::operator::Access;
use crate::sanitizer::finding::{Suspicion, report_all};
use crate::sanitizer::vector_clock::{Operation, StreamId, StreamProgress, VectorClock};
use crate::status::{AICORE_EXCEPTION, Failure, Outcome};
use smallvec::SmallVec;

/// One access of queued work to a part of a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedAccess {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) write: bool,
    pub(super) operation: Operation,
    pub(super) site: (&'static str, &'static str),
}

/// Largest number of accesses that are kept for one region. Forgetting the oldest may lose findings but adds none.
const ACCESSES: usize = 4096;

/// Visits the accesses of one operation.
pub(crate) type Accesses<'a> = &'a dyn Fn(&mut dyn FnMut(Access));

/// The findings about the accesses of an operation.
#[derive(Default)]
pub(super) struct Examination {
    pub(super) suspicions: Vec<Suspicion>,
    /// A message, if a range is outside of all memory.
    pub(super) broken: Option<String>,
}

impl AllocationTable {
    /// Checks that a range is within one allocation. `Err` is for a range outside of all memory.
    pub(super) fn bounds(&self, name: &'static str, access: Access) -> Result<(&Region, Option<Suspicion>), Suspicion> {
        let Access { address, bytes, what, .. } = access;
        let suspicion = |kind, message| Suspicion { kind, site: (name, what), tensor: address, message };
        let Some(region) = self.region(address) else {
            let stale = self.freed.iter().any(|range| range.contains(&address));
            let (kind, state) = if stale {
                (FindingKind::UseAfterFree, "memory that was freed")
            } else {
                (FindingKind::OutOfBounds, "no allocated memory")
            };
            return Err(suspicion(kind, format!("{name}: {what} at {address:#x} ({bytes} bytes) is {state}")));
        };
        let end = usize::try_from(bytes).ok().and_then(|bytes| address.checked_add(bytes)).unwrap_or(usize::MAX);
        if end <= region.requested_end() {
            return Ok((region, None));
        }
        let beyond = suspicion(
            FindingKind::OutOfBounds,
            format!(
                "{name}: {what} takes {bytes} bytes at {address:#x}, {} bytes past the end of an allocation of {} \
                 bytes at {:#x}",
                end - region.requested_end(),
                region.info.bytes,
                region.info.base
            ),
        );
        if end <= region.reach { Ok((region, Some(beyond))) } else { Err(beyond) }
    }

    /// Splits an access at the borders of regions that are mapped side by side, which programs see as one. The bytes
    /// past the last region are a part as well.
    fn parts(&self, access: Access, visit: &mut dyn FnMut(Access)) {
        let mut rest = access;
        while let Some(region) = self.region(rest.address)
            && let Owner::Mapped(_) = region.owner
        {
            let own = (region.reach - rest.address) as u64;
            if rest.bytes <= own {
                break;
            }
            visit(Access { bytes: own, ..rest });
            rest.address = region.reach;
            rest.bytes -= own;
        }
        visit(rest);
    }

    /// The queued accesses of a region that conflict with an access.
    pub(super) fn conflicts(region: &Region, access: Access) -> impl Iterator<Item = &QueuedAccess> {
        let end = access.address.saturating_add(usize::try_from(access.bytes).unwrap_or(usize::MAX));
        region
            .accesses
            .iter()
            .filter(move |known| (known.write || access.write) && known.start < end && access.address < known.end)
    }

    fn record(&mut self, access: Access, operation: Operation, name: &'static str) {
        let end = access.address.saturating_add(usize::try_from(access.bytes).unwrap_or(usize::MAX));
        let Some((_, region)) = self.regions.range_mut(..=access.address).next_back() else {
            return;
        };
        let accesses = &mut region.accesses;
        let same = |known: &&mut QueuedAccess| {
            known.operation.stream == operation.stream
                && known.start == access.address
                && known.end == end
                && known.write == access.write
        };
        if let Some(known) = accesses.iter_mut().find(same) {
            if known.operation.number <= operation.number {
                known.operation = operation;
                known.site = (name, access.what);
            }
            return;
        }
        if accesses.len() == accesses.capacity() {
            accesses.retain(|known| !self.order.host_has_waited(known.operation));
        }
        if accesses.len() >= ACCESSES {
            accesses.remove(0);
        }
        accesses.push(QueuedAccess {
            start: access.address,
            end,
            write: access.write,
            operation,
            site: (name, access.what),
        });
    }

    /// Looks for ranges outside of all memory, and for queued accesses that `races` finds unordered with the new ones.
    pub(super) fn examine(
        &self,
        name: &'static str,
        visit: Accesses<'_>,
        races: impl Fn(&QueuedAccess, Access) -> Option<Suspicion>,
    ) -> Examination {
        let mut examined = Examination::default();
        let mut examine = |access: Access| match self.bounds(name, access) {
            Err(suspicion) => {
                examined.broken.get_or_insert_with(|| suspicion.message.clone());
                examined.suspicions.push(suspicion);
            }
            Ok((region, beyond)) => {
                examined.suspicions.extend(beyond);
                let race = AllocationTable::conflicts(region, access).find_map(|known| races(known, access));
                examined.suspicions.extend(race);
            }
        };
        visit(&mut |access| {
            if access.bytes != 0 {
                self.parts(access, &mut examine);
            }
        });
        examined
    }

    /// Counts an operation as queued, and records its accesses.
    fn queue(&mut self, operation: Operation, name: &'static str, visit: Accesses<'_>) {
        self.order.queue(operation);
        let mut parts: SmallVec<[Access; 4]> = SmallVec::new();
        visit(&mut |access| {
            if access.bytes != 0 {
                self.parts(access, &mut |part| parts.push(part));
                for part in parts.drain(..) {
                    self.record(part, operation, name);
                }
            }
        });
    }
}

/// Checks the operation about to be queued, and records its accesses. In strict mode a
/// finding refuses the operation. An operation on bytes outside of all memory must not run: the result is the fault
/// that its stream reports instead.
pub(crate) fn admit(
    operation: Operation,
    check: Check,
    code: i32,
    name: &'static str,
    visit: Accesses<'_>,
) -> Outcome<Option<Failure>> {
    let examined = with(|table| {
        let races = |known: &QueuedAccess, access| {
            let ordered = table.order.happens_before(known.operation, operation.stream);
            (!ordered).then(|| stream_race(name, access, known))
        };
        let examined = table.examine(name, visit, races);
        if examined.suspicions.is_empty() {
            table.queue(operation, name, visit);
        }
        examined
    });
    if examined.suspicions.is_empty() {
        return Ok(None);
    }
    report_all(check, code, examined.suspicions)?;
    let fault = examined.broken.map(|message| Failure::new(AICORE_EXCEPTION, message));
    if fault.is_none() {
        with(|table| table.queue(operation, name, visit));
    }
    Ok(fault)
}

/// Adds the accesses of a queued update of a graph to those of the graph's queued replays, which run the new tasks
/// unless they happen before the update. These accesses are not examined for races.
pub(crate) fn add_replay_accesses(update: Operation, replays: &[Operation], name: &'static str, visit: Accesses<'_>) {
    with(|table| {
        table.order.queue(update);
        for &replay in replays {
            if !table.order.happens_before(replay, update.stream) {
                table.queue(replay, name, visit);
            }
        }
    });
}

fn stream_race(name: &'static str, access: Access, known: &QueuedAccess) -> Suspicion {
    let verb = |write| if write { "writes" } else { "reads" };
    Suspicion {
        kind: FindingKind::StreamRace,
        site: (name, access.what),
        tensor: access.address,
        message: format!(
            "{name} {} its {} at {:#x} ({} bytes) while a {} queued on another stream {} the same memory as its {}, \
             with no event between them; record an event on the other stream after that work, and let this stream \
             wait for it (aclrtRecordEvent, aclrtStreamWaitEvent)",
            verb(access.write),
            access.what,
            access.address,
            access.bytes,
            known.site.0,
            verb(known.write),
            known.site.1
        ),
    }
}

/// Checks accesses that are not queued: by the host itself, or by work recorded for later. A range outside of all
/// memory fails in either mode.
pub(crate) fn inspect(check: Check, code: i32, name: &'static str, by_host: bool, visit: Accesses<'_>) -> Outcome {
    let examined = with(|table| {
        table.examine(name, visit, |known, access| {
            (by_host && !table.order.host_has_waited(known.operation)).then(|| host_race(name, access, known))
        })
    });
    let check = if examined.broken.is_some() { Check::Strict } else { check };
    report_all(check, code, examined.suspicions)
}

fn host_race(name: &'static str, access: Access, known: &QueuedAccess) -> Suspicion {
    let verb = if access.write { "writes" } else { "reads" };
    let what = if known.write { "written" } else { "read" };
    Suspicion {
        kind: FindingKind::HostRace,
        site: (name, access.what),
        tensor: access.address,
        message: format!(
            "{name} {verb} its {} at {:#x} ({} bytes), which a queued {} has {what} as its {} with no synchronisation \
             since; wait for its stream first (aclrtSynchronizeStream)",
            access.what, access.address, access.bytes, known.site.0, known.site.1
        ),
    }
}

/// Adds a stream, whose thread counts its finished operations in `progress`.
pub(crate) fn add_stream(stream: StreamId, progress: StreamProgress) {
    with(|table| table.order.add_stream(stream, progress));
}

/// Removes a stream whose work is over.
pub(crate) fn remove_stream(stream: StreamId) {
    with(|table| table.order.remove_stream(stream));
    settle();
}

/// Streams with tasks that are queued and not over.
pub(crate) fn busy_streams() -> Vec<StreamId> {
    with(|table| table.order.busy_streams())
}

/// Writes the clock of a stream, with the stream's own queued work, into `into`.
pub(crate) fn snapshot_clock(stream: StreamId, into: &mut VectorClock) {
    with(|table| table.order.snapshot(stream, into));
}

/// Whether an operation happens before the next one of a stream.
pub(crate) fn happens_before(operation: Operation, stream: StreamId) -> bool {
    with(|table| table.order.happens_before(operation, stream))
}

/// Whether the host has waited for an operation, or its stream is gone.
pub(crate) fn host_has_waited(operation: Operation) -> bool {
    with(|table| table.order.host_has_waited(operation))
}

/// Orders the next operation of a stream after everything in a clock.
pub(crate) fn order_after(stream: StreamId, clock: &[(StreamId, u64)]) {
    with(|table| table.order.order_after(stream, clock));
}

/// Notes that the next operation of a stream waits for something that the sanitizer does not know.
pub(crate) fn order_after_unknown(stream: StreamId) {
    with(|table| table.order.order_after_unknown(stream));
}

/// Notes that the host has waited for everything in a clock.
pub(crate) fn host_waited(clock: &[(StreamId, u64)]) {
    with(|table| table.order.host_waited(clock));
    settle();
}

/// Notes that the host has waited for the first `number` operations of a stream, and so for the stream's clock.
pub(crate) fn host_waited_for_stream(stream: StreamId, number: u64) {
    with(|table| table.order.host_waited_for_stream(stream, number));
    settle();
}
