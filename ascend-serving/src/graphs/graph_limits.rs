//! The largest steps that graphs are captured for.

use ascend_attention::graph::CaptureEstimate;
use ascend_attention::{AnyTensor, Element, Tensor, Violation};

use crate::batch::Drafting;
use crate::error::{Error, Result};
use crate::kv::CacheShape;
use crate::rules;

/// The weights of a layer's convolution and its bias, if it has one.
pub(crate) type ConvolutionWeights = (AnyTensor, Option<AnyTensor>);

/// Limits of the steps that graphs are captured for: a graph has the shapes of one size, and steps are padded to it.
#[derive(Clone, Debug)]
pub struct GraphLimits {
    /// Requests of each size.
    pub(crate) sizes: Vec<usize>,
    /// Rows of each request: its new tokens, or the nodes of its tree, at most.
    pub(crate) each: RowsPerRequest,
    /// Keys of a request, those of the step included; of drafted trees its tokens in the cache.
    pub(crate) keys: usize,
    /// Blocks of all requests of a step together.
    pub(crate) blocks: usize,
    /// The sinks of each layer of the model; empty without sinks.
    pub(crate) learnable_sinks: Vec<Option<AnyTensor>>,
    /// How the drafts of the steps are made, if that is said.
    pub(crate) drafting: Option<Drafting>,
    /// The weights of the convolution of each layer of linear attention; empty without convolutions.
    pub(crate) convolutions: Vec<ConvolutionWeights>,
}

/// Query rows of each request of a captured size. It converts between the sizes of engines, in requests, and those of
/// a [`GraphPool`](crate::GraphPool), in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowsPerRequest(pub(crate) usize);

impl RowsPerRequest {
    /// The rows of `requests` requests.
    pub(crate) fn rows(self, requests: usize) -> usize {
        requests.saturating_mul(self.0)
    }

    /// The requests that have `rows` rows.
    pub(crate) fn requests(self, rows: usize) -> usize {
        rows.checked_div(self.0).unwrap_or(0)
    }
}

impl GraphLimits {
    /// Limits of steps of up to these numbers of requests ([`tokens_each`](Self::tokens_each) may need one more), each
    /// of which has at most `keys` keys, those of the step included; of [drafted trees](crate::TreeGraphs) at most
    /// `keys` tokens in the cache. All requests of a step together have at most as many blocks as the cache, unless
    /// they verify trees. More sizes than [`CaptureEstimate::STREAMS`] are refused at the capture; one more is kept for
    /// that.
    pub fn new(sizes: impl IntoIterator<Item = usize>, keys: usize) -> Self {
        Self {
            sizes: sizes.into_iter().take(CaptureEstimate::STREAMS.saturating_add(1)).collect(),
            each: RowsPerRequest(1),
            keys,
            blocks: usize::MAX,
            learnable_sinks: Vec::new(),
            drafting: None,
            convolutions: Vec::new(),
        }
    }

    /// Sets the most new tokens of a request in a step, where drafts are verified or a draft model catches up with
    /// what was accepted (draft extend). By default each request adds one token.
    ///
    /// The rows of a size are its requests times these tokens. Each request of a step may add fewer: the rows left
    /// over are those of dummy requests, so that such a step needs a size of at least one request more than it has.
    /// So capture one request more than ever run. A step without drafts has the rows of its size, too: for such steps
    /// capture a second set of graphs over the same attention, of one token each, and begin each step from the set
    /// that [serves](crate::AttentionGraphs::serves) it, this one first. Layers of linear attention need a pool of at
    /// least as many states as the largest size has rows, from CANN 9.1 on. Absorbed queries over latents have at most
    /// 16 rows a request on CANN 8.1: a step whose dummies would have more takes a larger size, or is computed without
    /// a graph.
    ///
    /// With layers of linear attention a request has at most 8 tokens, which their operator takes.
    ///
    /// Of [drafted trees](crate::TreeGraphs) it is the most nodes: a smaller tree is padded within its request, and
    /// needs no larger size.
    pub fn tokens_each(mut self, tokens: usize) -> Self {
        self.each = RowsPerRequest(tokens);
        self
    }

