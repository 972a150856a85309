//! Captured graphs, their task groups, and their replay.

use crate::handle::{Id, Kind, Table};
use crate::lock::Lock;
use crate::operator::{Access, Addresses};
use crate::runtime::event::Event;
use crate::runtime::task::Task;
use crate::sanitizer::{Operation, StreamId, allocation_table};
use crate::status::{Outcome, TASK_GROUP_STATUS, failure};
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Arc, Weak};

/// The function that queues a replay.
pub(crate) const REPLAY: &str = "aclmdlRIExecuteAsync";

pub(crate) static GRAPHS: Table<Graph> = Table::new(Kind::Graph);
pub(crate) static GROUPS: Table<Group> = Table::new(Kind::TaskGroup);

/// One recorded step, with the addresses of the task's tensors in `A`. Records and waits inside the capture are no
/// steps: a graph is replayed in the order of recording, which implies them.
#[derive(Clone, Debug)]
pub(crate) enum Step<A = Box<Addresses>> {
    Task(Task, A),
    /// Record of an external event.
    Raise(Arc<Event>),
    /// Wait for an external event.
    Await(Arc<Event>),
    /// Reset of an external event.
    Lower(Arc<Event>),
}

#[derive(Debug)]
pub(crate) struct Node {
    /// Stream it was recorded in.
    pub stream: StreamId,
    pub step: Step,
}

/// An update of a task group that is queued and was not carried out yet.
#[derive(Debug)]
struct QueuedUpdate {
    operation: Operation,
    /// The new task of each step that it replaces.
    tasks: Vec<(usize, Task, Addresses)>,
}

impl QueuedUpdate {
    fn replaces(&self, place: usize) -> bool {
        self.tasks.iter().any(|(member, ..)| *member == place)
    }
}

#[derive(Debug, Default)]
struct Steps {
    nodes: Vec<Node>,
    groups: Vec<Id>,
    complete: bool,
    /// The updates that are queued, the earliest first.
    updates: Vec<QueuedUpdate>,
    /// The latest replays; those that the host has waited for are forgotten at the next update.
    replays: VecDeque<Operation>,
}

/// Largest number of replays that are remembered for updates. Forgetting the oldest may lose findings but adds none.
const REPLAYS: usize = 1024;

/// A captured graph.
#[derive(Debug, Default)]
pub(crate) struct Graph(Lock<Steps>);

impl Graph {
    /// Appends a node and returns its number.
    pub(crate) fn push(&self, node: Node) -> usize {
        let mut steps = self.0.lock();
        steps.nodes.push(node);
        steps.nodes.len() - 1
    }

    /// Marks the capture as over.
    pub(crate) fn complete(&self) {
        self.0.lock().complete = true;
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.0.lock().complete
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().nodes.len()
    }

    /// Copies a step, and the addresses of its tensors to `to`.
    pub(crate) fn step(&self, place: usize, to: &mut Addresses) -> Option<Step<()>> {
        let steps = self.0.lock();
        Some(match &steps.nodes.get(place)?.step {
            Step::Task(task, addresses) => {
                to.copy_from(addresses);
                Step::Task(task.clone(), ())
            }
            Step::Raise(event) => Step::Raise(Arc::clone(event)),
            Step::Await(event) => Step::Await(Arc::clone(event)),
            Step::Lower(event) => Step::Lower(Arc::clone(event)),
        })
    }

    /// The queued updates that happen before the next operation of a stream.
    pub(crate) fn updates_before(&self, stream: StreamId) -> Vec<Operation> {
        // The sanitizer asks for accesses while it is locked, so it is not asked while the steps are.
        let steps = self.0.lock();
        let mut updates: Vec<_> = steps.updates.iter().map(|u| u.operation).collect();
        drop(steps);
        updates.retain(|update| allocation_table::happens_before(*update, stream));
        updates
    }

    /// Visits every byte range that a replay may touch: those of each step, and those of queued updates that may be
    /// carried out before it runs. Tasks that one of the updates `before` the replay replaces do not run.
    pub(crate) fn accesses(&self, before: &[Operation], visit: &mut dyn FnMut(Access)) {
        let steps = self.0.lock();
        let replaced = |place: usize, counts: &dyn Fn(&QueuedUpdate) -> bool| {
            let mut updates = steps.updates.iter();
            updates.any(|update| before.contains(&update.operation) && counts(update) && update.replaces(place))
        };
        for (place, node) in steps.nodes.iter().enumerate() {
            if let Step::Task(task, addresses) = &node.step
                && !replaced(place, &|_| true)
            {
                task.accesses(addresses, visit);
            }
        }
        for update in &steps.updates {
            let Operation { stream, number } = update.operation;
            // A stream carries its updates out in order.
            let later = |other: &QueuedUpdate| other.operation.stream == stream && other.operation.number > number;
            for (place, task, addresses) in &update.tasks {
                if !replaced(*place, &later) {
                    task.accesses(addresses, visit);
                }
            }
        }
    }

