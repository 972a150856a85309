//! The thread of a stream.

use super::Stream;
use crate::config::Check;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses};
use crate::runtime::event::Event;
use crate::runtime::graph::{Graph, Step};
use crate::runtime::queue::Command;
use crate::runtime::stall::{Wait, Waiting};
use crate::runtime::task::Task;
use crate::runtime::{callback, stream_value};
use crate::sanitizer::allocation_table;
use crate::status::{AICORE_EXCEPTION, DEVICE_INTERNAL, Outcome, TASK_TIMEOUT, contain, failure};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Stream {
    pub(super) fn work(self: Arc<Self>) {
        let mut addresses = Addresses::default();
        let mut scratch = Vec::new();
        loop {
            let mut shared = self.shared.lock();
            let command = loop {
                if let Some(command) = shared.queue.take(&mut addresses) {
                    break command;
                }
                if shared.ending {
                    return;
                }
                shared = self.filled.wait(shared, None);
            };
            shared.running = true;
            if let Command::Wait { event, .. } = &command {
                shared.waiting = Some(Arc::clone(event));
            }
            let stopped = self.faults.is_stopped();
            drop(shared);
            // There is room in the queue again.
            self.advanced.notify_all();
            let outcome = contain(DEVICE_INTERNAL, || {
                if stopped {
                    command.cancel();
                    return Ok(());
                }
                self.execute(command, &mut addresses, &mut scratch)
            });
            let mut shared = self.shared.lock();
            shared.running = false;
            shared.waiting = None;
            shared.completed += 1;
            if let Err(fault) = outcome {
                self.faults.add(fault, self.settings.values().stop_on_failure);
            }
            self.progress.store(shared.completed, Ordering::Release);
            drop(shared);
            self.advanced.notify_all();
        }
    }

    /// Runs one command, which is dropped afterwards.
    fn execute(&self, command: Command, addresses: &mut Addresses, scratch: &mut Vec<Access>) -> Outcome {
        match command {
            // SAFETY: the allocation table admitted the task, so its ranges are live, and it keeps them until
            // `completed` passes the task's number.
            Command::Task(task, check) => unsafe { self.run_task(&task, addresses, check, scratch) },
            Command::Record { event, mark } => {
                event.reach_record(mark);
                Ok(())
            }
            Command::Wait { event, mark, limit } => {
                let waiting = Waiting::begin(self.id, Wait::Record(mark.stream));
                let in_time = event.wait_reached(mark, limit, &self.abort);
                drop(waiting);
                event.end_wait();
                match limit.filter(|_| !in_time) {
                    None => Ok(()),
                    Some(limit) => Err(failure!(
                        TASK_TIMEOUT,
                        "aclrtStreamWaitEvent: the event was not reached in {} s, which aclrtSetOpWaitTimeout \
                             allows",
                        limit.as_secs()
                    )),
                }
            }
            Command::Reset { event, ticket } => {
                event.reach_reset(ticket);
                Ok(())
            }
            Command::Replay(graph, check) => self.run_graph(&graph, addresses, check, scratch),
            Command::Update(group, update) => {
                group.end_update(update, false);
                Ok(())
            }
            Command::Broken(fault) => Err(fault),
        }
    }

    /// Waits for an event of a graph.
    fn wait_within(&self, event: &Arc<Event>) {
        let wake = |event| self.shared.lock().waiting = event;
        wake(Some(Arc::clone(event)));
        let waiting = Waiting::begin(self.id, Wait::Event(Arc::clone(event)));
        event.wait_raised(&self.abort);
        drop(waiting);
        wake(None);
    }

    /// Runs the steps of a graph in the order of their recording, which holds every dependency among them.
    fn run_graph(&self, graph: &Graph, addresses: &mut Addresses, check: Check, scratch: &mut Vec<Access>) -> Outcome {
        for place in 0..graph.len() {
            if self.abort.load(Ordering::Acquire) {
                break;
            }
            match graph.step(place, addresses) {
                Some(Step::Task(task, ())) => {
                    let _waiting = match task {
                        Task::AwaitValue { address, .. } => Some(Waiting::begin(self.id, Wait::Value(address))),
                        _ => None,
                    };
                    // SAFETY: the allocation table admitted the replay with the ranges of every task that it may run,
                    // and added those of updates that were queued since; it keeps them until `completed` passes the
                    // replay's number.
                    unsafe { self.run_task(&task, addresses, check, scratch)? }
                }
                Some(Step::Raise(event)) => event.raise(self.id),
                Some(Step::Lower(event)) => event.lower(),
                Some(Step::Await(event)) => self.wait_within(&event),
                None => {}
            }
        }
        Ok(())
    }
}

impl Stream {
    /// Runs a task of any kind.
    ///
    /// # Safety
    ///
    /// As for [`Task::run`].
    pub(super) unsafe fn run_task(
        &self,
        task: &Task,
        addresses: &Addresses,
        check: Check,
        scratch: &mut Vec<Access>,
    ) -> Outcome {
        match task {
            Task::Call(call) => {
                // SAFETY: the program promised it when it queued the call.
                unsafe { call.run() };
                Ok(())
            }
            Task::Report { stream, call, block } => callback::deliver(*stream, *call, *block, &self.abort),
            Task::Raise(notify) => {
                notify.raise();
                Ok(())
            }
            Task::AwaitNotify { notify, limit } => notify.wait(*limit, &self.abort),
            Task::Write { address, value } => {
                // SAFETY: the allocation table admitted the task, so its bytes are live.
                unsafe { stream_value::write(DeviceMemory::get()?, *address, *value) };
                allocation_table::wrote(*address..address.saturating_add(size_of::<u64>()));
                Ok(())
            }
            Task::AwaitValue { address, value, comparison } => {
                // SAFETY: the allocation table admitted the task, so its bytes are live.
                unsafe { stream_value::wait(DeviceMemory::get()?, *address, *value, *comparison, &self.abort) };
                Ok(())
            }
            // SAFETY: the caller's promise.
            Task::Collective(call) => unsafe { call.run(&self.abort) },
            // SAFETY: the caller's promise.
            task => unsafe { task.run(addresses, (check, AICORE_EXCEPTION), scratch) },
        }
    }

    /// Tells the sanitizer how a task that was just admitted orders streams.
    pub(super) fn order(&self, task: &Task) {
        match task {
            Task::Raise(notify) => notify.queue_record(self.id),
            Task::AwaitNotify { notify, .. } => notify.queue_wait(self.id),
            Task::Write { address, value } => stream_value::queue_write(self.id, *address, *value),
            Task::AwaitValue { address, value, comparison } => {
                stream_value::queue_wait(self.id, *address, *value, *comparison)
            }
            _ => {}
        }
    }
}
