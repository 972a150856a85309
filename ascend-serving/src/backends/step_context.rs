//! What a backend gets of a step and of a layer, and what several backends check of them.

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::spec::attention_problem::{SoftCap, inverted_scale, score_scale};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use ascend_attention::spec::{Layout, Rule};
use ascend_attention::{AnyTensor, Element, FusedInferAttention, Stream, Tensor, Violation};

use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::kv::{CacheShape, LayerCache, QuantisedLayer, stored};
use crate::rules;

use super::latent_tensors::{LatentForm, LatentFormKind, LatentTensors};
use super::quantised_queries::QuantisedQueries;

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key heads, a divisor of the query heads.
    pub kv_heads: usize,
    /// Elements of a head; for latent attention the sum of both parts.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`. Steps, captures and plans refuse a factor that is not
    /// finite and above 0 in 32 bits, and the head dimension and its root.
    pub scale: f64,
    /// Cap of the scores, which **the emulation alone** computes: see
    /// [`emulated_only_soft_cap`](Self::emulated_only_soft_cap). `None` means no cap; 0 is refused.
    pub emulated_only_soft_cap: Option<f64>,
}

impl AttentionShape {
    /// Heads with the usual scale, `1 / sqrt(head_dim)`.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f64).sqrt();
        Self { heads, kv_heads, head_dim, scale, emulated_only_soft_cap: None }
    }

    /// Heads of multi-head latent attention with parts of 128 and 64 elements: one key head in the cache, and the
    /// scale of the whole head, `1 / sqrt(192)`.
    pub fn latent(heads: usize) -> Self {
        Self::new(heads, 1, 192)
    }

    /// The heads of `ranks` ranks with as many each, over the same key heads. Of too many to count the most, which no
    /// tensor has.
    pub(crate) fn of_ranks(self, ranks: usize) -> Self {
        Self { heads: self.heads.saturating_mul(ranks), ..self }
    }

    /// Sets another factor of the scores.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    /// Caps the scores of every layer with these heads: `cap * tanh(score / cap)` before the softmax, as in Gemma 2
    /// (50) and Grok (30). **No operator of an NPU does**: the emulation of this process computes it by
    /// [`FusedInferAttention::emulated_only_soft_cap`], with windows, grouped queries, paged caches and graphs, so that
    /// an engine can be tested with such a model; elsewhere planning is an
    /// [`EMULATED_ONLY`](ascend_attention::rules::EMULATED_ONLY). Backends and layers that other operators compute
    /// ([`Backend::PromptAndIncre`](crate::Backend::PromptAndIncre), sparse attention) are refused by
    /// [`OPTION_SOFT_CAP`](crate::rules::OPTION_SOFT_CAP).
    ///
    /// A cap on the logits of the vocabulary (`final_logit_softcapping`) is no matter of attention.
    pub fn emulated_only_soft_cap(mut self, cap: f64) -> Self {
        self.emulated_only_soft_cap = Some(cap);
        self
    }

    /// Refuses a cap on behalf of an operator that computes none, not even on the emulation, with what mends the call.
    ///
    /// # Errors
    /// [`OPTION_SOFT_CAP`](crate::rules::OPTION_SOFT_CAP).
    pub(crate) fn check_no_soft_cap(&self, operator: &str, fix: &'static str) -> Result<(), Violation> {
        match self.emulated_only_soft_cap {
            None => Ok(()),
            Some(cap) => Err(Violation::new(
                &rules::OPTION_SOFT_CAP,
                format_args!("a cap of {cap} in a call of {operator}"),
                "a cap in calls of FusedInferAttentionScore alone, on the emulation",
                fix,
            )),
        }
    }

    /// Refuses query heads that are no multiple of the key heads, a cap that is no number of at least 1.2e-38 and
    /// finite in 32 bits, a scale that makes every key weigh the same or none anything, and the inverse of the usual
    /// scale.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for these.
    pub fn check(&self) -> Result<()> {
        let of_each = self.heads.checked_rem(self.kv_heads);
        if self.heads == 0 || of_each != Some(0) {
            return Err(Error::invalid(
                "AttentionShape.heads",
                format_args!("{} query heads over {} key heads", self.heads, self.kv_heads),
                "as many query heads for each key head, 1 or more of both",
            )
            .fix("give the heads of the model, query heads a multiple of the key heads"));
        }
        if let Some(cap) = self.emulated_only_soft_cap.filter(|cap| SoftCap::new(*cap).is_none()) {
            return Err(Error::invalid("AttentionShape.emulated_only_soft_cap", cap, SoftCap::ALLOWED)
                .fix("give the cap of the model's configuration, or none where it has none or 0"));
        }
        let held = score_scale(self.scale);
        let is_latent = self.head_dim == Self::latent(self.heads).head_dim && self.kv_heads == 1;
        let inverted = inverted_scale(self.scale, self.head_dim, 0)
            // Absorbed queries are longer.
            .or_else(|| inverted_scale(self.scale, 512, 64).filter(|_| is_latent))
            .is_some();
        if held.is_finite() && held > 0.0 && !inverted {
            return Ok(());
        }
        Err(Error::invalid(
            "AttentionShape.scale",
            self.scale,
            format_args!(
                "finite, above 0 in 32 bits, and neither the head dimension nor its root: the factor by which scores \
                 are multiplied, for heads of {} usually {}",
                self.head_dim,
                Self::new(self.heads, self.kv_heads, self.head_dim).scale
            ),
        )
        .fix("leave the scale out, or give the factor itself, not its inverse"))
    }

    /// Checks the heads and the scale as [`check`](Self::check) does, and refuses a cache with other key heads. Over a
    /// cache of latents the heads are [those of latent attention](Self::latent).
    pub(crate) fn check_cache(&self, cache: &CacheShape) -> Result<()> {
        self.check()?;
        let of_cache = (cache.kv_heads, cache.key_dim);
        if cache.is_latent() {
            return self.check_latent();
        }
        if of_cache == (self.kv_heads, self.head_dim) {
            return Ok(());
        }
        Err(Error::invalid(
            "AttentionShape",
            format_args!("{} key heads of {}", self.kv_heads, self.head_dim),
            format_args!("{} key heads of {}, as the cache has", of_cache.0, of_cache.1),
        )
        .fix("make the cache and the `AttentionShape` of one model"))
    }

    /// Refuses heads that are not those of latent attention, whose usual scale would be another one.
    pub(crate) fn check_latent(&self) -> Result<()> {
        let wanted = Self::latent(self.heads);
        if (self.kv_heads, self.head_dim) == (wanted.kv_heads, wanted.head_dim) {
            return Ok(());
        }
        Err(Error::invalid(
            "AttentionShape",
            format_args!("{} key heads of {}", self.kv_heads, self.head_dim),
            format_args!("{} key head of {}, over a cache of latents", wanted.kv_heads, wanted.head_dim),
        )
        .fix("make the heads by `AttentionShape::latent`, and set another scale by `AttentionShape::scale`"))
    }

    /// A call with these heads, this scale and this cap.
    pub fn call(&self, layout: Layout) -> FusedInferAttention {
        let call = FusedInferAttention::new(layout).heads(self.heads).kv_heads(self.kv_heads).scale(self.scale);
        match self.emulated_only_soft_cap {
            Some(cap) => call.emulated_only_soft_cap(cap),
            None => call,
        }
    }
}

