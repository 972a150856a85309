//! Steps by packed calls of FusedInferAttentionScore: any step by one, mixed steps also by two.

use ascend_attention::Element;

use crate::batch::StepPart;
use crate::error::Result;
use crate::rules;

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
/// | 8.5 | and FLOAT16 | and others up to 256 of grouped queries | a multiple of 16, up to 1024 for 64, 128, else 512 |
/// | 9.0 | | and others up to 256 of any number of key heads | |
/// | 9.1 | | and over NZ caches others than 64 and 128 | |
#[derive(Clone, Copy, Debug, Default)]
pub struct FusedAttention;

impl<T: Element> AttentionBackend<T> for FusedAttention {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn is_batch_invariant(&self, _: &StepContext<'_>, _: &LayerTensors<'_, T>) -> bool {
        true
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        Ok(StepCall::of_step(step)?.into())
    }
}

/// Two packed calls (TND) a layer over the paged cache, for steps that mix decoding with prefill: one of the decodes,
/// then one of the rest, with lengths that begin anew. vLLM-Ascend computes such steps so on Ascend 950 (A5), and in
/// one call, as [`FusedAttention`](crate::FusedAttention) does, elsewhere.
///
/// The decodes come first in the batch. Other steps are refused: register a backend for them after this one.
#[derive(Clone, Copy, Debug, Default)]
pub struct TwoFusedCalls;

impl<T: Element> AttentionBackend<T> for TwoFusedCalls {
    fn name(&self) -> &'static str {
        "fused_in_two"
    }

    fn is_batch_invariant(&self, _: &StepContext<'_>, _: &LayerTensors<'_, T>) -> bool {
        true
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let metadata = step.metadata;
        let (decodes, prefills) = (metadata.decodes(), metadata.prefills());
        let mixed = metadata.state().reads_cache() && decodes > 0 && prefills > 0;
        if !mixed || !metadata.decodes_lead() {
            return Err(rules::BACKEND_TWO_CALLS
                .broken(
                    format_args!(
                        "{:?} of {decodes} decodes and {prefills} prefills{}",
                        metadata.state(),
                        if metadata.decodes_lead() { "" } else { ", one of the prefills in front of a decode" },
                    ),
                    "decodes, then prefills, at least one of them behind cached tokens",
                )
                .into());
        }
        let masks = step.stream.device().masks();
        let mask = step.mask.causality()?.mask(&masks)?;
        let call = |part: StepPart| {
            StepCall::packed(part.q_ends, part.kv_lengths).rows(part.tokens).requests(part.requests).mask(mask.clone())
        };
        Ok(StepProgram::new(StepPart::split(metadata).map(call)))
    }
}
