//! Who owns which bytes, and which queued work uses them.
//!
//! Every stream is a *lane* whose operations are numbered. A lane's clock says, for each other lane, up to which
//! operation its next one is known to come after: events copy clocks from lane to lane. What the host has waited for is
//! known to everybody. Two uses of the same bytes, one of them a write, that neither a clock nor the host orders are a
//! race, whether or not they happened to meet.

mod clocks;
mod hazards;
mod registered;
mod virtual_memory;

pub(crate) use clocks::{
    Clock, LaneId, Progress, close_lane, follow, follow_unknown, host_waited, host_waited_for_lane,
    open_lane, snapshot,
};
pub(crate) use hazards::{admit, inspect};
pub(crate) use registered::{register_host, registered_mapped, registrations, unregister_host};

pub(crate) use virtual_memory::{
    allocate_physical, free_physical, map, release_range, reserve, totals as virtual_totals, unmap,
};

use crate::config::{Check, config};
use crate::handle::IdHasher;
use crate::lock::Lock;
use crate::memory::{Arena, DeviceMemory};
use crate::sanitizer::{FindingKind, Suspicion, report_all};
use crate::status::{Failure, MEMORY_ALLOCATION, MEMORY_FREE, Outcome, PARAM_INVALID, failure};
use clocks::Lane;
use hazards::Use;
use registered::Registration;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::ops::Range;
use virtual_memory::Virtual;

/// Kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Memory of the device with this number, from `aclrtMalloc` or mapped by `aclrtMapMem`.
    Device(i32),
    /// Pinned host memory, from `aclrtMallocHost` or registered by `aclrtHostRegister`.
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

/// Where the bytes of a block are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// From [`allocate`].
    Emulator,
    /// The program's own: they are only registered.
    Program,
    /// Physical memory of this number, which the addresses show.
    Mapped(u64),
}

#[derive(Debug)]
struct Block {
    info: Allocation,
    /// End of what may be touched: the requested size, rounded up to whole pages, and one page more.
    reach: usize,
    owner: Owner,
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

#[derive(Debug, Default)]
struct Books {
    arena: Option<Arena>,
    blocks: BTreeMap<usize, Block>,
    /// Registered host memory, by first address.
    registered: BTreeMap<usize, Registration>,
    memory: Virtual,
    lanes: HashMap<LaneId, Lane, BuildHasherDefault<IdHasher>>,
    /// Freed while work in flight uses it: given back once that is over.
    limbo: Vec<Block>,
    /// Freed of late, to name stale addresses.
    freed: VecDeque<Range<usize>>,
    /// Bytes of live allocations.
    used: BTreeMap<Place, u64>,
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

    fn used_bytes(&self, place: Place) -> u64 {
        self.used.get(&place).copied().unwrap_or(0)
    }

    fn insert(&mut self, block: Block) {
        if block.owner == Owner::Emulator {
            let used = self.used.entry(block.info.place).or_default();
            *used = used.saturating_add(block.info.bytes);
        }
        self.blocks.insert(block.info.base, block);
    }

