//! Host memory that a program has registered: its own, or pinned memory of the emulator's.

use super::{Allocation, BOOKS, Block, Books, Owner, Place, with};
use crate::config::Check;
use crate::sanitizer::{FindingKind, Suspicion, report_all};
use crate::status::{
    ALREADY_REGISTERED, MEMORY_FREE, NOT_REGISTERED, Outcome, PARAM_INVALID, failure,
};

/// A registered range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registration {
    end: usize,
    /// The memory is the program's, so that its block ends with the registration.
    foreign: bool,
    /// The device reaches it.
    mapped: bool,
}

/// Registers host memory, `pin` if it is to become pinned: memory that is pinned already refuses that.
pub(crate) fn register_host(
    name: &str,
    address: usize,
    bytes: u64,
    mapped: bool,
    pin: bool,
) -> Outcome {
    let end = usize::try_from(bytes)
        .ok()
        .and_then(|bytes| address.checked_add(bytes))
        .ok_or_else(|| {
            failure!(
                PARAM_INVALID,
                "{name}: size: {bytes} bytes at {address:#x} leave the address space"
            )
        })?;
    with(|books| {
        let before = books.registered.range(..end).next_back();
        if let Some((start, known)) = before
            && known.end > address
        {
            return Err(failure!(
                ALREADY_REGISTERED,
                "{name}: {address:#x} ({bytes} bytes) is registered already, in part or as a whole: {start:#x} to {:#x}",
                known.end
            ));
        }
        let owner = books.blocks.range(..end).next_back();
        let owner = owner
            .map(|(_, block)| block)
            .filter(|block| block.reach > address);
        let foreign = match owner {
            None => true,
            Some(block)
                if block.info.base <= address
                    && end <= block.reach
                    && block.info.place == Place::PinnedHost =>
            {
                if pin {
                    return Err(failure!(
                        PARAM_INVALID,
                        "{name}: {address:#x} is pinned already; leave ACL_HOST_REG_PINNED out"
                    ));
                }
                false
            }
            Some(block) => {
                return Err(failure!(
                    PARAM_INVALID,
                    "{name}: {address:#x} ({bytes} bytes) is no one range of host memory: there is an allocation at \
                     {:#x}",
                    block.info.base
                ));
            }
        };
        books.registered.insert(
            address,
            Registration {
                end,
                foreign,
                mapped,
            },
        );
        if foreign {
            books.allocations += 1;
            books.freed.retain(|range| !range.contains(&address));
            books.blocks.insert(
                address,
                Block {
                    info: Allocation {
                        id: books.allocations,
                        base: address,
                        bytes,
                        place: Place::PinnedHost,
                        version: 0,
                    },
                    reach: end,
                    owner: Owner::Program,
                    uses: Vec::new(),
                },
            );
        }
        Ok(())
    })
}

/// Whether the device reaches the registered host memory that begins at an address.
pub(crate) fn registered_mapped(name: &str, address: usize) -> Outcome<bool> {
    with(|books| match books.registered.get(&address) {
        Some(registration) => Ok(registration.mapped),
        None => Err(missing(name, address)),
    })
}

fn missing(name: &str, address: usize) -> crate::status::Failure {
    failure!(
        NOT_REGISTERED,
        "{name}: no registered host memory begins at {address:#x}"
    )
}

/// Ends a registration. The memory stays its owner's.
pub(crate) fn unregister_host(check: Check, name: &'static str, address: usize) -> Outcome {
    let found = with(|books| {
        let Some(registration) = books.registered.get(&address) else {
            return Err(missing(name, address));
        };
        let block = books.blocks.get(&address).filter(|_| registration.foreign);
        let uses = block.map(|block| block.uses.as_slice()).unwrap_or_default();
        let unsynced = uses.iter().find(|of| !Books::synced(&books.lanes, of));
        Ok(unsynced.map(|of| Suspicion {
            kind: FindingKind::FreeInUse,
            site: (name, of.site.1),
            message: format!(
                "{name}: {address:#x} is the {} of a queued {}, and nothing has waited for that since",
                of.site.1, of.site.0
            ),
        }))
    })?;
    report_all(check, MEMORY_FREE, found)?;
    with(|books| {
        let registration = books
            .registered
            .remove(&address)
            .ok_or_else(|| missing(name, address))?;
        if registration.foreign {
            // What the program does with the memory now is its own affair.
            books.blocks.remove(&address);
        }
        Ok(())
    })
}

/// How many ranges are registered.
pub(crate) fn registrations() -> usize {
    BOOKS
        .lock()
        .as_ref()
        .map_or(0, |books| books.registered.len())
}
