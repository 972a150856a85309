//! RecurrentGatedDeltaRule: linear attention of few tokens a sequence over a pool of states.
//!
//! [`RecurrentGatedDeltaRule`] describes a call, which is planned once and launched per layer as a
//! [`RecurrentDeltaPlan`].

use ascend_spec::ops::recurrent_gated_delta_rule::{Parameter, RecurrentDeltaCall, Version, rules};
use ascend_spec::recurrent_gated_delta_rule_arguments;

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::delta_rule::{DeltaLints, DeltaSequences, DeltaStates, DeltaTensors, require_held};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    recurrent_gated_delta_rule_arguments, RecurrentDeltaCall, AnyArguments::RecurrentGatedDeltaRule;
    Version::V1 => 1: aclnnRecurrentGatedDeltaRuleGetWorkspaceSize, aclnnRecurrentGatedDeltaRule;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "compute the recurrence on the host; on Ascend 950 the operator comes with CANN 9.1";

/// The parameters of [`DeltaTensors`].
const TENSORS: [Parameter; 6] =
    [Parameter::Query, Parameter::Key, Parameter::Value, Parameter::Beta, Parameter::G, Parameter::Gk];

/// A call of RecurrentGatedDeltaRule, by which layers of linear attention decode and verify drafts (Qwen3-Next,
/// Qwen3.5, Kimi): each sequence has up to 8 tokens, and after each of them its state is written to the token's slot of
/// the pool.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`RecurrentDeltaPlan`] once a layer.
///
/// Source: aclnnRecurrentGatedDeltaRule, since CANN 8.5, on Ascend 950 since 9.1; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
/// use ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule;
/// use ascend_attention::{Runtime, bf16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// // A pool of 4 states with one head, of values of 2 elements and keys of 4.
/// let states = DeltaStates::zeroed::<bf16>(&device, 4, 1, 2, 4)?;
/// // One sequence decodes a token, whose state goes to slot 3, where the sequence began.
/// let sequences = DeltaSequences::of_slots(&stream, &[[3]])?;
/// let key = stream.upload(&[1.0, 0.0, 0.0, 0.0].map(bf16::from_f32), [1, 1, 4])?;
/// let value = stream.upload(&[0.5, -2.0].map(bf16::from_f32), [1, 1, 2])?;
/// let beta = stream.upload(&[bf16::ONE], [1, 1])?;
/// let tensors = DeltaTensors::new((&key, &key, &value), &beta);
/// let plan = RecurrentGatedDeltaRule::new(1.0).plan(&sequences, (tensors, &states))?;
/// // An empty state takes the value under the key, and a query like the key gets it back.
/// let out = plan.launch(&stream, (tensors, &states))?;
/// assert_eq!(out.download(&stream)?, value.download(&stream)?);
/// assert_eq!(states.tensor().clone().typed::<bf16>()?.download(&stream)?[3 * 8], bf16::from_f32(0.5));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct RecurrentGatedDeltaRule {
    scale: f64,
    allowed: AllowedLints,
}

impl RecurrentGatedDeltaRule {
    /// A call with this factor of the queries, usually `1 / sqrt(Dk)`. The operator takes it in single precision.
    pub fn new(scale: f64) -> Self {
        Self { scale, allowed: AllowedLints::default() }
    }

    /// Lets a call through that breaks this lint, such as `recurrent_delta.scale_zero`. Of a slot of two sequences,
    /// which `recurrent_delta.shared_slot` lets through, the strict emulation makes an error at the launch.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call of these sequences, and prepares it for tensors of these shapes and strides, which have exactly
    /// the tokens of the sequences: narrow those of a padded step. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `recurrent_delta.contents` for numbers that lead elsewhere than to the sequence's own tokens and states;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for sequences without slots,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnRecurrentGatedDeltaRuleGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &DeltaSequences,
        inputs: impl Into<RecurrentDeltaInputs<'a, T>>,
    ) -> Result<RecurrentDeltaPlan> {
        let inputs = inputs.into();
        let tensors = inputs.tensors;
        let context = tensors.query.memory().context();
        RecurrentDeltaCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        sequences.on(context, true)?;
        let launch: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = RecurrentDeltaCall { scale: self.scale, ..RecurrentDeltaCall::default() };
        call.describe(&launch);
        call.out = call.output();
        RecurrentDeltaPlan::of_call((&call, Version::V1), tensors.value, &launch, || {
            let target = context.target()?;
            require_held(&[call.out], tensors.value)?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let lints = DeltaLints::Recurrent { shared: &rules::SHARED };
            let numbers = sequences.check(&problem, &rules::CONTENTS, lints, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads, and the states that it reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentDeltaInputs<'a, T: Element> {
    tensors: DeltaTensors<'a, T>,
    states: &'a AnyTensor,
}

impl<'a, T: Element> From<(DeltaTensors<'a, T>, &'a DeltaStates)> for RecurrentDeltaInputs<'a, T> {
    /// Queries, keys and values, and the pool of states.
    fn from((tensors, states): (DeltaTensors<'a, T>, &'a DeltaStates)) -> Self {
        Self { tensors, states: states.tensor() }
    }
}

impl<'a, T: Element> RecurrentDeltaInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> impl Iterator<Item = (Parameter, &'a AnyTensor)> {
        [(Parameter::State, self.states)].into_iter().chain(self.tensors.each(TENSORS))
    }
}

/// A call of RecurrentGatedDeltaRule that was checked and prepared. From [`RecurrentGatedDeltaRule::plan`].
///
/// A launch reads and writes the states, and writes outputs `[T, Nv, Dv]`.
pub type RecurrentDeltaPlan = operation::Plan<PlainOperation<RecurrentGatedDeltaRule>>;

impl Sealed for RecurrentGatedDeltaRule {}

impl PlainCall for RecurrentGatedDeltaRule {
    type Inputs<'a, T: Element> = RecurrentDeltaInputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = DeltaSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Out];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t DeltaSequences,
        inputs: &'t RecurrentDeltaInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().chain(sequences.each(RecurrentDeltaCall::CONTENTS))
    }

    fn first_unwritten(sequences: &DeltaSequences) -> Result<Option<usize>> {
        sequences.first_unwritten()
    }
}
