//! Virtual memory: reserved ranges of addresses, physical memory, and its mappings.

use super::written::WrittenBytes;
use super::{Allocation, AllocationTable, MemoryLocation, Owner, Region, capacity, settle, with};
use crate::config::{Check, poisons};
use crate::handle::{Id, Kind, Table};
use crate::memory::{DeviceMemory, POISON, PhysicalMemory, Range, Ranges, hide};
use crate::sanitizer::finding::{Suspicion, report_all};
use crate::status::{MEMORY_ALLOCATION, MEMORY_FREE, Outcome, PARAM_INVALID, failure};
use std::collections::BTreeMap;
use std::ffi::c_void;

/// Handles of physical memory; the number is that of [`VirtualMemory::physical`].
static HANDLES: Table<u64> = Table::new(Kind::Physical);

/// Physical memory behind a handle.
#[derive(Debug)]
struct PhysicalHandle {
    device: i32,
    /// The size that was requested.
    bytes: u64,
    /// Start of its part of the file; `len` is the part's length.
    offset: usize,
    len: usize,
    /// The number of its mappings.
    mappings: usize,
    /// Whether the program has its handle.
    held: bool,
    /// The written bytes, wherever they were mapped when they were written.
    written: WrittenBytes,
    /// Whether it is to be filled with NaN when it is mapped first.
    unpoisoned: bool,
}

/// A range that a program has reserved.
#[derive(Clone, Copy, Debug)]
struct ReservedRange {
    /// The range, which may be longer than the requested size.
    range: Range,
    /// The requested size, in whole units.
    len: usize,
    /// The device of the thread that reserved it.
    device: Option<i32>,
}

/// The physical memory and the reserved ranges of the process.
#[derive(Debug, Default)]
pub(super) struct VirtualMemory {
    file: Option<PhysicalMemory>,
    physical: BTreeMap<u64, PhysicalHandle>,
    count: u64,
    /// By first address.
    reserved: BTreeMap<usize, ReservedRange>,
}

impl VirtualMemory {
    /// The written bytes of the physical memory with a number.
    pub(super) fn written(&self, number: u64) -> Option<&WrittenBytes> {
        self.physical.get(&number).map(|physical| &physical.written)
    }

    /// The written bytes of physical memory, to be changed.
    pub(super) fn written_mut(&mut self, number: u64) -> Option<&mut WrittenBytes> {
        let physical = self.physical.get_mut(&number);
        physical.map(|physical| &mut physical.written)
    }
}

/// `aclrtReserveMemAddress`.
pub(crate) fn reserve(device: Option<i32>, bytes: usize) -> Outcome<usize> {
    let range = DeviceMemory::get()?.ranges.reserve(bytes)?;
    with(|table| {
        let len = bytes.next_multiple_of(Ranges::ALIGNMENT);
        let known = ReservedRange { range, len, device };
        table.memory.reserved.insert(range.base, known);
        let end = range.base + len;
        table.forget_freed(range.base..end);
    });
    Ok(range.base)
}

/// `aclrtReleaseMemAddress`.
pub(crate) fn release_range(name: &str, address: usize) -> Outcome {
    settle();
    let range = with(|table| {
        let Some(known) = table.memory.reserved.get(&address).copied() else {
            return Err(failure!(
                PARAM_INVALID,
                "{name}: virPtr: given {address:#x}, allowed: an address that aclrtReserveMemAddress gave"
            ));
        };
        let end = known.range.base + known.len;
        let regions = table.regions.range(address..end).map(|(_, region)| region);
        let dying = table.deferred_frees.iter();
        let inside = regions.chain(dying).find(|region| (address..end).contains(&region.info.base));
        if let Some(region) = inside {
            return Err(failure!(
                PARAM_INVALID,
                "{name}: {:#x} in the range ({} bytes) is still mapped, or used by queued work; aclrtUnmapMem, then \
                 wait, comes first",
                region.info.base,
                region.info.bytes
            ));
        }
        table.memory.reserved.remove(&address);
        table.remember_freed(address..end);
        Ok(known.range)
    })?;
    DeviceMemory::get()?.ranges.give_back(range);
    Ok(())
}