/// Refuses an output that shares memory with other tensors.
pub(crate) fn apart<'a>(
    name: &'static str,
    output: &AnyTensor,
    others: impl IntoIterator<Item = (&'static str, &'a AnyTensor)>,
) -> Result<()> {
    let mut others = others.into_iter();
    match others.find(|(_, other)| output.overlaps(other)) {
        None => Ok(()),
        Some((other, _)) => {
            Err(Error::shared(name, format_args!("memory that is shared with {other}"), "memory of its own"))
        }
    }
}

/// Size of an axis.
pub(crate) fn size(tensor: &AnyTensor, axis: usize) -> usize {
    tensor.shape().get(axis).copied().unwrap_or(0)
}

/// Packed rows `[tokens, ...]` as `[requests, tokens of each, N * D]`.
pub(crate) fn batched<T: Element>(tensor: &Tensor<T>, requests: usize) -> Result<Tensor<T>> {
    let tokens = size(tensor, 0).checked_div(requests).unwrap_or(0);
    let hidden = tensor.shape().iter().skip(1).product();
    Ok(tensor.reshape([requests, tokens, hidden])?)
}

/// What all layers of a step with one mask and scale share.
#[derive(Clone, Copy, Debug)]
pub struct StepContext<'a> {
    /// Where the step's work is queued.
    pub stream: &'a Stream,
    /// The heads.
    pub shape: AttentionShape,
    /// Lengths, table and kind of the step.
    pub metadata: &'a AttentionMetadata,
    /// Which keys the tokens of these layers see.
    pub mask: &'a LayerMask,
    /// The table on the device.
    pub block_table: &'a BlockTable,
    /// Whether a graph replays the program for steps of other lengths: its calls may differ in lengths, blocks and the
    /// contents of named masks alone then.
    pub recorded: bool,
    /// Whether the layers read the keys of others ([`LayerInputs::shared_keys`](crate::LayerInputs::shared_keys)):
    /// their `key` and `value` may hold something else by now, and every key is read from the cache.
    pub shares_keys: bool,
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerTensors<'a, T: Element> {
    /// Number of the layer, from 0 on, as the cache counts them.
    pub layer: usize,
    /// Queries of the step, packed: `[tokens, N, D]`. Beside [quantised ones](LatentForm::Quantised) their rotary
    /// parts.
    pub query: &'a Tensor<T>,
    /// Keys of the step, packed: `[tokens, Nkv, D]`.
    pub key: &'a Tensor<T>,
    /// Values of the step, packed.
    pub value: &'a Tensor<T>,
    /// The layer's cache, this step's keys and values in it. It has no blocks where the cache is quantised.
    pub cache: &'a LayerCache<T>,
    /// The layer's cache where it is quantised.
    pub quantised: Option<&'a QuantisedLayer>,
    /// One more logit for each head, `[N]`, of BF16; also of the query's type from CANN 9.0 on, and on Ascend 950.
    pub learnable_sink: Option<&'a AnyTensor>,
    /// The additional inputs of multi-head latent attention. With them, `query` is as their form says, and `key` and
    /// `value` are the latents and rotary parts of the step.
    pub latent: Option<LatentTensors<'a, T>>,
}

