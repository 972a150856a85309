//! Multi-head latent attention by the stock operator.

use ascend_attention::spec::Layout;
use ascend_attention::{CausalOrigin, Element, Violation};

use crate::backends::{AttentionBackend, LatentForm, LayerTensors, StepCall, StepContext, StepProgram};
use crate::batch::{AttentionMetadata, StatePolicy, StepPart};
use crate::error::Result;
use crate::kv::LayerCache;
use crate::rules;

use super::prefill::MlaPrefill;
use super::refusals::{check_step, latent_inputs};

/// Multi-head latent attention over a cache of latents and rotary parts
/// ([`CacheShape::latent`](crate::kv::CacheShape::latent)), for causal layers.
///
/// | queries | step | calls |
/// |---|---|---|
/// | [absorbed](LatentForm::Absorbed) | one token a request | BNSD_NBSD over the cache, mode 0 |
/// | absorbed | several tokens a request (drafts), on CANN 8.1 up to 16 | TND_NTD over the cache, mode 3 |
/// | [plain](LatentForm::Plain) | any | TND over the step's own tokens, mode 3, and over cached ones, mode 0 |
/// | [mixed](LatentForm::Mixed) | decodes, then prefills | the absorbed call for decodes, the plain ones for the rest |
///
/// An absorbed call has the latents as keys and as values, one key head, and returns `[N, tokens, 512]`, so that the
/// projection of the values is one batched product. A plain step has a call for each chunk of the cached tokens, and
/// merges all by their log-sum-exps. It calls the [`UpProjection`](crate::UpProjection) for its own tokens and for
/// each chunk, and returns `[tokens, N, 128]`. It gathers the chunks from caches in which a token's row is contiguous,
/// so not from NZ caches.
///
/// In the [`AttentionShape`](crate::AttentionShape), `kv_heads` is 1 and the scale is that of the whole head, usually
/// `1 / sqrt(192)` and not `1 / sqrt(512)`: [`AttentionShape::latent`](crate::AttentionShape::latent).
///
/// The operator's rules are the contract's; among them that absorbed queries have 1, 2, 4, ... or 128 heads and that
/// plain ones are BF16 on CANN 8.1. Merging takes AttentionUpdate, which CANN 8.1 does not have.
///
/// Source: aclnnFusedInferAttentionScoreV3, multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mla {
    workspace_bytes: usize,
}

impl Mla {
    /// Default bytes of device memory for a chunk of cached tokens and their keys and values.
    pub const WORKSPACE_BYTES: usize = 256 << 20;

    /// A backend with [`Mla::WORKSPACE_BYTES`] of workspace.
    pub fn new() -> Self {
        Self { workspace_bytes: Self::WORKSPACE_BYTES }
    }

    /// Sets the most bytes of device memory for a chunk of cached tokens and their keys and values. Fewer bytes make
    /// more chunks. The step's own tokens are computed at once, whatever their number.
    pub fn workspace_bytes(mut self, bytes: usize) -> Self {
        self.workspace_bytes = bytes;
        self
    }

    /// Whether a step can be computed with absorbed queries: no request has more than [`StatePolicy::MAX_VERIFIED`]
    /// tokens. Prompts are seldom that short, so absorb the queries where this is true.
    pub fn absorbs(metadata: &AttentionMetadata) -> bool {
        let rows = metadata.q_ends().per_request();
        rows.lengths().iter().all(|rows| *rows <= StatePolicy::MAX_VERIFIED)
    }
}

impl Default for Mla {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Element> AttentionBackend<T> for Mla {
    fn name(&self) -> &'static str {
        "mla"
    }

    fn reads_latents(&self) -> bool {
        true
    }

    /// With absorbed queries, which are one call. Plain ones have keys of another form, and merge the cached ones in
    /// chunks.
    fn is_batch_invariant(&self, _: &StepContext<'_>, first: &LayerTensors<'_, T>) -> bool {
        matches!(first.latent.map(|latent| latent.form), Some(LatentForm::Absorbed))
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let latent = latent_inputs(first)?;
        check_step(step)?;
        let rope = latent.query_rope;
        let metadata = step.metadata;
        let bytes = self.workspace_bytes;
        Ok(match latent.form {
            LatentForm::Absorbed => absorbed_call(step, &StepPart::all(metadata), first.cache)?.into(),
            LatentForm::Plain(_) => {
                let part = StepPart::all(metadata);
                StepProgram::new([]).stage(MlaPrefill::plan(step, part, first, rope, bytes)?)
            }
            LatentForm::Mixed { .. } => {
                if metadata.prefills() == 0 || metadata.decodes() == 0 || !metadata.decodes_lead() {
                    return Err(not_mixed(metadata).into());
                }
                let [decodes, others] = StepPart::split(metadata);
                let call = absorbed_call(step, &decodes, first.cache)?.rows(decodes.tokens).requests(decodes.requests);
                let prefill = MlaPrefill::plan(step, others, first, rope, bytes)?;
                StepProgram::from(call).stage(prefill)
            }
        })
    }
}

/// The call of absorbed queries, which reads the cache as it is.
fn absorbed_call<T: Element>(step: &StepContext<'_>, part: &StepPart, cache: &LayerCache<T>) -> Result<StepCall> {
    let lengths = part.kv_lengths.clone();
    // The operator reads an NZ cache for BSND queries alone, which are the same bytes.
    Ok(match (part.is_single(), cache.key.shape().len()) {
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
