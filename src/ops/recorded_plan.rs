//! Prepared calls whose launches and refusals are recorded.

use std::sync::Arc;

use ascend_spec::TensorDesc;
use ascend_spec::declared::AnyArguments;

use crate::case_file::{self, LiveOperator};
use crate::error::{Error, Result};
use crate::operator::{Parameter, Plan, Tensors};
use crate::runtime::{Context, LaunchQueue};
use crate::tensor::AnyTensor;

/// A prepared call, with the description that a case file of it needs.
pub(super) struct RecordedPlan<P> {
    prepared: Plan<P>,
    call: AnyArguments<TensorDesc>,
    /// The version that launches call, counted from 1.
    version: u8,
}

impl<P: Parameter> RecordedPlan<P> {
    pub(super) fn new(prepared: Plan<P>, call: AnyArguments<TensorDesc>, version: u8) -> Self {
        Self {
            prepared,
            call,
            version,
        }
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.prepared.context()
    }

    /// Name of the function that launches call.
    pub(super) fn function(&self) -> &'static str {
        self.prepared.function()
    }

    /// Scratch memory that each launch needs.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.prepared.workspace_bytes()
    }

    /// Checks the tensors of a launch, calls `admits`, and queues the launch. The outer result is an error if nothing
    /// was queued, the inner one if only a part may have been.
    #[inline]
    pub(super) fn run(
        &self,
        queue: &impl LaunchQueue,
        tensors: &impl Tensors<P>,
        admits: impl FnOnce() -> Result<()>,
    ) -> Result<Result<()>> {
        let checked = self.prepared.check(queue, tensors);
        let checked = checked.and_then(|checked| admits().map(|()| checked));
        let outcome = checked.map(|checked| checked.launch());
        if case_file::is_on() {
            self.record(queue, tensors, &outcome);
        }
        outcome
    }

    #[cold]
    fn record(
        &self,
        queue: &impl LaunchQueue,
        tensors: &impl Tensors<P>,
        outcome: &Result<Result<()>>,
    ) {
        let live = LiveOperator::new(self.context(), &self.call, Some(self.version));
        let live = live.with(tensors, self.prepared.each_fixed());
        match outcome {
            Ok(Ok(())) => case_file::launched(queue.stream(), live),
            Ok(Err(error)) | Err(error) => case_file::failed(live, queue.stream(), error),
        }
    }
}

/// Records the refusal of a call that was to be planned with these tensors, and with `fixed`, the same for all
/// launches.
pub(super) fn recorded<R, P: Parameter>(
    planned: Result<R>,
    context: &Arc<Context>,
    call: impl FnOnce() -> AnyArguments<TensorDesc>,
    tensors: &impl Tensors<P>,
    fixed: &[(P, &AnyTensor)],
) -> Result<R> {
    let note = |error: &Error| {
        if case_file::is_on() {
            let live = LiveOperator::new(context, &call(), None);
            let live = live.with(tensors, fixed.iter().copied());
            case_file::failed(live, None, error);
        }
    };
    planned.inspect_err(note)
}
