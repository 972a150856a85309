//! Streams that are being captured, or that update a task group.

use super::{Mode, Stream};
use crate::config::check;
use crate::handle::Id;
use crate::operator::Access;
use crate::runtime::capture::{Capture, Mode as CaptureMode};
use crate::runtime::graph::Group;
use crate::runtime::queue::Command;
use crate::sanitizer::allocation_table;
use crate::status::{Outcome, PARAM_INVALID, STREAM_CAPTURED, STREAM_NOT_CAPTURED, TASK_GROUP_STATUS, failure};
use std::mem;
use std::sync::Arc;

impl Stream {
    /// `aclmdlRICaptureBegin`.
    pub(crate) fn begin_capture(&self, mode: CaptureMode) -> Outcome {
        let mut submission = self.submission.lock();
        match submission.mode() {
            Mode::Eager => {
                submission.mode = Mode::Captured(Capture::begin(self.id, mode));
                Ok(())
            }
            Mode::Captured(_) => {
                Err(failure!(STREAM_CAPTURED, "aclmdlRICaptureBegin: the stream is already being captured"))
            }
            Mode::Updating(..) => {
                Err(failure!(TASK_GROUP_STATUS, "aclmdlRICaptureBegin: the stream is in a task update"))
            }
        }
    }

    /// The capture that the stream is in.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        match self.submission.lock().mode() {
            Mode::Captured(capture) => Some(Arc::clone(capture)),
            Mode::Eager | Mode::Updating(..) => None,
        }
    }

    pub(crate) fn captured(&self, name: &str) -> Outcome<Arc<Capture>> {
        self.capture().ok_or_else(|| failure!(STREAM_NOT_CAPTURED, "{name}: the stream is not being captured"))
    }

    /// `aclmdlRICaptureEnd`; returns the graph's handle.
    pub(crate) fn end_capture(&self) -> Outcome<Id> {
        let capture = self.captured("aclmdlRICaptureEnd")?;
        capture.check_end(self.id)?;
        capture.end()?;
        Ok(capture.graph)
    }

    /// Leaves a capture: the stream's work is queued again.
    pub(super) fn leave(&self, capture: &Arc<Capture>) {
        let mut submission = self.submission.lock();
        if matches!(&submission.mode, Mode::Captured(own) if Arc::ptr_eq(own, capture)) {
            submission.mode = Mode::Eager;
        }
    }

    /// `aclmdlRICaptureTaskUpdateBegin`.
    pub(crate) fn begin_update(&self, group: Arc<Group>) -> Outcome {
        const NAME: &str = "aclmdlRICaptureTaskUpdateBegin";
        let mut submission = self.submission.lock();
        match submission.mode() {
            Mode::Eager => {
                submission.mode = Mode::Updating(group, Vec::new());
                Ok(())
            }
            Mode::Captured(_) => {
                Err(failure!(STREAM_CAPTURED, "{NAME}: the stream is being captured; update on another one"))
            }
            Mode::Updating(..) => {
                Err(failure!(TASK_GROUP_STATUS, "{NAME}: an update is already going on in this stream"))
            }
        }
    }

    /// `aclmdlRICaptureTaskUpdateEnd`: queues the replacement of the group's tasks by the new ones.
    pub(crate) fn end_update(&self) -> Outcome {
        const NAME: &str = "aclmdlRICaptureTaskUpdateEnd";
        let mut submission = self.submission.lock();
        self.wait_for_room(NAME, &submission)?;
        match mem::take(submission.mode()) {
            Mode::Updating(group, tasks) => {
                group.check(&tasks)?;
                let visit = |visit: &mut dyn FnMut(Access)| {
                    for (task, addresses) in &tasks {
                        task.accesses(addresses, visit);
                    }
                };
                allocation_table::inspect(check(), PARAM_INVALID, NAME, false, &visit)?;
                let update = self.next_operation(&submission);
                group.queue_update(update, tasks);
                self.push(&mut submission, Command::Update(group, update), None);
                Ok(())
            }
            other => {
                submission.mode = other;
                Err(failure!(TASK_GROUP_STATUS, "{NAME}: no update is going on in this stream"))
            }
        }
    }
}
