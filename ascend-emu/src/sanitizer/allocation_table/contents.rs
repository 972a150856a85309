//! Written bytes of allocations, and reads of unwritten bytes.
//!
//! Memory of a device is unwritten when it is handed out, and again when it is handed out anew. What launches and
//! copies write counts as written, by the byte; a copy between devices copies, for each byte, whether its source is
//! written. Host memory counts as written, since programs write it themselves. Allocators of the program that hand
//! out parts of an allocation are not seen: bytes that an earlier tensor wrote stay written.

use super::hazards::Accesses;
use super::written::WrittenBytes;
use super::{AllocationTable, MemoryLocation, Owner, Region, with};
use crate::config::Check;
use crate::elements::{Elements, NamedTensor, Place, Reader, Visit};
use crate::finding_kind::FindingKind;
use crate::sanitizer::finding::{Suspicion, report_all};
use crate::status::Outcome;
use smallvec::SmallVec;
use std::ops::Range;

impl AllocationTable {
    /// The written bytes of a region; `None` if all of it counts as written.
    fn written_of<'a>(&'a self, region: &'a Region) -> Option<&'a WrittenBytes> {
        match (region.owner, region.info.location) {
            (Owner::Emulator, MemoryLocation::Device(_)) => Some(&region.written),
            (Owner::Mapped(number), _) => self.memory.written(number),
            _ => None,
        }
    }

    /// Visits the parts of a range that are within one region each, as ranges of offsets in it.
    fn each_part(&self, bytes: Range<usize>, visit: &mut dyn FnMut(&Region, Range<usize>) -> bool) {
        let mut address = bytes.start;
        while address < bytes.end
            && let Some(region) = self.region(address)
        {
            let base = region.info.base;
            // Bytes past the requested size are out of bounds, which has a finding of its own.
            let end = bytes.end.min(region.requested_end());
            if address < end && !visit(region, address - base..end - base) {
                return;
            }
            address = region.reach;
        }
    }

    /// The first unwritten bytes among these. Addresses outside of all memory count as written.
    fn first_unwritten(&self, bytes: Range<usize>) -> Option<Range<usize>> {
        let mut gap = None;
        self.each_part(bytes, &mut |region, part| {
            let found = self.written_of(region).and_then(|written| written.first_gap(part));
            let base = region.info.base;
            gap = found.map(|found| base + found.start..base + found.end);
            gap.is_none()
        });
        gap
    }

    /// Changes what is written of these bytes: `change` is given each region's written bytes, the region's first
    /// address, and the part that is within the region.
    fn change_written(&mut self, bytes: Range<usize>, change: &mut dyn FnMut(&mut WrittenBytes, usize, Range<usize>)) {
        let mut parts: SmallVec<[(usize, Range<usize>); 2]> = SmallVec::new();
        self.each_part(bytes, &mut |region, part| {
            parts.push((region.info.base, part));
            true
        });
        for (base, part) in parts {
            let Some(region) = self.regions.get_mut(&base) else {
                continue;
            };
            match (region.owner, region.info.location) {
                (Owner::Emulator, MemoryLocation::Device(_)) => {
                    change(&mut region.written, base, part);
                }
                (Owner::Mapped(number), _) => {
                    if let Some(written) = self.memory.written_mut(number) {
                        change(written, base, part);
                    }
                }
                _ => {}
            }
        }
    }

    fn add_written(&mut self, bytes: Range<usize>) {
        self.change_written(bytes.clone(), &mut |written, _, part| written.add(part));
        self.set_order(bytes, None);
    }

    /// Notes that elements were written: all bytes from the first to the last where there are too many runs of them.
    fn add_elements(&mut self, elements: &Elements) {
        let bounds = elements.bounds();
        self.change_written(bounds.clone(), &mut |written, base, part| {
            let all = elements.runs(&mut |run| {
                let start = run.start.saturating_sub(base).max(part.start);
                let end = run.end.saturating_sub(base).min(part.end);
                if start < end {
                    written.add(start..end);
                }
                true
            });
            if !all {
                written.add(part);
            }
        });
        self.set_order(bounds, elements.order);
    }

    /// Notes the order that bytes were written in, and forgets the order of what was there.
    fn set_order(&mut self, bytes: Range<usize>, order: Option<&'static str>) {
        let Some((_, region)) = self.regions.range_mut(..=bytes.start).next_back() else {
            return;
        };
        let (base, reach) = (region.info.base, region.reach);
        if (region.orders.is_empty() && order.is_none()) || bytes.start >= reach {
            return;
        }
        let bytes = bytes.start - base..bytes.end - base;
        (region.orders).retain(|(known, _)| known.end <= bytes.start || bytes.end <= known.start);
        if let Some(order) = order.filter(|_| region.orders.len() < ORDERS) {
            region.orders.push((bytes, order));
        }
    }

    /// The order that some of these bytes were written in, if it differs from `order`.
    fn other_order(&self, bytes: &Range<usize>, order: &str) -> Option<&'static str> {
        let region = self.region(bytes.start)?;
        let base = region.info.base;
        let mut orders = region.orders.iter();
        let other = orders.find(|(known, written)| {
            base + known.start < bytes.end && bytes.start < base + known.end && *written != order
        });
        other.map(|(_, written)| *written)
    }
}

/// The most parts of an allocation whose order is kept. Forgetting one loses findings and makes none up.
const ORDERS: usize = 64;

/// The most gaps that a copy hands on. Beyond, all of the copy counts as written.
const MOST_GAPS: usize = 1 << 12;

