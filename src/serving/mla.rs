//! Multi-head latent attention by the stock operator.

use ascend_spec::Layout;

use crate::attention::{Inputs, Output, Plan};
use crate::error::Result;
use crate::kv::{Refused, Rule, refused};
use crate::mask::CausalOrigin;
use crate::memory::Element;
use crate::tensor::{AnyTensor, Tensor};

use super::backend::{AttentionBackend, LayerTensors, StepContext, StepPlan};
use super::causality::Causality;
use super::latent::{LatentForm, LatentTensors};
use super::lengths::CallLengths;
use super::metadata::AttentionMetadata;
use super::mla_prefill::MlaPrefill;
use super::state::{AttentionState, StatePolicy};

/// Multi-head latent attention over a cache of latents and rotary parts
/// ([`CacheShape::latent`](crate::kv::CacheShape::latent)), for causal layers.
///
/// | queries | step | calls |
/// |---|---|---|
/// | [absorbed](LatentForm::Absorbed) | one token a request | BNSD_NBSD over the cache, mode 0 |
/// | absorbed | up to 16 tokens a request: multi-token prediction, drafts | TND_NTD over the cache, mode 3 |
/// | [plain](LatentForm::Plain) | any | TND over the step's own tokens, mode 3; then for each chunk of the cached tokens TND, mode 0, merged by log-sum-exps |
///
/// An absorbed call has the latents as keys and as values, one key head, and gives `[N, tokens, 512]`, so that the
/// projection of the values is one batched product. A plain step calls the [`UpProjection`](super::UpProjection) for its
/// own tokens and for each chunk, and gives `[tokens, N, 128]`. It gathers the chunks where tokens lie whole, so not out
/// of NZ caches.
///
/// Of the [`AttentionShape`](super::AttentionShape), `kv_heads` is 1 and the scale that of the whole head, usually
/// `1 / sqrt(192)` and not `1 / sqrt(512)`: [`AttentionShape::latent`](super::AttentionShape::latent).
///
/// The operator's rules are the contract's; among them that absorbed queries have 1, 2, 4, ... or 128 heads and that plain
/// ones are BF16. Merging takes AttentionUpdate, which CANN 8.1 does not have.
///
/// Source: aclnnFusedInferAttentionScoreV3, multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mla {
    workspace_bytes: usize,
}

impl Mla {
    /// Bytes of device memory for a chunk of cached tokens and their keys and values, unless set.
    pub const WORKSPACE_BYTES: usize = 256 << 20;

    /// With [`Mla::WORKSPACE_BYTES`].
    pub fn new() -> Self {
        Self {
            workspace_bytes: Self::WORKSPACE_BYTES,
        }
    }

    /// The most bytes of device memory for a chunk of cached tokens and their keys and values. Fewer make more chunks. The
    /// step's own tokens are computed at once, whatever their number.
    pub fn workspace_bytes(mut self, bytes: usize) -> Self {
        self.workspace_bytes = bytes;
        self
    }

    /// Whether a step can be computed with absorbed queries: no request has more than
    /// [`StatePolicy::MAX_VERIFIED`] tokens. Prompts are that short seldom, so this is when to absorb.
    pub fn absorbs(metadata: &AttentionMetadata) -> bool {
        let rows = metadata.q_ends().per_request();
        let most = i64::from(StatePolicy::MAX_VERIFIED);
        rows.lengths().iter().all(|rows| *rows <= most)
    }
}

impl Default for Mla {
    fn default() -> Self {
        Self::new()
    }
}

/// What the steps of this backend have in common.
fn latent<'a, T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'a, T>,
) -> Result<LatentTensors<'a, T>, Refused> {
    let causality = step.metadata.settings().causality;
    let refused = |given: String| {
        refused(
            Rule::BackendLatent,
            given,
            "latents and rotary parts, one key head, causal, without window and sinks",
            "call Step::forward_latent for layers of multi-head latent attention",
        )
    };
    match layer.latent {
        None => Err(refused("a layer without rotary parts".to_owned())),
        Some(_) if causality != Causality::Causal => Err(refused(format!("{causality:?}"))),
        Some(_) if layer.learnable_sink.is_some() => Err(refused("sinks".to_owned())),
        Some(_) if step.shape.kv_heads != 1 => {
            Err(refused(format!("{} key heads", step.shape.kv_heads)))
        }
        Some(latent) => Ok(latent),
    }
}

/// Size of an axis.
pub(super) fn size(tensor: &AnyTensor, axis: usize) -> usize {
    let size = tensor.shape().get(axis).copied().unwrap_or(0);
    usize::try_from(size).unwrap_or(0)
}

