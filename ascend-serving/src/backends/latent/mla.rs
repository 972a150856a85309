//! Multi-head latent attention by the stock operator.

use std::fmt;

use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::paged_decode::sizes;
use crate::backends::{
    AttentionBackend, LatentForm, LatentTensors, LayerTensors, StepContext, StepMemory,
    StepProgram, StepStage,
};
use crate::batch::{AttentionMetadata, Causality, LayerMask, StatePolicy, StepPart};
use crate::error::{Error, Result};
use crate::rules;

use super::decode::MlaDecode;
use super::prefill::MlaPrefill;

/// Multi-head latent attention over a cache of latents and rotary parts
/// ([`CacheShape::latent`](crate::kv::CacheShape::latent)), for causal layers.
///
/// | queries | step | calls |
/// |---|---|---|
/// | [absorbed](LatentForm::Absorbed) | one token a request | BNSD_NBSD over the cache, mode 0 |
/// | absorbed | several tokens a request, on CANN 8.1 up to 16: drafts, multi-token prediction | TND_NTD over the cache, mode 3 |
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
        Self {
            workspace_bytes: Self::WORKSPACE_BYTES,
        }
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
        rows.lengths()
            .iter()
            .all(|rows| *rows <= StatePolicy::MAX_VERIFIED)
    }
}

impl Default for Mla {
    fn default() -> Self {
        Self::new()
    }
}

/// The refusal of a layer that no call of latent attention computes.
fn refused(given: impl fmt::Display, fix: &'static str) -> Violation {
    Violation::new(
        &rules::BACKEND_LATENT,
        given,
        "latents and rotary parts, one key head, causal, without window and sinks",
        fix,
    )
}

/// The latent inputs of a layer.
fn latent<'a, T: Element>(layer: &LayerTensors<'a, T>) -> Result<LatentTensors<'a, T>, Violation> {
    match (layer.latent, layer.learnable_sink) {
        (None, _) => Err(refused(
            "a layer without rotary parts",
            "make the inputs of layers of multi-head latent attention by `LayerInputs::latent`",
        )),
        (Some(_), Some(_)) => Err(refused(
            "sinks",
            "leave the sinks out: no call of latent attention takes any",
        )),
        (Some(latent), None) => Ok(latent),
    }
}

/// Refuses steps that no form of latent attention computes.
fn check_step(step: &StepContext<'_>) -> Result<(), Violation> {
    let causal = "give layers of latent attention the mask of `Causality::Causal`, by the step or by \
                  `LayerInputs::mask`";
    match step.mask {
        LayerMask::Causality(Causality::Causal) if step.shape.kv_heads == 1 => Ok(()),
        LayerMask::Causality(Causality::Causal) => Err(refused(
            format_args!("{} key heads", step.shape.kv_heads),
            "make the `AttentionShape` by `AttentionShape::latent`",
        )),
        LayerMask::Causality(other) => Err(refused(format_args!("{other:?}"), causal)),
        mask @ LayerMask::Named(_) => Err(Violation::new(
            &rules::BACKEND_MASK,
            mask,
            "causal layers: no call of latent attention takes another mask",
            causal,
        )),
    }
}

impl<T: Element> AttentionBackend<T> for Mla {
    fn name(&self) -> &'static str {
        "mla"
    }

    fn reads_latents(&self) -> bool {
        true
    }

    fn program(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<StepProgram<T>> {
        let latent = latent(first)?;
        check_step(step)?;
        let rope = latent.query_rope;
        let metadata = step.metadata;
        let bytes = self.workspace_bytes;
        Ok(StepProgram::new([]).stage(match latent.form {
            LatentForm::Absorbed => {
                let part = StepPart::all(metadata);
                let queries = [first.query, rope];
                MlaStep::Absorbed(MlaDecode::plan(step, &part, first.cache, queries)?)
            }
            LatentForm::Plain(_) => {
                let part = StepPart::all(metadata);
                let prefill = MlaPrefill::plan(step, part, first, rope, bytes)?;
                MlaStep::Plain(Box::new(prefill))
            }
            LatentForm::Mixed { absorbed, .. } => {
                if metadata.prefills() == 0 || metadata.decodes() == 0 || !metadata.decodes_lead() {
                    return Err(not_mixed(metadata).into());
                }
                let [decodes, others] = StepPart::split(metadata);
                let rope_of = rope.narrow(0, decodes.tokens.clone())?;
                let queries = [absorbed, &rope_of];
                let decode = MlaDecode::plan(step, &decodes, first.cache, queries)?;
                let prefill = MlaPrefill::plan(step, others, first, rope, bytes)?;
                MlaStep::Mixed(decodes.tokens.len(), decode, Box::new(prefill))
            }
        }))
    }
}

#[cold]
fn not_mixed(metadata: &AttentionMetadata) -> Violation {
    Violation::new(
        &rules::BACKEND_LATENT,
        format_args!(
            "mixed queries for {} decodes and {} prefills{}",
            metadata.decodes(),
            metadata.prefills(),
            if metadata.decodes_lead() {
                ""
            } else {
                ", one of these in front of a decode"
            },
        ),
        "decodes, then prefills",
        "put the decodes first, and bring one form where there is one kind of request",
    )
}

/// A step, by the form of its queries.
enum MlaStep<T: Element> {
    Absorbed(MlaDecode),
    Plain(Box<MlaPrefill<T>>),
    /// Tokens that decode, their call, and the calls of the rest.
    Mixed(usize, MlaDecode, Box<MlaPrefill<T>>),
}

impl<T: Element> StepStage<T> for MlaStep<T> {
    fn memory(&self) -> StepMemory {
        match self {
            Self::Absorbed(decode) => decode.memory(),
            Self::Plain(prefill) => prefill.memory(),
            Self::Mixed(_, decode, prefill) => decode.memory().then(prefill.memory()),
        }
    }

    fn output_shape(&self, layer: &LayerTensors<'_, T>) -> [usize; 3] {
        let [tokens, heads, dim] = sizes(layer.query);
        match self {
            Self::Absorbed(_) => [heads, tokens, dim],
            Self::Plain(_) | Self::Mixed(..) => [tokens, heads, dim],
        }
    }

    fn launch_into(
        &self,
        stream: &Stream,
        layer: &LayerTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let latent = latent(layer)?;
        let (rope, into) = (latent.query_rope, &*output);
        match (self, latent.form) {
            (Self::Absorbed(decode), LatentForm::Absorbed) => {
                decode.launch(stream, layer.cache, [layer.query, rope], into)
            }
            (Self::Plain(prefill), LatentForm::Plain(projection)) => {
                prefill.launch(stream, layer, rope, projection, into)
            }
            (
                Self::Mixed(tokens, decode, prefill),
                LatentForm::Mixed {
                    absorbed,
                    decoded,
                    projection,
                },
            ) => {
                let queries = [absorbed, &rope.narrow(0, 0..*tokens)?];
                decode.launch(stream, layer.cache, queries, decoded)?;
                prefill.launch(stream, layer, rope, projection, into)
            }
            (planned, given) => Err(Error::not_as_planned(
                "form",
                format_args!("{given:?}"),
                format_args!("{planned:?}"),
            )),
        }
    }
}

impl<T: Element> fmt::Debug for MlaStep<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absorbed(decode) => f.debug_tuple("Absorbed").field(decode).finish(),
            Self::Plain(prefill) => f.debug_tuple("Plain").field(prefill).finish(),
            Self::Mixed(_, decode, prefill) => {
                let mut mixed = f.debug_tuple("Mixed");
                mixed.field(decode).field(prefill).finish()
            }
        }
    }
}