/// Collects reads of unwritten bytes.
struct UnwrittenReads<'a> {
    table: &'a AllocationTable,
    name: &'static str,
    found: SmallVec<[Suspicion; 1]>,
}

impl Reader for UnwrittenReads<'_> {
    fn knows(&self, bytes: Range<usize>) -> bool {
        self.table.first_unwritten(bytes).is_none()
    }

    fn untouched(&self, bytes: Range<usize>) -> bool {
        self.table.first_unwritten(bytes.clone()) == Some(bytes)
    }

    fn read_in_order(&mut self, elements: &Elements) {
        let NamedTensor { what, address } = elements.tensor;
        let other = elements.order.and_then(|order| {
            let other = self.table.other_order(&elements.bounds(), order)?;
            Some((order, other))
        });
        if let Some((order, other)) = other {
            self.found.push(Suspicion {
                kind: FindingKind::SoftmaxOrder,
                site: (self.name, what),
                tensor: address,
                message: format!(
                    "{}: {what} at {address:#x} is read as {order}, and was written as {other}; let the attention \
                     write, and the update read, one of both: softmaxOutLayout \"same_as_input\" goes with \
                     inputSoftmaxLayout \"TND\"",
                    self.name
                ),
            });
        }
    }

    fn read(&mut self, elements: &Elements) {
        let NamedTensor { what, address } = elements.tensor;
        // One finding for a tensor is enough.
        if self.found.iter().any(|known| known.site.1 == what) || self.knows(elements.bounds()) {
            return;
        }
        let mut first: Option<Range<usize>> = None;
        let mut rows: Option<(usize, usize)> = None;
        elements.runs(&mut |run| {
            let mut address = run.start;
            while let Some(gap) = self.table.first_unwritten(address..run.end) {
                address = gap.end;
                let (low, high) = (elements.row_of(gap.start), elements.row_of(gap.end - 1));
                rows = Some(rows.map_or((low, high), |rows| (rows.0.min(low), rows.1.max(high))));
                first.get_or_insert(gap);
            }
            true
        });
        let (Some(first), Some((low, high))) = (first, rows) else {
            return;
        };
        let start = elements.bounds().start;
        let place = match elements.place {
            Place::Whole | Place::Copied => {
                format!("{what} bytes {} to {}", first.start - start, first.end - 1 - start)
            }
            Place::Block { block, first: token, .. } => match (token + low, token + high) {
                (low, high) if low == high => format!("{what} block {block}, token {low}"),
                (low, high) => format!("{what} block {block}, tokens {low} to {high}"),
            },
        };
        let mend = match elements.place {
            Place::Copied => "a block that is saved whole may be so; otherwise write them first".to_owned(),
            Place::Whole | Place::Block { sequence: None, .. } => "write them first".to_owned(),
            Place::Block { sequence: Some((sequence, keys)), .. } => format!(
                "write their slots first, or see whether sequence {sequence} has {keys} keys, and whether block table \
                 and block size are those that the cache was written with"
            ),
        };
        let (kind, reader) = match elements.place {
            Place::Copied => (FindingKind::UnwrittenCopy, "a copy to the host"),
            _ => (FindingKind::UnwrittenRead, self.name),
        };
        self.found.push(Suspicion {
            kind,
            site: (self.name, what),
            tensor: address,
            message: format!(
                "{place}: {reader} reads them at {:#x}, and nothing has written them since the memory was handed out; \
                 {mend}",
                first.start
            ),
        });
    }
}

/// Reports reads of unwritten bytes. `visit` passes the elements that are read to a reader.
pub(crate) fn inspect_reads(
    name: &'static str,
    (check, code): (Check, i32),
    visit: &mut dyn FnMut(&mut dyn Reader),
) -> Outcome {
    let found = with(|table| {
        let mut reads = UnwrittenReads { table, name, found: SmallVec::new() };
        visit(&mut reads);
        reads.found
    });
    report_all(check, code, found)
}

/// Counts the bytes that work should have written as written; the work never runs.
pub(crate) fn spare(accesses: Accesses<'_>) {
    let mut written: SmallVec<[Range<usize>; 4]> = SmallVec::new();
    accesses(&mut |access| {
        let bytes = usize::try_from(access.bytes).unwrap_or(usize::MAX);
        if access.write {
            written.push(access.address..access.address.saturating_add(bytes));
        }
    });
    with(|table| {
        for bytes in written {
            table.add_written(bytes);
        }
    });
}

/// Notes that bytes were written.
pub(crate) fn wrote(bytes: Range<usize>) {
    with(|table| table.add_written(bytes));
}

/// Notes that elements were written. `visit` calls its argument with them.
pub(crate) fn wrote_elements(visit: &mut dyn FnMut(&mut Visit<'_>)) {
    with(|table| {
        visit(&mut |elements| {
            table.add_elements(elements);
        });
    });
}

/// Notes that bytes were copied: each byte of the copy is written if its source byte is.
pub(crate) fn copied(src: usize, dst: usize, bytes: usize) {
    with(|table| {
        let source = src..src.saturating_add(bytes);
        let mut gaps: SmallVec<[Range<usize>; 4]> = SmallVec::new();
        let mut address = source.start;
        while let Some(gap) = table.first_unwritten(address..source.end) {
            address = gap.end;
            gaps.push(gap);
            if gaps.len() > MOST_GAPS {
                gaps.clear();
                break;
            }
        }
        table.add_written(dst..dst.saturating_add(bytes));
        for gap in gaps {
            let moved = gap.start - src..gap.end - src;
            let moved = dst.saturating_add(moved.start)..dst.saturating_add(moved.end);
            table.change_written(moved, &mut |written, _, part| written.remove(part));
        }
    });
}
