//! Ways to compute the attention of a step, by name.

use std::fmt;

use ascend_attention as attention;
use ascend_attention::attention::BlockTable;
use ascend_attention::case::tentatively;
use ascend_attention::spec::{Cann, Layout, Target};
use ascend_attention::{AnyTensor, Device, Element, FusedInferAttention, Output, Stream, Tensor};

use crate::batch::{AttentionMetadata, AttentionState, Causality};
use crate::error::{Error, Result};
use crate::kv::{LayerCache, too_many_blocks};
use crate::refusal::{Refused, Rule, refused};

use super::latent::LatentTensors;
use super::paged_decode::PagedDecode;

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key heads, a divisor of the query heads.
    pub kv_heads: usize,
    /// Elements of a head; of latent attention those of both parts.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`. Steps, captures and plans refuse 0, infinities and NaN.
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
        if self.scale.is_finite() && self.scale != 0.0 {
            return Ok(());
        }
        Err(Error::invalid(
            "AttentionShape.scale",
            self.scale,
            format_args!(
                "finite and not 0: the factor of the scores, for heads of {} usually {}",
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

/// What all layers of a step share.
#[derive(Clone, Copy, Debug)]
pub struct StepContext<'a> {
    /// Where the step's work is queued.
    pub stream: &'a Stream,
    /// The heads.
    pub shape: AttentionShape,
    /// Lengths, table and kind of the step.
    pub metadata: &'a AttentionMetadata,
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
    /// The layer's cache, this step's keys and values in it.
    pub cache: &'a LayerCache<T>,
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

/// A way to compute attention: plans once a step, runs once a layer.
pub trait AttentionBackend<T: Element>: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

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
    /// Queues the attention of a layer.
    ///
    /// # Errors
    /// [`NotAsPlanned`](attention::Error::NotAsPlanned) for tensors of other shapes; whatever the launch says.
    fn run(&self, step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<Output<T>>;

    /// Queues the attention of a layer, with an output tensor of the caller, of the query's shape; of latent attention
    /// as its form says.
    ///
    /// Unless a plan says otherwise this copies what [`StepPlan::run`] gives.
    ///
    /// # Errors
    /// As for [`StepPlan::run`]; [`InvalidArgument`](attention::Error::InvalidArgument) for an output of another shape.
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

/// Backends in the order in which they are tried.
pub struct Backends<T: Element> {
    backends: Vec<Box<dyn AttentionBackend<T>>>,
}

/// A backend that could not serve a step.
#[derive(Clone, Debug, PartialEq)]
pub struct RefusedBackend {
    /// Its name.
    pub name: &'static str,
    /// Why.
    pub why: Error,
    /// The product and release that take the call which was refused: the oldest newer release of the device's product, or
    /// else another product. `None` where none does, and where the backend refused the step by a rule of its own.
    pub taken_by: Option<Target>,
}

impl RefusedBackend {
    pub(crate) fn new(name: &'static str, why: Error, device: &Device) -> Self {
        let release = |since| {
            let cann = Cann::of_version(since)?.cann();
            let soc = device.target().ok()?.soc;
            Some(Target { soc, cann })
        };
        let taken_by = match &why {
            Error::Attention(attention::Error::Violation(violation)) => violation.taken_by,
            Error::Attention(attention::Error::OperatorVersion { since, .. }) => release(since),
            _ => None,
        };
        Self {
            name,
            why: for_schedulers(why),
            taken_by,
        }
    }
}

impl fmt::Display for RefusedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.why)?;
        match self.taken_by {
            Some(target) => write!(f, "; {target} takes the call"),
            None => Ok(()),
        }
    }
}

/// The backend that serves a step, and why those before it do not.
#[derive(Debug)]
pub struct Selected<T: Element> {
    /// Its name.
    pub name: &'static str,
    /// The step, prepared.
    pub plan: Box<dyn StepPlan<T>>,
    /// Backends that were tried before.
    pub refused: Vec<RefusedBackend>,
}

impl<T: Element> Backends<T> {
    /// No backend.
    pub fn none() -> Self {
        Self {
            backends: Vec::new(),
        }
    }

    /// Adds a backend behind the others, in the place of one of the same name.
    pub fn with(mut self, backend: impl AttentionBackend<T> + 'static) -> Self {
        let name = backend.name();
        let mut places = self.backends.iter_mut();
        match places.find(|other| other.name() == name) {
            Some(place) => *place = Box::new(backend),
            None => self.backends.push(Box::new(backend)),
        }
        self
    }

    /// The backend of this name.
    pub fn get(&self, name: &str) -> Option<&dyn AttentionBackend<T>> {
        let mut backends = self.backends.iter().map(|backend| &**backend);
        backends.find(|backend| backend.name() == name)
    }

    /// Names in the order of trial.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.backends.iter().map(|backend| backend.name())
    }

    /// Prepares a step with the first backend that can serve it.
    ///
    /// # Errors
    /// [`Error::NoBackend`] with the reason of each.
    pub fn plan(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<Selected<T>> {
        tentatively(|| self.first_that_serves(step, first))
    }

    /// What may serve a step that only decodes, unless it was tried.
    fn decode_hint(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Option<&'static str> {
        let metadata = step.metadata;
        let plain = metadata.settings().causality == Causality::Causal
            && first.learnable_sink.is_none()
            && first.latent.is_none();
        let decodes = metadata.state() == AttentionState::DecodeOnly && plain;
        let untried = self
            .get(AttentionBackend::<T>::name(&PagedDecode))
            .is_none();
        (decodes && untried).then_some(
            "`.with(PagedDecode)` adds the operator's decode path, which in steps such as this one takes element types, head \
             dimensions and blocks that packed calls of the release may not",
        )
    }

    fn first_that_serves(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
    ) -> Result<Selected<T>> {
        let mut refused = Vec::new();
        for backend in &self.backends {
            let name = backend.name();
            match backend.plan(step, first) {
                Ok(plan) => {
                    return Ok(Selected {
                        name,
                        plan,
                        refused,
                    });
                }
                Err(why) => {
                    refused.push(RefusedBackend::new(name, why, step.stream.device()));
                }
            }
        }
        Err(no_backend(&refused, self.decode_hint(step, first)))
    }
}

/// The operator's refusal of a batch in the terms of those who make batches.
pub(crate) fn for_schedulers(why: Error) -> Error {
    match why {
        Error::Attention(attention::Error::Violation(violation))
            if violation.rule.id == "cache.blocks" =>
        {
            let given = violation.given;
            too_many_blocks(
                format_args!("{given}, shared blocks counted for each request"),
                violation.allowed,
            )
            .into()
        }
        why => why,
    }
}

/// The rules of this layer that an error names.
pub(crate) fn rules_of(why: &Error) -> Vec<Rule> {
    match why {
        Error::Refused(refused) => vec![refused.rule],
        Error::NoBackend { rules, .. } => rules.clone(),
        _ => Vec::new(),
    }
}

/// The error of a step that no backend can serve, with the reason of each.
pub(crate) fn no_backend(refused: &[RefusedBackend], hint: Option<&str>) -> Error {
    let reasons = refused.iter().map(RefusedBackend::to_string);
    let mut reasons: Vec<_> = match refused {
        [] => vec!["there is none: add some with `Backends::none().with(Fused)`".to_owned()],
        _ => reasons.collect(),
    };
    reasons.extend(hint.map(str::to_owned));
    let rules = refused.iter().flat_map(|refused| rules_of(&refused.why));
    Error::NoBackend {
        reasons: reasons.join("; "),
        rules: rules.collect(),
    }
}

impl<T: Element> fmt::Debug for Backends<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
