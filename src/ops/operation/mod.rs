//! Plans, which are made once and launched again and again: one type for every operator.
//!
//! A [`Plan`] holds a call that was checked and prepared, and launches it. What an [`Operation`] reads and writes in a
//! launch are its types [`Inputs`](Operation::Inputs) and [`Output`](Operation::Output). An operator whose launch
//! queues its call and does nothing else is a [`PlainCall`]. Each operator has a name for its plans, such as
//! [`attention::Plan`](crate::attention::Plan) or [`FlashPlan`](crate::flash::FlashPlan).

mod outputs;
mod plain_call;

pub(crate) use outputs::{OutputTensors, Outputs, PlannedOutputs, new_output, outputs};
pub use plain_call::{PlainCall, PlainOperation};

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use ascend_spec::TensorDesc;
use ascend_spec::declared::AnyArguments;
use ascend_spec::operator::DeclaredParameter;

use crate::case_file::{self, LiveCall};
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{EntryPoints, Parameter, PreparedCall, Tensors};
use crate::runtime::{Context, LaunchQueue, Queue, ReplayCheck, Stream};
use crate::tensor::AnyTensor;

/// Keeps others from implementing [`Operation`].
pub(crate) trait Sealed {}

/// What a [`Plan`] launches: an operator, or merges of rows. Only this crate implements the trait.
#[allow(private_bounds, reason = "sealed: the bound has no public name")]
pub trait Operation: Sealed + Sized {
    /// What a launch reads: the tensors that differ from layer to layer. `T` is the element type of the output.
    type Inputs<'a, T: Element>;

    /// What a launch writes.
    type Output<T: Element>;

    /// Parameters of the operator.
    type Parameter: Parameter;

    /// Whether a launch writes tensors that it makes. Others write some of their inputs.
    #[doc(hidden)]
    const MAKES_OUTPUT: bool = true;

    /// Makes new output tensors with unspecified content.
    #[doc(hidden)]
    fn output<T: Element>(&self, plan: &Plan<Self>) -> Result<Self::Output<T>>;

    /// Checks the tensors of a launch and queues it, mostly by [`Plan::queue`].
    #[doc(hidden)]
    fn launch<T: Element>(
        &self,
        plan: &Plan<Self>,
        queue: &impl Queue,
        inputs: &Self::Inputs<'_, T>,
        output: &mut Self::Output<T>,
    ) -> Result<()>;

    /// Returns the check that each replay of a captured launch passes, if replays read what may have changed.
    #[doc(hidden)]
    #[inline]
    fn replay_check<T: Element>(&self, _inputs: &Self::Inputs<'_, T>) -> Option<Arc<dyn ReplayCheck>> {
        None
    }

    /// Returns the checks of numbers on the device that the plan has made, and that the host can replace.
    #[doc(hidden)]
    #[inline]
    fn number_checks(&self) -> &[Arc<dyn ReplayCheck>] {
        &[]
    }

    /// Whether a launch leaves rows of its outputs as they are.
    #[doc(hidden)]
    fn has_unwritten(&self) -> Result<bool> {
        Ok(false)
    }

    /// Queues zeros for the rows of new outputs that a launch leaves as they are, if there are any.
    #[doc(hidden)]
    fn clear_unwritten<T: Element>(&self, _: &Stream, _output: &Self::Output<T>) -> Result<()> {
        Ok(())
    }

    /// Checks what the contents of a launch's inputs show, mostly by [`Plan::lint_contents`]. By default nothing.
    #[doc(hidden)]
    fn check_contents<T: Element>(&self, _: &Plan<Self>, _: &Stream, _: &Self::Inputs<'_, T>) -> Result<()> {
        Ok(())
    }

    /// Returns scratch memory that each launch needs, in bytes.
    #[doc(hidden)]
    fn workspace_bytes(&self, plan: &Plan<Self>) -> usize {
        plan.call.workspace_bytes()
    }

    /// Adds what is particular to a plan to its debugging text.
    #[doc(hidden)]
    fn describe(&self, _plan: &Plan<Self>, _text: &mut fmt::DebugStruct<'_, '_>) {}
}

/// A call that was checked and prepared. From `plan` of the operator's description, such as
/// [`FusedInferAttention::plan`](crate::FusedInferAttention::plan).
///
/// All layers of a step share its shapes: one plan serves them all, and a launch swaps addresses and nothing else.
/// Attributes are part of the plan, lengths among them: others need another plan. Where there is nothing to compute,
/// such as no token, a launch checks its tensors and queues nothing.
///
/// # Threads
/// `Send` and `Sync`. Launches of one plan from several threads take turns; they may go to different streams.
pub struct Plan<O: Operation> {
    call: PreparedCall<O::Parameter>,
    recorded: Option<Box<RecordedCall>>,
    operation: O,
}