    /// Sets how the drafts of the engine are made, as its [`StatePolicy`](crate::StatePolicy) does, by which the graphs
    /// record the backends of the kind that its steps are of
    /// ([`Backends::for_steps`](crate::Backends::for_steps)): with [`Drafting::Mtp`] steps of one token verify drafts
    /// too. Without it graphs of one token record the backends of decodes, and those of several the backends of steps
    /// that verify drafts, if a list or a preference names such steps, or otherwise those of chunks.
    ///
    /// Captures that choose no backend refuse it: those of [drafted trees](crate::TreeGraphs) and of
    /// [sparse attention](crate::SparseGraphs).
    pub fn drafting(mut self, drafting: Drafting) -> Self {
        self.drafting = Some(drafting);
        self
    }

    /// Refuses weights of convolutions where no layers of linear attention are captured.
    pub(crate) fn check_no_convolutions(&self) -> Result<(), Violation> {
        match self.convolutions.len() {
            0 => Ok(()),
            layers => Err(Violation::new(
                &rules::GRAPH_INPUTS,
                format_args!("weights of the convolutions of {layers} layers of linear attention"),
                "none, in graphs without such layers",
                "leave `GraphLimits::convolutions` out: only an `Attention::of_hybrid` captures such layers",
            )),
        }
    }

    /// Refuses limits as [`check`](Self::check) does, and what only the layers of an
    /// [`Attention`](crate::Attention) have, where other layers are captured: linear attention, a choice of backends,
    /// and sinks.
    pub(crate) fn check_of_other_layers(&self, sinks_fix: &'static str) -> Result<()> {
        self.check()?;
        self.check_no_convolutions()?;
        if let Some(drafting) = self.drafting {
            return Err(Error::invalid(
                "drafting",
                format_args!("{drafting:?}"),
                "none: these graphs have no backends to choose among",
            )
            .fix("leave `GraphLimits::drafting` out: `GraphLimits::tokens_each` says how many tokens are verified"));
        }
        match self.learnable_sinks.iter().flatten().count() {
            0 => Ok(()),
            sinks => Err(Error::invalid(
                "learnable_sinks",
                format_args!("sinks of {sinks} layers"),
                "none: these layers have no sinks",
            )
            .fix(sinks_fix)),
        }
    }

    /// Refuses limits of 0 tokens a request, and of 0 keys or blocks: each request has a key, its own, in a block.
    pub(crate) fn check(&self) -> Result<(), Violation> {
        if self.each.0 == 0 {
            return Err(Violation::new(
                &rules::GRAPH_SIZE,
                "graphs of requests with 0 new tokens each",
                "1 or more",
                "give `GraphLimits::tokens_each` the most new tokens of a request, 1 for decodes",
            ));
        }
        if self.keys > 0 && self.blocks > 0 {
            return Ok(());
        }
        Err(Violation::new(
            &rules::GRAPH_LENGTHS,
            format_args!("graphs of requests with at most {} keys, in at most {} blocks", self.keys, self.blocks),
            "1 or more of both, the keys of the step included",
            "declare the longest request that graphs are to serve",
        ))
    }

    /// The query rows of each size.
    pub(crate) fn rows(&self) -> Vec<usize> {
        let rows = self.sizes.iter().map(|requests| self.each.rows(*requests));
        rows.collect()
    }

