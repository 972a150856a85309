//! Drafted trees verified by graphs, layer by layer.

use std::fmt;
use std::sync::Arc;

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::merge::Part;
use ascend_attention::{Element, Output, Stream, Tensor, Violation};

use crate::backends::RefusedBackend;
use crate::error::{Error, Result};
use crate::graphs::{GraphLimits, GraphPool, GraphTensors, LentTensors, RowsPerRequest};
use crate::kv::{CacheEntry, CacheShape, LayerCache, PagedKvCache, QueuedLayers};
use crate::rules;

use super::DraftTree;
use super::node_writes::NodeSlots;
use super::tree_request::{TreeForm, TreeLengths, TreeRequest, begin_trees, check_nodes};
use super::tree_step::{Calls, PlannedTrees, TREES_AGAIN, TreeBuffers, TreeStep};
use super::tree_verification::{NodeAndContextCalls, TreeTensors, TreeVerification, tree_mask, with_fewest_calls};

/// Verifications of drafted trees, replayed from graphs that were captured for a few numbers of requests: one graph
/// of each layer. From [`TreeVerification::capture`]. [`TreeVerification`] computes the same without graphs and lists
/// the calls of each target.
///
/// A graph has all calls of a layer and the merge. The mask of the trees is part of the buffers, so that each step has
/// trees of its own of up to the captured nodes; the numbers of cached tokens are the lengths that vary.
///
/// Over a cache of latents a step writes the nodes to the cache; elsewhere they need not be there
/// ([`TreeRequest::sequence`]).
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
/// let mut step = graphs.begin(&stream, &[TreeRequest { sequence: &sequence, cached: 200, tree: &tree }])?;
/// for layer in 0..2 {
///     let output = step.forward(layer, (&nodes, &nodes, &nodes))?;
///     assert_eq!(output.shape(), [1, 1, 3, 64]);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct TreeGraphs<T: Element> {
    verification: TreeVerification,
    graphs: GraphPool<TreeBuffers<T>>,
    cache_entry: Arc<CacheEntry>,
    shape: CacheShape,
    caches: Vec<LayerCache<T>>,
    /// Most nodes of a tree.
    nodes: RowsPerRequest,
    /// Limits of the requests' tokens in the cache.
    limits: KeyLimits,
    form: TreeForm,
    /// Why a layer is not one call, over latents.
    refused: Option<RefusedBackend>,
}

/// The numbers for which a size is captured.
#[derive(Clone, Copy, Debug)]
struct TreeExtents {
    requests: usize,
    /// Most nodes of each request.
    nodes: usize,
    /// Most keys of each request in the cache.
    keys: usize,
}

impl TreeExtents {
    /// The longest lengths, which no step has all at once: each call reads up to as many keys as the cache allows.
    fn longest(self) -> Result<TreeLengths> {
        let each = |tokens: usize| PerRequest::new(vec![tokens; self.requests]);
        Ok(TreeLengths { cached: each(self.keys)?, nodes: each(self.nodes)?, with_nodes: each(self.keys)? })
    }
}

