//! Steps by packed calls of FusedInferAttentionScore: any step by one, mixed steps also by two.

use ascend_attention::Element;

use crate::batch::StepPart;
use crate::error::Result;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::StepContext;

/// One packed call of all rows.
pub(super) fn program<T: Element>(step: &StepContext<'_>) -> Result<StepProgram<T>> {
    Ok(StepCall::of_step(step)?.into())
}

/// A packed call of the decodes, and one of the rest.
pub(super) fn program_in_two<T: Element>(step: &StepContext<'_>) -> Result<StepProgram<T>> {
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
