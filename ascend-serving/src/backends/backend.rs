//! What a way to compute the attention of a step is, and what it is given.

use std::fmt;

use ascend_attention::attention::BlockTable;
use ascend_attention::spec::Layout;
use ascend_attention::spec::attention_problem::score_scale;
use ascend_attention::spec::fia::FiaCall;
use ascend_attention::{AnyTensor, Element, FusedInferAttention, Output, Stream, Tensor};

use crate::batch::{AttentionMetadata, MaskKind};
use crate::error::{Error, Result};
use crate::kv::{LayerCache, QuantisedLayer};
use crate::refusal::{Refused, Rule, refused};

use super::latent_tensors::LatentTensors;
use super::step_memory::StepMemory;

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key heads, a divisor of the query heads.
    pub kv_heads: usize,
    /// Elements of a head; of latent attention those of both parts.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`. Steps, captures and plans refuse what is 0, infinite or NaN in 32
    /// bits.
    pub scale: f64,
}

impl AttentionShape {
    /// With the usual scale.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
        }
    }

    /// Multi-head latent attention of 128 and 64 elements a head: one key head in the cache, and the scale of the whole
    /// head, `1 / sqrt(192)`.
    pub fn latent(heads: usize) -> Self {
        Self::new(heads, 1, 192)
    }

    /// Refuses a scale by which every key would weigh the same, or none anything.
    pub(crate) fn check(&self) -> Result<()> {
        let held = score_scale(self.scale);
        if held.is_finite() && held != 0.0 {
            return Ok(());
        }
        Err(Error::invalid(
            "AttentionShape.scale",
            self.scale,
            format_args!(
                "finite and not 0 in 32 bits: the factor of the scores, for heads of {} usually {}",
                self.head_dim,
                Self::new(self.heads, self.kv_heads, self.head_dim).scale
            ),
        ))
    }

    /// A call with these heads and this scale.
    pub(crate) fn call(&self, layout: Layout) -> FusedInferAttention {
        FusedInferAttention::new(layout)
            .heads(self.heads)
            .kv_heads(self.kv_heads)
            .scale(self.scale)
    }
}

/// Size of an axis.
pub(crate) fn size(tensor: &AnyTensor, axis: usize) -> usize {
    tensor.shape().get(axis).copied().unwrap_or(0)
}

/// Rows of requests, `[requests, tokens of each, N * D]`, of `[tokens, ...]`.
pub(crate) fn batched<T: Element>(tensor: &Tensor<T>, requests: usize) -> Result<Tensor<T>> {
    let tokens = size(tensor, 0).checked_div(requests).unwrap_or(0);
    let hidden = tensor.shape().iter().skip(1).product();
    Ok(tensor.reshape([requests, tokens, hidden])?)
}

/// What all layers of a step with one mask share.
#[derive(Clone, Copy, Debug)]
pub struct StepContext<'a> {
    /// Where the step's work is queued.
    pub stream: &'a Stream,
    /// The heads.
    pub shape: AttentionShape,
    /// Lengths, table and kind of the step.
    pub metadata: &'a AttentionMetadata,
    /// Which keys the tokens of these layers see.
    pub mask: &'a MaskKind,
    /// The table on the device.
    pub block_table: &'a BlockTable,
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerTensors<'a, T: Element> {
    /// Number of the layer, from 0 on, as the cache counts them.
    pub layer: usize,
    /// Queries of the step, packed: `[tokens, N, D]`.
    pub query: &'a Tensor<T>,
    /// Keys of the step, packed: `[tokens, Nkv, D]`.
    pub key: &'a Tensor<T>,
    /// Values of the step, packed.
    pub value: &'a Tensor<T>,
    /// The layer's cache, this step's keys and values in it. Without blocks where they are quantised.
    pub cache: &'a LayerCache<T>,
    /// The layer's cache where it is quantised.
    pub quantised: Option<&'a QuantisedLayer>,
    /// One more logit a head, `[N]`, of BF16; of the query's type from CANN 9.0 on, and on Ascend 950.
    pub learnable_sink: Option<&'a AnyTensor>,
    /// What multi-head latent attention brings besides. With it, `query` is as its form says, and `key` and `value` are
    /// the latents and rotary parts of the step.
    pub latent: Option<LatentTensors<'a, T>>,
}

impl<T: Element> LayerTensors<'_, T> {
    /// A word for messages on whether there are sinks.
    pub(crate) fn with_sinks(&self) -> &'static str {
        match self.learnable_sink {
            Some(_) => "with",
            None => "without",
        }
    }

    /// Refuses latent attention on behalf of a backend that knows keys and values alone.
    pub(crate) fn without_latent(&self) -> Result<(), Refused> {
        match self.latent {
            None => Ok(()),
            Some(_) => Err(refused(
                Rule::BackendLatent,
                "latents and rotary parts",
                "keys and values",
                "register `Mla`",
            )),
        }
    }
}

