//! Notifies: flags that one stream sets and another one waits for and clears.

use crate::handle::{Id, Kind, Table};
use crate::lock::{Lock, Signal};
use crate::runtime::callback::ABORT_POLL;
use crate::sanitizer::{StreamId, VectorClock, allocation_table};
use crate::status::{Outcome, TASK_TIMEOUT, failure};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub(crate) static NOTIFIES: Table<Notify> = Table::new(Kind::Notify);

#[derive(Debug, Default)]
struct State {
    raised: bool,
    /// The clock of each queued record that no wait has taken.
    records: VecDeque<VectorClock>,
}

/// A notify.
#[derive(Debug)]
pub(crate) struct Notify {
    pub id: u32,
    state: Lock<State>,
    changed: Signal,
}

impl Notify {
    /// `aclrtCreateNotify`.
    pub(crate) fn create() -> Id {
        static IDS: AtomicU32 = AtomicU32::new(0);
        NOTIFIES.insert(Notify {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            state: Lock::default(),
            changed: Signal::new(),
        })
    }

    /// Notes a record that a stream queues.
    pub(crate) fn queue_record(&self, stream: StreamId) {
        /// Largest number of records that are kept, for programs that never wait.
        const MOST: usize = 64;
        let mut clock = VectorClock::new();
        allocation_table::snapshot_clock(stream, &mut clock);
        let mut state = self.state.lock();
        if state.records.len() < MOST {
            state.records.push_back(clock);
        }
    }

    /// Orders a stream, which queues a wait, after the earliest record that no wait has taken. If there is no such
    /// record the order is unknown.
    pub(crate) fn queue_wait(&self, stream: StreamId) {
        match self.state.lock().records.pop_front() {
            Some(clock) => allocation_table::order_after(stream, &clock),
            None => allocation_table::order_after_unknown(stream),
        }
    }

    /// Sets the notify. A stream calls this when it reaches or drops a record.
    pub(crate) fn raise(&self) {
        self.state.lock().raised = true;
        self.changed.notify_all();
    }

    /// Waits until the notify is set, and clears it.
    pub(crate) fn wait(&self, limit: Option<Duration>, abort: &AtomicBool) -> Outcome {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state.lock();
        while !state.raised && !abort.load(Ordering::Acquire) {
            let now = Instant::now();
            if let (Some(limit), Some(deadline)) = (limit, deadline)
                && now >= deadline
            {
                return Err(failure!(
                    TASK_TIMEOUT,
                    "aclrtWaitAndResetNotify: the notify was not recorded in {} s",
                    limit.as_secs()
                ));
            }
            state = self.changed.wait(state, now.checked_add(ABORT_POLL));
        }
        state.raised = false;
        Ok(())
    }
}
