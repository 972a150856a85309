//! Who owns which bytes, and which queued work uses them.
//!
//! Every stream is a *lane* whose operations are numbered. A lane's clock says, for each other lane, up to which
//! operation its next one is known to come after: events copy clocks from lane to lane. What the host has waited for is
//! known to everybody. Two uses of the same bytes, one of them a write, that neither a clock nor the host orders are a
//! race, whether or not they happened to meet.

use crate::config::{Check, config};
use crate::fault::Fault;
use crate::handle::IdHasher;
use crate::lock::Lock;
use crate::memory::{Arena, DeviceMemory};
use crate::operator::Access;
use crate::sanitizer::{FindingKind, Suspicion, report_all};
use crate::status::{
    AICORE_EXCEPTION, Failure, MEMORY_ALLOCATION, MEMORY_FREE, Outcome, PARAM_INVALID, failure,
};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::ops::Range;
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

/// Kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of the device with this number, from `aclrtMalloc`.
    Device(i32),
    /// Pinned host memory, from `aclrtMallocHost`.
    PinnedHost,
}

/// A live allocation, for tests and for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// Number of the allocation, never used twice.
    pub id: u64,
    /// First address.
    pub base: usize,
    /// Bytes asked for.
    pub bytes: u64,
    /// Where it is.
    pub place: Place,
    /// Number of operations that have written to it.
    pub version: u64,
}

/// One use of a part of an allocation by queued work.
#[derive(Clone, Copy, Debug)]
struct Use {
    start: usize,
    end: usize,
    write: bool,
    lane: LaneId,
    seq: u64,
    site: (&'static str, &'static str),
}

/// Uses kept for one allocation; beyond that the oldest is forgotten, which loses findings but makes none up.
const USES: usize = 4096;

#[derive(Debug)]
struct Block {
    info: Allocation,
    /// End of what may be touched: the requested size, rounded up to whole pages, and one page more.
    reach: usize,
    uses: Vec<Use>,
}

impl Block {
    fn reserved(&self) -> usize {
        self.reach - self.info.base
    }

    fn requested_end(&self) -> usize {
        self.info.base.saturating_add(self.info.bytes as usize)
    }
}

#[derive(Debug)]
struct Lane {
    /// Operations queued so far.
    queued: u64,
    /// Operations that the host has waited for.
    synced: u64,
    progress: Progress,
    clock: Clock,
}

#[derive(Debug, Default)]
struct Books {
    arena: Option<Arena>,
    blocks: BTreeMap<usize, Block>,
    lanes: HashMap<LaneId, Lane, BuildHasherDefault<IdHasher>>,
    /// Freed while work in flight uses it: given back once that is over.
    limbo: Vec<Block>,
    /// Freed of late, to name stale addresses.
    freed: VecDeque<Range<usize>>,
    /// Bytes of live allocations, by device.
    used: BTreeMap<i32, u64>,
    allocations: u64,
}

/// How many freed ranges are remembered.
const FREED: usize = 1024;

