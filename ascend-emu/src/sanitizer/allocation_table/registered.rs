//! Host memory that a program has registered: the program's own, or pinned memory of the emulator.

use super::written::WrittenBytes;
use super::{Allocation, MemoryLocation, Owner, Region, TABLE, with};
use crate::config::Check;
use crate::sanitizer::finding::report_all;
use crate::status::{ALREADY_REGISTERED, MEMORY_FREE, NOT_REGISTERED, Outcome, PARAM_INVALID, failure};

/// A registered range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registration {
    end: usize,
    /// Whether the memory is the program's, so that its region ends with the registration.
    foreign: bool,
    /// Whether the device can access it.
    mapped: bool,
}

/// Registers host memory. With `pin` it becomes pinned, which is refused for memory that is pinned already.
pub(crate) fn register_host(name: &str, address: usize, bytes: u64, mapped: bool, pin: bool) -> Outcome {
    let end = usize::try_from(bytes).ok().and_then(|bytes| address.checked_add(bytes)).ok_or_else(|| {
        failure!(PARAM_INVALID, "{name}: size: {bytes} bytes at {address:#x} leave the address space")
    })?;
    with(|table| {
        let before = table.registered.range(..end).next_back();
        if let Some((start, known)) = before
            && known.end > address
        {
            return Err(failure!(
                ALREADY_REGISTERED,
                "{name}: {address:#x} ({bytes} bytes) is registered already, in part or as a whole: {start:#x} to \
                 {:#x}",
                known.end
            ));
        }
        let owner = table.regions.range(..end).next_back();
        let owner = owner.map(|(_, region)| region).filter(|region| region.reach > address);
        let foreign = match owner {
            None => true,
            Some(region)
                if region.info.base <= address
                    && end <= region.reach
                    && region.info.location == MemoryLocation::PinnedHost =>
            {
                if pin {
                    return Err(failure!(
                        PARAM_INVALID,
                        "{name}: {address:#x} is pinned already; leave ACL_HOST_REG_PINNED out"
                    ));
                }
                false
            }
            Some(region) => {
                return Err(failure!(
                    PARAM_INVALID,
                    "{name}: {address:#x} ({bytes} bytes) is no one range of host memory: there is an allocation at \
                     {:#x}",
                    region.info.base
                ));
            }
        };
        table.registered.insert(address, Registration { end, foreign, mapped });
        if foreign {
            table.allocations += 1;
            table.insert(Region {
                info: Allocation {
                    id: table.allocations,
                    base: address,
                    bytes,
                    location: MemoryLocation::PinnedHost,
                    version: 0,
                },
                reach: end,
                owner: Owner::Program,
                accesses: Vec::new(),
                written: WrittenBytes::default(),
                poisoned: false,
                orders: Vec::new(),
            });
        }
        Ok(())
    })
}

/// Whether the device can access the registered host memory that begins at an address.
pub(crate) fn registered_mapped(name: &str, address: usize) -> Outcome<bool> {
    with(|table| match table.registered.get(&address) {
        Some(registration) => Ok(registration.mapped),
        None => Err(missing(name, address)),
    })
}

fn missing(name: &str, address: usize) -> crate::status::Failure {
    failure!(NOT_REGISTERED, "{name}: no registered host memory begins at {address:#x}")
}

/// Ends a registration; the memory is not freed.
pub(crate) fn unregister_host(check: Check, name: &'static str, address: usize) -> Outcome {
    let found = with(|table| {
        let Some(registration) = table.registered.get(&address) else {
            return Err(missing(name, address));
        };
        let region = table.regions.get(&address).filter(|_| registration.foreign);
        Ok(region.and_then(|region| table.ends_in_use(name, region)))
    })?;
    report_all(check, MEMORY_FREE, found)?;
    with(|table| {
        let registration = table.registered.remove(&address).ok_or_else(|| missing(name, address))?;
        if registration.foreign {
            // The sanitizer does not follow what the program does with the memory now.
            table.regions.remove(&address);
        }
        Ok(())
    })
}

/// The number of registered ranges.
pub(crate) fn registrations() -> usize {
    TABLE.lock().as_ref().map_or(0, |table| table.registered.len())
}
