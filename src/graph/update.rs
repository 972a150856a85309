//! New lengths for a replay.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::attention::{CallLengths, Plan};
use crate::error::Result;
use ascend_spec::Violation;

use crate::rules;

use super::call::{CapturedCall, VaryingCall};

/// The calls of a graph that take lengths.
#[derive(Debug)]
pub(super) struct VaryingCalls {
    pub(super) graph: u64,
    pub(super) calls: Vec<VaryingCall>,
}

/// New lengths for every call of a graph that takes them: checked, planned, and used up by one replay. From
/// [`Graph::update`](super::Graph::update).
///
/// It can be made while the previous replay is still running.
#[must_use = "an update does nothing until replayed"]
pub struct Update {
    calls: Arc<VaryingCalls>,
    plans: Vec<Option<Plan>>,
    /// Whether a replay was queued with it.
    used: AtomicBool,
}

impl Update {
    pub(super) fn new(calls: &Arc<VaryingCalls>) -> Self {
        Self {
            calls: Arc::clone(calls),
            plans: calls.calls.iter().map(|_| None).collect(),
            used: AtomicBool::new(false),
        }
    }

    /// Gives one call its lengths.
    ///
    /// # Errors
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for more keys than the capture declared or lengths in another
    /// form, [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for another number of requests,
    /// [`GRAPH_WORKSPACE`](crate::rules::GRAPH_WORKSPACE), [`GRAPH_UPDATE`](crate::rules::GRAPH_UPDATE) for a call
    /// of another graph or one that has lengths already; otherwise as for
    /// [`FusedInferAttention::plan`](crate::FusedInferAttention::plan).
    pub fn lengths(mut self, call: CapturedCall, lengths: CallLengths<'_>) -> Result<Self> {
        self.set(call, lengths)?;
        Ok(self)
    }

    /// Gives all calls the same lengths.
    ///
    /// # Errors
    /// As for [`Update::lengths`]; [`GRAPH_UPDATE`](crate::rules::GRAPH_UPDATE) for a graph without such calls:
    /// launches of plans keep the lengths of their plans, but for those that read them from tensors
    /// ([`SparseSequences::overwrite`](crate::sparse::SparseSequences::overwrite)).
    pub fn all(self, lengths: CallLengths<'_>) -> Result<Self> {
        if self.plans.is_empty() {
            return Err(Violation::new(
                &rules::GRAPH_UPDATE,
                "lengths for a graph whose launches all keep the lengths of their plans",
                "none",
                "capture the call by `Capturing::attention` and `Capturing::launch_into`, or replay without lengths",
            )
            .into());
        }
        let every = self.plans.len();
        self.each(std::iter::repeat_n(lengths, every))
    }

    /// Gives each call lengths of its own, in the order of their captures.
    ///
    /// # Errors
    /// As for [`Update::lengths`].
    pub fn each<'l>(mut self, lengths: impl IntoIterator<Item = CallLengths<'l>>) -> Result<Self> {
        let graph = self.calls.graph;
        for (index, lengths) in lengths.into_iter().enumerate() {
            self.set(CapturedCall { graph, index }, lengths)?;
        }
        Ok(self)
    }

    fn set(&mut self, call: CapturedCall, lengths: CallLengths<'_>) -> Result<()> {
        let own = call.graph == self.calls.graph;
        let known = self.calls.calls.get(call.index).filter(|_| own);
        let (Some(varying), Some(place)) = (known, self.plans.get_mut(call.index)) else {
            return Err(Violation::new(
                &rules::GRAPH_UPDATE,
                "lengths for a call of another graph",
                "a call of this graph",
                "keep each graph's calls beside it",
            )
            .into());
        };
        if place.is_some() {
            return Err(Violation::new(
                &rules::GRAPH_UPDATE,
                format_args!("lengths for call {} twice", call.index),
                "once for each call",
                "give a call all its lengths at once",
            )
            .into());
        }
        *place = Some(varying.plan(lengths)?);
        Ok(())
    }

    /// Takes note that a replay was queued, of which this has the lengths.
    pub(super) fn use_up(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// The plans of a graph's calls, if they are all there.
    pub(super) fn complete(&self, calls: &Arc<VaryingCalls>) -> Result<&[Option<Plan>], Violation> {
        if !Arc::ptr_eq(&self.calls, calls) {
            return Err(Violation::new(
                &rules::GRAPH_UPDATE,
                "an update of another graph",
                "one of this graph",
                "call `update` of the graph that is replayed",
            ));
        }
        if self.used.load(Ordering::Relaxed) {
            return Err(Violation::new(
                &rules::GRAPH_UPDATE,
                "an update that a replay was queued with",
                "one for each replay",
                "begin another one by `update` of the graph, also for the same lengths",
            ));
        }
        let count = self.plans.len();
        let missing = self.plans.iter().position(Option::is_none);
        match missing {
            None => Ok(&self.plans),
            Some(call) => Err(Violation::new(
                &rules::GRAPH_UPDATE,
                format_args!("no lengths for call {call}"),
                format_args!("lengths for all {count} calls"),
                "lengths are captured by value: give every call those of the step",
            )),
        }
    }
}

impl fmt::Debug for Update {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = self.plans.iter().filter(|plan| plan.is_some()).count();
        f.debug_struct("Update").field("calls", &self.plans.len()).field("given", &given).finish_non_exhaustive()
    }
}
