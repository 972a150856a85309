//! A verification of drafted trees in progress, and the buffers of its size.

use std::fmt;

use ascend_attention::attention::BlockTable;
use ascend_attention::{Element, Output, Stream, Tensor};

use crate::backends::size;
use crate::drafts::{NodeWrites, check_inputs, check_rows};
use crate::engine::LayerInputs;
use crate::error::Result;
use crate::kv::{LayerCache, StepLease};

use super::graph_pool::GraphStep;
use super::graph_tensors::GraphTensors;

/// The buffers of the graphs of a size.
#[derive(Debug)]
pub(super) struct TreeBuffers<T: Element> {
    pub(super) block_table: BlockTable,
    /// The mask of the trees, `[requests, nodes, nodes]`.
    pub(super) mask: Tensor<i8>,
    pub(super) tensors: GraphTensors<T>,
    /// The outputs of two calls, of the nodes among themselves and over the cached tokens, and the merged
    /// log-sum-exps; `None` for a single call.
    pub(super) two: Option<([Output<T>; 2], Tensor<f32>)>,
}

/// A verification of drafted trees in progress, replayed from graphs. From
/// [`TreeGraphs::begin`](crate::TreeGraphs::begin); [end](TreeGraphStep::end) or drop it when the last layer is queued.
pub struct TreeGraphStep<'a, T: Element> {
    /// The lease, which ends after the last replay.
    lease: StepLease<'a, Stream>,
    step: GraphStep<'a, TreeBuffers<T>>,
    /// The writes of the nodes to the layers of a cache of latents.
    writes: Option<(NodeWrites, &'a [LayerCache<T>])>,
    stream: &'a Stream,
    requests: usize,
}

impl<'a, T: Element> TreeGraphStep<'a, T> {
    pub(super) fn new(
        lease: StepLease<'a, Stream>,
        step: GraphStep<'a, TreeBuffers<T>>,
        writes: Option<(NodeWrites, &'a [LayerCache<T>])>,
        stream: &'a Stream,
        requests: usize,
    ) -> Self {
        Self { lease, step, writes, stream, requests }
    }

    /// The tensors of the captured size, to be filled in place on the step's stream before [`TreeGraphStep::launch`]:
    /// `[size, heads, nodes, D]`. Rows of padding, and rows after the nodes of a tree, may hold any finite numbers.
    pub fn tensors(&self) -> &'a GraphTensors<T> {
        &self.step.buffers().tensors
    }

    /// Launches the graph of a layer, whose tensors were filled; before it, nodes over latents are written to the
    /// cache. Returns at once. The output of all layers is one tensor, lent until the next call of this step: queue
    /// work that reads it on the step's stream before that, or copy it there.
    ///
    /// # Errors
    /// As for [`GraphStep::launch`].
    pub fn launch(&mut self, layer: usize) -> Result<&Tensor<T>> {
        self.step.admits(layer)?;
        let layer_cache = self.writes.as_ref();
        let layer_cache = layer_cache.and_then(|(writes, layers)| Some((writes, layers.get(layer)?)));
        if let Some((writes, cache)) = layer_cache {
            let tensors = self.tensors();
            writes.queue(cache, self.stream, [&tensors.key, &tensors.value])?;
        }
        self.step.launch(layer)?;
        Ok(&self.tensors().output)
    }

    /// Copies the nodes' query `[requests, N, nodes, D]`, key and value `[requests, Nkv, nodes, D]` of a layer into
    /// the buffers, unless they are in their places there, and launches its graph; over a cache of latents absorbed
    /// queries and rotary parts, latents and rotary keys ([`LayerInputs::latent`],
    /// [`LatentForm::Absorbed`](crate::LatentForm::Absorbed)). They have the captured number of nodes; rows
    /// after the nodes of a tree mean nothing. The output has the size's padding, too.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for another number of requests or nodes,
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for other heads,
    /// [`DRAFT_INPUTS`](crate::rules::DRAFT_INPUTS) for a mask, sinks, queries that are not absorbed, inputs without
    /// latents over a cache that has them, and latents over another;
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an input that shares memory with a tensor of the graph
    /// and is not in its own place; as for [`AnyTensor::copy_from`](ascend_attention::AnyTensor::copy_from) and
    /// [`TreeGraphStep::launch`].
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<&Tensor<T>> {
        let inputs = inputs.into();
        let tensors = self.tensors();
        let query_rope = check_inputs(layer, &inputs, tensors.query_rope.is_some())?;
        self.step.admits(layer)?;
        tensors.copy_in(self.stream, &inputs, query_rope, |name, from, to| {
            check_rows(name, layer, from, [self.requests, size(to, 1), size(to, 2), size(to, 3)])
        })?;
        self.launch(layer)
    }

    /// Ends the step, and checks that all its layers were queued.
    ///
    /// # Errors
    /// As for [`Step::end`](crate::Step::end).
    pub fn end(self) -> Result<()> {
        self.step.end()
    }

    /// The log-sum-exps over all keys, `[size, N, nodes, 1]`, of the layer that was launched last; `None` where a
    /// layer is one call.
    pub fn softmax_lse(&self) -> Option<&'a Tensor<f32>> {
        let (_, merged) = self.step.buffers().two.as_ref()?;
        Some(merged)
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'a, Stream> {
        &self.lease
    }
}

impl<T: Element> fmt::Debug for TreeGraphStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeGraphStep").field("step", &self.step).finish_non_exhaustive()
    }
}
