//! Values in device memory that streams write and wait for.

use crate::lock::{Lock, Signal};
use crate::memory::DeviceMemory;
use crate::operator::Access;
use crate::sanitizer::access_lock::lock_accesses;
use crate::sanitizer::{StreamId, VectorClock, allocation_table};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a value in memory is compared with the operand of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// Their difference is not negative.
    NotBelow,
    Equal,
    /// A bit is set in both.
    SharedBit,
    /// A bit is set in neither.
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

/// For each address, the value of the latest queued write, and what happens before it.
static QUEUED: Lock<BTreeMap<usize, (u64, VectorClock)>> = Lock::new(BTreeMap::new());

/// Notified when a stream has written a value.
static WRITTEN: Signal = Signal::new();
static WRITES: Lock<()> = Lock::new(());

/// The interval at which a waiting stream reads the value again, because copies and fills write values without
/// notice.
const POLL: Duration = Duration::from_millis(1);

/// Largest number of addresses whose writes are remembered. Forgetting them may lose findings but adds none.
const MOST: usize = 4096;

/// Notes a write that a stream queues.
pub(crate) fn queue_write(stream: StreamId, address: usize, value: u64) {
    let mut clock = VectorClock::new();
    allocation_table::snapshot_clock(stream, &mut clock);
    let mut queued = QUEUED.lock();
    if queued.len() >= MOST {
        queued.clear();
    }
    queued.insert(address, (value, clock));
}

/// Orders a stream, which queues a wait, after the latest write if that write ends the wait. Otherwise the order is
/// unknown.
pub(crate) fn queue_wait(stream: StreamId, address: usize, value: u64, comparison: Comparison) {
    match QUEUED.lock().get(&address) {
        Some((written, clock)) if comparison.holds(*written, value) => allocation_table::order_after(stream, clock),
        _ => allocation_table::order_after_unknown(stream),
    }
}

/// The eight bytes at an address.
fn value_bytes(address: usize, write: bool) -> Access {
    Access { address, bytes: 8, write, what: "devAddr" }
}

/// Writes a value.
///
/// # Safety
///
/// The allocation table has found the eight bytes live, and keeps them.
pub(crate) unsafe fn write(memory: &DeviceMemory, address: usize, value: u64) {
    let locked = lock_accesses(&[value_bytes(address, true)]);
    // SAFETY: live by the caller's promise, and locked.
    unsafe { memory.host(address).cast::<u64>().write_unaligned(value) };
    drop(locked);
    drop(WRITES.lock());
    WRITTEN.notify_all();
}

/// Waits until the value at an address passes the comparison, or `abort` is set.
///
/// # Safety
///
/// As for [`write`].
pub(crate) unsafe fn wait(
    memory: &DeviceMemory,
    address: usize,
    value: u64,
    comparison: Comparison,
    abort: &AtomicBool,
) {
    loop {
        let writes = WRITES.lock();
        // Locked for one read only, so that a waiting stream does not keep others from writing.
        let locked = lock_accesses(&[value_bytes(address, false)]);
        // SAFETY: live by the caller's promise, and locked.
        let found = unsafe { memory.host(address).cast::<u64>().read_unaligned() };
        drop(locked);
        if comparison.holds(found, value) || abort.load(Ordering::Acquire) {
            return;
        }
        drop(WRITTEN.wait(writes, Instant::now().checked_add(POLL)));
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
            assert_eq!(comparison.holds(found, wanted), holds, "{comparison:?} {found} {wanted}");
        }
    }
}
