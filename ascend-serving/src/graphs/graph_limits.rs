//! What decode steps are captured for.

use ascend_attention::graph::CaptureEstimate;
use ascend_attention::{AnyTensor, Element, Tensor};

use crate::kv::CacheShape;

/// What decode steps are captured for.
#[derive(Clone, Debug)]
pub struct GraphLimits {
    pub(super) sizes: Vec<usize>,
    pub(super) tokens: usize,
    pub(super) keys: usize,
    pub(super) blocks: usize,
    pub(super) learnable_sinks: Vec<Option<AnyTensor>>,
}

impl GraphLimits {
    /// Steps of up to these numbers of requests, each of which has at most so many keys, those of the step included. All
    /// together have as many blocks as the cache, however many requests there are. Of more sizes than
    /// [`CaptureEstimate::STREAMS`] only one more is kept: they are never captured.
    pub fn new(sizes: impl IntoIterator<Item = usize>, keys: usize) -> Self {
        Self {
            sizes: sizes
                .into_iter()
                .take(CaptureEstimate::STREAMS.saturating_add(1))
                .collect(),
            tokens: 1,
            keys,
            blocks: usize::MAX,
            learnable_sinks: Vec::new(),
        }
    }

    /// The same for steps of up to so many new tokens a request, where drafts are verified or a draft model catches up with what
    /// was accepted (draft extend). Without it each request adds one.
    ///
    /// The rows of a size are its requests times these tokens. Requests of a step may add fewer, each its own number: the
    /// rows left over are those of dummy requests, for which such a step needs a size of one request more than it has. So
    /// capture one request more than ever run.
    pub fn tokens_each(mut self, tokens: usize) -> Self {
        self.tokens = tokens;
        self
    }

    /// The same with fewer blocks for all requests together, where drafted trees are verified with a limit at all. A block
    /// that requests share counts for each, and a dummy request takes one.
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.blocks = blocks;
        self
    }

    /// The same with one more logit for each head, `[N]`, of each layer of the model: a tensor, or none for the layers of a
    /// group without sinks ([`GroupedAttention`](crate::GroupedAttention)). Of more layers than [`CacheShape::MAX_LAYERS`]
    /// only one more is kept: no model has them.
    pub fn learnable_sinks<E: Element, S: Into<Option<Tensor<E>>>>(
        mut self,
        sinks: impl IntoIterator<Item = S>,
    ) -> Self {
        let most = CacheShape::MAX_LAYERS.saturating_add(1);
        let sinks = sinks.into_iter().take(most).map(Into::into);
        self.learnable_sinks = sinks.map(|sink| sink.map(AnyTensor::from)).collect();
        self
    }
}
