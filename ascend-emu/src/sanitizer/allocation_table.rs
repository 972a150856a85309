//! Who owns which bytes, and which queued work accesses them.
//!
//! Two accesses of the same bytes, at least one of them a write, are a race if neither happens before the other,
//! whether or not they ran at the same time.

mod contents;
mod hazards;
mod registered;
mod virtual_memory;
mod written;

pub(crate) use contents::{copied, inspect_reads, spare, wrote, wrote_elements};
pub(crate) use hazards::{
    add_replay_accesses, add_stream, admit, busy_streams, happens_before, host_has_waited, host_waited,
    host_waited_for_stream, inspect, order_after, order_after_unknown, remove_stream, snapshot_clock,
};
pub(crate) use registered::{register_host, registered_mapped, registrations, unregister_host};
pub(crate) use virtual_memory::{
    allocate_physical, free_physical, map, release_range, reserve, totals as virtual_totals, unmap,
};

use super::finding::{Suspicion, report_all};
use super::vector_clock::StreamOrder;
use crate::config::{Check, config, poisons};
use crate::finding_kind::FindingKind;
use crate::lock::Lock;
use crate::memory::{Arena, DeviceMemory};
use crate::status::{Failure, MEMORY_ALLOCATION, MEMORY_FREE, Outcome, PARAM_INVALID, failure};
use hazards::QueuedAccess;
use registered::Registration;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use virtual_memory::VirtualMemory;
use written::WrittenBytes;

/// The location of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MemoryLocation {
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
    /// The size that was requested.
    pub bytes: u64,
    /// The device, or pinned host memory.
    pub location: MemoryLocation,
    /// Number of operations that have written to it.
    pub version: u64,
}

/// Who provides the bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The emulator, by [`allocate`].
    Emulator,
    /// The program, which has registered its own memory.
    Program,
    /// The physical memory with this number, which is mapped at the addresses.
    Mapped(u64),
}

#[derive(Debug)]
struct Region {
    info: Allocation,
    /// End of the bytes that may be touched. Memory of the emulator is rounded up to whole pages, with one guard page
    /// behind them; memory that is registered or mapped ends exactly.
    reach: usize,
    owner: Owner,
    accesses: Vec<QueuedAccess>,
    /// The written bytes of device memory. For mapped memory, the physical memory records them instead.
    written: WrittenBytes,
    /// Whether the memory was handed out full of NaN.
    poisoned: bool,
    /// The order in which parts were written last, by their offsets.
    orders: Vec<(Range<usize>, &'static str)>,
}

impl Region {
    fn reserved(&self) -> usize {
        self.reach - self.info.base
    }

    fn requested_end(&self) -> usize {
        self.info.base.saturating_add(self.info.bytes as usize)
    }
}

#[derive(Debug, Default)]
struct AllocationTable {
    arena: Option<Arena>,
    regions: BTreeMap<usize, Region>,
    /// Registered host memory, by first address.
    registered: BTreeMap<usize, Registration>,
    memory: VirtualMemory,
    order: StreamOrder,
    /// Freed regions that work in flight still accesses; their memory is given back when that work is over.
    deferred_frees: Vec<Region>,
    /// The ranges that were freed last, so that messages can distinguish stale addresses from wrong ones.
    freed: VecDeque<Range<usize>>,
    /// Bytes of live allocations.
    used: BTreeMap<MemoryLocation, u64>,
    allocations: u64,
}

/// Largest number of freed ranges that are remembered.
const FREED: usize = 1024;

impl AllocationTable {
    /// The region that contains an address, guard page included.
    fn region(&self, address: usize) -> Option<&Region> {
        let (_, region) = self.regions.range(..=address).next_back()?;
        (address < region.reach).then_some(region)
    }

    /// Removes the deferred frees that no work in flight accesses any more.
    fn take_finished_frees(&mut self) -> Vec<Region> {
        if self.deferred_frees.is_empty() {
            return Vec::new();
        }
        let (keep, done) =
            std::mem::take(&mut self.deferred_frees).into_iter().partition(|region| self.is_in_flight(region));
        self.deferred_frees = keep;
        done
    }

    /// Whether work in flight accesses a region.
    fn is_in_flight(&self, region: &Region) -> bool {
        let mut accesses = region.accesses.iter();
        accesses.any(|known| self.order.in_flight(known.operation))
    }

