//! What PromptFlashAttention and IncreFlashAttention have in common: description, inputs and plans.
//!
//! Both compute what FusedInferAttentionScore does, for fewer kinds of [`Inputs`](crate::attention::Inputs). An
//! operator states which of its parameters reads an input ([`InferenceParameter`]), how its newest version takes a
//! call ([`InferenceCall`]), and which call a description makes ([`InferenceOperator`]); the rest is the same for both.

use std::marker::PhantomData;
use std::sync::Arc;

use ascend_spec::operator::{Argument, DeclaredVersion};
use ascend_spec::ops::fused_infer_attention_score::{self as fia, ContentBounds};
use ascend_spec::ops::inference_attention::PathCall;
use ascend_spec::{Layout, Rule, TensorDesc};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::memory::Element;
use crate::operator::{self, AllowedLints, EntryPoints, PreparedCall, Tensors, lints_of};
use crate::ops::attention_settings::{Settings, setters};
use crate::ops::fused_infer_attention_score::{CallTensors, CapturedTable, Features, Inputs, Reading};
use crate::ops::operation::{self, Operation, Sealed, no_elements, no_scale};
use crate::runtime::{Queue, ReplayCheck, Stream};
use crate::tensor::{AnyTensor, Tensor};

/// A call of PromptFlashAttention or IncreFlashAttention; `P` are the operator's parameters. See
/// [`PromptFlashAttention`](crate::prompt::PromptFlashAttention) and
/// [`IncreFlashAttention`](crate::incre::IncreFlashAttention).
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct InferenceAttention<P> {
    pub(crate) settings: Settings,
    pub(crate) mask: Mask,
    pub(crate) allowed: AllowedLints,
    parameters: PhantomData<P>,
}

/// An operator that [`InferenceAttention`] describes a call of.
pub(crate) trait InferenceOperator: InferenceParameter {
    /// Checks the call with these inputs and prepares it.
    fn plan(attention: &InferenceAttention<Self>, described: &Described<'_, Self>) -> Result<InferencePlan<Self>>;
}

#[allow(private_bounds, reason = "sealed: the bound has no public name")]
impl<P: InferenceOperator> InferenceAttention<P> {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: Layout) -> Self {
        Self {
            settings: Settings::new(layout),
            mask: Mask::none(),
            allowed: AllowedLints::default(),
            parameters: PhantomData,
        }
    }

    setters!();

    /// Lengths of the keys: the number of valid keys of each sequence, or one number for all; with TND where the keys
    /// of each end, cumulative. A paged cache needs them. CANN calls them `actualSeqLengthsKv` in
    /// PromptFlashAttention, `actualSeqLengths` in IncreFlashAttention.
    pub fn actual_seq_lengths_kv(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.settings.give_keys(lengths.into());
        self
    }

    /// Lets the call through although it breaks a lint that stays within the call's tensors, by the lint's id.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks the call against every rule of the operator and prepares it for tensors of these shapes. Nothing is
    /// launched, and the tensors are not kept.
    ///
    /// A tuple of query, key and value does, and [`Inputs`] for calls that read more: a position bias, or a
    /// [`Quantisation`](crate::attention::Quantisation) of `Output` or `Int8`; with IncreFlashAttention also a paged
    /// cache, a key and value for each sequence, left padding of the keys, or a quantisation of `KeyValue` by merged
    /// scales a channel or a tensor. Each launch then provides tensors of the same kinds, shapes and element types.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation) for a broken rule
    /// or lint, [`UNSUPPORTED`](ascend_spec::UNSUPPORTED),
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) without a scale or without elements, for tensors of
    /// different devices and for other kinds of inputs,
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for lengths beyond INT64. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnPromptFlashAttentionV3GetWorkspaceSize")]
    #[doc(alias = "aclnnIncreFlashAttentionV4GetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<Inputs<'a, T>>) -> Result<InferencePlan<P>> {
        P::plan(self, &Described::new(inputs.into().tensors())?)
    }
}