/// `aclrtMallocPhysical`; the memory reads as zero, or as NaN where memory is poisoned.
pub(crate) fn allocate_physical(device: i32, bytes: u64) -> Outcome<Id> {
    let memory = DeviceMemory::get()?;
    let len = usize::try_from(bytes)
        .ok()
        .and_then(|bytes| bytes.checked_next_multiple_of(Ranges::ALIGNMENT))
        .ok_or_else(|| failure!(MEMORY_ALLOCATION, "out of memory: {bytes} bytes asked for on device {device}"))?;
    settle();
    let limit = capacity()?;
    let number = with(|table| {
        let location = MemoryLocation::Device(device);
        let left = limit.saturating_sub(table.used_bytes(location));
        let short = || {
            failure!(
                MEMORY_ALLOCATION,
                "out of memory on device {device}: {bytes} bytes asked for, {left} of {limit} free"
            )
        };
        if len as u64 > left {
            return Err(short());
        }
        let file = match &mut table.memory.file {
            Some(file) => file,
            none => none.insert(PhysicalMemory::new(memory.len())?),
        };
        let offset = file.take(len).ok_or_else(short)?;
        table.memory.count += 1;
        let number = table.memory.count;
        let physical = PhysicalHandle {
            device,
            bytes,
            offset,
            len,
            mappings: 0,
            held: true,
            written: WrittenBytes::default(),
            unpoisoned: poisons(),
        };
        table.memory.physical.insert(number, physical);
        let used = table.used.entry(location).or_default();
        *used = used.saturating_add(len as u64);
        Ok(number)
    })?;
    Ok(HANDLES.insert(number))
}

/// `aclrtFreePhysical`: mappings of the memory stay until they are unmapped.
pub(crate) fn free_physical(handle: *const c_void) -> Outcome {
    let number = *HANDLES.remove(handle)?;
    with(|table| {
        if let Some(physical) = table.memory.physical.get_mut(&number) {
            physical.held = false;
        }
        table.drop_physical(number);
    });
    Ok(())
}

/// `aclrtMapMem`.
pub(crate) fn map(name: &str, address: usize, bytes: usize, handle: *const c_void) -> Outcome {
    let number = *HANDLES.get(handle)?;
    let memory = DeviceMemory::get()?;
    settle();
    with(|table| {
        let AllocationTable { memory: virtuals, regions, deferred_frees, .. } = table;
        let wrong = |what: &str, value: usize, allowed: String| {
            failure!(PARAM_INVALID, "{name}: {what}: given {value:#x}, allowed: {allowed}")
        };
        let Some(physical) = virtuals.physical.get_mut(&number) else {
            return Err(failure!(PARAM_INVALID, "{name}: the physical memory is gone"));
        };
        if bytes as u64 != physical.bytes || bytes != physical.len {
            return Err(wrong(
                "size",
                bytes,
                format!(
                    "that of the physical memory, {:#x}, if it is a multiple of {:#x}",
                    physical.bytes,
                    Ranges::ALIGNMENT
                ),
            ));
        }
        let outside = || {
            wrong(
                "virPtr",
                address,
                format!(
                    "a multiple of {:#x} with {bytes:#x} bytes of one range of aclrtReserveMemAddress from there on",
                    Ranges::ALIGNMENT
                ),
            )
        };
        let range = virtuals.reserved.range(..=address).next_back();
        let (_, known) = range.ok_or_else(outside)?;
        let (start, end) = (known.range.base, known.range.base + known.len);
        let fits = address < end && bytes <= end - address;
        if !fits || !address.is_multiple_of(Ranges::ALIGNMENT) {
            return Err(outside());
        }
        let dying = deferred_frees.iter().filter(|region| (start..end).contains(&region.info.base));
        let living = regions.range(start..end).map(|(_, region)| region);
        for region in living.chain(dying) {
            let apart = region.reach <= address || address + bytes <= region.info.base;
            if !apart {
                return Err(failure!(
                    PARAM_INVALID,
                    "{name}: {:#x} ({} bytes) is mapped already, or still used by queued work",
                    region.info.base,
                    region.info.bytes
                ));
            }
            if region.info.location != MemoryLocation::Device(physical.device) {
                return Err(failure!(
                    PARAM_INVALID,
                    "{name}: the range at {start:#x} shows memory of another device already, allowed: memory of one"
                ));
            }
        }
        let file = virtuals.file.as_ref();
        let file = file.ok_or_else(|| failure!(PARAM_INVALID, "{name}: the physical memory is gone"))?;
        // SAFETY: the part of the backing view belongs to the reserved range, and no mapping, live or ending, is in
        // it. Another range may map the same physical memory: then bytes have two addresses, and neither locks on
        // accesses nor the check for overlapping outputs, both of which go by address, know that these are the same
        // bytes. Work that runs on both at once reads or writes the bytes through raw pointers, never through
        // references, and reads any of the values that are written there, as on hardware.
        unsafe { file.show(memory.host(address), physical.offset, bytes) }?;
        if std::mem::take(&mut physical.unpoisoned) {
            // SAFETY: the bytes were mapped just now, for the first time: no other code has their address.
            unsafe { memory.host(address).write_bytes(POISON, bytes) };
        }
        physical.mappings += 1;
        let device = physical.device;
        table.allocations += 1;
        let region = Region {
            info: Allocation {
                id: table.allocations,
                base: address,
                bytes: bytes as u64,
                location: MemoryLocation::Device(device),
                version: 0,
            },
            reach: address + bytes,
            owner: Owner::Mapped(number),
            accesses: Vec::with_capacity(8),
            written: WrittenBytes::default(),
            poisoned: false,
            orders: Vec::new(),
        };
        table.insert(region);
        Ok(())
    })
}