impl<'a, T: Element> LayerTensors<'a, T> {
    /// Adds the layer's sinks, if it has any, to the inputs of a call.
    pub(super) fn with_sink<'b>(&self, inputs: Inputs<'b, T>) -> Inputs<'b, T>
    where
        'a: 'b,
    {
        match self.learnable_sink {
            Some(sink) => inputs.learnable_sink_of_any(sink),
            None => inputs,
        }
    }

    /// The queries, by name: over latents with their rotary parts, and apart those that are absorbed.
    pub(crate) fn queries(&self) -> impl Iterator<Item = (&'static str, &'a AnyTensor)> + Clone + use<'a, T> {
        let query = match self.latent.map(|latent| latent.form) {
            Some(LatentForm::Quantised(queries)) => queries.query(),
            _ => self.query,
        };
        let scale = self.quantised_queries().map(|queries| ("scale", &**queries.scale()));
        let rope = self.latent.map(|latent| ("query_rope", &**latent.query_rope));
        let absorbed = self.mixed().map(|(absorbed, _)| ("absorbed", absorbed));
        [Some(("query", query)), rope, absorbed, scale].into_iter().flatten()
    }

    /// The absorbed queries of one byte an element.
    pub(crate) fn quantised_queries(&self) -> Option<&'a QuantisedQueries> {
        match self.latent?.form {
            LatentForm::Quantised(queries) | LatentForm::QuantisedMixed { absorbed: queries, .. } => Some(queries),
            LatentForm::Absorbed | LatentForm::Plain(_) | LatentForm::Mixed { .. } => None,
        }
    }

    /// The form of the queries over latents.
    pub(crate) fn latent_form(&self) -> Option<LatentFormKind> {
        self.latent.map(|latent| latent.form.kind())
    }

    /// The absorbed queries of a mixed step, and where their output goes.
    pub(crate) fn mixed(&self) -> Option<(&'a AnyTensor, &'a Tensor<T>)> {
        self.latent?.form.mixed()
    }

    /// Refuses outputs that share memory with the layer's inputs, or with each other: where a layer has several calls,
    /// the first would write what the second reads.
    pub(crate) fn check_outputs(&self, into: Option<&Tensor<T>>) -> Result<()> {
        let own = [("key", &**self.key), ("value", &**self.value)];
        let sink = self.learnable_sink.map(|sink| ("learnable_sink", sink));
        let stored = stored(self.cache, self.quantised).map(|tensor| ("the cache", tensor));
        let read = self.queries().chain(own).chain(sink).chain(stored);
        let decoded = self.mixed().map(|(_, decoded)| ("decoded", &**decoded));
        if let Some((name, decoded)) = decoded {
            apart(name, decoded, read.clone())?;
        }
        match into {
            Some(output) => apart("output", output, read.chain(decoded)),
            None => Ok(()),
        }
    }

    /// `with` or `without`, for messages on whether the layer has sinks.
    pub(crate) fn describe_sinks(&self) -> &'static str {
        match self.learnable_sink {
            Some(_) => "with",
            None => "without",
        }
    }
}

