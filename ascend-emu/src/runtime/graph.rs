//! Captured graphs, their task groups, and their replay.

use crate::handle::{Id, Kind, Table};
use crate::lock::Lock;
use crate::operator::{Access, Addresses};
use crate::runtime::event::Event;
use crate::runtime::task::Task;
use crate::sanitizer::StreamId;
use crate::status::{Outcome, TASK_GROUP_STATUS, failure};
use std::fmt::Write;
use std::sync::{Arc, Weak};

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

#[derive(Debug, Default)]
struct Steps {
    nodes: Vec<Node>,
    groups: Vec<Id>,
    complete: bool,
}

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

    /// Copies a step, and the addresses of its tensors to `at`.
    pub(crate) fn step(&self, place: usize, at: &mut Addresses) -> Option<Step<()>> {
        let steps = self.0.lock();
        Some(match &steps.nodes.get(place)?.step {
            Step::Task(task, addresses) => {
                at.copy_from(addresses);
                Step::Task(task.clone(), ())
            }
            Step::Raise(event) => Step::Raise(Arc::clone(event)),
            Step::Await(event) => Step::Await(Arc::clone(event)),
            Step::Lower(event) => Step::Lower(Arc::clone(event)),
        })
    }

    /// Visits every byte range that a replay touches.
    pub(crate) fn accesses(&self, visit: &mut dyn FnMut(Access)) {
        for node in &self.0.lock().nodes {
            if let Step::Task(task, at) = &node.step {
                task.accesses(at, visit);
            }
        }
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
        let id = GROUPS.insert(Group {
            graph: Arc::downgrade(graph),
            members,
        });
        graph.0.lock().groups.push(id);
        id
    }

    /// Checks that tasks can replace the group's.
    pub(crate) fn check(&self, tasks: &[(Task, Addresses)]) -> Outcome {
        const NAME: &str = "aclmdlRICaptureTaskUpdateEnd";
        let graph = self
            .graph
            .upgrade()
            .ok_or_else(|| failure!(TASK_GROUP_STATUS, "{NAME}: the graph was destroyed"))?;
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

    /// Replaces the group's tasks. Does nothing if the graph was destroyed.
    pub(crate) fn replace(&self, tasks: Vec<(Task, Addresses)>) {
        let Some(graph) = self.graph.upgrade() else {
            return;
        };
        let mut steps = graph.0.lock();
        for (&member, (task, at)) in self.members.iter().zip(tasks) {
            if let Some(node) = steps.nodes.get_mut(member) {
                node.step = Step::Task(task, Box::new(at));
            }
        }
    }
}
