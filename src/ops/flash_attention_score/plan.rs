//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::fmt;

use ascend_spec::ops::flash_attention_score::{Argument, Parameter};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{Tensors, into_new};
use crate::ops::recorded_plan::RecordedPlan;
use crate::runtime::{LaunchQueue, Queue};
use crate::tensor::AnyTensor;

use super::inputs::{Features, FlashTensors};
use super::output::PlannedOutput;
use super::{FlashInputs, FlashOutput, SoftmaxState};

/// A call that was checked and prepared. From [`FlashAttention::plan`](super::FlashAttention::plan).
///
/// All layers of a step share its shapes: one plan serves them all, and a launch swaps addresses and nothing else.
/// Lengths of packed sequences, prefixes and first places are part of the plan: others need another plan.
///
/// # Threads
/// `Send` and `Sync`. Launches of one plan from several threads take turns.
pub struct FlashPlan {
    pub(super) prepared: RecordedPlan<Parameter>,
    pub(super) features: Features,
    pub(super) output: PlannedOutput,
}

/// The tensors of a launch.
struct Launch<'a> {
    inputs: FlashTensors<'a>,
    attention: &'a AnyTensor,
    softmax: &'a SoftmaxState,
}

impl Tensors<Parameter> for Launch<'_> {
    fn each<'t>(
        &'t self,
        mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>,
    ) -> Result<()> {
        visit(Parameter::SoftmaxMax.into(), self.softmax.max())?;
        visit(Parameter::SoftmaxSum.into(), self.softmax.sum())?;
        visit(Parameter::AttentionOut.into(), self.attention)?;
        self.inputs.visit(visit)
    }
}

impl FlashPlan {
    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.prepared.function()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.prepared.workspace_bytes()
    }

    /// New output tensors, to be used with [`FlashPlan::launch_into`] again and again. Their content is unspecified.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if
    /// `T` is not the query's type.
    pub fn output<T: Element>(&self) -> Result<FlashOutput<T>> {
        self.output.empty(self.prepared.context())
    }

    /// Queues the call with new output tensors. Returns at once; the output is there when the stream is synchronised,
    /// as [`Tensor::download`](crate::Tensor::download) does. The tensors may be dropped at once.
    ///
    /// # Errors
    /// As for [`FlashPlan::launch_into`] and [`FlashPlan::output`]; [`Error::Capturing`](crate::Error::Capturing) for
    /// a graph that is captured, whose launches write outputs that were there before.
    #[doc(alias = "aclnnFlashAttentionScore")]
    #[doc(alias = "aclnnFlashAttentionVarLenScore")]
    pub fn launch<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<FlashInputs<'a, T>>,
    ) -> Result<FlashOutput<T>> {
        let inputs = inputs.into().tensors();
        into_new(
            queue,
            || self.output(),
            |output| self.add(queue, inputs, &output.attention, &mut output.softmax),
        )
    }

    /// Queues the call with output tensors of the caller. Allocates no host memory from the second launch on a stream
    /// on.
    ///
    /// The replays of a captured launch write an output of this plan's: [`FlashPlan::output`].
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors that differ from the planned ones in more than their
    /// addresses, for another kind of position bias, other first places, or another share that dropout keeps, and in
    /// a capture for an output whose state describes other rows; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE)
    /// or [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for tensors of another device, or outputs that share
    /// memory with another tensor; [`Error::OutOfMemory`](crate::Error::OutOfMemory) for the workspace;
    /// [`Error::Aclnn`](crate::Error::Aclnn). A failure while it runs shows when the stream is synchronised.
    #[doc(alias = "aclnnFlashAttentionScore")]
    pub fn launch_into<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<FlashInputs<'a, T>>,
        output: &mut FlashOutput<T>,
    ) -> Result<()> {
        let FlashOutput { attention, softmax } = output;
        self.add(queue, inputs.into().tensors(), attention, softmax)
    }

    fn add(
        &self,
        queue: &impl LaunchQueue,
        inputs: FlashTensors<'_>,
        attention: &AnyTensor,
        softmax: &mut SoftmaxState,
    ) -> Result<()> {
        let (rows, keyless) = (&self.output.rows, &self.output.keyless);
        let launched = softmax
            .admits(queue, "output", rows, keyless)
            .and_then(|()| {
                let launch = Launch {
                    inputs,
                    attention,
                    softmax,
                };
                let admits = || inputs.features().are_as_planned(&self.features);
                self.prepared.run(queue, &launch, admits)
            });
        let launched = queue.note(launched)?;
        // Also after a failure: part of the work may have been queued.
        softmax.rewrite(rows, keyless.clone());
        queue.note(launched)
    }
}

impl fmt::Debug for FlashPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlashPlan")
            .field("operator", &self.operator())
            .field("layout", &self.output.rows.layout)
            .field("workspace_bytes", &self.workspace_bytes())
            .finish_non_exhaustive()
    }
}