/// The cache of a layer with scales of channels or tokens, on behalf of a backend that reads no other.
pub(super) fn quantised_cache<'a, T: Element>(
    layer: &LayerTensors<'a, T>,
) -> Result<&'a QuantisedLayer, Refused> {
    match layer.quantised {
        Some(of) if of.of_groups().is_none() => Ok(of),
        Some(_) => Err(refused(
            Rule::BackendQuantised,
            "a cache of MXFP8",
            "a quantised cache with scales of channels or tokens",
            "register `MxFp8`, or make the cache by `PagedKvCache::quantised_as`",
        )),
        None => Err(refused(
            Rule::BackendQuantised,
            format_args!("a cache of {}", T::DTYPE),
            "a quantised cache",
            "make the cache by `PagedKvCache::quantised`, or register `Fused`",
        )),
    }
}

/// Whether a layer's sinks, if it has any, may be counted by one of several calls that are merged by their log-sum-exps.
pub(super) fn merges_sinks<T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
) -> Result<bool> {
    Ok(layer.learnable_sink.is_none() || FiaCall::lse_counts_sink(step.stream.device().target()?))
}

/// Refuses a quantised cache on behalf of a backend that does not know its scales.
pub(super) fn knows_cache<T: Element>(
    backend: &dyn AttentionBackend<T>,
    layer: &LayerTensors<'_, T>,
) -> Result<(), Refused> {
    match layer.quantised {
        Some(_) if !backend.reads_quantised() => Err(refused(
            Rule::BackendQuantised,
            "a quantised cache",
            format_args!("a cache of {}", T::DTYPE),
            "register `QuantisedDecode` and `QuantisedPrefill`, over MXFP8 `MxFp8`, or make the cache by `PagedKvCache::new`",
        )),
        _ => Ok(()),
    }
}

/// An output for the queries of a layer, without log-sum-exps.
pub(super) fn empty_output<T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
) -> Result<Output<T>> {
    let shape = [
        size(layer.query, 0),
        size(layer.query, 1),
        size(layer.value, 2),
    ];
    Ok(Output {
        attention: Tensor::empty(step.stream.device(), shape)?,
        softmax_lse: None,
    })
}

/// [`StepPlan::run`] of plans whose [`StepPlan::run_into`] does not go by way of it.
pub(super) fn run_into_empty<T: Element>(
    plan: &dyn StepPlan<T>,
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
) -> Result<Output<T>> {
    let mut output = empty_output(step, layer)?;
    plan.run_into(step, layer, &mut output)?;
    Ok(output)
}

/// A way to compute attention: plans once a step, runs once a layer.
pub trait AttentionBackend<T: Element>: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Whether it reads quantised caches ([`LayerTensors::quantised`]). Others are not asked where the cache is one.
    fn reads_quantised(&self) -> bool {
        false
    }

    /// Prepares a step for layers whose tensors have the shapes of these, which are those of the first layer that the
    /// plan will serve.
    ///
    /// # Errors
    /// Why it cannot serve the step: a broken rule of the operator, or a refusal of its own. Nothing is launched.
    fn plan(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Box<dyn StepPlan<T>>>;
}

/// A step that a backend has prepared.
pub trait StepPlan<T: Element>: Send + Sync + fmt::Debug {
    /// What it needs of the device's memory besides the cache and the tensors of the layers, whose output is the caller's
    /// ([`StepPlan::run_into`]). [`Backends::memory_limit`](crate::Backends::memory_limit) goes by it.
    fn memory(&self) -> StepMemory;

    /// Queues the attention of a layer.
    ///
    /// # Errors
    /// [`NotAsPlanned`](ascend_attention::Error::NotAsPlanned) for tensors of other shapes; whatever the launch says.
    fn run(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Output<T>>;

    /// Queues the attention of a layer, with an output tensor of the caller, of the query's shape; of latent attention
    /// as its form says.
    ///
    /// Unless a plan says otherwise this copies what [`StepPlan::run`] gives.
    ///
    /// # Errors
    /// As for [`StepPlan::run`]; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for an output of another shape.
    fn run_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Output<T>,
    ) -> Result<()> {
        let computed = self.run(step, layer)?;
        match &computed.softmax_lse {
            None => without_lse(output)?,
            Some(from) => {
                if let Some(to) = &output.softmax_lse {
                    to.copy_from(step.stream, from)?;
                }
            }
        }
        Ok((output.attention).copy_from(step.stream, &computed.attention)?)
    }
}

/// Refuses an output with a place for log-sum-exps: a step computes the attention alone.
pub(crate) fn without_lse<T: Element>(output: &Output<T>) -> Result<()> {
    match &output.softmax_lse {
        None => Ok(()),
        Some(lse) => Err(Error::invalid(
            "output.softmax_lse",
            lse.desc(),
            "none: a step computes no log-sum-exps, so that these would be those of another call",
        )),
    }
}
