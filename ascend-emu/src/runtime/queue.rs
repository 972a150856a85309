//! The ring of commands that wait in a stream. It never grows, and queueing allocates nothing.

use crate::config::Check;
use crate::operator::Addresses;
use crate::runtime::event::{Event, Mark};
use crate::runtime::graph::{Graph, Group};
use crate::runtime::task::Task;
use crate::sanitizer::Operation;
use crate::status::Failure;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

/// Largest number of commands that a stream holds; the next one waits for room, as with the hardware's queues.
const CAPACITY: usize = 1024;

/// One command.
#[derive(Debug)]
pub(crate) enum Command {
    /// Runs a task. The addresses of its tensors are kept beside it in the queue. The mode is that of the thread that
    /// queued the task.
    Task(Task, Check),
    Record {
        event: Arc<Event>,
        mark: Mark,
    },
    Wait {
        event: Arc<Event>,
        mark: Mark,
        limit: Option<Duration>,
    },
    Reset {
        event: Arc<Event>,
        ticket: u64,
    },
    Replay(Arc<Graph>, Check),
    /// Carries out an update of a task group, which the graph keeps.
    Update(Arc<Group>, Operation),
    /// Work that must not run and fails with the fault instead.
    Broken(Failure),
}

impl Command {
    /// Ends a command that will never run, so that nothing waits for it.
    pub(crate) fn cancel(self) {
        match self {
            Command::Record { event, mark } => event.reach_record(mark),
            Command::Wait { event, .. } => event.end_wait(),
            Command::Reset { event, ticket } => event.reach_reset(ticket),
            Command::Task(task, _) => task.cancel(),
            Command::Update(group, update) => group.end_update(update, true),
            Command::Replay(..) | Command::Broken(_) => {}
        }
    }
}

#[derive(Debug, Default)]
struct Entry {
    command: Option<Command>,
    /// Reused from command to command, so that long lists do not allocate again.
    addresses: Addresses,
}

/// A ring of commands, the oldest first.
#[derive(Debug)]
pub(crate) struct Queue {
    entries: Box<[Entry]>,
    first: usize,
    len: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { entries: (0..CAPACITY).map(|_| Entry::default()).collect(), first: 0, len: 0 }
    }
}

impl Queue {
    pub(crate) fn is_full(&self) -> bool {
        self.len == self.entries.len()
    }

    /// Appends a command. The caller has waited until the queue is not full; a command that does not fit is lost.
    pub(crate) fn push(&mut self, command: Command, addresses: Option<&Addresses>) {
        debug_assert!(!self.is_full());
        if self.len == 0 {
            // The first entries have allocated what their lists need.
            self.first = 0;
        }
        let place = (self.first + self.len) % self.entries.len();
        if let (false, Some(entry)) = (self.is_full(), self.entries.get_mut(place)) {
            if let Some(addresses) = addresses {
                entry.addresses.copy_from(addresses);
            }
            entry.command = Some(command);
            self.len += 1;
        }
    }

    /// Takes the first command, and swaps its addresses with `addresses`.
    pub(crate) fn take(&mut self, addresses: &mut Addresses) -> Option<Command> {
        let entry = self.entries.get_mut(self.first)?;
        let command = entry.command.take()?;
        if let Command::Task(..) = command {
            mem::swap(addresses, &mut entry.addresses);
        }
        self.advance();
        Some(command)
    }

    /// Removes the first command, which will not run.
    pub(crate) fn drop_first(&mut self) -> Option<Command> {
        let command = self.entries.get_mut(self.first)?.command.take()?;
        self.advance();
        Some(command)
    }

    fn advance(&mut self) {
        self.first = (self.first + 1) % self.entries.len();
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(value: u8) -> Command {
        let fill = Task::Fill { dst: 0, value, bytes: 0 };
        Command::Task(fill, Check::Compat)
    }

    #[test]
    fn commands_come_out_in_order_around_the_end() {
        let mut queue = Queue::default();
        let mut taken = Addresses::default();
        let mut next = 0u8;
        let mut expected = 0u8;
        for round in 0..50 {
            let mut addresses = Addresses::default();
            while !queue.is_full() {
                addresses.inputs[0] = usize::from(next);
                queue.push(fill(next), Some(&addresses));
                next = next.wrapping_add(1);
            }
            for _ in 0..CAPACITY - round {
                let Some(Command::Task(Task::Fill { value, .. }, _)) = queue.take(&mut taken) else {
                    panic!("no command");
                };
                assert_eq!(value, expected);
                assert_eq!(taken.inputs[0], usize::from(expected));
                expected = expected.wrapping_add(1);
            }
        }
    }

    #[test]
    fn an_empty_queue_gives_nothing() {
        let mut queue = Queue::default();
        assert!(queue.take(&mut Addresses::default()).is_none());
        assert!(queue.drop_first().is_none());
    }
}