/// The description of a call that a case file of it needs.
struct RecordedCall {
    call: AnyArguments<TensorDesc>,
    /// Whether launches compute what this call says, so that case files may have them.
    is_whole: bool,
}

impl<O: Operation> Plan<O> {
    /// A plan whose launches are not recorded.
    pub(crate) fn new(call: PreparedCall<O::Parameter>, operation: O) -> Self {
        Self { call, recorded: None, operation }
    }

    /// The plan, whose launches are recorded as this call.
    pub(crate) fn recorded_as(mut self, call: &impl EntryPoints) -> Self {
        self.recorded = Some(Box::new(RecordedCall { call: call.recorded(), is_whole: true }));
        self
    }

    /// The plan, whose launches compute more than a call of the operator says, and are not recorded.
    pub(crate) fn unrecorded(mut self) -> Self {
        if let Some(recorded) = &mut self.recorded {
            recorded.is_whole = false;
        }
        self
    }

    /// Plans a call. `check` asks the contract for what the plan knows and whether there is nothing to compute; its
    /// refusal is recorded with these tensors. While the call is prepared `stand_in`, one of them, is the address of
    /// all.
    pub(crate) fn of_call<C: EntryPoints<Parameter = O::Parameter>>(
        (call, version): (&C, C::Version),
        stand_in: &AnyTensor,
        tensors: &impl Tensors<O::Parameter>,
        check: impl FnOnce() -> Result<(O, bool)>,
    ) -> Result<Self> {
        let context = stand_in.memory().context();
        let planned = check().and_then(|(operation, is_idle)| {
            let prepared = PreparedCall::standing_in(context, call, version, is_idle, stand_in, &[])?;
            Ok(Self::new(prepared, operation))
        });
        Self::recorded(planned, context, call, tensors, None)
    }

    /// The plan of a call, whose launches are recorded as this call, or its refusal, which is recorded with these
    /// tensors and those that stay the same for all launches.
    pub(crate) fn recorded<'t>(
        planned: Result<Self>,
        context: &Arc<Context>,
        call: &impl EntryPoints,
        tensors: &impl Tensors<O::Parameter>,
        fixed: impl IntoIterator<Item = (O::Parameter, &'t AnyTensor)>,
    ) -> Result<Self> {
        let planned = record_refusal(planned, || LiveCall::new(context, &call.recorded(), 1, tensors, fixed));
        planned.map(|plan| plan.recorded_as(call))
    }

    pub(crate) fn call(&self) -> &PreparedCall<O::Parameter> {
        &self.call
    }

