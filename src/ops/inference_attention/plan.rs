//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::marker::PhantomData;
use std::sync::Arc;

use ascend_spec::operator::{Argument, DeclaredVersion};
use ascend_spec::ops::fused_infer_attention_score::{self as fia, ContentBounds};
use ascend_spec::ops::inference_attention::PathCall;
use ascend_spec::{Rule, TensorDesc};

use crate::case_file::LiveCall;
use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, PreparedCall, Tensors, lints_of};
use crate::ops::attention_settings::Settings;
use crate::ops::fused_infer_attention_score::{CallTensors, CapturedTable, Features, Inputs, Reading};
use crate::ops::operation::{self, Operation, Sealed, new_output, no_elements, no_scale, record_refusal};
use crate::runtime::{Queue, ReplayCheck, Stream};
use crate::tensor::{AnyTensor, Tensor};

use super::inputs::{Described, InferenceCall, InferenceParameter, visit};

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "call FusedInferAttention";

/// A call that was checked and prepared. `P` are the operator's parameters: see
/// [`PromptPlan`](crate::prompt::PromptPlan) and [`IncrePlan`](crate::incre::IncrePlan).
///
/// Lengths are part of the plan. A launch reads [`Inputs`] and writes a tensor in the output order of the layout, whose
/// type is the query's unless [`Inputs::output_type`] names another. It refuses a table that names a block which the
/// cache does not have, or too few for its lengths.
pub type InferencePlan<P> = operation::Plan<InferenceOperation<P>>;

/// PromptFlashAttention or IncreFlashAttention, as an [`InferencePlan`] knows it.
#[derive(Debug)]
pub struct InferenceOperation<P> {
    features: Features,
    /// Bounds of what launches read on the device as positions.
    bounds: Option<ContentBounds>,
    attention: TensorDesc,
    allowed: AllowedLints,
    parameters: PhantomData<P>,
}

/// The tensors of a launch.
struct Launch<'a> {
    inputs: CallTensors<'a>,
    /// `None` for a call that is only planned.
    attention: Option<&'a AnyTensor>,
}

impl<P: InferenceParameter> Tensors<P> for Launch<'_> {
    fn each<'t>(&'t self, mut each: impl FnMut(Argument<P>, &'t AnyTensor) -> Result<()>) -> Result<()> {
        if let Some(attention) = self.attention {
            each(P::ATTENTION_OUT.into(), attention)?;
        }
        visit(self.inputs, each)
    }
}

impl<P: InferenceParameter> operation::Plan<InferenceOperation<P>> {
    /// Checks a call that describes these inputs, this mask and its output, and prepares it.
    pub(crate) fn checked<C: InferenceCall<Parameter = P>>(
        call: &C,
        described: &Described<'_, P>,
        mask: Option<&AnyTensor>,
        settings: &Settings,
        allowed: &AllowedLints,
    ) -> Result<Self> {
        let planned = Self::prepare(call, described, mask, settings, allowed);
        let launch = Launch { inputs: described.inputs, attention: None };
        record_refusal(planned, || {
            let context = described.query.memory().context();
            let mask = mask.map(|mask| (P::ATTEN_MASK, mask));
            LiveCall::new(context, &call.recorded(), 1, &launch, mask)
        })
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
        visit::<P>(described.inputs, |argument, tensor| tensor.on(argument.name(), context))?;
        if let Some(mask) = mask {
            mask.on(P::ATTEN_MASK.noun(), context)?;
        }
        call.resolve(C::VERSION, context.target()?, |_| ())?;
        let api = context.runtime().api();
        C::phases(C::VERSION).required(api, C::VERSION.info(), INSTEAD)?;
        call.first_lint(C::VERSION, &allowed.ids(lints::<P>)?)?;
        if settings.scale.is_none() {
            let heads = settings.numbers()?.num_heads;
            let axes = settings.layout.input();
            let extents = axes.extents(&query.desc().shape, heads);
            return Err(no_scale(extents.map_or(128, |extents| extents.dim)));
        }
        let attention = call.tensor(P::ATTENTION_OUT.into()).copied();
        let Some(attention) = attention.filter(|attention| !attention.is_empty()) else {
            return Err(no_elements(query));
        };
        let bounds = call.bounds(C::VERSION)?;
        let given = described.inputs.contents();
        given.admitted(bounds.as_ref(), Reading::Planned)?;

        let mask = mask.map(|mask| (P::ATTEN_MASK, mask));
        let prepared = PreparedCall::standing_in(context, call, C::VERSION, false, query, mask.as_slice())?;
        let (features, allowed) = (described.features, allowed.clone());
        let operation = InferenceOperation { features, bounds, attention, allowed, parameters: PhantomData };
        let version = C::VERSION.info().number();
        Ok(Self::new(prepared, operation).recorded_as(call.recorded(), version))
    }
}

/// The operator's own lints, and those of FusedInferAttentionScore, with which it shares a path.
fn lints<P: InferenceParameter>() -> impl Iterator<Item = &'static Rule> {
    lints_of::<<P::Call<'static> as PathCall>::Version>().chain(lints_of::<fia::Version>())
}

impl<P> Sealed for InferenceOperation<P> {}

impl<P: InferenceParameter> Operation for InferenceOperation<P> {
    type Inputs<'a, T: Element> = Inputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = P;

    fn output<T: Element>(&self, plan: &InferencePlan<P>) -> Result<Tensor<T>> {
        new_output(plan.context(), P::ATTENTION_OUT.noun(), self.attention)
    }

    fn launch<T: Element>(
        &self,
        plan: &InferencePlan<P>,
        queue: &impl Queue,
        inputs: &Inputs<'_, T>,
        attention: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = inputs.tensors();
        let launch = Launch { inputs, attention: Some(attention) };
        let admits = || {
            inputs.features().are_as_planned(&self.features)?;
            let contents = inputs.contents();
            contents.admitted(self.bounds.as_ref(), Reading::on(queue))
        };
        plan.queue(queue, &launch, admits).flatten()
    }

    fn check_contents<T: Element>(
        &self,
        plan: &InferencePlan<P>,
        stream: &Stream,
        inputs: &Inputs<'_, T>,
    ) -> Result<()> {
        let launch = Launch { inputs: inputs.tensors(), attention: None };
        plan.lint_contents(stream, &launch, &self.allowed.ids(lints::<P>)?)
    }

    #[inline]
    fn replay_check<T: Element>(&self, inputs: &Inputs<'_, T>) -> Option<Arc<dyn ReplayCheck>> {
        CapturedTable::of(&inputs.tensors().contents(), self.bounds.as_ref())
    }
}
