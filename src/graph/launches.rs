//! Captured launches of operators whose lengths are those of their plans in every replay.

use crate::attention::Inputs;
use crate::error::Result;
use crate::flash::{FlashInputs, FlashOutput, FlashPlan};
use crate::gather::GatherPlan;
use crate::matmul::BatchMatMulPlan;
use crate::memory::Element;
use crate::ops::inference_attention::{InferenceParameter, InferencePlan};
use crate::ring::RingPlan;
use crate::tensor::Tensor;

use super::Capturing;

impl Capturing<'_> {
    /// Captures a launch of PromptFlashAttention or IncreFlashAttention. Every replay reads a block table on the
    /// device; the table is checked on the host before each replay, as for [`Capturing::launch_plan`].
    ///
    /// # Errors
    /// As for [`InferencePlan::launch_with_into`].
    pub fn inference<P: InferenceParameter, T: Element>(
        &mut self,
        plan: &InferencePlan<P>,
        inputs: &Inputs<'_>,
        attention: &Tensor<T>,
    ) -> Result<()> {
        let outcome = plan.run(self.recorder(), inputs, attention);
        self.read_by_replays(plan.captured_table(inputs));
        self.note(outcome)
    }

    /// Captures a launch of FlashAttentionScore. The output is one of the plan's: [`FlashPlan::output`].
    ///
    /// # Errors
    /// As for [`FlashPlan::launch_with_into`]; [`Error::NotAsPlanned`](crate::Error::NotAsPlanned) for an output
    /// whose state describes other rows.
    pub fn flash<T: Element>(
        &mut self,
        plan: &FlashPlan,
        inputs: &FlashInputs<'_>,
        output: &FlashOutput<T>,
    ) -> Result<()> {
        let outcome = plan.capture(self.recorder(), inputs, output);
        self.note(outcome)
    }

    /// Captures a merge of two parts. The merged part is one of the plan's: [`RingPlan::output`].
    ///
    /// # Errors
    /// As for [`RingPlan::launch_into`]; [`Error::NotAsPlanned`](crate::Error::NotAsPlanned) for a merged part whose
    /// state describes other rows.
    pub fn ring<T: Element>(
        &mut self,
        plan: &RingPlan,
        previous: &FlashOutput<T>,
        current: &FlashOutput<T>,
        merged: &FlashOutput<T>,
    ) -> Result<()> {
        let outcome = plan.capture(self.recorder(), previous, current, merged);
        self.note(outcome)
    }

    /// Captures the copies of keys and values out of a paged cache, for the sequences that the plan was made for.
    ///
    /// # Errors
    /// As for [`GatherPlan::launch_into`].
    pub fn gather<T: Element>(
        &mut self,
        plan: &GatherPlan,
        key_cache: &Tensor<T>,
        value_cache: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<()> {
        let outcome = plan.run(self.recorder(), [key_cache, value_cache], [key, value]);
        self.note(outcome)
    }

    /// Captures a launch of BatchMatMul.
    ///
    /// # Errors
    /// As for [`BatchMatMulPlan::launch_into`].
    pub fn batch_mat_mul<T: Element>(
        &mut self,
        plan: &BatchMatMulPlan,
        self_: &Tensor<T>,
        mat2: &Tensor<T>,
        out: &Tensor<T>,
    ) -> Result<()> {
        let outcome = plan.run(self.recorder(), [self_, mat2], out);
        self.note(outcome)
    }
}
