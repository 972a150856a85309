//! Memory full of NaN, which exposes results computed from unwritten bytes.

use super::{DeviceMemory, PhysicalMemory};
use crate::lock::Lock;

/// Each byte of poisoned memory: two, or four, are a NaN of `FLOAT16`, `BFLOAT16` and `FLOAT`.
pub(crate) const POISON: u8 = 0xff;

/// Bytes of the file of poison. Longer memory maps the file repeatedly, and takes room only where it is written to.
const FILE: usize = 16 << 20;

/// The file of poison, once it was needed; `Some(None)` if the system grants none.
static POISONED: Lock<Option<Option<PhysicalMemory>>> = Lock::new(None);

/// Makes the file; `scratch` is a place of `FILE` bytes to write it through.
///
/// # Safety
///
/// `scratch` is whole pages of this crate's own, which no other thread accesses.
unsafe fn file(scratch: *mut u8) -> Option<PhysicalMemory> {
    let mut file = PhysicalMemory::new(FILE).ok()?;
    let at = file.take(FILE)?;
    // SAFETY: the caller's promise.
    unsafe {
        file.show(scratch, at, FILE).ok()?;
        scratch.write_bytes(POISON, FILE);
    }
    Some(file)
}

impl DeviceMemory {
    /// Fills whole pages with NaN.
    ///
    /// # Safety
    ///
    /// The pages lie in the device view, are allocated, and no other thread accesses them.
    pub(crate) unsafe fn poison(&self, address: usize, bytes: usize) {
        let host = self.host(address);
        if bytes < FILE {
            // SAFETY: the caller's promise.
            return unsafe { host.write_bytes(POISON, bytes) };
        }
        let mut poisoned = POISONED.lock();
        // SAFETY: the caller's promise: there is room for the file.
        let file = poisoned.get_or_insert_with(|| unsafe { file(host) });
        for at in (0..bytes).step_by(FILE) {
            let len = FILE.min(bytes - at);
            // SAFETY: the caller's promise, for both.
            unsafe {
                let host = host.add(at);
                let shown = file.as_ref().map(|file| file.show_privately(host, 0, len));
                if shown.is_none_or(|shown| shown.is_err()) {
                    host.write_bytes(POISON, len);
                }
            }
        }
    }
}