    pub(crate) fn operation(&self) -> &O {
        &self.operation
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.call.context()
    }

    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.call.version().symbol()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.operation.workspace_bytes(self)
    }

    /// New output tensors, to be used with [`Plan::launch_into`] again and again. Their content is unspecified.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if
    /// `T` is not the output's type.
    pub fn output<T: Element>(&self) -> Result<O::Output<T>> {
        self.operation.output(self)
    }

    /// New tensors for these outputs, in the order of `R`. Their content is unspecified.
    pub(crate) fn new_outputs<R: Outputs>(&self, outputs: &[O::Parameter]) -> Result<R> {
        let mut planned = outputs.iter().map(|output| (output.noun(), self.call.desc(*output)));
        R::new(&mut PlannedOutputs { context: self.context(), each: &mut planned })
    }

    /// Queues the call with new output tensors. Returns at once; the output is there when the stream is synchronised,
    /// as [`Tensor::download`](crate::Tensor::download) does. The tensors may be dropped at once. `T` is the output's
    /// element type: that of the tensors that are given by their type, unless the inputs name another.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`] and [`Plan::output`]; [`Error::Capturing`](crate::Error::Capturing) for a graph
    /// that is captured, whose launches write outputs that were there before.
    #[doc(alias = "aclnnFusedInferAttentionScore")]
    #[doc(alias = "aclnnFlashAttentionScore")]
    #[doc(alias = "aclnnFlashAttentionVarLenScore")]
    #[doc(alias = "aclnnRingAttentionUpdate")]
    #[doc(alias = "aclnnPromptFlashAttention")]
    #[doc(alias = "aclnnIncreFlashAttention")]
    #[doc(alias = "aclnnScatterPaKvCache")]
    #[doc(alias = "aclnnGatherPaKvCache")]
    #[doc(alias = "aclnnAttentionUpdate")]
    #[doc(alias = "aclnnBatchMatMul")]
    #[doc(alias = "aclnnLightningIndexer")]
    #[doc(alias = "aclnnSparseFlashAttention")]
    #[doc(alias = "aclnnKvQuantSparseFlashAttention")]
    #[doc(alias = "aclnnQuantLightningIndexer")]
    #[doc(alias = "aclnnBlockSparseAttention")]
    #[doc(alias = "aclnnNsaCompress")]
    #[doc(alias = "aclnnNsaCompressWithCache")]
    #[doc(alias = "aclnnNsaCompressAttentionInfer")]
    #[doc(alias = "aclnnNsaSelectedAttentionInfer")]
    #[doc(alias = "aclnnRecurrentGatedDeltaRule")]
    #[doc(alias = "aclnnChunkGatedDeltaRule")]
    pub fn launch<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<O::Inputs<'a, T>>,
    ) -> Result<O::Output<T>> {
        let inputs = inputs.into();
        let room = match O::MAKES_OUTPUT {
            true => queue.makes_outputs(),
            false => Ok(()),
        };
        let mut output = queue.note(room.and_then(|()| self.output()))?;
        if let Some(stream) = queue.stream() {
            self.operation.clear_unwritten(stream, &output)?;
        }
        self.add(queue, &inputs, &mut output)?;
        Ok(output)
    }

    /// Queues the call with output tensors of the caller. Returns at once, and allocates no host memory from the
    /// second launch on a stream on.
    ///
    /// A captured launch has the lengths and attributes of its plan in every replay, and every replay reads the
    /// tensors as they are then: block tables are checked on the host before each.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors that differ from the planned ones in more than their
    /// addresses, and for other attributes that come with them; [`Error::Violation`](crate::Error::Violation) for
    /// contents that are positions outside of other tensors; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for
    /// tensors of another device; [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an output that shares memory
    /// with another tensor; [`Error::OutOfMemory`](crate::Error::OutOfMemory) for the workspace;
    /// [`Error::Aclnn`](crate::Error::Aclnn) if the operator cannot be launched. A failure while it runs shows when the
    /// stream is synchronised.
    #[doc(alias = "aclSetInputTensorAddr")]
    #[doc(alias = "aclSetDynamicInputTensorAddr")]
    pub fn launch_into<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<O::Inputs<'a, T>>,
        output: &mut O::Output<T>,
    ) -> Result<()> {
        self.add(queue, &inputs.into(), output)
    }

    /// Waits for a stream, and checks the numbers of a launch's inputs that the contract has lints on: a position bias
    /// with an infinity or NaN, or with a row that it hides every key of; in training also a full mask that shows what
    /// its mode hides. Launches do not look at them: no host memory has them, and the operator takes them.
    ///
    /// Copies those tensors to the host: for a bias that serves many steps, and for finding an error. An operator
    /// without such lints has nothing to check, and a bias that is not read has none. Lints that the plan's description
    /// allows, by `allow_lint`, are left out. Nothing is launched.
    ///
    /// # Errors
    /// [`Error::Violation`](crate::Error::Violation) by a lint such as `pse_shift.finite` or `flash.pse_hidden_row`;
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) and [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) as for
    /// [`Plan::launch_into`]; otherwise as for [`Tensor::download`](crate::Tensor::download).
    pub fn check_contents<'a, T: Element>(&self, stream: &Stream, inputs: impl Into<O::Inputs<'a, T>>) -> Result<()> {
        self.operation.check_contents(self, stream, &inputs.into())
    }

    /// Checks the contents of these inputs and of the tensors that stay the same for all launches, against the lints
    /// that are not allowed.
    pub(crate) fn lint_contents(
        &self,
        stream: &Stream,
        inputs: &impl Tensors<O::Parameter>,
        allowed: &[&str],
    ) -> Result<()> {
        self.context().admits("stream", stream.context())?;
        self.call.check_inputs(inputs)?;
        let Some(RecordedCall { call, .. }) = self.recorded.as_deref() else {
            return Ok(());
        };
        let (mut first, failed) = (None, RefCell::new(None));
        let bytes = |name: &str| {
            let mut fixed = self.call.each_fixed();
            let mut held = fixed.find(|(parameter, _)| parameter.info().name == name).map(|(_, tensor)| tensor.clone());
            // Looking for one does not fail.
            let _ = inputs.each(|argument, tensor| {
                if argument.name() == name {
                    held = Some(tensor.clone());
                }
                Ok(())
            });
            let read = held?.download_bytes(stream);
            read.map_err(|error| failed.replace(Some(error))).ok()
        };
        call.lint_contents(self.call.version().number(), self.context().target()?, &bytes, &mut |lint| {
            if first.is_none() && !allowed.contains(&lint.rule.id) {
                first = Some(lint);
            }
        });
        match (failed.take(), first) {
            (Some(error), _) => Err(error),
            (None, Some(lint)) => Err(lint.into()),
            (None, None) => Ok(()),
        }
    }

    fn add<T: Element>(&self, queue: &impl Queue, inputs: &O::Inputs<'_, T>, output: &mut O::Output<T>) -> Result<()> {
        let outcome = self.operation.launch(self, queue, inputs, output);
        queue.before_replays(|| {
            self.operation.replay_check(inputs).into_iter().chain(self.operation.number_checks().iter().cloned())
        });
        queue.note(outcome)
    }

    /// Checks the tensors of a launch, calls `admits`, and queues the launch. The outer result is an error if nothing
    /// was queued, the inner one if only a part may have been.
    #[inline]
    pub(crate) fn queue(
        &self,
        queue: &impl LaunchQueue,
        tensors: &impl Tensors<O::Parameter>,
        admits: impl FnOnce() -> Result<()>,
    ) -> Result<Result<()>> {
        let checked = self.call.check(queue, tensors);
        let numbers = || self.operation.number_checks().iter().try_for_each(|numbers| numbers.admits_replay());
        let checked = checked.and_then(|checked| admits().and_then(|()| numbers()).map(|()| checked));
        if !case_file::is_on() || self.call.is_idle() {
            return checked.map(|checked| checked.launch());
        }
        let live = self.live(tensors).map(|live| match case_file::keeps_calls() {
            true => live.keep_contents(queue.stream()),
            false => Ok(live),
        });
        let live = live.transpose()?;
        let outcome = checked.map(|checked| checked.launch());
        match (&outcome, live) {
            (_, None) => {}
            (Ok(Ok(())), Some(live)) => {
                // A case cannot say which rows are not specified.
                let is_whole = !self.operation.has_unwritten().unwrap_or(true);
                return Ok(case_file::launched(queue.stream(), live, is_whole));
            }
            (Ok(Err(error)) | Err(error), Some(live)) => {
                case_file::failed(live, queue.stream(), error);
            }
        }
        outcome
    }

    /// A launch with these tensors, to be recorded.
    #[cold]
    pub(crate) fn live(&self, tensors: &impl Tensors<O::Parameter>) -> Option<LiveCall> {
        let RecordedCall { call, .. } = self.recorded.as_deref().filter(|recorded| recorded.is_whole)?;
        let fixed = self.call.each_fixed();
        Some(LiveCall::new(self.context(), call, self.call.version().number(), tensors, fixed))
    }
}

