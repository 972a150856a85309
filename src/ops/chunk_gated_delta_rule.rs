//! ChunkGatedDeltaRule: linear attention of prompts.
//!
//! [`ChunkGatedDeltaRule`] describes a call, which is planned once and launched per layer as a [`ChunkDeltaPlan`].

use ascend_spec::chunk_gated_delta_rule_arguments;
use ascend_spec::ops::chunk_gated_delta_rule::{ChunkDeltaCall, Parameter, Version, rules};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::delta_rule::{DeltaLints, DeltaSequences, DeltaStates, DeltaTensors, require_held};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed, outputs};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    chunk_gated_delta_rule_arguments, ChunkDeltaCall, AnyArguments::ChunkGatedDeltaRule;
    Version::V1 => 1: aclnnChunkGatedDeltaRuleGetWorkspaceSize, aclnnChunkGatedDeltaRule;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "compute the prompt by RecurrentGatedDeltaRule, 8 tokens of a sequence in a call; on Ascend 950 \
     this operator comes with CANN 9.2, and that one with 9.1";

/// A call of ChunkGatedDeltaRule, by which layers of linear attention compute prompts and chunks of them: each sequence
/// has a state that it begins with, and gets the one behind its last token.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`ChunkDeltaPlan`] once a layer.
///
/// Source: aclnnChunkGatedDeltaRule, since CANN 9.1, on Ascend 950 since 9.2; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::chunk_delta_rule::ChunkGatedDeltaRule;
/// use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
/// use ascend_attention::spec::{Cann, Soc};
/// use ascend_attention::{Machine, Runtime, bf16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1))?.device(0)?;
/// let stream = device.stream()?;
/// // Two tokens of one sequence with one head, which begins empty: values of 2 elements, keys of 4.
/// let states = DeltaStates::zeroed::<bf16>(&device, 1, 1, 2, 4)?;
/// let sequences = DeltaSequences::of_lengths(&stream, &[2])?;
/// let keys = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0].map(bf16::from_f32);
/// let key = stream.upload(&keys, [2, 1, 4])?;
/// let value = stream.upload(&[0.5, -2.0, 4.0, 1.0].map(bf16::from_f32), [2, 1, 2])?;
/// let beta = stream.upload(&[bf16::ONE; 2], [2, 1])?;
/// let tensors = DeltaTensors::new((&key, &key, &value), &beta);
/// let plan = ChunkGatedDeltaRule::new(1.0).plan(&sequences, (tensors, &states))?;
/// let computed = plan.launch(&stream, (tensors, &states))?;
/// assert_eq!(computed.out.download(&stream)?, value.download(&stream)?);
/// // Keys that have nothing in common leave each other's values alone.
/// let state = computed.states().tensor().clone().typed::<bf16>()?.download(&stream)?;
/// assert_eq!(state[..2], [0.5, 4.0].map(bf16::from_f32));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct ChunkGatedDeltaRule {
    scale: f64,
    allowed: AllowedLints,
}

impl ChunkGatedDeltaRule {
    /// A call with this factor of the queries, usually `1 / sqrt(Dk)`. The operator takes it in single precision.
    pub fn new(scale: f64) -> Self {
        Self { scale, allowed: AllowedLints::default() }
    }

