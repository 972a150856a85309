//! Values in device memory that streams write and wait for.

use crate::lock::{Lock, Signal};
use crate::memory::DeviceMemory;
use crate::operator::Access;
use crate::sanitizer::access_lock::claim;
use crate::sanitizer::{StreamId, VectorClock, allocation_table};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a value in memory is compared with the one that a stream waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// Their difference is not negative.
    NotBelow,
    Equal,
    /// They have a bit in common.
    SharedBit,
    /// There is a bit that neither has.
    MissingBit,
}

impl Comparison {
    fn holds(self, found: u64, wanted: u64) -> bool {
        match self {
            Comparison::NotBelow => found.wrapping_sub(wanted) as i64 >= 0,
            Comparison::Equal => found == wanted,
            Comparison::SharedBit => found & wanted != 0,
            Comparison::MissingBit => !(found | wanted) != 0,
        }
    }
}

/// The latest write that is queued for an address, and what it comes after.
static QUEUED: Lock<BTreeMap<usize, (u64, VectorClock)>> = Lock::new(BTreeMap::new());

/// A value was written.
static WRITTEN: Signal = Signal::new();
static WRITES: Lock<()> = Lock::new(());

/// How often those who wait look: copies and fills write values as well, and tell nobody.
const LOOK: Duration = Duration::from_millis(1);

/// Addresses whose writes are remembered; beyond that none are, which loses findings but makes none up.
const MOST: usize = 4096;

/// A write is queued in a lane.
pub(crate) fn queue_write(lane: StreamId, at: usize, value: u64) {
    let mut clock = VectorClock::new();
    allocation_table::snapshot_clock(lane, &mut clock);
    let mut queued = QUEUED.lock();
    if queued.len() >= MOST {
        queued.clear();
    }
    queued.insert(at, (value, clock));
}

/// A wait is queued in a lane: it comes after the latest write if that is what it waits for, otherwise after something of
/// which nobody knows.
pub(crate) fn queue_wait(lane: StreamId, at: usize, value: u64, comparison: Comparison) {
    match QUEUED.lock().get(&at) {
        Some((written, clock)) if comparison.holds(*written, value) => {
            allocation_table::order_after(lane, clock)
        }
        _ => allocation_table::order_after_unknown(lane),
    }
}

/// The eight bytes at an address.
fn bytes(at: usize, write: bool) -> Access {
    Access {
        address: at,
        bytes: 8,
        write,
        what: "devAddr",
    }
}

/// Writes a value.
///
/// # Safety
///
/// The ledger has found the eight bytes live, and keeps them.
pub(crate) unsafe fn write(memory: &DeviceMemory, at: usize, value: u64) {
    let held = claim(&[bytes(at, true)]);
    // SAFETY: live by the caller's promise, and claimed.
    unsafe { memory.host(at).cast::<u64>().write_unaligned(value) };
    drop(held);
    drop(WRITES.lock());
    WRITTEN.notify_all();
}

/// Waits until a value is there, or `abort` is set.
///
/// # Safety
///
/// As for [`write`].
pub(crate) unsafe fn wait(
    memory: &DeviceMemory,
    at: usize,
    value: u64,
    comparison: Comparison,
    abort: &AtomicBool,
) {
    loop {
        let writes = WRITES.lock();
        // Held no longer than one look: who waits must not keep others from writing.
        let held = claim(&[bytes(at, false)]);
        // SAFETY: live by the caller's promise, and claimed.
        let found = unsafe { memory.host(at).cast::<u64>().read_unaligned() };
        drop(held);
        if comparison.holds(found, value) || abort.load(Ordering::Acquire) {
            return;
        }
        drop(WRITTEN.wait(writes, Instant::now().checked_add(LOOK)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_are_those_of_the_flags() {
        for (comparison, found, wanted, holds) in [
            (Comparison::NotBelow, 3, 3, true),
            (Comparison::NotBelow, 2, 3, false),
            // The difference is that of signed numbers.
            (Comparison::NotBelow, 1, u64::MAX, true),
            (Comparison::Equal, 1, 1, true),
            (Comparison::Equal, 1, 0, false),
            (Comparison::SharedBit, 0b110, 0b011, true),
            (Comparison::SharedBit, 0b100, 0b011, false),
            (Comparison::MissingBit, 1, 2, true),
            (Comparison::MissingBit, u64::MAX - 1, 1, false),
        ] {
            assert_eq!(
                comparison.holds(found, wanted),
                holds,
                "{comparison:?} {found} {wanted}"
            );
        }
    }
}
