//! A merge that was checked and prepared, to be launched for each part that arrives.

use std::fmt;

use ascend_spec::ops::ring_attention_update::{Argument, Parameter};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, Tensors, into_new};
use crate::ops::flash_attention_score::{FlashOutput, Keyless, PlannedOutput, SoftmaxState};
use crate::ops::recorded_plan::RecordedPlan;
use crate::runtime::Queue;
use crate::tensor::AnyTensor;

use super::keyless::merged_keyless;

/// A merge that was checked and prepared. From [`RingUpdate::plan`](super::RingUpdate::plan).
///
/// # Threads
/// `Send` and `Sync`. Launches of one plan from several threads take turns.
pub struct RingPlan {
    pub(super) prepared: RecordedPlan<Parameter>,
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
        let part = |of: &'a FlashOutput<T>| Part(&of.attention, &of.softmax);
        Self {
            previous: part(previous),
            current: part(current),
            merged: merged.map(part),
        }
    }
}

impl Tensors<Parameter> for Launch<'_> {
    fn each<'t>(
        &'t self,
        mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>,
    ) -> Result<()> {
        use Parameter as P;
        let merged = self.merged.as_ref();
        let merged = merged.map(|part| (part, [P::AttnOut, P::SoftmaxMax, P::SoftmaxSum]));
        let parts = [
            (
                &self.previous,
                [P::PrevAttnOut, P::PrevSoftmaxMax, P::PrevSoftmaxSum],
            ),
            (
                &self.current,
                [P::CurAttnOut, P::CurSoftmaxMax, P::CurSoftmaxSum],
            ),
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

impl RingPlan {
    /// Name of the operator's function that launches call.
    pub fn operator(&self) -> &'static str {
        self.prepared.function()
    }

    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        self.prepared.workspace_bytes()
    }

    /// New output tensors, to be used with [`RingPlan::launch_into`] again and again. Their content is unspecified.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc); [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if `T` is
    /// not the parts' type.
    pub fn output<T: Element>(&self) -> Result<FlashOutput<T>> {
        self.output.empty(self.prepared.context())
    }

    /// Queues the merge into new tensors. Returns at once.
    ///
    /// # Errors
    /// As for [`RingPlan::launch_into`] and [`RingPlan::output`]; [`Error::Capturing`] for a graph that is captured,
    /// whose launches write outputs that were there before.
    #[doc(alias = "aclnnRingAttentionUpdate")]
    pub fn launch<T: Element>(
        &self,
        queue: &impl Queue,
        previous: &FlashOutput<T>,
        current: &FlashOutput<T>,
    ) -> Result<FlashOutput<T>> {
        into_new(
            queue,
            || self.output(),
            |merged| self.launch_into(queue, previous, current, merged),
        )
    }

    /// Queues the merge into tensors of the caller. Returns at once, and allocates no host memory from the second
    /// launch on a stream on.
    ///
    /// The replays of a captured merge write an output of this plan's: [`RingPlan::output`].
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for parts that differ from the planned ones in more than their
    /// addresses, also in the order or the ends of their sequences, and in a capture for a merged part whose state
    /// describes other rows; [`Error::Violation`] for sequences without keys in a part;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for
    /// tensors of another device, or outputs that share memory with another tensor; [`Error::OutOfMemory`] for the
    /// workspace; [`Error::Aclnn`]. A failure while it runs shows when the stream is synchronised.
    #[doc(alias = "aclnnRingAttentionUpdate")]
    pub fn launch_into<T: Element>(
        &self,
        queue: &impl Queue,
        previous: &FlashOutput<T>,
        current: &FlashOutput<T>,
        merged: &mut FlashOutput<T>,
    ) -> Result<()> {
        let keyless = queue.note(self.keyless(previous, current))?;
        let rows = &self.output.rows;
        let launched = merged
            .softmax
            .admits(queue, "merged", rows, &keyless)
            .and_then(|()| {
                let launch = Launch::of(previous, current, Some(merged));
                self.prepared.run(queue, &launch, || Ok(()))
            });
        let launched = queue.note(launched)?;
        // Also after a failure: part of the work may have been queued.
        merged.softmax.rewrite(rows, keyless);
        queue.note(launched)
    }

    /// The sequences that the merged part has no keys for. Refuses parts of other rows.
    fn keyless<T: Element>(
        &self,
        previous: &FlashOutput<T>,
        current: &FlashOutput<T>,
    ) -> Result<Keyless> {
        for (argument, part) in [("previous", previous), ("current", current)] {
            if part.softmax.rows() != &self.output.rows {
                return Err(Error::not_as_planned(
                    argument,
                    part.softmax.rows(),
                    &self.output.rows,
                ));
            }
        }
        merged_keyless(&previous.softmax, &current.softmax, &self.allowed)
    }
}

impl fmt::Debug for RingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingPlan")
            .field("operator", &self.operator())
            .field("layout", &self.output.rows.layout)
            .field("workspace_bytes", &self.workspace_bytes())
            .finish_non_exhaustive()
    }
}
