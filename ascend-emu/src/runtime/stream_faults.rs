//! Faults of a stream that were not reported yet.

use crate::fault::Fault;
use crate::lock::Lock;

#[derive(Debug, Default)]
struct State {
    /// First fault since the last synchronisation.
    first: Option<Fault>,
    /// The fault after which nothing more is run.
    stopped: Option<Fault>,
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
        Self {
            state: Lock::default(),
            device,
        }
    }

    /// The device of the stream.
    pub(crate) fn device(&self) -> i32 {
        self.device
    }

    /// Keeps a fault to be reported, if it is the first one since the last report; with `stop` the stream runs
    /// nothing more.
    pub(crate) fn add(&self, fault: Fault, stop: bool) {
        let mut state = self.state.lock();
        if stop {
            state.stopped.get_or_insert_with(|| fault.clone());
        }
        state.first.get_or_insert(fault);
    }

    /// Takes the first fault since the last call. If there is none, returns the fault that stopped the stream.
    pub(crate) fn take(&self) -> Option<Fault> {
        let mut state = self.state.lock();
        state.first.take().or_else(|| state.stopped.clone())
    }

    /// The fault that stopped the stream.
    pub(crate) fn stopped(&self) -> Option<Fault> {
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
