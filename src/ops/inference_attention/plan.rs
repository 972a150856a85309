//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::fmt;

use ascend_spec::TensorDesc;
use ascend_spec::operator::{Argument, DeclaredVersion};
use ascend_spec::ops::fused_infer_attention_score::{self as fia, ContentBounds};
use ascend_sys::Api;

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{
    AllowedLints, Descriptors, Plan, Tensors, into_new, lints_of, new_output, no_elements,
    no_scale, standing_in,
};
use crate::ops::attention_settings::Settings;
use crate::ops::fused_infer_attention_score::{
    CallTensors, CapturedTable, Features, Inputs, Reading,
};
use crate::ops::recorded_plan::{RecordedPlan, recorded};
use crate::runtime::{LaunchQueue, Queue};
use crate::tensor::{AnyTensor, Tensor};

use super::InferenceCall;
use super::inputs::{Described, InferenceParameter, visit};

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "call FusedInferAttention";

/// A call that was checked and prepared. `P` are the operator's parameters: see
/// [`PromptPlan`](crate::prompt::PromptPlan) and [`IncrePlan`](crate::incre::IncrePlan).
///
/// One plan serves all layers of a step, and a launch swaps addresses and nothing else. Lengths are part of the plan.
///
/// # Threads
/// `Send` and `Sync`. Launches of one plan from several threads take turns.
pub struct InferencePlan<P> {
    prepared: RecordedPlan<P>,
    features: Features,
    /// Bounds of what launches read on the device as positions.
    bounds: Option<ContentBounds>,
    attention: TensorDesc,
}

/// The tensors of a launch.
struct Launch<'a> {
    inputs: CallTensors<'a>,
    /// `None` for a call that is only planned.
    attention: Option<&'a AnyTensor>,
}

impl<P: InferenceParameter> Tensors<P> for Launch<'_> {
    fn each<'t>(
        &'t self,
        mut each: impl FnMut(Argument<P>, &'t AnyTensor) -> Result<()>,
    ) -> Result<()> {
        if let Some(attention) = self.attention {
            each(P::ATTENTION_OUT.into(), attention)?;
        }
        visit(self.inputs, each)
    }
}

impl<P: InferenceParameter> InferencePlan<P> {
    /// Checks a call that describes these inputs, this mask and its output, and prepares it.
    pub(crate) fn new<C: InferenceCall<Parameter = P>>(
        call: &C,
        described: &Described<'_, P>,
        mask: Option<&AnyTensor>,
        settings: &Settings,
        allowed: &AllowedLints,
    ) -> Result<Self> {
        let planned = Self::prepare(call, described, mask, settings, allowed);
        let launch = Launch {
            inputs: described.inputs,
            attention: None,
        };
        let context = described.query.memory().context();
        let mask = mask.map(|mask| (P::ATTEN_MASK, mask));
        recorded(
            planned,
            context,
            || call.recorded(),
            &launch,
            mask.as_slice(),
        )
    }