impl TreeVerification {
    /// Captures the verification of trees of up to [`GraphLimits::tokens_each`] nodes for every layer of a cache. The
    /// keys of the limits are a request's tokens in the cache: over a cache of latents its nodes are among them. All
    /// requests together may have any number of blocks that they share, unless [`GraphLimits::blocks`] limits it.
    /// CANN 8.1 needs a cache with as many blocks as the longest requests of a size take together.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for limits without sizes, or with one of 0 nodes;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for limits of 0 keys;
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for more than 16 nodes over latents;
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised cache;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a cache of other heads, for a scale that is not above 0 or
    /// not finite, and for sinks and [drafting](GraphLimits::drafting), which no verification of trees takes;
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for layers of linear attention;
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs take too many streams; [`Error::NoBackend`] with
    /// the reasons where latents have no call in either form; as for
    /// [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
    ) -> Result<TreeGraphs<T>> {
        self.check_cache(cache)?;
        cache.admits(stream)?;
        limits.check_of_other_layers(
            "verify a chain of drafts (`BatchRequest::drafts`) in a step, whose layers may have sinks; for a model \
             without sinks leave `GraphLimits::learnable_sinks` out",
        )?;
        let is_latent = cache.shape().is_latent();
        check_nodes(limits.each.0, is_latent).map_err(|many| {
            Error::from(many).fix("give `GraphLimits::tokens_each` at most as many, and draft no larger trees")
        })?;
        let captured = |form| self.capture_form(stream, cache, limits, form);
        let (graphs, refused) = with_fewest_calls(stream.device(), is_latent, captured)?;
        Ok(TreeGraphs { refused, ..graphs })
    }

    fn capture_form<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
        form: TreeForm,
    ) -> Result<TreeGraphs<T>> {
        let (each, pool) = (limits.each, cache.pool());
        let block_size = pool.block_size();
        let most = pool.blocks().min(limits.blocks) * block_size;
        // From CANN 8.5 on a batched call counts a block that requests share once, so that the cache does not limit
        // the requests together. On CANN 8.1, the capture of a size whose longest requests need more blocks than
        // there are is refused.
        let limits_of_keys = KeyLimits { keys: limits.keys.min(most), blocks: limits.blocks, block_size };
        let extents =
            |rows: usize| TreeExtents { requests: each.requests(rows), nodes: each.0, keys: limits_of_keys.keys };
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &limits.rows(),
            cache.shape().layers,
            |rows| self.buffers(stream, cache, extents(rows), form),
            |capture, rows, layer, buffers| {
                let longest = extents(rows).longest()?;
                self.record(capture, cache.layer(layer)?, form.lengths(&longest), buffers)
            },
        )?;
        let layers = 0..cache.shape().layers;
        Ok(TreeGraphs {
            verification: *self,
            graphs,
            cache_entry: Arc::clone(cache.entry()),
            shape: cache.shape(),
            caches: layers.map(|layer| cache.layer(layer).cloned()).collect::<Result<_>>()?,
            nodes: each,
            limits: limits_of_keys,
            form,
            refused: None,
        })
    }

    fn buffers<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        extents: TreeExtents,
        form: TreeForm,
    ) -> Result<TreeBuffers<T>> {
        let device = stream.device();
        let TreeExtents { requests, nodes, keys } = extents;
        let rows = self.node_rows(cache.shape());
        let tensor = |[heads, dim]: [usize; 2]| Tensor::<T>::empty(device, [requests, heads, nodes, dim]);
        let softmax_lse = || Tensor::<f32>::empty(device, [requests, self.shape.heads, nodes, 1]);
        let part = || -> Result<Output<T>> {
            Ok(Output { attention: tensor(rows.output)?, softmax_lse: Some(softmax_lse()?) })
        };
        let block_size = cache.pool().block_size();
        let columns = keys.div_ceil(block_size);
        Ok(TreeBuffers {
            block_table: BlockTable::zeroed(device, requests, columns, block_size)?,
            mask: Tensor::empty(device, [requests, nodes, nodes])?,
            tensors: GraphTensors {
                query: tensor(rows.query)?,
                query_rope: rows.query_rope.map(tensor).transpose()?,
                quantised_query: None,
                key: tensor(rows.key)?,
                value: tensor(rows.value)?,
                output: tensor(rows.output)?,
            },
            two: match form.is_one_call() {
                true => None,
                false => Some(([part()?, part()?], softmax_lse()?)),
            },
        })
    }

    /// Records a layer: the single call, or both calls and their merge.
    fn record<T: Element>(
        &self,
        capture: &Capturing<'_>,
        cache: &LayerCache<T>,
        longest: CallLengths<'_>,
        buffers: &TreeBuffers<T>,
    ) -> Result<()> {
        let TreeBuffers { block_table, mask, tensors: captured, two } = buffers;
        let tensors = TreeTensors {
            query: &captured.query,
            key: &captured.key,
            value: &captured.value,
            query_rope: captured.query_rope.as_ref(),
            cache,
            block_table,
        };
        let over_cache = tensors.over_cache();
        let mut output = buffers.output();
        let Some(([of_nodes, of_cached], _)) = two else {
            let call = capture.attention(&self.one_call(mask.clone()), longest, over_cache)?;
            return Ok(capture.launch_into(call, over_cache, &mut output)?);
        };
        let calls = self.two_calls(mask.clone(), tensors.query_rope.is_some());
        let own = tensors.of_nodes();
        let nodes = calls.nodes.plan(own)?;
        nodes.launch_into(capture, own, &mut of_nodes.clone())?;
        let cached = capture.attention(&calls.context, longest, over_cache)?;
        capture.launch_into(cached, over_cache, &mut of_cached.clone())?;
        let parts = [Part::of(of_nodes)?, Part::of(of_cached)?];
        let merge = NodeAndContextCalls::merge().plan(&parts)?;
        Ok(merge.launch_into(capture, &parts, &mut output)?)
    }
}

