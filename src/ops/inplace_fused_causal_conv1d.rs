//! InplaceFusedCausalConv1d: FusedCausalConv1d that writes its outputs to the rows.

use ascend_spec::inplace_fused_causal_conv1d_arguments;
use ascend_spec::ops::fused_causal_conv1d::{self, rules};
use ascend_spec::ops::inplace_fused_causal_conv1d::{InplaceFusedConvCall, Parameter, Version};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::fused_causal_conv1d::{FusedCausalConv1d, FusedConvInputs, FusedConvSequences};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::tensor::AnyTensor;

entry_points! {
    inplace_fused_causal_conv1d_arguments, InplaceFusedConvCall, AnyArguments::InplaceFusedCausalConv1d;
    Version::V1 => 1: aclnnInplaceFusedCausalConv1dGetWorkspaceSize, aclnnInplaceFusedCausalConv1d;
}

/// The parameters of [`FusedConvInputs`].
const INPUTS: [Parameter; 3] = [Parameter::ConvStates, Parameter::X, Parameter::Weight];

/// A call of InplaceFusedCausalConv1d: [`FusedCausalConv1d`] that writes the outputs to its rows. From
/// [`FusedCausalConv1d::in_place`].
///
/// Source: aclnnInplaceFusedCausalConv1d, for Ascend 950 since CANN 9.1.
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct InplaceFusedCausalConv1d(FusedCausalConv1d);

impl FusedCausalConv1d {
    /// The call that writes the outputs to its rows: a second launch convolves the outputs of the first.
    pub fn in_place(self) -> InplaceFusedCausalConv1d {
        InplaceFusedCausalConv1d(self)
    }
}

impl InplaceFusedCausalConv1d {
    /// As [`FusedCausalConv1d::plan`], of launches that write the outputs to their rows.
    ///
    /// # Errors
    /// As for [`FusedCausalConv1d::plan`].
    #[doc(alias = "aclnnInplaceFusedCausalConv1dGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &FusedConvSequences,
        inputs: impl Into<FusedConvInputs<'a, T>>,
    ) -> Result<InplaceFusedConvPlan> {
        let Self(rule) = self;
        let inputs = inputs.into();
        let context = inputs.x.memory().context();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        InplaceFusedConvCall::check_device(Version::V1, context, rules::PRODUCT.fix, tensors.iter().copied())?;
        let mut call = InplaceFusedConvCall::from(rule.call(sequences, &inputs)?);
        call.describe(&tensors);
        InplaceFusedConvPlan::of_call((&call, Version::V1), inputs.x, &tensors, || {
            let target = context.target()?;
            let problem = call.check(target)?;
            let allowed = rule.allowed().ids(lints_of::<fused_causal_conv1d::Version>)?;
            call.lint(target, &allowed)?;
            let numbers = sequences.require(problem, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// A call of InplaceFusedCausalConv1d that was checked and prepared. From [`InplaceFusedCausalConv1d::plan`].
///
/// A launch reads and writes the rows and the lines. Of rows of a sequence without a line nothing is promised: the
/// emulation leaves them as they are.
pub type InplaceFusedConvPlan = operation::Plan<PlainOperation<InplaceFusedCausalConv1d>>;

impl Sealed for InplaceFusedCausalConv1d {}

impl PlainCall for InplaceFusedCausalConv1d {
    type Inputs<'a, T: Element> = FusedConvInputs<'a, T>;
    type Output<T: Element> = ();
    type Parameter = Parameter;
    type Kept = FusedConvSequences;
    const OUTPUTS: &'static [Parameter] = &[];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t FusedConvSequences,
        inputs: &'t FusedConvInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each(INPUTS).chain(sequences.each(InplaceFusedConvCall::CONTENTS))
    }

    fn first_unwritten(sequences: &FusedConvSequences) -> Result<Option<usize>> {
        Ok(sequences.has_unwritten()?.then_some(0))
    }
}
