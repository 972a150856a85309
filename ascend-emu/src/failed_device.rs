//! Devices that have failed. Where `ASCEND_EMU_CHECK=strict` chooses the mode of the process, a finding that spoils
//! results ends its device: every later wait and copy is answered with it until the device is reset. A caller that
//! does not look at the status of the call that failed, such as a queue of tasks on another thread, cannot take what
//! is left in memory for a result. [`check_scope`](crate::check_scope) fails no device.

use crate::config::{Check, config};
use crate::lock::Lock;
use crate::status::{AICORE_EXCEPTION, Outcome, failure};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The finding that each failed device failed by.
static FAILED: Lock<BTreeMap<i32, String>> = Lock::new(BTreeMap::new());

thread_local! {
    static DEVICE: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The device that the calling thread works for, or has as its own.
pub(crate) fn of_thread() -> Option<i32> {
    DEVICE.try_with(Cell::get).ok().flatten()
}

/// Makes a device the calling thread's.
pub(crate) fn enter(device: Option<i32>) {
    // Fails only while the thread ends.
    let _ = DEVICE.try_with(|of| of.set(device));
}

/// Ends the calling thread's device with a finding; the first one counts.
pub(crate) fn fail(finding: &str) {
    if let (Some(device), Check::Strict) = (of_thread(), config().check) {
        let mut failed = FAILED.lock();
        failed.entry(device).or_insert_with(|| finding.to_owned());
    }
}

/// Refuses a wait or a copy of a thread whose device has failed.
pub(crate) fn check(name: &str) -> Outcome {
    check_device(name, of_thread())
}

/// Refuses a wait for work of a device that has failed.
pub(crate) fn check_device(name: &str, device: Option<i32>) -> Outcome {
    if config().check != Check::Strict {
        return Ok(());
    }
    let failed = FAILED.lock();
    match device.and_then(|device| Some((device, failed.get(&device)?))) {
        None => Ok(()),
        Some((device, finding)) => Err(failure!(
            AICORE_EXCEPTION,
            "{name}: device {device} has failed by a finding, and answers nothing else until aclrtResetDevice (which the safe \
             layer calls once the last handle of the device is dropped): {finding}"
        )),
    }
}

/// Makes a device usable again.
pub(crate) fn reset(device: i32) {
    FAILED.lock().remove(&device);
}