    fn prepare<C: InferenceCall<Parameter = P>>(
        call: &C,
        described: &Described<'_, P>,
        mask: Option<&AnyTensor>,
        settings: &Settings,
        allowed: &AllowedLints,
    ) -> Result<Self> {
        let query = described.query;
        let context = query.memory().context();
        visit::<P>(described.inputs, |argument, tensor| {
            tensor.on(argument.name(), context)
        })?;
        if let Some(mask) = mask {
            mask.on(P::ATTEN_MASK.noun(), context)?;
        }
        call.check(context.target()?)?;
        let api = context.runtime().api();
        let phases = C::phases();
        phases.required(api, C::VERSION.info(), INSTEAD)?;
        // The operator's own lints, and those of FusedInferAttentionScore, with which it shares a path.
        let lints = || lints_of::<C::Version>().chain(lints_of::<fia::Version>());
        call.lint(&allowed.ids(lints)?)?;
        if settings.scale.is_none() {
            let heads = settings.numbers()?.num_heads;
            let axes = settings.layout.input();
            let extents = axes.extents(&query.desc().shape, heads);
            return Err(no_scale(extents.map_or(128, |of| of.dim)));
        }
        let attention = call.tensor(P::ATTENTION_OUT.into()).copied();
        let Some(attention) = attention.filter(|attention| !attention.is_empty()) else {
            return Err(no_elements(query));
        };
        let bounds = call.content_bounds()?;
        let given = described.inputs.contents();
        given.admitted(bounds.as_ref(), Reading::Planned)?;

        let brought = call.each_tensor();
        let brought = brought.filter(|(argument, _)| argument.parameter != P::ATTEN_MASK);
        let tensors = standing_in(brought, query);
        let mask = mask.map(|mask| (P::ATTEN_MASK, mask));
        let phase_one =
            |api: &Api, descriptors: &mut Descriptors<P>| call.phase_one(api, descriptors);
        // SAFETY: phase one is called with pointers of the descriptors, and only its executor is returned.
        let prepared =
            unsafe { Plan::new(context, &phases, &tensors, mask.as_slice(), phase_one) }?;
        let version = C::VERSION.info().number();
        Ok(Self {
            prepared: RecordedPlan::new(prepared, call.recorded(), version),
            features: described.features,
            bounds,
            attention,
        })
    }

    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.prepared.function()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.prepared.workspace_bytes()
    }

    /// A new output tensor, to be used with [`launch_into`](Self::launch_into) again and again. Its content is
    /// unspecified.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if
    /// `T` is not the output's type.
    pub fn output<T: Element>(&self) -> Result<Tensor<T>> {
        let noun = P::ATTENTION_OUT.noun();
        new_output(self.prepared.context(), noun, self.attention)
    }

    /// Queues the call with a new output tensor, in the output order of the layout. Returns at once. `T` is the
    /// output's element type: the query's unless [`Inputs::output_type`] names another.
    ///
    /// # Errors
    /// As for [`launch_into`](Self::launch_into) and [`output`](Self::output);
    /// [`Error::Capturing`](crate::Error::Capturing) for a graph that is captured, whose launches write outputs that
    /// were there before.
    #[doc(alias = "aclnnPromptFlashAttentionV3")]
    #[doc(alias = "aclnnIncreFlashAttentionV4")]
    pub fn launch<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<Inputs<'a, T>>,
    ) -> Result<Tensor<T>> {
        let inputs = inputs.into().tensors();
        into_new(
            queue,
            || self.output(),
            |attention| self.run(queue, inputs, attention),
        )
    }

    /// Queues the call with an output tensor of the caller. Returns at once, and allocates no host memory from the
    /// second launch on a stream on.
    ///
    /// A captured launch has the lengths of its plan in every replay, and every replay reads the block table on the
    /// device: the table is checked on the host before each.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for inputs that differ from the planned ones in more than their
    /// addresses; [`Error::Violation`](crate::Error::Violation) for a table that names a block which the cache does
    /// not have, or too few for its lengths; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for tensors of another device, or an output that shares
    /// memory with another tensor; [`Error::OutOfMemory`](crate::Error::OutOfMemory) for the workspace;
    /// [`Error::Aclnn`](crate::Error::Aclnn). A failure while it runs shows when the stream is synchronised.
    #[doc(alias = "aclnnPromptFlashAttentionV3")]
    #[doc(alias = "aclnnIncreFlashAttentionV4")]
    pub fn launch_into<'a, T: Element>(
        &self,
        queue: &impl Queue,
        inputs: impl Into<Inputs<'a, T>>,
        attention: &mut Tensor<T>,
    ) -> Result<()> {
        self.run(queue, inputs.into().tensors(), attention)
    }

    fn run(
        &self,
        queue: &impl LaunchQueue,
        inputs: CallTensors<'_>,
        attention: &AnyTensor,
    ) -> Result<()> {
        let launch = Launch {
            inputs,
            attention: Some(attention),
        };
        let contents = inputs.contents();
        let launched = self.prepared.run(queue, &launch, || {
            inputs.features().are_as_planned(&self.features)?;
            contents.admitted(self.bounds.as_ref(), Reading::on(queue))
        });
        queue.before_replays(|| CapturedTable::of(&contents, self.bounds.as_ref()));
        queue.note(launched.flatten())
    }
}

impl<P: InferenceParameter> fmt::Debug for InferencePlan<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(P::PLAN)
            .field("workspace_bytes", &self.workspace_bytes())
            .finish_non_exhaustive()
    }
}
