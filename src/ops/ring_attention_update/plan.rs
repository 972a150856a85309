//! A merge that was checked and prepared, to be launched for each part that arrives.

use std::fmt;

use ascend_spec::ops::ring_attention_update::{Argument, Parameter};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, Tensors};
use crate::ops::flash_attention_score::{FlashOutput, Keyless, PlannedOutput, SoftmaxState};
use crate::ops::operation::{self, Operation, Sealed};
use crate::runtime::Queue;
use crate::tensor::AnyTensor;

use super::versions::merged_keyless;

/// A merge that was checked and prepared. From [`RingUpdate::plan`](super::RingUpdate::plan).
///
/// A launch reads the pair of the previous part and the current one, and writes their merge. It refuses parts of other
/// orders or ends of sequences than the planned ones, and sequences without keys in a part. The replays of a captured
/// merge write an output of this plan's ([`Plan::output`](operation::Plan::output)): the capture refuses a merged part
/// whose state describes other rows.
pub type RingPlan = operation::Plan<RingOperation>;

/// RingAttentionUpdate, as its [`RingPlan`] knows it.
#[derive(Debug)]
pub struct RingOperation {
    pub(super) output: PlannedOutput,
    pub(super) allowed: AllowedLints,
}

/// Attention, maxima and sums.
struct Part<'a>(&'a AnyTensor, &'a SoftmaxState);

/// The tensors of a launch.
pub(super) struct Launch<'a> {
    previous: Part<'a>,
    current: Part<'a>,
    /// `None` for a merge that is only planned.
    merged: Option<Part<'a>>,
}

impl<'a> Launch<'a> {
    pub(super) fn of<T: Element>(
        previous: &'a FlashOutput<T>,
        current: &'a FlashOutput<T>,
        merged: Option<&'a FlashOutput<T>>,
    ) -> Self {
        let part = |output: &'a FlashOutput<T>| Part(&output.attention, &output.softmax);
        Self { previous: part(previous), current: part(current), merged: merged.map(part) }
    }
}

impl Tensors<Parameter> for Launch<'_> {
    fn each<'t>(&'t self, mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>) -> Result<()> {
        use Parameter as P;
        let merged = self.merged.as_ref();
        let merged = merged.map(|part| (part, [P::AttnOut, P::SoftmaxMax, P::SoftmaxSum]));
        let parts = [
            (&self.previous, [P::PrevAttnOut, P::PrevSoftmaxMax, P::PrevSoftmaxSum]),
            (&self.current, [P::CurAttnOut, P::CurSoftmaxMax, P::CurSoftmaxSum]),
        ];
        for (Part(attention, softmax), parameters) in merged.into_iter().chain(parts) {
            let tensors = [*attention, softmax.max(), softmax.sum()];
            for (parameter, tensor) in parameters.into_iter().zip(tensors) {
                visit(parameter.into(), tensor)?;
            }
        }
        Ok(())
    }
}

impl Sealed for RingOperation {}

impl Operation for RingOperation {
    type Inputs<'a, T: Element> = (&'a FlashOutput<T>, &'a FlashOutput<T>);
    type Output<T: Element> = FlashOutput<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &RingPlan) -> Result<FlashOutput<T>> {
        self.output.empty(plan.context())
    }

    fn launch<T: Element>(
        &self,
        plan: &RingPlan,
        queue: &impl Queue,
        &(previous, current): &(&FlashOutput<T>, &FlashOutput<T>),
        merged: &mut FlashOutput<T>,
    ) -> Result<()> {
        let keyless = self.keyless(previous, current)?;
        let rows = &self.output.rows;
        merged.softmax.admits(queue, "merged", rows, &keyless)?;
        let launch = Launch::of(previous, current, Some(merged));
        let launched = plan.queue(queue, &launch, || Ok(()))?;
        // Also after a failure: part of the work may have been queued.
        merged.softmax.rewrite(rows, keyless);
        launched
    }

    fn describe(&self, _: &RingPlan, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("layout", &self.output.rows.layout);
    }
}

impl RingOperation {
    /// The sequences that the merged part has no keys for. Refuses parts of other rows.
    fn keyless<T: Element>(&self, previous: &FlashOutput<T>, current: &FlashOutput<T>) -> Result<Keyless> {
        for (argument, part) in [("previous", previous), ("current", current)] {
            if part.softmax.rows() != &self.output.rows {
                return Err(Error::not_as_planned(argument, part.softmax.rows(), &self.output.rows));
            }
        }
        merged_keyless(&previous.softmax, &current.softmax, &self.allowed)
    }
}