    /// Defers the end of a region that work in flight accesses; otherwise returns it, to be released.
    fn end(&mut self, region: Region) -> Vec<Region> {
        if self.is_in_flight(&region) {
            self.deferred_frees.push(region);
            return Vec::new();
        }
        vec![region]
    }

    /// The misuse of ending a region that queued work accesses, without a wait of the host for that work.
    fn ends_in_use(&self, name: &'static str, region: &Region) -> Option<Suspicion> {
        let mut accesses = region.accesses.iter();
        let unsynced = accesses.find(|known| !self.order.host_has_waited(known.operation))?;
        let (address, (queued, what)) = (region.info.base, unsynced.site);
        Some(Suspicion {
            kind: FindingKind::FreeInUse,
            site: (name, what),
            tensor: address,
            message: format!(
                "{name}: {address:#x} ({} bytes) is the {what} of a queued {queued}, and nothing has waited for \
                 that since",
                region.info.bytes
            ),
        })
    }

    fn used_bytes(&self, location: MemoryLocation) -> u64 {
        self.used.get(&location).copied().unwrap_or(0)
    }

    /// Adds a region; its addresses no longer count as freed.
    fn insert(&mut self, region: Region) {
        if region.owner == Owner::Emulator {
            let used = self.used.entry(region.info.location).or_default();
            *used = used.saturating_add(region.info.bytes);
        }
        self.forget_freed(region.info.base..region.reach);
        self.regions.insert(region.info.base, region);
    }

    /// Removes a region, and remembers its addresses as freed.
    fn remove(&mut self, base: usize) -> Option<Region> {
        let region = self.regions.remove(&base)?;
        if region.owner == Owner::Emulator
            && let Some(used) = self.used.get_mut(&region.info.location)
        {
            *used = used.saturating_sub(region.info.bytes);
        }
        self.remember_freed(region.info.base..region.reach);
        Some(region)
    }

    /// Remembers a range as freed.
    fn remember_freed(&mut self, range: Range<usize>) {
        if self.freed.len() >= FREED {
            self.freed.pop_front();
        }
        self.freed.push_back(range);
    }

