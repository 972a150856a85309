//! Calls that take new lengths for every replay.

use std::ffi::c_void;
use std::sync::Arc;

use ascend_sys::{Api, bindings as sys};

use crate::attention::{CallLengths, Cumulative, FusedInferAttention, OwnedBindings, Plan, Reading};
use crate::error::{Result, acl};
use ascend_spec::Violation;

use crate::rules;
use crate::runtime::{Context, LaunchQueue, Memory, Stream};

use super::external_event::ExternalEvent;
use super::limits::KeyLimits;

/// A call of a graph, launched once or more within it, all launches with the same lengths. From
/// [`Capturing::attention`](super::Capturing::attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CapturedCall {
    pub(super) graph: u64,
    pub(super) index: usize,
}

/// The longest lengths of a call.
#[derive(Debug)]
struct LongestLengths {
    form: &'static str,
    requests: usize,
    most: KeyBounds,
}

#[derive(Debug)]
enum KeyBounds {
    /// Keys of each request.
    Each(Vec<usize>),
    /// Keys of any request, and of all together.
    Within(KeyLimits),
}

/// A call whose lengths vary.
#[derive(Debug)]
pub(super) struct VaryingCall {
    call: FusedInferAttention,
    longest: LongestLengths,
    /// Tensors to plan with.
    bound: OwnedBindings,
    /// Workspace that every launch has.
    workspace_bytes: usize,
}

impl VaryingCall {
    /// A call planned at its longest lengths.
    pub(super) fn new(
        call: &FusedInferAttention,
        longest: CallLengths<'_>,
        bound: OwnedBindings,
    ) -> Result<(Self, Plan)> {
        let plan = longest.apply(call.clone()).plan_bindings(&bound, Reading::Captured)?;
        let varying = Self {
            call: call.clone(),
            longest: LongestLengths {
                form: longest.form(),
                requests: longest.keys().lengths().len(),
                most: KeyBounds::Each(longest.keys().lengths().to_vec()),
            },
            bound,
            workspace_bytes: plan.workspace_bytes(),
        };
        Ok((varying, plan))
    }

    /// A packed call over a paged cache, planned at the extremes of its limits.
    pub(super) fn within(
        call: &FusedInferAttention,
        rows: &Cumulative,
        limits: KeyLimits,
        bound: OwnedBindings,
    ) -> Result<(Self, Plan)> {
        let mut extremes = limits.extremes(rows)?.into_iter();
        let first = extremes.next().unwrap_or_default();
        let longest = CallLengths::PackedPaged { q: rows, kv: &first };
        let (mut varying, plan) = Self::new(call, longest, bound)?;
        varying.longest.most = KeyBounds::Within(limits);
        for other in extremes {
            let lengths = CallLengths::PackedPaged { q: rows, kv: &other };
            let call = lengths.apply(call.clone());
            let plan = call.plan_bindings(&varying.bound, Reading::Captured)?;
            varying.workspace_bytes = varying.workspace_bytes.max(plan.workspace_bytes());
        }
        Ok((varying, plan))
    }

    /// Workspace that every launch has.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// The call planned with other lengths, which need no more than the longest.
    pub(super) fn plan(&self, lengths: CallLengths<'_>) -> Result<Plan> {
        self.longest.admits(lengths)?;
        let plan = lengths.apply(self.call.clone()).plan_bindings(&self.bound, Reading::Captured)?;
        if plan.workspace_bytes() > self.workspace_bytes {
            return Err(Violation::new(
                &rules::GRAPH_WORKSPACE,
                format_args!("{} bytes", plan.workspace_bytes()),
                format_args!("{} bytes", self.workspace_bytes),
                "capture again with lengths that need the most workspace",
            )
            .into());
        }
        Ok(plan)
    }
}

impl LongestLengths {
    fn admits(&self, lengths: CallLengths<'_>) -> Result<(), Violation> {
        if lengths.form() != self.form {
            return Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!("lengths of a call {}", lengths.form()),
                format_args!("those of a call {}", self.form),
                "give the lengths in the form of the capture",
            ));
        }
        let keys = lengths.keys();
        if keys.lengths().len() != self.requests {
            return Err(Violation::new(
                &rules::LENGTHS_BATCH,
                format_args!("{} requests", keys.lengths().len()),
                format_args!("{}, as captured", self.requests),
                "pad the batch with dummy requests to the captured size",
            ));
        }
        let longest = match &self.most {
            KeyBounds::Within(limits) => return limits.admits(keys.lengths()),
            KeyBounds::Each(longest) => longest,
        };
        let mut both = keys.lengths().iter().zip(longest);
        match both.position(|(given, longest)| given > longest) {
            None => Ok(()),
            Some(request) => Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!("{} keys of request {request}", keys.lengths().get(request).copied().unwrap_or(0)),
                format_args!("at most {}", longest.get(request).copied().unwrap_or(0)),
                "declare the longest lengths that will ever come, such as the model's limit, at the capture",
            )),
        }
    }
}

