//! Faults: of a device operation, of a stream until they are reported, and of a whole device.
//!
//! Where `ASCEND_EMU_CHECK=strict` chooses the mode of the process, a finding that spoils results ends its device:
//! every later wait and copy is answered with it until the device is reset. A caller that does not look at the status
//! of the call that failed, such as a queue of tasks on another thread, cannot take what is left in memory for a
//! result. [`check_scope`](crate::check_scope) fails no device.

use crate::config::config;
use crate::lock::Lock;
use crate::status::{AICORE_EXCEPTION, Failure, Outcome, failure};
use std::cell::Cell;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
struct State {
    /// First fault since the last synchronisation.
    first: Option<Failure>,
    /// The fault after which nothing more is run.
    stopped: Option<Failure>,
}

/// The faults of one stream, which the stream's events report as well.
#[derive(Debug)]
pub(crate) struct StreamFaults {
    state: Lock<State>,
    /// The device of the stream.
    device: i32,
}

impl StreamFaults {
    /// Keeps the faults of a stream of a device.
    pub(crate) fn new(device: i32) -> Self {
        Self { state: Lock::default(), device }
    }

    /// The device of the stream.
    pub(crate) fn device(&self) -> i32 {
        self.device
    }

    /// Keeps a fault to be reported, if it is the first one since the last report; with `stop` the stream runs
    /// nothing more.
    pub(crate) fn add(&self, fault: Failure, stop: bool) {
        let mut state = self.state.lock();
        if stop {
            state.stopped.get_or_insert_with(|| fault.clone());
        }
        state.first.get_or_insert(fault);
    }

    /// Takes the first fault since the last call. If there is none, returns the fault that stopped the stream.
    pub(crate) fn take(&self) -> Option<Failure> {
        let mut state = self.state.lock();
        state.first.take().or_else(|| state.stopped.clone())
    }

    /// The fault that stopped the stream.
    pub(crate) fn stopped(&self) -> Option<Failure> {
        self.state.lock().stopped.clone()
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state.lock().stopped.is_some()
    }

    /// Lets the stream run again.
    pub(crate) fn resume(&self) {
        self.state.lock().stopped = None;
    }
}

/// The finding that each failed device failed by.
static FAILED: Lock<BTreeMap<i32, String>> = Lock::new(BTreeMap::new());

thread_local! {
    static DEVICE: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The device that the calling thread works for, or has as its own.
pub(crate) fn device_of_thread() -> Option<i32> {
    DEVICE.try_with(Cell::get).ok().flatten()
}

/// Makes a device the calling thread's.
pub(crate) fn enter_device(device: Option<i32>) {
    // Fails only while the thread ends.
    let _ = DEVICE.try_with(|own| own.set(device));
}

/// Ends the calling thread's device with a finding; the first one counts.
pub(crate) fn fail_device(finding: &str) {
    if let Some(device) = device_of_thread().filter(|_| config().check.is_strict()) {
        let mut failed = FAILED.lock();
        failed.entry(device).or_insert_with(|| finding.to_owned());
    }
}

/// Refuses a wait or a copy of a thread whose device has failed.
pub(crate) fn check_thread_device(name: &str) -> Outcome {
    check_device(name, device_of_thread())
}

/// Refuses a wait for work of a device that has failed.
pub(crate) fn check_device(name: &str, device: Option<i32>) -> Outcome {
    if !config().check.is_strict() {
        return Ok(());
    }
    let failed = FAILED.lock();
    match device.and_then(|device| Some((device, failed.get(&device)?))) {
        None => Ok(()),
        Some((device, finding)) => Err(failure!(
            AICORE_EXCEPTION,
            "{name}: device {device} has failed by a finding, and answers nothing else until aclrtResetDevice (which \
             the safe layer calls once the last handle of the device is dropped): {finding}"
        )),
    }
}

/// Makes a device usable again.
pub(crate) fn reset_device(device: i32) {
    FAILED.lock().remove(&device);
}