    /// Forgets the freed ranges that overlap `range`, which is in use again.
    fn forget_freed(&mut self, range: Range<usize>) {
        self.freed.retain(|freed| freed.end <= range.start || range.end <= freed.start);
    }
}

static TABLE: Lock<Option<AllocationTable>> = Lock::new(None);

fn with<T>(body: impl FnOnce(&mut AllocationTable) -> T) -> T {
    body(TABLE.lock().get_or_insert_default())
}

/// Bytes of memory of each device; pinned host memory has the same capacity.
pub(crate) fn capacity() -> Outcome<u64> {
    let len = DeviceMemory::get()?.len() as u64;
    Ok(config().memory.map_or(len, |bytes| bytes.min(len)))
}

/// Allocates memory. Device memory reads as zero, or, where memory is poisoned, as NaN of every floating-point type.
pub(crate) fn allocate(location: MemoryLocation, bytes: u64) -> Outcome<usize> {
    let memory = DeviceMemory::get()?;
    let page = memory.page();
    let short = || failure!(MEMORY_ALLOCATION, "out of memory: {bytes} bytes asked for on {location:?}");
    let reserved = usize::try_from(bytes)
        .ok()
        .and_then(|bytes| bytes.checked_next_multiple_of(page))
        .and_then(|bytes| bytes.checked_add(page))
        .ok_or_else(short)?;
    settle();
    let limit = capacity()?;
    let poisoned = poisons() && location != MemoryLocation::PinnedHost;
    let base = with(|table| {
        let left = limit.saturating_sub(table.used_bytes(location));
        if bytes > left {
            let place = match location {
                MemoryLocation::Device(device) => format!("on device {device}"),
                MemoryLocation::PinnedHost => "of pinned host memory".to_owned(),
            };
            return Err(failure!(
                MEMORY_ALLOCATION,
                "out of memory {place}: {bytes} bytes asked for, {left} of {limit} free"
            ));
        }
        let base = match location {
            MemoryLocation::Device(_) => {
                table.arena.get_or_insert_with(|| Arena::new(memory.base(), memory.len())).take(reserved)
            }
            MemoryLocation::PinnedHost => allocate_host(page, reserved),
        };
        let base = base.ok_or_else(short)?;
        table.allocations += 1;
        let region = Region {
            info: Allocation { id: table.allocations, base, bytes, location, version: 0 },
            reach: base.saturating_add(reserved),
            owner: Owner::Emulator,
            accesses: Vec::with_capacity(8),
            written: WrittenBytes::default(),
            poisoned,
            orders: Vec::new(),
        };
        table.insert(region);
        Ok(base)
    })?;
    if poisoned {
        // SAFETY: the memory was handed out just now, and no other code knows its address yet.
        unsafe { memory.poison(base, reserved) };
    }
    Ok(base)
}

fn allocate_host(align: usize, bytes: usize) -> Option<usize> {
    let mut start = std::ptr::null_mut();
    // SAFETY: `start` is a valid place for the result; `align` is a power of two and a multiple of a pointer's size.
    let status = unsafe { libc::posix_memalign(&raw mut start, align, bytes) };
    (status == 0 && !start.is_null()).then(|| start.expose_provenance())
}

/// Gives the memory of regions back to its source.
fn release(regions: Vec<Region>) {
    let Ok(memory) = DeviceMemory::get() else {
        return;
    };
    for region in &regions {
        match (region.owner, region.info.location) {
            (Owner::Emulator, MemoryLocation::Device(_)) => {
                memory.discard(region.info.base, region.reserved(), region.poisoned);
            }
            (Owner::Emulator, MemoryLocation::PinnedHost) => {
                // SAFETY: the region came from `posix_memalign`, and left the table once: no other code frees it.
                unsafe { libc::free(std::ptr::with_exposed_provenance_mut(region.info.base)) };
            }
            (Owner::Program | Owner::Mapped(_), _) => {}
        }
    }
    with(|table| {
        for region in &regions {
            match (region.owner, region.info.location) {
                (Owner::Emulator, MemoryLocation::Device(_)) => {
                    if let Some(arena) = &mut table.arena {
                        arena.give_back(region.info.base, region.reserved());
                    }
                }
                (Owner::Mapped(number), _) => table.end_mapping(memory, region, number),
                _ => {}
            }
        }
    });
}

/// Carries out the deferred frees whose work is over.
fn settle() {
    let done = with(AllocationTable::take_finished_frees);
    if !done.is_empty() {
        release(done);
    }
}

/// Frees memory that [`allocate`] returned; defers this while work in flight accesses the memory.
pub(crate) fn free(check: Check, name: &'static str, device: bool, address: usize) -> Outcome {
    let found = with(|table| {
        let Some(region) = table.regions.get(&address) else {
            return Err(not_allocated(table, name, address));
        };
        if device != matches!(region.info.location, MemoryLocation::Device(_)) {
            let (is, other) =
                if device { ("pinned host memory", "aclrtFreeHost") } else { ("device memory", "aclrtFree") };
            return Err(failure!(PARAM_INVALID, "{name}: {address:#x} is {is}, which {other} frees"));
        }
        let other = match region.owner {
            Owner::Emulator => None,
            Owner::Program => Some("the program's own, whose registration aclrtHostUnregister ends"),
            Owner::Mapped(_) => Some("mapped, which aclrtUnmapMem ends"),
        };
        if let Some(other) = other {
            return Err(failure!(PARAM_INVALID, "{name}: {address:#x} is memory that is {other}"));
        }
        Ok(table.ends_in_use(name, region))
    })?;
    report_all(check, MEMORY_FREE, found)?;
    let free_now = with(|table| -> Outcome<Vec<Region>> {
        let region = table.remove(address).ok_or_else(|| not_allocated(table, name, address))?;
        // Registrations within the memory end with it.
        table.registered.retain(|start, _| !(address..region.reach).contains(start));
        Ok(table.end(region))
    })?;
    release(free_now);
    settle();
    Ok(())
}

fn not_allocated(table: &AllocationTable, name: &str, address: usize) -> Failure {
    let why = if let Some(region) = table.region(address) {
        format!("is inside the allocation at {:#x}", region.info.base)
    } else if table.freed.iter().any(|range| range.start == address) {
        "was already freed".to_owned()
    } else {
        "was not allocated".to_owned()
    };
    failure!(PARAM_INVALID, "{name}: {address:#x} {why}")
}

/// Frees everything that is allocated on a device, as a reset does. Returns the number of allocations and of bytes.
pub(crate) fn clear_device(device: i32) -> (u64, u64) {
    let (now, count, bytes) = with(|table| {
        let on_device = |region: &&Region| region.info.location == MemoryLocation::Device(device);
        let bases: Vec<usize> = table.regions.values().filter(on_device).map(|region| region.info.base).collect();
        let own = |region: &&Region| on_device(region) && region.owner == Owner::Emulator;
        let own: Vec<u64> = table.regions.values().filter(own).map(|region| region.info.bytes).collect();
        let (count, bytes) = (own.len() as u64, own.iter().sum::<u64>());
        let mut now = Vec::new();
        for base in bases {
            let region = table.remove(base);
            now.extend(region.into_iter().flat_map(|region| table.end(region)));
        }
        (now, count, bytes)
    });
    release(now);
    let (handles, physical_bytes) = virtual_memory::clear(device);
    (count + handles, bytes + physical_bytes)
}

/// The live allocation that contains an address.
pub(crate) fn lookup(address: usize) -> Option<Allocation> {
    with(|table| table.region(address).map(|region| region.info))
}

/// The location of live memory at `address`, and the number of bytes from there to the end of its allocation. Memory
/// that is mapped side by side counts as one allocation.
pub(crate) fn bytes_from(address: usize) -> Option<(MemoryLocation, u64)> {
    with(|table| {
        let first = table.region(address)?;
        let location = first.info.location;
        let mut end = first.info.base as u64 + first.info.bytes;
        let mut joined = matches!(first.owner, Owner::Mapped(_));
        while joined {
            let next = usize::try_from(end).ok().and_then(|end| table.region(end));
            let next = next.filter(|region| {
                matches!(region.owner, Owner::Mapped(_))
                    && region.info.location == location
                    && region.info.base as u64 == end
                    && region.info.bytes > 0
            });
            joined = next.is_some();
            end += next.map_or(0, |region| region.info.bytes);
        }
        Some((location, end.saturating_sub(address as u64)))
    })
}

/// The live allocation that contains `address`, its guard page included. The memory is not touched.
pub fn allocation_at<T>(address: *const T) -> Option<Allocation> {
    lookup(address.addr())
}

/// Bytes in use on a device.
pub(crate) fn used_bytes(device: i32) -> u64 {
    with(|table| table.used_bytes(MemoryLocation::Device(device)))
}

/// The number of live allocations on devices, their bytes, and the number of live allocations of pinned host memory.
pub(crate) fn totals() -> (usize, u64, usize) {
    with(|table| {
        let mut totals = (0, 0, 0);
        for region in table.regions.values() {
            match (region.owner, region.info.location) {
                (Owner::Emulator, MemoryLocation::Device(_)) => {
                    totals.0 += 1;
                    totals.1 += region.info.bytes;
                }
                (Owner::Emulator, MemoryLocation::PinnedHost) => totals.2 += 1,
                (Owner::Program | Owner::Mapped(_), _) => {}
            }
        }
        totals
    })
}

/// Counts a write to each allocation that contains one of the addresses.
pub(crate) fn written(addresses: impl Iterator<Item = usize>) {
    with(|table| {
        for address in addresses {
            if let Some((_, region)) = table.regions.range_mut(..=address).next_back()
                && address < region.reach
            {
                region.info.version += 1;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(range: Range<usize>) -> Region {
        Region {
            info: Allocation {
                id: 1,
                base: range.start,
                bytes: (range.end - range.start) as u64,
                location: MemoryLocation::Device(0),
                version: 0,
            },
            reach: range.end,
            owner: Owner::Emulator,
            accesses: Vec::new(),
            written: WrittenBytes::default(),
            poisoned: false,
            orders: Vec::new(),
        }
    }

    #[test]
    fn an_address_within_a_live_region_is_not_called_freed() {
        let said = |table: &AllocationTable, address| not_allocated(table, "aclrtFree", address).message.into_owned();
        let mut table = AllocationTable::default();
        for base in [0x4000, 0x6000] {
            table.insert(region(base..base + 0x2000));
            table.remove(base);
        }
        assert!(said(&table, 0x6000).contains("was already freed"));
        // The new region begins in front of both, and overlaps one.
        table.insert(region(0x1000..0x5000));
        assert!(said(&table, 0x4000).contains("is inside the allocation at 0x1000"));
        assert!(said(&table, 0x6000).contains("was already freed"));
        table.remove(0x1000);
        assert!(said(&table, 0x4000).contains("was not allocated"));
    }
}
