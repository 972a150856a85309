//! Drafted trees verified by graphs, layer by layer.

use std::fmt;

use ascend_attention::attention::{CallLengths, Inputs};
use ascend_attention::graph::Capturing;
use ascend_attention::merge::Part;
use ascend_attention::{Element, Output, Stream, Tensor};

use crate::drafts::{TreeTensors, TreeVerification, TwoCalls, tree_nodes, tree_paged};
use crate::engine::LayerInputs;
use crate::error::Result;
use crate::kv::{LayerCache, PagedKvCache, StepLease};

use super::graph_limits::GraphLimits;
use super::graph_tensors::GraphTensors;
use super::tree_pool::{
    TreeBuffers, TreeExtents, TreeLengths, TreePool, TreePoolStep, TreeRequest, TreeTables,
    not_of_trees,
};

/// Verifications of drafted trees, replayed from graphs that were captured for a few numbers of requests: one graph
/// of each layer. From [`TreeVerification::capture`]. [`TreeVerification`] computes the same without graphs.
///
/// A graph has both calls and the merge. The mask of the trees is part of the buffers, so that each step has trees of
/// its own of up to the captured nodes; the numbers of cached tokens are the lengths that vary.
///
/// ```
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{AttentionShape, DraftTree, GraphLimits, TreeRequest, TreeVerification};
///
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let shape = CacheShape::new(2, 1, 64);
/// let mut cache = PagedKvCache::<bf16>::new(stream.device(), 16, 128, shape, PadPolicy::SkipNegative)?;
/// let verification = TreeVerification::new(AttentionShape::new(1, 1, 64));
/// // Up to 4 requests of up to 1000 cached tokens, and trees of up to 3 nodes.
/// let limits = GraphLimits::new([1, 4], 1000).tokens_each(3);
/// let mut graphs = verification.capture(&stream, &cache, &limits)?;
///
/// let mut sequence = Sequence::new(cache.pool());
/// cache.grow(&stream, &mut sequence, 200)?;
/// // Zeros here; elsewhere steps have computed them.
/// cache.mark_computed(&sequence, 200)?;
/// let tree = DraftTree::from_parents(&[-1, 0, 0])?;
/// let nodes = stream.upload(&[bf16::ONE; 3 * 64], [1, 1, 3, 64])?;
/// let mut step = graphs.begin(&stream, &[TreeRequest { sequence: &sequence, tree: &tree }])?;
/// for layer in 0..2 {
///     let output = step.forward(layer, (&nodes, &nodes, &nodes))?;
///     assert_eq!(output.shape(), [1, 1, 3, 64]);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct TreeGraphs<T: Element> {
    pool: TreePool<PlainBuffers<T>>,
}

/// The buffers of the graphs of a size.
#[derive(Debug)]
struct PlainBuffers<T: Element> {
    tables: TreeTables,
    tensors: GraphTensors<T>,
    /// The merged log-sum-exps, `[size, N, nodes, 1]`.
    softmax_lse: Tensor<f32>,
    /// The outputs that are merged: of the nodes among themselves, and over the cached tokens.
    parts: [Output<T>; 2],
}

impl<T: Element> TreeBuffers for PlainBuffers<T> {
    fn tables(&self) -> &TreeTables {
        &self.tables
    }
}

impl TreeVerification {
    /// Captures the verification of trees of up to [`GraphLimits::tokens_each`] nodes, after at most as many cached
    /// tokens as the limits have keys, for every layer of a cache. The keys of the nodes are no part of the cache.
    /// All requests together may have any number of blocks that they share, unless [`GraphLimits::blocks`] limits it.
    /// CANN 8.1 needs a cache with as many blocks as the longest requests of a size take together.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for limits without sizes, or with one of 0 nodes;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// stream of another device, a scale that is 0 or not finite, and sinks, which no verification has;
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs take too many streams; a broken rule of one of
    /// the calls; as for [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
    ) -> Result<TreeGraphs<T>> {
        self.shape.check()?;
        let pool = TreePool::capture(
            stream,
            cache,
            limits,
            false,
            |extents| self.buffers(stream, cache, extents),
            |capture, extents, layer, buffers| {
                self.record(capture, cache.layer(layer)?, extents, buffers)
            },
        )?;
        Ok(TreeGraphs { pool })
    }

    fn buffers<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        extents: TreeExtents,
    ) -> Result<PlainBuffers<T>> {
        let (device, cached, heads) = (stream.device(), cache.shape(), self.shape.heads);
        let TreeExtents {
            requests, nodes, ..
        } = extents;
        let tensor = |heads, dim| Tensor::empty(device, [requests, heads, nodes, dim]);
        let softmax_lse = || Tensor::empty(device, [requests, heads, nodes, 1]);
        let part = || -> Result<Output<T>> {
            Ok(Output {
                attention: tensor(heads, cached.value_dim)?,
                softmax_lse: Some(softmax_lse()?),
            })
        };
        Ok(PlainBuffers {
            tables: TreeTables::new(stream, cache.pool().block_size(), extents)?,
            tensors: GraphTensors {
                query: tensor(heads, self.shape.head_dim)?,
                key: tensor(cached.kv_heads, cached.key_dim)?,
                value: tensor(cached.kv_heads, cached.value_dim)?,
                output: tensor(heads, cached.value_dim)?,
            },
            softmax_lse: softmax_lse()?,
            parts: [part()?, part()?],
        })
    }

    /// Records a layer: both calls and their merge.
    fn record<T: Element>(
        &self,
        capture: &Capturing<'_>,
        cache: &LayerCache<T>,
        extents: TreeExtents,
        buffers: &PlainBuffers<T>,
    ) -> Result<()> {
        let PlainBuffers {
            tables,
            tensors:
                GraphTensors {
                    query,
                    key,
                    value,
                    output,
                },
            softmax_lse,
            parts,
        } = buffers;
        let tensors = TreeTensors {
            query,
            key,
            value,
            cache,
            block_table: &tables.block_table,
        };
        let inputs = [&tree_nodes(&tensors), &tree_paged(&tensors)];
        let calls = self.two_calls(tables.mask.clone());
        let output = Output {
            attention: output.clone(),
            softmax_lse: Some(softmax_lse.clone()),
        };
        record_two(calls, capture, extents, inputs, parts, &output)
    }
}

