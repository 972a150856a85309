//! Waits of the host for the work of a stream.

use super::{Mode, Stream};
use crate::config::check;
use crate::fault::Fault;
use crate::lock::expired;
use crate::sanitizer::{FindingKind, Suspicion, allocation_table, report};
use crate::status::{Outcome, STREAM_CAPTURED, STREAM_SYNC_TIMEOUT, failure};
use std::time::{Duration, Instant};

impl Stream {
    /// The number of commands to wait for. Refused while the stream is being captured; the capture becomes invalid.
    fn target(&self, name: &str) -> Outcome<u64> {
        let mut submission = self.submission.lock();
        if let Mode::Captured(capture) = submission.mode() {
            let failure = failure!(STREAM_CAPTURED, "{name}: the stream is being captured");
            capture.invalidate(&failure.message);
            return Err(failure);
        }
        Ok(submission.seq)
    }

    /// The number of commands to wait for, in a wait for the whole context. Refused while the stream is being captured; the
    /// capture stays valid.
    pub(crate) fn queued(&self, name: &str) -> Outcome<u64> {
        let mut submission = self.submission.lock();
        if let Mode::Captured(_) = submission.mode() {
            return Err(failure!(
                STREAM_CAPTURED,
                "{name}: stream {} of the context is being captured; wait for the other streams one by one, or for all \
                 after aclmdlRICaptureEnd",
                self.id
            ));
        }
        Ok(submission.seq)
    }

    /// Waits until that many commands are over. Returns `false` when the deadline has passed before.
    ///
    /// Without a deadline, a replay that waits for an event that no stream has a record of queued is a finding after a second:
    /// other threads may queue the record, but a program whose only thread waits here would wait for ever.
    pub(super) fn wait_completed(
        &self,
        name: &'static str,
        target: u64,
        deadline: Option<Instant>,
    ) -> Outcome<bool> {
        let mut patience = Patience::default();
        let mut shared = self.shared.lock();
        while shared.completed < target {
            if expired(deadline) {
                return Ok(false);
            }
            let until = deadline.or_else(|| Instant::now().checked_add(Patience::POLL));
            shared = self.advanced.wait(shared, until);
            let stalled = deadline.is_none()
                && shared.replaying
                && shared.waiting.as_ref().is_some_and(|e| !e.will_be_raised());
            if patience.is_over(stalled) {
                drop(shared);
                report(
                    check(),
                    STREAM_SYNC_TIMEOUT,
                    Suspicion {
                        kind: FindingKind::StalledReplay,
                        site: (name, "stream"),
                        tensor: 0,
                        message: format!(
                            "{name}: a replayed graph on the stream waits for an ACL_EVENT_EXTERNAL event that no \
                             stream has a record of queued; record it after aclmdlRIExecuteAsync and the task updates"
                        ),
                    },
                )?;
                shared = self.shared.lock();
            }
        }
        Ok(true)
    }

    /// Waits for the work queued so far and reports the first fault since the last time.
    pub(crate) fn synchronize(&self, name: &'static str, deadline: Option<Instant>) -> Outcome {
        let target = self.target(name)?;
        self.synchronize_to(name, target, deadline)
    }

    /// Waits for the first `target` commands and reports the first fault since the last time.
    pub(crate) fn synchronize_to(
        &self,
        name: &'static str,
        target: u64,
        deadline: Option<Instant>,
    ) -> Outcome {
        if !self.wait_completed(name, target, deadline)? {
            return Err(failure!(
                STREAM_SYNC_TIMEOUT,
                "{name}: the stream's work was not over in time"
            ));
        }
        allocation_table::host_waited_for_stream(self.id, target);
        self.take_fault().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Waits for the work queued so far and reports none of its faults.
    pub(crate) fn wait(&self, name: &'static str) -> Outcome {
        let target = self.target(name)?;
        self.wait_completed(name, target, None)?;
        allocation_table::host_waited_for_stream(self.id, target);
        Ok(())
    }

    /// Whether submitted work is recorded rather than queued.
    pub(crate) fn records(&self) -> bool {
        !matches!(self.submission.lock().mode(), Mode::Eager)
    }

    /// Whether all work is over.
    pub(crate) fn query(&self, name: &str) -> Outcome<bool> {
        let target = self.target(name)?;
        let over = self.shared.lock().completed >= target;
        if over {
            allocation_table::host_waited_for_stream(self.id, target);
        }
        Ok(over)
    }

    /// Takes the first fault since the last synchronisation.
    pub(crate) fn take_fault(&self) -> Option<Fault> {
        self.faults.take()
    }
}

/// Measures how long a wait without a deadline has been hopeless.
#[derive(Debug, Default)]
struct Patience {
    since: Option<Instant>,
    told: bool,
}

impl Patience {
    /// The time between two looks at the stream.
    const POLL: Duration = Duration::from_millis(100);
    /// The time after which a hopeless wait is a finding.
    const LIMIT: Duration = Duration::from_secs(1);

    /// Takes note of a look at the stream. Returns `true` once, when the wait is to become a finding.
    fn is_over(&mut self, hopeless: bool) -> bool {
        if !hopeless {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let over = !self.told && since.elapsed() >= Self::LIMIT;
        self.told |= over;
        over
    }
}