    /// Takes a block out, and remembers its addresses as freed.
    fn remove(&mut self, base: usize) -> Option<Block> {
        let block = self.blocks.remove(&base)?;
        if block.owner == Owner::Emulator
            && let Some(used) = self.used.get_mut(&block.info.place)
        {
            *used = used.saturating_sub(block.info.bytes);
        }
        if self.freed.len() >= FREED {
            self.freed.pop_front();
        }
        self.freed.push_back(block.info.base..block.reach);
        Some(block)
    }
}

static BOOKS: Lock<Option<Books>> = Lock::new(None);

fn with<T>(body: impl FnOnce(&mut Books) -> T) -> T {
    body(BOOKS.lock().get_or_insert_default())
}

/// Bytes of memory of one device, and of pinned host memory.
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
    with(|books| {
        let left = limit.saturating_sub(books.used_bytes(place));
        if bytes > left {
            let at = match place {
                Place::Device(device) => format!("on device {device}"),
                Place::PinnedHost => "of pinned host memory".to_owned(),
            };
            return Err(failure!(
                MEMORY_ALLOCATION,
                "out of memory {at}: {bytes} bytes asked for, {left} of {limit} free"
            ));
        }
        let base = match place {
            Place::Device(_) => books
                .arena
                .get_or_insert_with(|| Arena::new(memory.base(), memory.len()))
                .take(reserved),
            Place::PinnedHost => allocate_host(page, reserved),
        };
        let base = base.ok_or_else(short)?;
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
            owner: Owner::Emulator,
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
        match (block.owner, block.info.place) {
            (Owner::Emulator, Place::Device(_)) => {
                memory.discard(block.info.base, block.reserved());
            }
            (Owner::Emulator, Place::PinnedHost) => {
                // SAFETY: the block came from `posix_memalign`, and left the books once: nobody else frees it.
                unsafe { libc::free(std::ptr::with_exposed_provenance_mut(block.info.base)) };
            }
            (Owner::Program | Owner::Mapped(_), _) => {}
        }
    }
    with(|books| {
        for block in &blocks {
            match (block.owner, block.info.place) {
                (Owner::Emulator, Place::Device(_)) => {
                    if let Some(arena) = &mut books.arena {
                        arena.give_back(block.info.base, block.reserved());
                    }
                }
                (Owner::Mapped(number), _) => books.unshow(memory, block, number),
                _ => {}
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
        let other = match block.owner {
            Owner::Emulator => None,
            Owner::Program => {
                Some("the program's own, whose registration aclrtHostUnregister ends")
            }
            Owner::Mapped(_) => Some("mapped, which aclrtUnmapMem ends"),
        };
        if let Some(other) = other {
            return Err(failure!(
                PARAM_INVALID,
                "{name}: {address:#x} is memory that is {other}"
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
        // Registered parts end with the memory.
        books
            .registered
            .retain(|start, _| !(address..block.reach).contains(start));
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
        let own = |block: &&Block| on_device(block) && block.owner == Owner::Emulator;
        let own: Vec<u64> = books
            .blocks
            .values()
            .filter(own)
            .map(|block| block.info.bytes)
            .collect();
        let (count, bytes) = (own.len() as u64, own.iter().sum::<u64>());
        let dropped: Vec<Block> = bases.iter().filter_map(|&b| books.remove(b)).collect();
        let (busy, now): (Vec<_>, Vec<_>) = dropped
            .into_iter()
            .partition(|block| block.uses.iter().any(|of| books.in_flight(of)));
        books.limbo.extend(busy);
        (now, count, bytes)
    });
    release(now);
    let (handles, physical_bytes) = virtual_memory::clear(device);
    (count + handles, bytes + physical_bytes)
}

/// The live allocation that an address lies in.
pub(crate) fn lookup(address: usize) -> Option<Allocation> {
    with(|books| books.block(address).map(|block| block.info))
}

/// Where live memory at `address` is, and how many bytes there are from there on: to the end of its allocation, or of what
/// is mapped side by side, which is one to programs.
pub(crate) fn room(address: usize) -> Option<(Place, u64)> {
    with(|books| {
        let first = books.block(address)?;
        let place = first.info.place;
        let mut end = first.info.base as u64 + first.info.bytes;
        let mut joined = matches!(first.owner, Owner::Mapped(_));
        while joined {
            let next = usize::try_from(end).ok().and_then(|end| books.block(end));
            let next = next.filter(|block| {
                matches!(block.owner, Owner::Mapped(_))
                    && block.info.place == place
                    && block.info.base as u64 == end
                    && block.info.bytes > 0
            });
            joined = next.is_some();
            end += next.map_or(0, |block| block.info.bytes);
        }
        Some((place, end.saturating_sub(address as u64)))
    })
}

/// The live allocation that `address` lies in (its guard page included), if any. Looking does not touch the memory.
pub fn allocation_at<T>(address: *const T) -> Option<Allocation> {
    lookup(address.addr())
}

/// Bytes in use on a device.
pub(crate) fn used_bytes(device: i32) -> u64 {
    with(|books| books.used_bytes(Place::Device(device)))
}

/// Live allocations: how many on devices, their bytes, how many of pinned host memory.
pub(crate) fn totals() -> (usize, u64, usize) {
    with(|books| {
        let mut totals = (0, 0, 0);
        for block in books.blocks.values() {
            match (block.owner, block.info.place) {
                (Owner::Emulator, Place::Device(_)) => {
                    totals.0 += 1;
                    totals.1 += block.info.bytes;
                }
                (Owner::Emulator, Place::PinnedHost) => totals.2 += 1,
                (Owner::Program | Owner::Mapped(_), _) => {}
            }
        }
        totals
    })
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