impl Books {
    /// The block that an address lies in, guard page included.
    fn block(&self, address: usize) -> Option<&Block> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        (address < block.reach).then_some(block)
    }

    /// Whether the host has waited for a use, or the use's stream is gone.
    fn synced(lanes: &HashMap<LaneId, Lane, BuildHasherDefault<IdHasher>>, of: &Use) -> bool {
        lanes.get(&of.lane).is_none_or(|lane| lane.synced >= of.seq)
    }

    fn in_flight(&self, of: &Use) -> bool {
        self.lanes
            .get(&of.lane)
            .is_some_and(|lane| lane.progress.load(Ordering::Acquire) < of.seq)
    }

    /// Whether a use comes before the next operation of a lane.
    fn ordered(&self, of: &Use, lane: LaneId) -> bool {
        let after = || {
            let clock = self.lanes.get(&lane).map(|lane| &lane.clock);
            clock.is_some_and(|clock| {
                clock
                    .iter()
                    .any(|&(id, seq)| id == of.lane && seq >= of.seq)
            })
        };
        of.lane == lane || Self::synced(&self.lanes, of) || after()
    }

    /// Checks that a range lies in one allocation. `Err` is a range that no memory answers for.
    fn bounds(
        &self,
        name: &'static str,
        access: Access,
    ) -> Result<(&Block, Option<Suspicion>), Suspicion> {
        let Access {
            address,
            bytes,
            what,
            ..
        } = access;
        let suspicion = |kind, message| Suspicion {
            kind,
            site: (name, what),
            message,
        };
        let Some(block) = self.block(address) else {
            let stale = self.freed.iter().any(|range| range.contains(&address));
            let (kind, state) = if stale {
                (FindingKind::UseAfterFree, "memory that was freed")
            } else {
                (FindingKind::OutOfBounds, "no allocated memory")
            };
            return Err(suspicion(
                kind,
                format!("{name}: {what} at {address:#x} ({bytes} bytes) is {state}"),
            ));
        };
        let end = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| address.checked_add(bytes))
            .unwrap_or(usize::MAX);
        if end <= block.requested_end() {
            return Ok((block, None));
        }
        let beyond = suspicion(
            FindingKind::OutOfBounds,
            format!(
                "{name}: {what} takes {bytes} bytes at {address:#x}, {} bytes past the end of an allocation of {} \
                 bytes at {:#x}",
                end - block.requested_end(),
                block.info.bytes,
                block.info.base
            ),
        );
        if end <= block.reach {
            Ok((block, Some(beyond)))
        } else {
            Err(beyond)
        }
    }

    /// Uses of a range that conflict with an access to it.
    fn conflicts(block: &Block, access: Access) -> impl Iterator<Item = &Use> {
        let end = access
            .address
            .saturating_add(usize::try_from(access.bytes).unwrap_or(usize::MAX));
        block.uses.iter().filter(move |of| {
            (of.write || access.write) && of.start < end && access.address < of.end
        })
    }

    fn note(&mut self, access: Access, lane: LaneId, seq: u64, name: &'static str) {
        let end = access
            .address
            .saturating_add(usize::try_from(access.bytes).unwrap_or(usize::MAX));
        let Some((_, block)) = self.blocks.range_mut(..=access.address).next_back() else {
            return;
        };
        let uses = &mut block.uses;
        let same = |of: &&mut Use| {
            of.lane == lane
                && of.start == access.address
                && of.end == end
                && of.write == access.write
        };
        if let Some(of) = uses.iter_mut().find(same) {
            of.seq = seq;
            of.site = (name, access.what);
            return;
        }
        if uses.len() == uses.capacity() {
            uses.retain(|of| !Self::synced(&self.lanes, of));
        }
        if uses.len() >= USES {
            uses.remove(0);
        }
        uses.push(Use {
            start: access.address,
            end,
            write: access.write,
            lane,
            seq,
            site: (name, access.what),
        });
    }

    /// Takes out of limbo what nothing in flight uses any more.
    fn sweep(&mut self) -> Vec<Block> {
        if self.limbo.is_empty() {
            return Vec::new();
        }
        let (keep, done) = std::mem::take(&mut self.limbo)
            .into_iter()
            .partition(|block| block.uses.iter().any(|of| self.in_flight(of)));
        self.limbo = keep;
        done
    }

    fn used_bytes(&self, device: i32) -> u64 {
        self.used.get(&device).copied().unwrap_or(0)
    }

    fn insert(&mut self, block: Block) {
        if let Place::Device(device) = block.info.place {
            let used = self.used.entry(device).or_default();
            *used = used.saturating_add(block.info.bytes);
        }
        self.blocks.insert(block.info.base, block);
    }

    /// Takes a block out, and remembers its addresses as freed.
    fn remove(&mut self, base: usize) -> Option<Block> {
        let block = self.blocks.remove(&base)?;
        if let Place::Device(device) = block.info.place
            && let Some(used) = self.used.get_mut(&device)
        {
            *used = used.saturating_sub(block.info.bytes);
        }
        if self.freed.len() >= FREED {
            self.freed.pop_front();
        }
        self.freed.push_back(block.info.base..block.reach);
        Some(block)
    }

    fn mark_synced(&mut self, lane: LaneId, seq: u64) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.synced = lane.synced.max(seq);
        }
    }
}