/// The parameters of an operator that reads [`Inputs`](crate::attention::Inputs).
pub trait InferenceParameter: operator::Parameter {
    /// A call of the operator.
    type Call<'a>: PathCall<Parameter = Self>;
    /// Name of the operator.
    const OPERATOR: &'static str;
    /// The queries.
    const QUERY: Self;
    /// The mask, which stays the same for all launches of a plan.
    const ATTEN_MASK: Self;
    /// The output.
    const ATTENTION_OUT: Self;
}

/// A call of an operator, in the version that all of its calls go to.
pub(crate) trait InferenceCall: PathCall + EntryPoints<Version = <Self as PathCall>::Version> {
    /// The version that calls go to.
    const VERSION: <Self as PathCall>::Version;
}

/// The refusal of an input that the operator has no argument for.
#[cold]
pub(crate) fn no_such_input<P: InferenceParameter>(name: &'static str) -> Error {
    Error::invalid(
        name,
        "a tensor",
        format_args!("none: {} has no such argument, FusedInferAttention has", P::OPERATOR),
    )
    .fix("leave it out, or call `FusedInferAttention`")
}

/// Visits the tensors by the operator's own arguments.
#[inline]
fn visit<'t, P: InferenceParameter>(
    tensors: CallTensors<'t>,
    mut visit: impl FnMut(Argument<P>, &'t AnyTensor) -> Result<()>,
) -> Result<()> {
    tensors.visit(|argument, tensor| match P::Call::<'static>::of_fused(argument.parameter) {
        Some(parameter) => visit(Argument::element(parameter, argument.index), tensor),
        None => Err(no_such_input::<P>(argument.name())),
    })
}

/// The inputs of a call that is to be planned.
pub(crate) struct Described<'t, P> {
    inputs: CallTensors<'t>,
    query: &'t AnyTensor,
    pub(crate) features: Features,
    /// Every tensor, in the order of [`CallTensors::visit`].
    pub(crate) tensors: SmallVec<[(Argument<P>, TensorDesc); 12]>,
}

impl<'t, P: InferenceParameter> Described<'t, P> {
    /// Describes inputs, and refuses those for which the operator has no arguments.
    pub(crate) fn new(inputs: CallTensors<'t>) -> Result<Self> {
        let (mut query, mut tensors) = (None, SmallVec::new());
        visit::<P>(inputs, |argument, tensor| {
            if argument.parameter == P::QUERY {
                query = Some(tensor);
            }
            tensors.push((argument, *tensor.desc()));
            Ok(())
        })?;
        let Some(query) = query else {
            return Err(Error::invalid("query", "none", "a tensor").fix("bring the query"));
        };
        let features = inputs.features();
        features.block_size_alone()?;
        Ok(Self { inputs, query, features, tensors })
    }

    /// The tensors of a list.
    pub(crate) fn list(&self, parameter: P) -> SmallVec<[TensorDesc; 1]> {
        let of_list = self.tensors.iter().filter(|(argument, _)| argument.parameter == parameter);
        of_list.map(|(_, desc)| *desc).collect()
    }

    /// The output that a call writes. Where the inputs imply none, the query's descriptor is a placeholder: the
    /// contract refuses the inputs.
    pub(crate) fn output_of(&self, call: &fia::FiaCall<'_>) -> TensorDesc {
        let (implied, _) = call.implied_outputs();
        implied.unwrap_or(*self.query.desc())
    }
}

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
        let mask = mask.map(|mask| (P::ATTEN_MASK, mask));
        Self::recorded(planned, described.query.memory().context(), call, &launch, mask)
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
        if call.tensor(P::ATTENTION_OUT.into()).is_none_or(TensorDesc::is_empty) {
            return Err(no_elements(query));
        }
        let bounds = call.bounds(C::VERSION)?;
        let given = described.inputs.contents();
        given.admitted(bounds.as_ref(), Reading::Planned)?;

        let mask = mask.map(|mask| (P::ATTEN_MASK, mask));
        let prepared = PreparedCall::standing_in(context, call, C::VERSION, false, query, mask.as_slice())?;
        let (features, allowed) = (described.features, allowed.clone());
        let operation = InferenceOperation { features, bounds, allowed, parameters: PhantomData };
        Ok(Self::new(prepared, operation))
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
        plan.new_outputs(&[P::ATTENTION_OUT])
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
