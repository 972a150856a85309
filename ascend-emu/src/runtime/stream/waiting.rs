//! Waits of the host for the work of a stream.

use super::{Mode, Stream};
use crate::lock::expired;
use crate::runtime::stall::StallWatch;
use crate::sanitizer::allocation_table;
use crate::status::{Failure, Outcome, STREAM_CAPTURED, STREAM_SYNC_TIMEOUT, failure};
use std::time::Instant;

impl Stream {
    /// The number of queued commands, which a wait waits for. Refused while the stream is being captured; the capture
    /// becomes invalid.
    fn target(&self, name: &str) -> Outcome<u64> {
        let mut submission = self.submission.lock();
        if let Mode::Captured(capture) = submission.mode() {
            let failure = failure!(STREAM_CAPTURED, "{name}: the stream is being captured");
            capture.invalidate(&failure.message);
            return Err(failure);
        }
        Ok(submission.seq)
    }

    /// The number of queued commands, which a wait for the whole context waits for. Refused while the stream is being
    /// captured; the capture stays valid.
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

    /// Waits until `target` commands are over. Returns `false` if the deadline passes first.
    pub(super) fn wait_completed(&self, name: &'static str, target: u64, deadline: Option<Instant>) -> Outcome<bool> {
        let mut watch = StallWatch::default();
        let mut shared = self.shared.lock();
        while shared.completed < target {
            if expired(deadline) {
                return Ok(false);
            }
            shared = self.advanced.wait(shared, deadline.or_else(StallWatch::next_look));
            if deadline.is_none() && shared.completed < target {
                drop(shared);
                watch.look(name, self.id)?;
                shared = self.shared.lock();
            }
        }
        Ok(true)
    }

    /// Waits for the work queued so far and reports the first fault since the last synchronisation.
    pub(crate) fn synchronize(&self, name: &'static str, deadline: Option<Instant>) -> Outcome {
        let target = self.target(name)?;
        self.synchronize_to(name, target, deadline)
    }

    /// Waits for the first `target` commands and reports the first fault since the last synchronisation.
    pub(crate) fn synchronize_to(&self, name: &'static str, target: u64, deadline: Option<Instant>) -> Outcome {
        if !self.wait_completed(name, target, deadline)? {
            return Err(failure!(STREAM_SYNC_TIMEOUT, "{name}: the stream's work was not over in time"));
        }
        allocation_table::host_waited_for_stream(self.id, target);
        self.take_fault().map_or(Ok(()), Err)
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
    pub(crate) fn take_fault(&self) -> Option<Failure> {
        self.faults.take()
    }
}
