//! The largest steps that graphs are captured for.

use ascend_attention::graph::CaptureEstimate;
use ascend_attention::{AnyTensor, Element, Tensor, Violation};

use crate::batch::Drafting;
use crate::error::{Error, Result};
use crate::kv::CacheShape;
use crate::rules;

use super::linear_capture::LinearCapture;

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
    /// What layers of linear attention have, in a model with such layers.
    pub(crate) linear: Option<LinearCapture>,
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
    /// Limits of steps of up to these numbers of requests, each of which has at most `keys` keys, those of the step
    /// included; of [drafted trees](crate::TreeGraphs) at most `keys` tokens in the cache. All requests of a step
    /// together have at most as many blocks as the cache, unless they verify trees. More sizes than
    /// [`CaptureEstimate::STREAMS`] are refused at the capture; one more is kept for that.
    pub fn new(sizes: impl IntoIterator<Item = usize>, keys: usize) -> Self {
        Self {
            sizes: sizes.into_iter().take(CaptureEstimate::STREAMS.saturating_add(1)).collect(),
            each: RowsPerRequest(1),
            keys,
            blocks: usize::MAX,
            learnable_sinks: Vec::new(),
            drafting: None,
            linear: None,
        }
    }

    /// Sets the most new tokens of a request in a step, where drafts are verified or a draft model catches up with
    /// what was accepted (draft extend). By default each request adds one token.
    ///
    /// The rows of a size are its requests times these tokens. Each request of a step may add fewer: the rows left
    /// over are those of dummy requests, so that such a step needs a size of at least one request more than it has.
    /// So capture one request more than ever run. Layers of linear attention need a pool of at least as many states as
    /// the largest size has rows, from CANN 9.1 on. Absorbed queries over latents have at most 16 rows a request on
    /// CANN 8.1: a step whose dummies would have more takes a larger size, or is computed without a graph.
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

    /// Refuses limits of layers of linear attention where none are captured.
    pub(crate) fn check_not_linear(&self) -> Result<(), Violation> {
        match self.linear {
            None => Ok(()),
            Some(_) => {
                let given = "layers of linear attention in limits of graphs that have none";
                Err(Violation::new(
                    &rules::GRAPH_INPUTS,
                    given,
                    "limits without such layers",
                    "leave `GraphLimits::linear` out: only an `Attention::of_hybrid` captures such layers",
                ))
            }
        }
    }

    /// Refuses limits as [`check`](Self::check) does, and what only the layers of an
    /// [`Attention`](crate::Attention) have, where other layers are captured: linear attention, a choice of backends,
    /// and sinks.
    pub(crate) fn check_of_other_layers(&self, sinks_fix: &'static str) -> Result<()> {
        self.check()?;
        self.check_not_linear()?;
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

    /// Sets what layers of linear attention have, which only a model with such layers is captured with
    /// ([`Attention::of_hybrid`](crate::Attention::of_hybrid)).
    pub fn linear(mut self, layers: LinearCapture) -> Self {
        self.linear = Some(layers);
        self
    }
}