/// Records the call of the nodes among themselves, that of all nodes over the cached tokens, and the merge.
pub(super) fn record_two<T: Element>(
    calls: TwoCalls,
    capture: &Capturing<'_>,
    extents: TreeExtents,
    [own, paged]: [&Inputs<'_, T>; 2],
    parts: &[Output<T>; 2],
    output: &Output<T>,
) -> Result<()> {
    let [of_nodes, of_cached] = parts;
    let nodes = calls.nodes.plan(own)?;
    nodes.launch_into(capture, own, &mut of_nodes.clone())?;
    let longest = extents.longest()?;
    let cached = capture.attention(&calls.context, of_context(&longest), paged)?;
    capture.launch_into(cached, paged, &mut of_cached.clone())?;
    let parts = [Part::of(of_nodes)?, Part::of(of_cached)?];
    let merge = TwoCalls::merge().plan(&parts)?;
    Ok(merge.launch_into(capture, &parts, &mut output.clone())?)
}

/// The lengths of the call over the cached tokens.
pub(super) fn of_context(lengths: &TreeLengths) -> CallLengths<'_> {
    TwoCalls::context_lengths(&lengths.before)
}

impl<T: Element> TreeGraphs<T> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.pool.sizes()
    }

    /// Most nodes of a tree.
    pub fn nodes(&self) -> usize {
        self.pool.nodes()
    }

    /// Begins a step: puts its trees and blocks into the buffers of the smallest size that holds it, which waits for
    /// the stream. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) without requests, [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE)
    /// for more requests than the largest size; for a request [`BLOCK_POOL`](crate::rules::BLOCK_POOL) if it is of
    /// another pool, [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) if it gave back tokens,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) if its copies were not queued,
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) without cached tokens or with more than
    /// were declared, also of all requests together if [blocks](GraphLimits::blocks) were;
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for more nodes than were captured;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`GraphPool::begin`](crate::GraphPool::begin).
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &[TreeRequest<'_>],
    ) -> Result<TreeGraphStep<'a, T>> {
        let step = self.pool.begin(stream, requests, of_context)?;
        Ok(TreeGraphStep { step })
    }
}

impl<T: Element> fmt::Debug for TreeGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TreeGraphs").field(&self.pool).finish()
    }
}

/// A verification in progress. From [`TreeGraphs::begin`]; drop it when the last layer is queued.
pub struct TreeGraphStep<'a, T: Element> {
    step: TreePoolStep<'a, PlainBuffers<T>>,
}

impl<'a, T: Element> TreeGraphStep<'a, T> {
    /// The tensors of the captured size, to be filled in place on the step's stream before [`TreeGraphStep::launch`]:
    /// `[size, N, nodes, D]`. Rows of padding, and rows after the nodes of a tree, may hold any finite numbers.
    pub fn tensors(&self) -> &'a GraphTensors<T> {
        &self.step.step.buffers().tensors
    }

    /// Launches the graph of a layer, whose tensors were filled. Returns at once. The output of all layers is one
    /// tensor, lent until the next call of this step: queue work that reads it on the step's stream before that, or
    /// copy it there.
    ///
    /// # Errors
    /// As for [`GraphStep::launch`](crate::GraphStep::launch).
    pub fn launch(&mut self, layer: usize) -> Result<&Tensor<T>> {
        self.step.step.launch(layer)?;
        Ok(&self.tensors().output)
    }

    /// Copies the nodes' query `[requests, N, nodes, D]`, key and value `[requests, Nkv, nodes, D]` of a layer into
    /// the buffers and launches its graph. They have the captured number of nodes; rows after the nodes of a tree
    /// mean nothing. The output has the size's padding, too.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for another number of requests or nodes,
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for other heads,
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for a mask, sinks or latents; as for
    /// [`AnyTensor::copy_from`](ascend_attention::AnyTensor::copy_from) and [`TreeGraphStep::launch`].
    pub fn forward<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<LayerInputs<'i, T>>,
    ) -> Result<&Tensor<T>> {
        let inputs = inputs.into();
        if inputs.latent.is_some() {
            return Err(not_of_trees(
                format_args!("latents in layer {layer}"),
                "query, key and value",
                "capture by `LatentTreeVerification::capture`",
            )
            .into());
        }
        let tensors = self.tensors();
        let copies = [
            ("query", inputs.query, &tensors.query),
            ("key", inputs.key, &tensors.key),
            ("value", inputs.value, &tensors.value),
        ];
        self.step.bring(layer, &inputs, &copies)?;
        self.launch(layer)
    }

    /// The log-sum-exps over all keys, `[size, N, nodes, 1]`, of the layer that was launched last.
    pub fn softmax_lse(&self) -> &'a Tensor<f32> {
        &self.step.step.buffers().softmax_lse
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'a, Stream> {
        &self.step.lease
    }
}

impl<T: Element> fmt::Debug for TreeGraphStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeGraphStep")
            .field("step", &self.step.step)
            .finish_non_exhaustive()
    }
}
