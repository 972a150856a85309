//! A call that was checked and prepared, to be launched with any tensors of its shapes.

use std::fmt;

use ascend_spec::ops::flash_attention_score::{Argument, Parameter, Version};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, Tensors, lints_of};
use crate::ops::operation::{self, Operation, Sealed};
use crate::runtime::{Queue, Stream};
use crate::tensor::AnyTensor;

use super::inputs::{Features, FlashTensors};
use super::softmax_state::PlannedOutput;
use super::{FlashInputs, FlashOutput, SoftmaxState};

/// A call that was checked and prepared. From [`FlashAttention::plan`](super::FlashAttention::plan).
///
/// Lengths of packed sequences, prefixes and first places are part of the plan, and so are the kind of position bias
/// and the share that dropout keeps. A launch reads [`FlashInputs`] and writes a [`FlashOutput`] of the query's type.
/// The replays of a captured launch write an output of this plan's ([`Plan::output`](operation::Plan::output)): the
/// capture refuses an output whose state describes other rows.
pub type FlashPlan = operation::Plan<FlashOperation>;

/// FlashAttentionScore, as its [`FlashPlan`] knows it.
#[derive(Debug)]
pub struct FlashOperation {
    pub(super) features: Features,
    pub(super) output: PlannedOutput,
    pub(super) allowed: AllowedLints,
}

/// The tensors of a launch.
struct Launch<'a> {
    inputs: FlashTensors<'a>,
    attention: &'a AnyTensor,
    softmax: &'a SoftmaxState,
}

impl Tensors<Parameter> for Launch<'_> {
    fn each<'t>(&'t self, mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>) -> Result<()> {
        visit(Parameter::SoftmaxMax.into(), self.softmax.max())?;
        visit(Parameter::SoftmaxSum.into(), self.softmax.sum())?;
        visit(Parameter::AttentionOut.into(), self.attention)?;
        self.inputs.visit(visit)
    }
}

impl Sealed for FlashOperation {}

impl Operation for FlashOperation {
    type Inputs<'a, T: Element> = FlashInputs<'a, T>;
    type Output<T: Element> = FlashOutput<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &FlashPlan) -> Result<FlashOutput<T>> {
        self.output.empty(plan.context())
    }

    fn launch<T: Element>(
        &self,
        plan: &FlashPlan,
        queue: &impl Queue,
        inputs: &FlashInputs<'_, T>,
        FlashOutput { attention, softmax }: &mut FlashOutput<T>,
    ) -> Result<()> {
        let (rows, keyless) = (&self.output.rows, &self.output.keyless);
        softmax.admits(queue, "output", rows, keyless)?;
        let launch = Launch { inputs: inputs.tensors(), attention, softmax };
        let admits = || launch.inputs.features().are_as_planned(&self.features);
        let launched = plan.queue(queue, &launch, admits)?;
        // Also after a failure: part of the work may have been queued.
        softmax.rewrite(rows, keyless.clone());
        launched
    }

    fn check_contents<T: Element>(&self, plan: &FlashPlan, stream: &Stream, inputs: &FlashInputs<'_, T>) -> Result<()> {
        plan.lint_contents(stream, &inputs.tensors(), &self.allowed.ids(lints_of::<Version>)?)
    }

    fn describe(&self, _: &FlashPlan, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("layout", &self.output.rows.layout);
    }
}