    /// Lets a call through that breaks this lint, such as `chunk_delta.no_tokens`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call of these sequences, and prepares it for tensors of these shapes and strides. Nothing is launched,
    /// and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `chunk_delta.contents` for lengths that the tensors do not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for sequences of slots, and for decays of columns,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnChunkGatedDeltaRuleGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &DeltaSequences,
        inputs: impl Into<ChunkDeltaInputs<'a, T>>,
    ) -> Result<ChunkDeltaPlan> {
        let inputs = inputs.into();
        let tensors = inputs.tensors;
        let context = tensors.query.memory().context();
        ChunkDeltaCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        inputs.check_decays()?;
        sequences.on(context, false)?;
        let launch: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = ChunkDeltaCall { scale: self.scale, ..ChunkDeltaCall::default() };
        call.describe(&launch);
        [call.out, call.final_state] = call.outputs();
        ChunkDeltaPlan::of_call((&call, Version::V1), tensors.value, &launch, || {
            require_held(&[call.out, call.final_state], tensors.value)?;
            let problem = call.check(context.target()?)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            let lints = DeltaLints::Chunk([&rules::ROWS_LEFT_OUT, &rules::NO_TOKENS]);
            let numbers = sequences.check(&problem, &rules::CONTENTS, lints, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads: tensors of the tokens, and the state that each sequence begins with.
#[derive(Clone, Copy, Debug)]
pub struct ChunkDeltaInputs<'a, T: Element> {
    tensors: DeltaTensors<'a, T>,
    states: &'a AnyTensor,
}

impl<'a, T: Element> From<(DeltaTensors<'a, T>, &'a DeltaStates)> for ChunkDeltaInputs<'a, T> {
    /// Queries, keys and values, and a state for each sequence.
    fn from((tensors, states): (DeltaTensors<'a, T>, &'a DeltaStates)) -> Self {
        Self { tensors, states: states.tensor() }
    }
}

impl<'a, T: Element> ChunkDeltaInputs<'a, T> {
    /// Refuses decays of columns, which the operator does not have.
    fn check_decays(&self) -> Result<()> {
        match self.tensors.gk {
            None => Ok(()),
            Some(gk) => Err(Error::invalid("gk", gk.desc(), "none: the operator has decays of heads alone").fix(
                "compute such layers by RecurrentGatedDeltaRule, 8 tokens of a sequence in a call, over a pool of \
                      as many states as tokens",
            )),
        }
    }

    /// The tensor of each argument.
    fn each(&self) -> impl Iterator<Item = (Parameter, &'a AnyTensor)> {
        let parameters =
            [Parameter::Query, Parameter::Key, Parameter::Value, Parameter::Beta, Parameter::G, Parameter::G];
        // Decays of columns have no parameter, and are refused.
        DeltaTensors { gk: None, ..self.tensors }.each(parameters).chain([(Parameter::InitialState, self.states)])
    }
}

/// What a launch writes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChunkDeltaOutput<T: Element> {
    /// Outputs, `[T, Nv, Dv]`. Rows of no sequence are not written.
    pub out: Tensor<T>,
    /// The state behind the last token of each sequence, `[B, Nv, Dv, Dk]`, of the type of the initial ones; that of a
    /// sequence without tokens is not written.
    pub final_state: AnyTensor,
}

outputs! { ChunkDeltaOutput { out, final_state } }

impl<T: Element> ChunkDeltaOutput<T> {
    /// Outputs for [`Plan::launch_into`](crate::Plan::launch_into), contiguous, of the shapes that a launch gives.
    pub fn new(out: Tensor<T>, states: &DeltaStates) -> Self {
        Self { out, final_state: states.tensor().clone() }
    }

    /// The states behind the last tokens, with which the next chunks or decodes begin. That of a sequence without
    /// tokens is no state: nothing was written there. The next launch writes to other memory than it reads them from.
    pub fn states(&self) -> DeltaStates {
        DeltaStates::with_key_columns(&self.final_state)
    }
}

/// A call of ChunkGatedDeltaRule that was checked and prepared. From [`ChunkGatedDeltaRule::plan`].
///
/// A launch reads tensors of the tokens and initial states, and writes contiguous [`ChunkDeltaOutput`].
pub type ChunkDeltaPlan = operation::Plan<PlainOperation<ChunkGatedDeltaRule>>;

impl Sealed for ChunkGatedDeltaRule {}

impl PlainCall for ChunkGatedDeltaRule {
    type Inputs<'a, T: Element> = ChunkDeltaInputs<'a, T>;
    type Output<T: Element> = ChunkDeltaOutput<T>;
    type Parameter = Parameter;
    type Kept = DeltaSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Out, Parameter::FinalState];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t DeltaSequences,
        inputs: &'t ChunkDeltaInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().chain([(Parameter::ActualSeqLengths, &**sequences.lengths())])
    }

    fn admits<T: Element>(_: &DeltaSequences, inputs: &ChunkDeltaInputs<'_, T>) -> Result<()> {
        inputs.check_decays()
    }
}