/// Refuses masks that no call over a quantised cache takes.
pub(super) fn check_quantised_mask(step: &StepContext<'_>) -> Result<(), Violation> {
    match step.mask {
        LayerMask::Causality(Causality::Causal | Causality::Window(_) | Causality::Bidirectional) => Ok(()),
        mask => Err(Violation::new(
            &rules::BACKEND_QUANTISED,
            format_args!("{mask} over a quantised cache"),
            "causal layers, windows, and layers that see every key",
            "give layers with named masks and chunks a cache of 16 bits",
        )),
    }
}

/// The quantised cache of a layer, for a backend that reads scales of channels or tokens alone; other caches are
/// refused.
pub(super) fn quantised_cache<'a, T: Element>(layer: &LayerTensors<'a, T>) -> Result<&'a QuantisedLayer, Violation> {
    match layer.quantised {
        Some(layer_cache) if layer_cache.is_dequantised_by_fused() => Ok(layer_cache),
        Some(layer_cache) => Err(Violation::new(
            &rules::BACKEND_QUANTISED,
            format_args!("a cache with {}", layer_cache.describe_scales()),
            "a quantised cache with scales of channels or tokens",
            "add `Backend::MxFp8` over MXFP8, `Backend::QUANTISED_MLA_256_MIB` over latents, or make the cache by \
             `PagedKvCache::quantised`",
        )),
        None => Err(Violation::new(
            &rules::BACKEND_QUANTISED,
            format_args!("a cache of {}", T::DTYPE),
            "a quantised cache",
            "make the cache by `PagedKvCache::quantised`, or add `Backend::Fused`",
        )),
    }
}

/// Whether a layer's sinks, if it has any, may be counted by one of several calls that are merged by their
/// log-sum-exps.
pub(super) fn merges_sinks<T: Element>(step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<bool> {
    Ok(layer.learnable_sink.is_none() || FiaCall::lse_counts_sink(step.stream.device().target()?))
}

/// Refuses, on behalf of a backend for single tokens, steps in which a request has several tokens.
pub(super) fn check_single_tokens<T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
    takes: bool,
    rule: &'static Rule,
    [allowed, fix]: [&'static str; 2],
) -> Result<(), Violation> {
    let metadata = step.metadata;
    if takes && metadata.is_single() {
        return Ok(());
    }
    let (tokens, requests) = (metadata.tokens(), metadata.table().requests());
    Err(Violation::new(
        rule,
        format_args!(
            "{:?} of {tokens} tokens in {requests} requests, {}, {} sinks",
            metadata.state(),
            step.mask,
            layer.describe_sinks(),
        ),
        allowed,
        fix,
    ))
}
