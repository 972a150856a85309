//! Any step by one packed call of FusedInferAttentionScore.

use ascend_attention::Element;

use crate::error::Result;

use super::backend::AttentionBackend;
use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext};

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
pub struct FusedAttention;

impl<T: Element> AttentionBackend<T> for FusedAttention {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn program(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<StepProgram<T>> {
        first.refuse_latent()?;
        Ok(StepCall::of_step(step)?.into())
    }
}
