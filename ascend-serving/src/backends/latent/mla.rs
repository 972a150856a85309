//! Multi-head latent attention by the stock operator.

use ascend_attention::spec::Layout;
use ascend_attention::{CausalOrigin, Element, Violation};

use crate::backends::{LatentForm, LayerTensors, StepCall, StepContext, StepProgram};
use crate::batch::{AttentionMetadata, StepPart};
use crate::error::Result;
use crate::kv::QuantisedLayer;
use crate::rules;

use super::prefill::MlaPrefill;
use super::refusals::{check_form, check_quantised_latents, check_step, latent_inputs};

/// Whether a row's bits depend on the row alone: with absorbed queries, which are one call. Plain ones have keys of
/// another form, and merge the cached ones in chunks.
pub(in crate::backends) fn is_batch_invariant<T: Element>(first: &LayerTensors<'_, T>) -> bool {
    matches!(first.latent.map(|latent| latent.form), Some(LatentForm::Absorbed))
}

/// A program of latent attention over latents of one byte.
pub(in crate::backends) fn quantised_program<T: Element>(
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
    workspace_bytes: usize,
) -> Result<StepProgram<T>> {
    latent_inputs(first)?;
    check_quantised_latents(first)?;
    program(step, first, workspace_bytes)
}

/// A program of latent attention, whose chunks of cached tokens take at most `workspace_bytes` bytes.
pub(in crate::backends) fn program<T: Element>(
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
    workspace_bytes: usize,
) -> Result<StepProgram<T>> {
    let latent = latent_inputs(first)?;
    check_step(step)?;
    check_form(latent.form, first)?;
    let rope = latent.query_rope;
    let metadata = step.metadata;
    Ok(match latent.form {
        LatentForm::Absorbed | LatentForm::Quantised(_) => absorbed_call(step, &StepPart::all(metadata), first)?.into(),
        LatentForm::Plain(_) => {
            let part = StepPart::all(metadata);
            StepProgram::new([]).stage(MlaPrefill::plan(step, part, first, rope, workspace_bytes)?)
        }
        LatentForm::Mixed { .. } | LatentForm::QuantisedMixed { .. } => {
            if metadata.prefills() == 0 || metadata.decodes() == 0 || !metadata.decodes_lead() {
                return Err(not_mixed(metadata).into());
            }
            let [decodes, others] = StepPart::split(metadata);
            let call = absorbed_call(step, &decodes, first)?.rows(decodes.tokens).requests(decodes.requests);
            let prefill = MlaPrefill::plan(step, others, first, rope, workspace_bytes)?;
            StepProgram::from(call).stage(prefill)
        }
    })
}

/// The call of absorbed queries, which reads the cache as it is.
fn absorbed_call<T: Element>(step: &StepContext<'_>, part: &StepPart, first: &LayerTensors<'_, T>) -> Result<StepCall> {
    let lengths = part.kv_lengths.clone();
    let latents = first.quantised.map_or(&*first.cache.key, QuantisedLayer::key);
    // The operator reads an NZ cache for BSND queries alone, which are the same bytes.
    Ok(match (part.is_single(), latents.shape().len()) {
        (false, _) => {
            let masks = step.stream.device().masks();
            let mask = masks.causal(CausalOrigin::RightDown)?;
            StepCall::packed(part.q_ends.clone(), lengths).mask(mask)
        }
        (true, 5) => StepCall::batched(Layout::Bsnd, lengths),
        (true, _) => StepCall::batched(Layout::Bnsd, lengths),
    })
}

#[cold]
fn not_mixed(metadata: &AttentionMetadata) -> Violation {
    Violation::new(
        &rules::BACKEND_LATENT,
        format_args!(
            "mixed queries for {} decodes and {} prefills{}",
            metadata.decodes(),
            metadata.prefills(),
            if metadata.decodes_lead() { "" } else { ", one of these in front of a decode" },
        ),
        "decodes, then prefills",
        "put the decodes first, and bring one form where there is one kind of request",
    )
}
