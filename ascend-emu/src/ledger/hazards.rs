//! What queued work uses, and what is wrong with that.

use super::clocks::LaneId;
use super::{Block, Books, Owner, with};
use crate::config::Check;
use crate::fault::Fault;
use crate::operator::Access;
use crate::sanitizer::{FindingKind, Suspicion, report_all};
use crate::status::{AICORE_EXCEPTION, Outcome};
use smallvec::SmallVec;

/// One use of a part of an allocation by queued work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) write: bool,
    pub(super) lane: LaneId,
    pub(super) seq: u64,
    pub(super) site: (&'static str, &'static str),
}

/// Uses kept for one allocation; beyond that the oldest is forgotten, which loses findings but makes none up.
const USES: usize = 4096;

/// Visits the accesses of one operation.
pub(crate) type Visit<'a> = &'a dyn Fn(&mut dyn FnMut(Access));

/// What examining an operation's accesses brought to light.
#[derive(Default)]
pub(super) struct Examined {
    pub(super) suspicions: Vec<Suspicion>,
    /// Set if a range is no memory.
    pub(super) broken: Option<String>,
}

impl Books {
    /// Checks that a range lies in one allocation. `Err` is a range that no memory answers for.
    pub(super) fn bounds(
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

    /// Visits the parts of an access that lie in one block each: memory that is mapped side by side is one to programs. What
    /// lies past the last block is a part as well.
    fn parts(&self, access: Access, visit: &mut dyn FnMut(Access)) {
        let mut rest = access;
        while let Some(block) = self.block(rest.address)
            && let Owner::Mapped(_) = block.owner
        {
            let room = (block.reach - rest.address) as u64;
            if rest.bytes <= room {
                break;
            }
            visit(Access {
                bytes: room,
                ..rest
            });
            rest.address = block.reach;
            rest.bytes -= room;
        }
        visit(rest);
    }

    /// Uses of a range that conflict with an access to it.
    pub(super) fn conflicts(block: &Block, access: Access) -> impl Iterator<Item = &Use> {
        let end = access
            .address
            .saturating_add(usize::try_from(access.bytes).unwrap_or(usize::MAX));
        block.uses.iter().filter(move |of| {
            (of.write || access.write) && of.start < end && access.address < of.end
        })
    }

    pub(super) fn note(&mut self, access: Access, lane: LaneId, seq: u64, name: &'static str) {
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

    /// Looks for ranges that are no memory and for uses that `races` finds fault with.
    pub(super) fn examine(
        &self,
        name: &'static str,
        visit: Visit<'_>,
        races: impl Fn(&Use, Access) -> Option<Suspicion>,
    ) -> Examined {
        let mut examined = Examined::default();
        let mut examine = |access: Access| match self.bounds(name, access) {
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
        };
        visit(&mut |access| {
            if access.bytes != 0 {
                self.parts(access, &mut examine);
            }
        });
        examined
    }

    /// Notes the accesses of operation `seq` of a lane.
    pub(super) fn register(
        &mut self,
        lane: LaneId,
        seq: u64,
        name: &'static str,
        visit: Visit<'_>,
    ) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.queued = lane.queued.max(seq);
        }
        let mut parts: SmallVec<[Access; 4]> = SmallVec::new();
        visit(&mut |access| {
            if access.bytes != 0 {
                self.parts(access, &mut |part| parts.push(part));
                for part in parts.drain(..) {
                    self.note(part, lane, seq, name);
                }
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