    /// Limits the blocks of all requests together; the default is the cache's size, and for drafted trees no limit. A
    /// block that requests share counts for each, and a dummy request takes one.
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.blocks = blocks;
        self
    }

    /// Sets one more logit for each head, `[N]`, of each layer of the model: a tensor, or none for the layers of a
    /// group without sinks ([`Attention::of_groups`](crate::Attention::of_groups)). At most one layer more than
    /// [`CacheShape::MAX_LAYERS`] is kept: no model has more.
    pub fn learnable_sinks<E: Element, S: Into<Option<Tensor<E>>>>(
        mut self,
        sinks: impl IntoIterator<Item = S>,
    ) -> Self {
        let most = CacheShape::MAX_LAYERS.saturating_add(1);
        let sinks = sinks.into_iter().take(most).map(Into::into);
        self.learnable_sinks = sinks.map(|sink| sink.map(AnyTensor::from)).collect();
        self
    }

    /// Sets the weights `[width, channels]` (those of PyTorch's modules transposed) of the convolution of each layer of
    /// linear attention, in the order in which [`Attention::of_hybrid`](crate::Attention::of_hybrid) names the layers,
    /// and the bias `[channels]` of those that have one: of all layers or of none. The graphs read them where they are:
    /// to change them, copy other numbers into the tensors. At most one layer more than [`CacheShape::MAX_LAYERS`] is
    /// kept: no model has more.
    ///
    /// ```
    /// use ascend_attention::delta_rule::DeltaTensors;
    /// use ascend_attention::spec::{Cann, Soc};
    /// use ascend_attention::{Machine, Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, Convolution, PadPolicy, PagedKvCache, StatePool, StateShape};
    /// use ascend_serving::{
    ///     Attention, AttentionShape, Backends, BatchRequest, Causality, GraphLimits, LayerGroup, StatePolicy,
    /// };
    ///
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// let stream = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1))?.device(0)?.stream()?;
    /// let device = stream.device();
    /// let cache = PagedKvCache::<bf16>::new(device, 8, 128, CacheShape::new(1, 1, 64), PadPolicy::SkipNegative)?;
    /// let full = AttentionShape::new(1, 1, 64);
    /// let full = LayerGroup::new([1], Causality::Causal, full, cache, Backends::standard(device));
    /// // Layer 0 has states of a head, behind a convolution of queries, keys and values of 16 elements each.
    /// let convolution = Some(Convolution { width: 4, channels: 48, silu: true });
    /// let shape = StateShape {
    ///     layers: 1,
    ///     key_heads: 1,
    ///     value_heads: 1,
    ///     value_dim: 16,
    ///     key_dim: 16,
    ///     scale: 0.25,
    ///     g: true,
    ///     gk: false,
    ///     drafts: 0,
    ///     convolution,
    /// };
    /// let mut attention = Attention::of_hybrid(2, [full], [0], StatePool::new::<bf16>(&stream, 4, shape)?)?;
    /// let rows = |shape: &[usize]| stream.upload(&vec![bf16::from_f32(0.25); shape.iter().product()], shape);
    /// let weight = rows(&[4, 48])?;
    ///
    /// // Decodes of up to 4 requests, one for each slot.
    /// let limits = GraphLimits::new([1, 4], 512).convolutions([(weight.clone(), None)]);
    /// let mut graphs = attention.capture(&stream, Causality::Causal, &limits)?;
    ///
    /// let mut sequence = attention.sequence();
    /// let (mixed, wide, beta) = (rows(&[1, 48])?, rows(&[1, 1, 64])?, rows(&[1, 1])?);
    /// let decay = stream.upload(&[-0.1f32], [1, 1])?;
    /// for _ in 0..3 {
    ///     attention.grow(&stream, &mut sequence, 1)?;
    ///     let mut metadata = attention.metadata(&[BatchRequest::of(&sequence, 1)], StatePolicy::default())?;
    ///     let mut step = graphs.begin(&stream, &mut metadata)?;
    ///     let convolved = step.convolve(0, (&mixed, &weight))?.narrow(0, 0..1)?;
    ///     let part = |from: usize| convolved.narrow(1, from..from + 16)?.contiguous(&stream)?.reshape([1, 1, 16]);
    ///     // Here a model normalises queries and keys, each head to length 1: neither graph nor operator does.
    ///     let (query, key, value) = (part(0)?, part(16)?, part(32)?);
    ///     let output = step.forward(0, DeltaTensors::new((&query, &key, &value), &beta).g(&decay))?;
    ///     assert_eq!(output.shape(), [1, 1, 16]);
    ///     step.forward(1, (&wide, &wide, &wide))?;
    ///     step.end()?;
    /// }
    /// assert_eq!(attention.computed_tokens(&sequence)?, 3);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn convolutions<E: Element>(
        mut self,
        layers: impl IntoIterator<Item = (Tensor<E>, Option<Tensor<E>>)>,
    ) -> Self {
        let layers = layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1));
        self.convolutions = layers.map(|(weight, bias)| (weight.into(), bias.map(AnyTensor::from))).collect();
        self
    }
}
