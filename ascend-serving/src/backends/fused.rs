//! Any step by one packed call of FusedInferAttentionScore.

use ascend_attention::attention::Inputs;
use ascend_attention::spec::Layout;
use ascend_attention::{Element, Plan, Tensor};

use crate::error::Result;

use super::backend::{AttentionBackend, LayerTensors, StepContext, StepPlan, attention_alone};
use super::step_memory::StepMemory;

/// One packed call (TND) a layer, for steps of every kind: over this step's keys where no token was cached before,
/// otherwise over the paged cache.
///
/// The contract of the device's target decides what packed calls take. On Atlas A2 and A3:
///
/// | CANN | dtype | head dimension | blocks |
/// |---|---|---|---|
/// | 8.1 | BF16 | 64, 128, (192, 192, 128) | a multiple of 128 tokens |
/// | 8.5 | and FLOAT16 | and others up to 256 of grouped queries | a multiple of 16, up to 1024 for heads of 64 and 128, for others up to 512 |
/// | 9.0 | | and others up to 256 of any number of key heads | |
/// | 9.1 | | and over NZ caches others than 64 and 128 | |
#[derive(Clone, Copy, Debug, Default)]
pub struct Fused;

#[derive(Debug)]
struct FusedStep {
    plan: Plan,
    reads_cache: bool,
}

impl FusedStep {
    fn inputs<'a, T: Element>(
        &self,
        step: &StepContext<'a>,
        layer: &LayerTensors<'a, T>,
    ) -> Inputs<'a, T> {
        layer.step_inputs(self.reads_cache.then_some(step.block_table))
    }
}

impl<T: Element> AttentionBackend<T> for Fused {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        first.without_latent()?;
        let metadata = step.metadata;
        let reads_cache = metadata.state().reads_cache();
        let masks = step.stream.device().masks();
        let mask = step.mask.causality()?.mask(&masks)?;
        let call = step.shape.call(Layout::Tnd).mask(mask);
        let call = metadata.call_lengths().apply(call);
        let keys = reads_cache.then_some(step.block_table);
        let plan = call.plan(first.step_inputs(keys))?;
        Ok(Box::new(FusedStep { plan, reads_cache }))
    }
}

impl<T: Element> StepPlan<T> for FusedStep {
    fn memory(&self) -> StepMemory {
        StepMemory::of_calls([self.plan.workspace_bytes()])
    }

    fn launch(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Tensor<T>> {
        let inputs = self.inputs(step, layer);
        Ok(self.plan.launch(step.stream, inputs)?.attention)
    }

    fn launch_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let inputs = self.inputs(step, layer);
        let mut output = attention_alone(output.clone());
        Ok(self.plan.launch_into(step.stream, inputs, &mut output)?)
    }
}
