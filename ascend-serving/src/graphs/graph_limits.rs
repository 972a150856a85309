//! How large the steps may be that graphs are captured for.

use ascend_attention::graph::CaptureEstimate;
use ascend_attention::{AnyTensor, CallRule, Element, Tensor};

use crate::kv::CacheShape;
use crate::refusal::{Refused, refused};

/// How large the steps may be that graphs are captured for: a graph has the shapes of one size, and steps are padded to it.
#[derive(Clone, Debug)]
pub struct GraphLimits {
    /// Requests of each size.
    pub(super) sizes: Vec<usize>,
    /// Rows of each request: its new tokens, or the nodes of its tree, at most.
    pub(super) each: RowsEach,
    /// Keys of a request, those of the step included.
    pub(super) keys: usize,
    /// Blocks of all requests of a step together.
    pub(super) blocks: usize,
    /// Of each layer of the model, or none.
    pub(super) learnable_sinks: Vec<Option<AnyTensor>>,
}

/// Query rows of each request of a captured size. The graphs of a pool are of so many rows, those of engines of so many
/// requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowsEach(pub(super) usize);

impl RowsEach {
    /// Rows of so many requests.
    pub(super) fn rows(self, requests: usize) -> usize {
        requests.saturating_mul(self.0)
    }

    /// Requests of so many rows.
    pub(super) fn requests(self, rows: usize) -> usize {
        rows.checked_div(self.0).unwrap_or(0)
    }
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
            each: RowsEach(1),
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
        self.each = RowsEach(tokens);
        self
    }

    /// Refuses limits that no request is within: each has a key, its own.
    pub(super) fn check(&self) -> Result<(), Refused> {
        if self.keys > 0 {
            return Ok(());
        }
        Err(refused(
            CallRule::GraphLengths,
            "graphs of requests with 0 keys",
            "1 or more, those of the step included",
            "declare the longest request that graphs are to serve",
        ))
    }

    /// The query rows of each size.
    pub(super) fn rows(&self) -> Vec<usize> {
        let rows = self.sizes.iter().map(|requests| self.each.rows(*requests));
        rows.collect()
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
