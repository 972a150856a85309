//! Steps of requests with equally many new tokens by one call with a batch axis.

use ascend_attention::Element;
use ascend_attention::spec::Layout;

use crate::error::Result;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext};

pub(super) fn program<T: Element>(step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
    let metadata = step.metadata;
    let mask = step.mask.causality()?;
    let rows = metadata.q_ends().per_request();
    let alike = rows.lengths().windows(2).all(|pair| pair.first() == pair.last());
    if !alike || !metadata.state().reads_cache() || first.learnable_sink.is_some() {
        return Err(rules::BACKEND_STEP
            .broken(
                format_args!(
                    "{:?} of {} tokens in {} requests, {} sinks",
                    metadata.state(),
                    metadata.tokens(),
                    rows.lengths().len(),
                    first.describe_sinks()
                ),
                "as many new tokens in each request, behind cached ones, without sinks",
            )
            .into());
    }
    let mask = mask.mask(&step.stream.device().masks())?;
    let lengths = metadata.kv_lengths().clone();
    Ok(StepCall::batched(Layout::Bsnd, lengths).mask(mask).into())
}