/// A launch of a [`VaryingCall`] within the graph.
#[derive(Debug)]
pub(super) struct CapturedLaunch {
    /// Index of the call among the graph's.
    pub(super) call: usize,
    bound: OwnedBindings,
    workspace: Option<Arc<Memory>>,
    group: TaskGroup,
    pub(super) event: ExternalEvent,
}

/// The handle of a task group. It ends with the graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct TaskGroup(pub(super) sys::aclrtTaskGrp);

// SAFETY: a name, not memory: CANN takes it from any thread whose context is the graph's.
unsafe impl Send for TaskGroup {}
// SAFETY: as for `Send`.
unsafe impl Sync for TaskGroup {}

impl CapturedLaunch {
    pub(super) fn new(
        call: usize,
        bound: OwnedBindings,
        workspace: Option<Arc<Memory>>,
        group: TaskGroup,
        event: ExternalEvent,
    ) -> Self {
        Self { call, bound, workspace, group, event }
    }

    /// Refuses a plan that needs more blocks than the launch's table names now.
    pub(super) fn admits(&self, plan: &Plan) -> Result<()> {
        plan.replayed(&self.bound)
    }

    /// Gives the captured launch the lengths of a plan, when the stream `side` gets there.
    pub(super) fn update(&self, api: &Api, side: &Stream, plan: &Plan) -> Result<()> {
        let raw = side.as_raw();
        // SAFETY: the stream is alive and not captured, and the group is one of the graph's, which lives.
        unsafe { acl!(api, aclmdlRICaptureTaskUpdateBegin(raw, self.group.0)) }?;
        let queue = UpdateQueue { side, workspace: self.workspace.as_ref() };
        let outcome = plan.run(&queue, &self.bound);
        // Also after a failure: the stream has to leave the update.
        // SAFETY: the stream is alive and not captured.
        let end = unsafe { acl!(api, aclmdlRICaptureTaskUpdateEnd(raw)) };
        outcome.and(end)
    }
}

/// The queue of a launch that replaces a captured one.
struct UpdateQueue<'a> {
    side: &'a Stream,
    workspace: Option<&'a Arc<Memory>>,
}

impl LaunchQueue for UpdateQueue<'_> {
    fn context(&self) -> &Arc<Context> {
        self.side.context()
    }

    fn raw(&self) -> Result<*mut c_void> {
        Ok(self.side.as_raw())
    }

    fn runs_now(&self) -> bool {
        false
    }

    fn workspace(&self, bytes: usize) -> Result<Arc<Memory>> {
        let have = self.workspace.map_or(0, |memory| memory.bytes());
        match self.workspace {
            Some(memory) if have >= bytes => Ok(Arc::clone(memory)),
            _ => Err(Violation::new(
                &rules::GRAPH_WORKSPACE,
                format_args!("{bytes} bytes"),
                format_args!("{have} bytes"),
                "capture again with lengths that need the most workspace",
            )
            .into()),
        }
    }

    fn queued(&self) -> u64 {
        self.side.progress().advance()
    }

    /// The graph has kept everything since the capture.
    fn keep(&self, _: u64, _: &Arc<Memory>) {}
}

#[cfg(all(test, feature = "emulation"))]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::attention::{BlockTable, Inputs, PerRequest};
    use crate::{Error, Layout, Runtime, Tensor, f16};

    /// Issue 15486 of vllm-project/vllm-ascend, where the declared lengths are right and the workspace is not:
    /// whatever workspace the operator needs is compared with what there is.
    #[test]
    fn lengths_that_need_more_workspace_than_was_reserved_are_refused() {
        let device = Runtime::emulated().unwrap().device(0).unwrap();
        let query: Tensor<f16> = Tensor::empty(&device, [1, 1, 64]).unwrap();
        let cache: Tensor<f16> = Tensor::empty(&device, [4, 16, 64]).unwrap();
        let table = BlockTable::zeroed(&device, 1, 4, 16).unwrap();
        let inputs = Inputs::new(&query, &cache, &cache).paged(&table);
        let keys = PerRequest::new(vec![64]).unwrap();
        let longest = CallLengths::Batched { q: None, kv: &keys };
        let call = FusedInferAttention::new(Layout::Bsh).scale(1.0).heads(1);
        let bound = OwnedBindings::of(&inputs.tensors()).unwrap();
        let (mut varying, plan) = VaryingCall::new(&call, longest, bound).unwrap();
        assert!(plan.workspace_bytes() > 0);
        assert!(varying.plan(longest).is_ok());
        varying.workspace_bytes -= 1;
        match varying.plan(longest) {
            Err(Error::Violation(refused)) => {
                assert_eq!(refused.rule, &rules::GRAPH_WORKSPACE);
                assert_eq!(refused.given, format!("{} bytes", plan.workspace_bytes()));
            }
            other => panic!("{other:?}"),
        }
    }
}
