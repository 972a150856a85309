//! Memory full of NaN, which shows what is computed from bytes that nothing has written.

use super::{DeviceMemory, PhysicalMemory};
use crate::lock::Lock;

/// Each byte of poisoned memory: two, or four, are a NaN of `FLOAT16`, `BFLOAT16` and `FLOAT`.
pub(crate) const POISON: u8 = 0xff;

/// Bytes of the file of poison. Longer memory maps it again and again, and takes room only where it is written to.
const FILE: usize = 16 << 20;

/// Memory from this size on maps the file: to fill it would take longer.
const MAPPED_FROM: usize = 1 << 20;

/// The most mappings of the file for one allocation, since a process has some ten thousands. What is beyond reads as
/// zero.
const MOST_MAPPINGS: usize = 256;

/// The file of poison, once it was made. Where the system grants none, the next allocation asks again.
static POISONED: Lock<Option<PhysicalMemory>> = Lock::new(None);

fn file() -> Option<PhysicalMemory> {
    let file = PhysicalMemory::new(FILE).ok()?;
    file.fill(POISON, FILE).then_some(file)
}

impl DeviceMemory {
    /// Fills whole pages with NaN: of large memory what can be had without taking as much of the host's.
    ///
    /// # Safety
    ///
    /// The pages lie in the device view, are allocated, and nothing else accesses them.
    pub(crate) unsafe fn poison(&self, address: usize, bytes: usize) {
        let host = self.host(address);
        let mut poisoned = POISONED.lock();
        if bytes >= MAPPED_FROM && poisoned.is_none() {
            *poisoned = file();
        }
        let Some(file) = poisoned.as_ref().filter(|_| bytes >= MAPPED_FROM) else {
            // SAFETY: the caller's promise.
            return unsafe { host.write_bytes(POISON, bytes.min(FILE)) };
        };
        for at in (0..bytes).step_by(FILE).take(MOST_MAPPINGS) {
            // SAFETY: the caller's promise.
            let mapped = unsafe { file.show_privately(host.add(at), 0, FILE.min(bytes - at)) };
            if mapped.is_err() {
                return;
            }
        }
    }
}