impl<T: Element> AttentionBackend<T> for Mla {
    fn name(&self) -> &'static str {
        "mla"
    }

    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>> {
        let latent = latent(step, first)?;
        match latent.form {
            LatentForm::Absorbed => Ok(Box::new(Absorbed::plan(step, first, &latent)?)),
            LatentForm::Plain(_) => {
                let prefill = MlaPrefill::plan(step, first, &latent, self.workspace_bytes)?;
                Ok(Box::new(prefill))
            }
        }
    }
}

/// A step of absorbed queries.
#[derive(Debug)]
struct Absorbed {
    plan: Plan,
    layout: Layout,
}

impl Absorbed {
    fn plan<T: Element>(
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        latent: &LatentTensors<'_, T>,
    ) -> Result<Self> {
        let metadata = step.metadata;
        let single = metadata.state() == AttentionState::DecodeOnly
            && metadata.tokens() as usize == metadata.table().requests();
        // An NZ cache goes with BSND queries alone, which are the same bytes.
        let layout = match (single, first.cache.key.shape().len()) {
            (false, _) => Layout::TndNtd,
            (true, 5) => Layout::BsndNbsd,
            (true, _) => Layout::BnsdNbsd,
        };
        let kv = metadata.kv_lengths();
        let lengths = match single {
            true => CallLengths::Batched { q: None, kv },
            false => CallLengths::PackedPaged {
                q: metadata.q_ends(),
                kv,
            },
        };
        let call = lengths.apply(step.shape.call(layout));
        let call = match single {
            true => call,
            false => {
                let masks = step.stream.device().masks();
                call.mask(masks.causal(CausalOrigin::RightDown)?)
            }
        };
        let (query, rope) = queries(layout, first.query, latent.query_rope)?;
        let plan = call.plan_with(&inputs(step, first, &query, &rope))?;
        Ok(Self { plan, layout })
    }
}

/// Packed queries and their rotary parts, `[tokens, N, D]`, in the axes of a layout.
fn queries<T: Element>(
    layout: Layout,
    query: &Tensor<T>,
    rope: &Tensor<T>,
) -> Result<(Tensor<T>, Tensor<T>)> {
    let view = |tensor: &Tensor<T>| {
        let [tokens, heads, dim] = [0, 1, 2].map(|axis| size(tensor, axis));
        match layout {
            Layout::BnsdNbsd => tensor.reshape([tokens, heads, 1, dim]),
            Layout::BsndNbsd => tensor.reshape([tokens, 1, heads, dim]),
            _ => Ok(tensor.clone()),
        }
    };
    Ok((view(query)?, view(rope)?))
}

fn inputs<'a, T: Element>(
    step: &StepContext<'a>,
    layer: &LayerTensors<'a, T>,
    query: &'a Tensor<T>,
    rope: &'a Tensor<T>,
) -> Inputs<'a> {
    let (latents, ropes) = (&layer.cache.key, &layer.cache.value);
    Inputs::new(query, latents, latents)
        .rope(rope, ropes)
        .paged(step.block_table)
}

impl<T: Element> StepPlan<T> for Absorbed {
    fn run(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Output<T>> {
        let latent = latent(step, layer)?;
        if let LatentForm::Plain(_) = latent.form {
            return Err(other_form(&latent.form, "Absorbed"));
        }
        let (query, rope) = queries(self.layout, layer.query, latent.query_rope)?;
        let inputs = inputs(step, layer, &query, &rope);
        let output: Output<T> = self.plan.launch_with(step.stream, &inputs)?;
        let [tokens, heads, dim] = [0, 1, 2].map(|axis| size(layer.query, axis));
        Ok(Output {
            attention: output.attention.reshape([heads, tokens, dim])?,
            softmax_lse: None,
        })
    }
}

/// The latent tensors of a plain layer.
pub(super) fn plain<'a, T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'a, T>,
) -> Result<(LatentTensors<'a, T>, &'a dyn super::UpProjection<T>)> {
    let latent = latent(step, layer)?;
    match latent.form {
        LatentForm::Plain(projection) => Ok((latent, projection)),
        LatentForm::Absorbed => Err(other_form(&latent.form, "Plain")),
    }
}

#[cold]
fn other_form<T: Element>(form: &LatentForm<'_, T>, planned: &str) -> crate::Error {
    crate::Error::NotAsPlanned {
        argument: "form",
        given: format!("{form:?}"),
        planned: planned.to_owned(),
    }
}