/// Records the refusal of a call that was to be planned, if there is any recorder.
pub(crate) fn record_refusal<R>(planned: Result<R>, live: impl FnOnce() -> LiveCall) -> Result<R> {
    planned.inspect_err(|error| {
        if case_file::is_on() {
            case_file::failed(live(), None, error);
        }
    })
}

impl<O: Operation> fmt::Debug for Plan<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Plan");
        text.field("operator", &self.operator());
        self.operation.describe(self, &mut text);
        text.field("workspace_bytes", &self.workspace_bytes());
        text.finish_non_exhaustive()
    }
}

/// The refusal of a call without a scale, whose heads have `dim` dimensions.
#[cold]
pub(crate) fn no_scale(dim: i64) -> Error {
    Error::invalid(
        "scale",
        "none",
        format_args!(
            "the factor of the scores, usually one over the root of the head dimension: `.scale(1.0 / \
             {dim}f64.sqrt())`; `.scale(1.0)` for queries that are scaled already"
        ),
    )
    .fix("set the factor by `.scale(..)`")
}

/// The refusal of a call whose outputs have no elements.
#[cold]
pub(crate) fn no_elements(query: &AnyTensor) -> Error {
    Error::invalid(
        "query",
        query.desc(),
        "a tensor with elements: leave the call out where there is nothing to compute",
    )
    .fix("leave the call out where there is nothing to compute")
}