static BOOKS: Lock<Option<Books>> = Lock::new(None);

fn with<T>(body: impl FnOnce(&mut Books) -> T) -> T {
    body(BOOKS.lock().get_or_insert_default())
}

/// Visits the accesses of one operation.
pub(crate) type Visit<'a> = &'a dyn Fn(&mut dyn FnMut(Access));

/// Bytes of memory of one device.
pub(crate) fn capacity() -> Outcome<u64> {
    let len = DeviceMemory::get()?.len() as u64;
    Ok(config().memory.map_or(len, |bytes| bytes.min(len)))
}

/// Allocates; the memory reads as zero when it is a device's.
pub(crate) fn allocate(place: Place, bytes: u64) -> Outcome<usize> {
    let memory = DeviceMemory::get()?;
    let page = memory.page();
    let short = || {
        failure!(
            MEMORY_ALLOCATION,
            "out of memory: {bytes} bytes asked for on {place:?}"
        )
    };
    let reserved = usize::try_from(bytes)
        .ok()
        .and_then(|bytes| bytes.checked_next_multiple_of(page))
        .and_then(|bytes| bytes.checked_add(page))
        .ok_or_else(short)?;
    settle();
    let limit = capacity()?;
    let pinned = match place {
        Place::PinnedHost => Some(allocate_host(page, reserved).ok_or_else(short)?),
        Place::Device(_) => None,
    };
    with(|books| {
        let base = match (pinned, place) {
            (Some(base), _) => base,
            (None, Place::Device(device)) => {
                let used = books.used_bytes(device);
                if bytes > limit.saturating_sub(used) {
                    return Err(failure!(
                        MEMORY_ALLOCATION,
                        "out of memory on device {device}: {bytes} bytes asked for, {} of {limit} free",
                        limit.saturating_sub(used)
                    ));
                }
                books
                    .arena
                    .get_or_insert_with(|| Arena::new(memory.base(), memory.len()))
                    .take(reserved)
                    .ok_or_else(short)?
            }
            (None, Place::PinnedHost) => return Err(short()),
        };
        books.allocations += 1;
        books.freed.retain(|range| !range.contains(&base));
        let block = Block {
            info: Allocation {
                id: books.allocations,
                base,
                bytes,
                place,
                version: 0,
            },
            reach: base.saturating_add(reserved),
            uses: Vec::with_capacity(8),
        };
        books.insert(block);
        Ok(base)
    })
}

fn allocate_host(align: usize, bytes: usize) -> Option<usize> {
    let mut at = std::ptr::null_mut();
    // SAFETY: `at` is a valid place for the result; `align` is a power of two and a multiple of a pointer's size.
    let status = unsafe { libc::posix_memalign(&raw mut at, align, bytes) };
    (status == 0 && !at.is_null()).then(|| at.expose_provenance())
}

/// Gives the memory of blocks back to where it came from.
fn release(blocks: Vec<Block>) {
    let Ok(memory) = DeviceMemory::get() else {
        return;
    };
    for block in &blocks {
        match block.info.place {
            Place::Device(_) => memory.discard(block.info.base, block.reserved()),
            Place::PinnedHost => {
                // SAFETY: the block came from `posix_memalign`, and left the books once: nobody else frees it.
                unsafe { libc::free(std::ptr::with_exposed_provenance_mut(block.info.base)) };
            }
        }
    }
    with(|books| {
        for block in &blocks {
            if let (Place::Device(_), Some(arena)) = (block.info.place, &mut books.arena) {
                arena.give_back(block.info.base, block.reserved());
            }
        }
    });
}

/// Gives back memory that was freed too early and that nothing uses any more.
fn settle() {
    let done = with(Books::sweep);
    if !done.is_empty() {
        release(done);
    }
}

