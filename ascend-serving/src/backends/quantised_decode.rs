//! Decoding steps over a quantised cache.

use ascend_attention::{Element, InnerPrecise};

use crate::causality::Causality;
use crate::error::Result;
use crate::kv::QuantisedLayer;
use crate::rules;

use super::paged_decode::layout;
use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext, check_quantised_mask, check_single_tokens, quantised_cache};

/// The call of the first `requests` requests of a step, which have one token each.
pub(super) fn single_tokens(step: &StepContext<'_>, quantised: &QuantisedLayer, requests: usize) -> StepCall {
    // The kernel for NZ caches has `HighPerformance` alone.
    let precise = match quantised.cache.key.shape().len() {
        5 => InnerPrecise::HighPerformance,
        _ => InnerPrecise::HighPrecision,
    };
    let (lengths, _) = step.metadata.kv_lengths().split_at(requests);
    StepCall::batched(layout(&quantised.cache), lengths).rows(0..requests).requests(0..requests).inner_precise(precise)
}

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
    let quantised = quantised_cache(first)?;
    check_quantised_mask(step)?;
    let metadata = step.metadata;
    let causality = step.mask.causality()?;
    let takes = metadata.state().reads_cache() && causality == Causality::Causal && first.learnable_sink.is_none();
    let allowed = "one token a request behind cached ones, causal, without window and sinks";
    let fix = "add `Backend::QuantisedPrefill` behind this one";
    check_single_tokens(step, first, takes, &rules::BACKEND_DECODE, [allowed, fix])?;
    let requests = metadata.table().requests();
    Ok(single_tokens(step, quantised, requests).into())
}