    /// Remembers a replay that is about to be queued, for the updates that are queued behind it.
    pub(crate) fn add_replay(&self, replay: Operation) {
        let mut steps = self.0.lock();
        if steps.groups.is_empty() {
            return;
        }
        if steps.replays.len() >= REPLAYS {
            steps.replays.pop_front();
        }
        steps.replays.push_back(replay);
    }

    /// Forgets a replay that was not queued.
    pub(crate) fn remove_replay(&self, replay: Operation) {
        self.0.lock().replays.retain(|known| *known != replay);
    }

    /// Ends the handles of the graph's task groups.
    pub(crate) fn destroy_groups(&self) {
        for group in std::mem::take(&mut self.0.lock().groups) {
            // A group's handle ends only here.
            let _ = GROUPS.remove_id(group);
        }
    }

    /// Describes the graph, one line for each node.
    pub(crate) fn describe(&self) -> String {
        let steps = self.0.lock();
        let mut text = format!("graph of {} steps\n", steps.nodes.len());
        for (place, node) in steps.nodes.iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = match &node.step {
                Step::Task(task, _) => writeln!(text, "{place}: stream {} {task:?}", node.stream),
                Step::Raise(_) => writeln!(text, "{place}: stream {} record", node.stream),
                Step::Await(_) => writeln!(text, "{place}: stream {} wait", node.stream),
                Step::Lower(_) => writeln!(text, "{place}: stream {} reset", node.stream),
            };
        }
        text
    }
}

/// Steps of a graph that can be replaced together.
#[derive(Debug)]
pub(crate) struct Group {
    graph: Weak<Graph>,
    members: Vec<usize>,
}

impl Group {
    /// Makes a group of steps and returns its handle, which lives as long as the graph's.
    pub(crate) fn create(graph: &Arc<Graph>, members: Vec<usize>) -> Id {
        let id = GROUPS.insert(Group { graph: Arc::downgrade(graph), members });
        graph.0.lock().groups.push(id);
        id
    }

    /// Checks that tasks can replace the group's.
    pub(crate) fn check(&self, tasks: &[(Task, Addresses)]) -> Outcome {
        const NAME: &str = "aclmdlRICaptureTaskUpdateEnd";
        let graph =
            self.graph.upgrade().ok_or_else(|| failure!(TASK_GROUP_STATUS, "{NAME}: the graph was destroyed"))?;
        let steps = graph.0.lock();
        if tasks.len() != self.members.len() {
            return Err(failure!(
                TASK_GROUP_STATUS,
                "{NAME}: given {} tasks, allowed: {}, as in the group",
                tasks.len(),
                self.members.len()
            ));
        }
        for (&member, (task, _)) in self.members.iter().zip(tasks) {
            match steps.nodes.get(member).map(|node| &node.step) {
                Some(Step::Task(old, _)) if old.name() == task.name() => {}
                _ => {
                    return Err(failure!(
                        TASK_GROUP_STATUS,
                        "{NAME}: a {} cannot take the place of step {member} of the graph",
                        task.name()
                    ));
                }
            }
        }
        Ok(())
    }

    /// Queues the replacement of the group's tasks, and adds the accesses of the new ones to those of queued replays.
    pub(crate) fn queue_update(&self, update: Operation, tasks: Vec<(Task, Addresses)>) {
        let Some(graph) = self.graph.upgrade() else {
            return;
        };
        let members = self.members.iter().copied().zip(tasks);
        let mut steps = graph.0.lock();
        steps.updates.push(QueuedUpdate {
            operation: update,
            tasks: members.map(|(member, (task, addresses))| (member, task, addresses)).collect(),
        });
        let mut replays: Vec<_> = steps.replays.iter().copied().collect();
        drop(steps);
        let waited = |replay: &mut Operation| allocation_table::host_has_waited(*replay);
        let over: Vec<_> = replays.extract_if(.., waited).collect();
        let visit = |visit: &mut dyn FnMut(Access)| {
            let steps = graph.0.lock();
            let queued = steps.updates.iter().filter(|queued| queued.operation == update);
            for (_, task, addresses) in queued.flat_map(|queued| &queued.tasks) {
                task.accesses(addresses, visit);
            }
        };
        allocation_table::add_replay_accesses(update, &replays, REPLAY, &visit);
        let mut steps = graph.0.lock();
        steps.replays.retain(|replay| !over.contains(replay));
    }

    /// Ends a queued update: replaces the group's tasks, unless the update was dropped. Does nothing if the graph was
    /// destroyed.
    pub(crate) fn end_update(&self, update: Operation, dropped: bool) {
        let Some(graph) = self.graph.upgrade() else {
            return;
        };
        let mut steps = graph.0.lock();
        let queued = steps.updates.iter().position(|queued| queued.operation == update);
        let queued = queued.map(|place| steps.updates.remove(place));
        for (member, task, addresses) in queued.filter(|_| !dropped).into_iter().flat_map(|q| q.tasks) {
            if let Some(node) = steps.nodes.get_mut(member) {
                node.step = Step::Task(task, Box::new(addresses));
            }
        }
    }
}