/// Frees what [`allocate`] gave.
pub(crate) fn free(check: Check, name: &'static str, device: bool, address: usize) -> Outcome {
    let found = with(|books| {
        let Some(block) = books.blocks.get(&address) else {
            return Err(not_allocated(books, name, address));
        };
        if device != matches!(block.info.place, Place::Device(_)) {
            let (is, other) = if device {
                ("pinned host memory", "aclrtFreeHost")
            } else {
                ("device memory", "aclrtFree")
            };
            return Err(failure!(
                PARAM_INVALID,
                "{name}: {address:#x} is {is}, which {other} frees"
            ));
        }
        let unsynced = block
            .uses
            .iter()
            .find(|of| !Books::synced(&books.lanes, of));
        let suspicion = unsynced.map(|of| Suspicion {
            kind: FindingKind::FreeInUse,
            site: (name, of.site.1),
            message: format!(
                "{name}: {address:#x} ({} bytes) is the {} of a queued {}, and nothing has waited for that since",
                block.info.bytes, of.site.1, of.site.0
            ),
        });
        Ok(suspicion)
    })?;
    report_all(check, MEMORY_FREE, found)?;
    let free_now = with(|books| -> Outcome<Vec<Block>> {
        let block = books
            .remove(address)
            .ok_or_else(|| not_allocated(books, name, address))?;
        if block.uses.iter().any(|of| books.in_flight(of)) {
            books.limbo.push(block);
            return Ok(Vec::new());
        }
        Ok(vec![block])
    })?;
    release(free_now);
    settle();
    Ok(())
}

fn not_allocated(books: &Books, name: &str, address: usize) -> Failure {
    let why = if books.freed.iter().any(|range| range.start == address) {
        "was already freed".to_owned()
    } else if let Some(block) = books.block(address) {
        format!("lies inside the allocation at {:#x}", block.info.base)
    } else {
        "was not allocated".to_owned()
    };
    failure!(PARAM_INVALID, "{name}: {address:#x} {why}")
}

/// Drops everything allocated on a device, as a reset does; how many allocations and bytes that was.
pub(crate) fn clear_device(device: i32) -> (u64, u64) {
    let (now, count, bytes) = with(|books| {
        let on_device = |block: &&Block| block.info.place == Place::Device(device);
        let bases: Vec<usize> = books
            .blocks
            .values()
            .filter(on_device)
            .map(|block| block.info.base)
            .collect();
        let bytes = books.used_bytes(device);
        let dropped: Vec<Block> = bases.iter().filter_map(|&b| books.remove(b)).collect();
        let (busy, now): (Vec<_>, Vec<_>) = dropped
            .into_iter()
            .partition(|block| block.uses.iter().any(|of| books.in_flight(of)));
        books.limbo.extend(busy);
        (now, bases.len() as u64, bytes)
    });
    release(now);
    (count, bytes)
}

/// The live allocation that an address lies in.
pub(crate) fn lookup(address: usize) -> Option<Allocation> {
    with(|books| books.block(address).map(|block| block.info))
}

/// The live allocation that `address` lies in (its guard page included), if any. Looking does not touch the memory.
pub fn allocation_at<T>(address: *const T) -> Option<Allocation> {
    lookup(address.addr())
}

/// Bytes in use on a device.
pub(crate) fn used_bytes(device: i32) -> u64 {
    with(|books| books.used_bytes(device))
}