/// `aclrtUnmapMem`. Memory that work in flight accesses stays mapped until that work is over.
pub(crate) fn unmap(check: Check, name: &'static str, address: usize) -> Outcome {
    let missing = || {
        failure!(PARAM_INVALID, "{name}: virPtr: given {address:#x}, allowed: an address that aclrtMapMem was given")
    };
    let is_mapped = |region: &&Region| matches!(region.owner, Owner::Mapped(_));
    let found = with(|table| -> Outcome<Option<Suspicion>> {
        let region = table.regions.get(&address).filter(is_mapped).ok_or_else(missing)?;
        Ok(table.ends_in_use(name, region))
    })?;
    report_all(check, MEMORY_FREE, found)?;
    let now = with(|table| -> Outcome<Vec<Region>> {
        table.regions.get(&address).filter(is_mapped).ok_or_else(missing)?;
        let region = table.remove(address).ok_or_else(missing)?;
        Ok(table.end(region))
    })?;
    super::release(now);
    settle();
    Ok(())
}

impl AllocationTable {
    /// Ends a mapping.
    pub(super) fn end_mapping(&mut self, memory: &DeviceMemory, region: &Region, number: u64) {
        // SAFETY: the mapping's part of the backing view, which nothing in flight accesses.
        unsafe { hide(memory.host(region.info.base), region.reserved()) };
        if let Some(physical) = self.memory.physical.get_mut(&number) {
            physical.mappings = physical.mappings.saturating_sub(1);
        }
        self.drop_physical(number);
    }

    /// Gives physical memory back if it has neither a handle nor a mapping.
    fn drop_physical(&mut self, number: u64) {
        let idle = |physical: &PhysicalHandle| !physical.held && physical.mappings == 0;
        if !self.memory.physical.get(&number).is_some_and(idle) {
            return;
        }
        let Some(physical) = self.memory.physical.remove(&number) else {
            return;
        };
        if let Some(used) = self.used.get_mut(&MemoryLocation::Device(physical.device)) {
            *used = used.saturating_sub(physical.len as u64);
        }
        if let Some(file) = &mut self.memory.file {
            file.give_back(physical.offset, physical.len);
        }
    }
}

/// Ends the handles and ranges of a device whose mappings are gone, as a reset does. Returns the number of handles
/// and their bytes.
pub(super) fn clear(device: i32) -> (u64, u64) {
    let memory = DeviceMemory::get();
    let (numbers, bytes, ranges) = with(|table| {
        let AllocationTable { memory, regions, deferred_frees, .. } = table;
        let of_device = |physical: &&mut PhysicalHandle| physical.device == device && physical.held;
        let mut bytes = 0u64;
        let mut numbers = Vec::new();
        for (number, physical) in &mut memory.physical {
            if of_device(&physical) {
                physical.held = false;
                bytes = bytes.saturating_add(physical.bytes);
                numbers.push(*number);
            }
        }
        let mut ranges = Vec::new();
        memory.reserved.retain(|&start, known| {
            let end = start + known.len;
            let used = regions.range(start..end).next().is_some()
                || deferred_frees.iter().any(|region| (start..end).contains(&region.info.base));
            let keep = known.device != Some(device) || used;
            if !keep {
                ranges.push(known.range);
            }
            keep
        });
        for &number in &numbers {
            table.drop_physical(number);
        }
        (numbers, bytes, ranges)
    });
    HANDLES.retain(|number| !numbers.contains(number));
    if let Ok(memory) = memory {
        for range in ranges {
            memory.ranges.give_back(range);
        }
    }
    (numbers.len() as u64, bytes)
}

/// The number of handles of physical memory, and of reserved ranges.
pub(crate) fn totals() -> (usize, usize) {
    (HANDLES.len(), with(|table| table.memory.reserved.len()))
}
