//! Attention within chunks, by virtual requests.

use ascend_attention::attention::PerRequest;
use ascend_attention::{Element, Violation};

use crate::batch::LayerMask;
use crate::causality::Causality;
use crate::error::Result;
use crate::local_attention::LocalBatch;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::StepContext;

pub(super) fn program<T: Element>(step: &StepContext<'_>) -> Result<StepProgram<T>> {
    let LayerMask::Causality(Causality::Chunk(chunk)) = step.mask else {
        return Err(Violation::new(
            &rules::BACKEND_CHUNK,
            format_args!("{:?}", step.mask),
            "chunks",
            "add a backend for other masks behind this one",
        )
        .into());
    };
    let metadata = step.metadata;
    let block_size = metadata.settings().block_size();
    let new: Vec<usize> = metadata.new_and_cached().map(|(new, _)| new).collect();
    let local =
        LocalBatch::new(&PerRequest::new(new)?, metadata.kv_lengths(), metadata.table(), block_size, chunk.get())?;
    let ends = local.q_lengths.cumulative()?;
    let mask = Causality::Causal.mask(&step.stream.device().masks())?;
    let call = match metadata.state().reads_cache() {
        true => StepCall::packed(ends, local.kv_lengths.clone()).blocks(local.rows()),
        false => StepCall::over_own_keys(ends),
    };
    Ok(call.mask(mask).into())
}