impl<T: Element> TreeGraphs<T> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes().map(|rows| self.nodes.requests(rows))
    }

    /// Most nodes of a tree.
    pub fn nodes(&self) -> usize {
        self.nodes.0
    }

    /// Whether a layer is one call of the operator, of sparse mode 9.
    pub fn is_one_call(&self) -> bool {
        self.form.is_one_call()
    }

    /// Begins a step: puts its trees and blocks into the buffers of the smallest size that holds it, which waits for
    /// the stream. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for more requests than the largest size;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) without cached tokens in front of a tree or with more than were
    /// declared, also of all requests together if [blocks](GraphLimits::blocks) were;
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for more nodes than were captured; for the requests as for
    /// [`TreeVerification::begin`]; as for [`GraphPool::begin`](crate::GraphPool::begin).
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, requests: &[TreeRequest<'_>]) -> Result<TreeStep<'a, T>> {
        self.graphs.admits(stream)?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let lease = self.cache_entry.pool().begin_step(stream);
        let progress = begin_trees(requests, &self.cache_entry, self.form.is_latent())?;
        let (form, count) = (self.form, requests.len());
        let rows = self.nodes.rows(count);
        let rows = self.graphs.size_for(rows).ok_or_else(|| {
            let most = self.sizes().last().unwrap_or(0);
            rules::GRAPH_SIZE.broken(format_args!("{count} requests"), format_args!("at most {most}"))
        })?;
        let size = self.nodes.requests(rows);
        for (index, request) in requests.iter().enumerate() {
            self.check_limits(index, request)?;
        }
        let trees: Vec<&DraftTree> = requests.iter().map(|request| request.tree).collect();
        let mask = tree_mask(&trees, size, self.nodes.0)?;
        // A dummy request has a tree of one node behind one token, and sees the first tokens of the first request,
        // which are in the cache.
        let dummies = std::iter::repeat_n(1, size - count);
        let cached = requests.iter().map(|request| request.cached);
        let nodes = trees.iter().map(|tree| tree.nodes());
        let of_step = TreeLengths::new(cached.chain(dummies.clone()).collect(), nodes.chain(dummies).collect())?;
        // Each request is within its keys: this refuses too many blocks of all together.
        self.limits.admits(form.keys_in_limits(&of_step).lengths())?;
        let first = requests.first().map(|request| request.sequence.row());
        let table = requests.iter().map(|request| request.sequence.row());
        let table = table.chain(std::iter::repeat_n(first.unwrap_or(&[]), size - count));
        let table: Vec<&[usize]> = table.collect();
        self.graphs.follow(stream)?;
        let buffers = self.graphs.buffers(rows).filter(|_| form.is_latent());
        let writes = match (self.caches.first(), buffers) {
            (Some(layer), Some(buffers)) => {
                let nodes = NodeSlots::of(self.cache_entry.pool(), self.shape, requests)?;
                let captured = [&buffers.tensors.key, &buffers.tensors.value];
                Some(nodes.plan(layer, stream, captured)?)
            }
            _ => None,
        };
        let lengths = form.lengths(&of_step);
        let replays = self.graphs.start(
            stream,
            rows,
            |_, update| Ok(update.all(lengths)?),
            |buffers| {
                buffers.block_table.overwrite(stream, &table)?;
                Ok(buffers.mask.overwrite_bytes(stream, mask.bytes())?)
            },
        )?;
        Ok(TreeStep {
            verification: self.verification,
            stream,
            _lease: lease,
            layers: QueuedLayers::new(self.caches.len(), vec![progress], TREES_AGAIN),
            caches: self.caches.clone(),
            block_table: replays.buffers().block_table.clone(),
            trees: trees.into_iter().cloned().collect(),
            lengths: of_step,
            rows: self.verification.node_rows(self.shape),
            slots: None,
            planned: Some(PlannedTrees {
                nodes: self.nodes.0,
                writes,
                calls: Calls::Graphs(replays),
                refused: self.refused.clone(),
            }),
            lent: LentTensors::default(),
            output: None,
        })
    }

    fn check_limits(&self, index: usize, request: &TreeRequest<'_>) -> Result<(), Violation> {
        let (cached, nodes) = (request.cached, request.tree.nodes());
        if nodes > self.nodes.0 {
            return Err(Violation::new(
                &rules::DRAFT_TREE,
                format_args!("a tree of {nodes} nodes for request {index}"),
                format_args!("at most {}, as captured", self.nodes.0),
                "capture with more nodes (`GraphLimits::tokens_each`), or verify the tree without a graph",
            ));
        }
        // Graphs over latents have the nodes among their keys.
        let of_tree = if self.form.is_latent() { nodes } else { 0 };
        let most = self.limits.keys.saturating_sub(of_tree);
        if cached > 0 && cached <= most {
            return Ok(());
        }
        Err(Violation::new(
            &rules::GRAPH_LENGTHS,
            format_args!("{cached} tokens of request {index} before its tree of {nodes} nodes"),
            match most {
                0 => format!("a capture of more than {nodes} keys"),
                _ => format!("1 to {most}"),
            },
            match cached {
                0 => "verify trees with no tokens before them without a graph",
                _ => "declare more keys at the capture, and more blocks where `GraphLimits::blocks` limits them",
            },
        ))
    }
}

impl<T: Element> fmt::Debug for TreeGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeGraphs")
            .field("graphs", &self.graphs)
            .field("nodes", &self.nodes.0)
            .field("form", &self.form)
            .finish_non_exhaustive()
    }
}