/// Live allocations: how many on devices, their bytes, how many of pinned host memory.
pub(crate) fn totals() -> (usize, u64, usize) {
    with(|books| {
        let on_device = |block: &&Block| matches!(block.info.place, Place::Device(_));
        let count = books.blocks.values().filter(on_device).count();
        let bytes = books.blocks.values().filter(on_device);
        (
            count,
            bytes.map(|block| block.info.bytes).sum(),
            books.blocks.len() - count,
        )
    })
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

/// What examining an operation's accesses brought to light.
#[derive(Default)]
struct Examined {
    suspicions: Vec<Suspicion>,
    /// Set if a range is no memory.
    broken: Option<String>,
}

impl Books {
    /// Looks for ranges that are no memory and for uses that `races` finds fault with.
    fn examine(
        &self,
        name: &'static str,
        visit: Visit<'_>,
        races: impl Fn(&Use, Access) -> Option<Suspicion>,
    ) -> Examined {
        let mut examined = Examined::default();
        visit(&mut |access| {
            if access.bytes == 0 {
                return;
            }
            match self.bounds(name, access) {
                Err(suspicion) => {
                    examined
                        .broken
                        .get_or_insert_with(|| suspicion.message.clone());
                    examined.suspicions.push(suspicion);
                }
                Ok((block, beyond)) => {
                    examined.suspicions.extend(beyond);
                    let race = Books::conflicts(block, access).find_map(|of| races(of, access));
                    examined.suspicions.extend(race);
                }
            }
        });
        examined
    }

    /// Notes the accesses of operation `seq` of a lane.
    fn register(&mut self, lane: LaneId, seq: u64, name: &'static str, visit: Visit<'_>) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.queued = lane.queued.max(seq);
        }
        visit(&mut |access| {
            if access.bytes != 0 {
                self.note(access, lane, seq, name);
            }
        });
    }
}

/// Checks the operation about to be queued in a lane with number `seq`, and notes what it uses. In strict mode a
/// finding refuses it. If it names bytes that are no memory, it must not run: its stream reports the fault instead.
pub(crate) fn admit(
    lane: LaneId,
    seq: u64,
    check: Check,
    code: i32,
    name: &'static str,
    visit: Visit<'_>,
) -> Outcome<Option<Fault>> {
    let examined = with(|books| {
        let races =
            |of: &Use, access| (!books.ordered(of, lane)).then(|| stream_race(name, access, of));
        let examined = books.examine(name, visit, races);
        if examined.suspicions.is_empty() {
            books.register(lane, seq, name, visit);
        }
        examined
    });
    if examined.suspicions.is_empty() {
        return Ok(None);
    }
    report_all(check, code, examined.suspicions)?;
    let fault = examined.broken.map(|message| Fault {
        code: AICORE_EXCEPTION,
        message,
    });
    if fault.is_none() {
        with(|books| books.register(lane, seq, name, visit));
    }
    Ok(fault)
}

fn stream_race(name: &'static str, access: Access, of: &Use) -> Suspicion {
    let verb = |write| if write { "writes" } else { "reads" };
    Suspicion {
        kind: FindingKind::StreamRace,
        site: (name, access.what),
        message: format!(
            "{name} {} its {} at {:#x} ({} bytes) while a {} queued on another stream {} the same memory as its {}, \
             with no event between them",
            verb(access.write),
            access.what,
            access.address,
            access.bytes,
            of.site.0,
            verb(of.write),
            of.site.1
        ),
    }
}

/// Checks accesses that are not queued: by the host itself, or by work recorded for later. A range that no memory
/// answers for fails in either mode.
pub(crate) fn inspect(
    check: Check,
    code: i32,
    name: &'static str,
    by_host: bool,
    visit: Visit<'_>,
) -> Outcome {
    let examined = with(|books| {
        books.examine(name, visit, |of, access| {
            (by_host && !Books::synced(&books.lanes, of)).then(|| host_race(name, access, of))
        })
    });
    let check = if examined.broken.is_some() {
        Check::Strict
    } else {
        check
    };
    report_all(check, code, examined.suspicions)
}

fn host_race(name: &'static str, access: Access, of: &Use) -> Suspicion {
    let verb = if access.write { "writes" } else { "reads" };
    let what = if of.write { "written" } else { "read" };
    Suspicion {
        kind: FindingKind::HostRace,
        site: (name, access.what),
        message: format!(
            "{name} {verb} its {} at {:#x} ({} bytes), which a queued {} has {what} as its {} with no synchronisation \
             since",
            access.what, access.address, access.bytes, of.site.0, of.site.1
        ),
    }
}

/// Counts a write to an allocation.
pub(crate) fn written(addresses: impl Iterator<Item = usize>) {
    with(|books| {
        for address in addresses {
            if let Some((_, block)) = books.blocks.range_mut(..=address).next_back()
                && address < block.reach
            {
                block.info.version += 1;
            }
        }
    });
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
        }
    });
    settle();
}
