//! Tasks that wait, or that call the program: they lock no memory, and end when the stream is aborted.

use super::Stream;
use crate::config::Check;
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses};
use crate::runtime::callback;
use crate::runtime::stream_value;
use crate::runtime::task::Task;
use crate::sanitizer::allocation_table;
use crate::status::AICORE_EXCEPTION;

impl Stream {
    /// Runs a task of any kind.
    ///
    /// # Safety
    ///
    /// As for [`Task::run`].
    pub(super) unsafe fn run_task(
        &self,
        task: &Task,
        at: &Addresses,
        check: Check,
        scratch: &mut Vec<Access>,
    ) -> Result<(), Fault> {
        let memory = || DeviceMemory::get().map_err(Fault::from);
        match task {
            Task::Call(call) => {
                // SAFETY: the program promised it when it queued the call.
                unsafe { call.run() };
                Ok(())
            }
            Task::Report {
                stream,
                call,
                block,
            } => callback::deliver(*stream, *call, *block, &self.abort),
            Task::Raise(notify) => {
                notify.raise();
                Ok(())
            }
            Task::AwaitNotify { notify, limit } => notify.wait(*limit, &self.abort),
            Task::Write { at, value } => {
                // SAFETY: the allocation table admitted the task, so its bytes are live.
                unsafe { stream_value::write(memory()?, *at, *value) };
                allocation_table::wrote(*at..at.saturating_add(size_of::<u64>()));
                Ok(())
            }
            Task::AwaitValue {
                at,
                value,
                comparison,
            } => {
                // SAFETY: as above.
                unsafe { stream_value::wait(memory()?, *at, *value, *comparison, &self.abort) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            task => unsafe { task.run(at, (check, AICORE_EXCEPTION), scratch) },
        }
    }

    /// Tells the sanitizer how a task that was just admitted orders streams.
    pub(super) fn order(&self, task: &Task) {
        match task {
            Task::Raise(notify) => notify.queue_record(self.id),
            Task::AwaitNotify { notify, .. } => notify.queue_wait(self.id),
            Task::Write { at, value } => stream_value::queue_write(self.id, *at, *value),
            Task::AwaitValue {
                at,
                value,
                comparison,
            } => stream_value::queue_wait(self.id, *at, *value, *comparison),
            _ => {}
        }
    }
}
