//! Drafted trees verified by graphs, layer by layer.

use std::fmt;
use std::sync::Arc;

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::case::tentatively;
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::merge::Part;
use ascend_attention::{Element, Output, Stream, Tensor, Violation};

use crate::drafts::{
    DraftTree, TreeTensors, TreeVerification, TwoCalls, has_no_such_call, tree_mask,
};
use crate::error::{Error, Result};
use crate::kv::{
    BlockPool, CacheEntry, LayerCache, PagedKvCache, Sequence, StepProgress, StepTokens, uncopied,
};
use crate::rules;

use super::graph_limits::{GraphLimits, RowsEach};
use super::graph_pool::GraphPool;
use super::graph_tensors::GraphTensors;
use super::tree_graph_step::{TreeBuffers, TreeGraphStep};

/// Verifications of drafted trees, replayed from graphs that were captured for a few numbers of requests: one graph
/// of each layer. From [`TreeVerification::capture`]. [`TreeVerification`] computes the same without graphs and lists
/// the calls of each target.
///
/// A graph has all calls of a layer and the merge. The mask of the trees is part of the buffers, so that each step has
/// trees of its own of up to the captured nodes; the numbers of cached tokens are the lengths that vary.
///
/// Over a cache of latents the nodes are in the cache before the layer is replayed; elsewhere they are no part of it
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
    graphs: GraphPool<TreeBuffers<T>>,
    pool: BlockPool,
    cache_entry: Arc<CacheEntry>,
    /// Most nodes of a tree.
    nodes: RowsEach,
    /// Limits of the requests' tokens in the cache.
    limits: KeyLimits,
    form: TreeForm,
}

/// A request of a step that verifies drafted trees.
#[derive(Clone, Copy, Debug)]
pub struct TreeRequest<'a> {
    /// The request's sequence: one or more tokens before the tree, none of them given back, which every node sees. Over
    /// a cache of latents, and only there, the nodes are its last tokens.
    pub sequence: &'a Sequence,
    /// The tokens before the tree, which says whether the nodes are in the sequence: all of the sequence's, and over a
    /// cache of latents all but the nodes.
    pub cached: usize,
    /// The tree, whose nodes follow the cached tokens.
    pub tree: &'a DraftTree,
}

/// How layers are verified.
#[derive(Clone, Copy, Debug)]
struct TreeForm {
    /// Whether the cache has latents, and the nodes of the trees behind the cached tokens.
    is_latent: bool,
    /// Whether a layer is one call with a tree mask.
    is_one_call: bool,
}

impl TreeForm {
    /// The lengths of the call over the cache.
    fn lengths(self, lengths: &TreeLengths) -> CallLengths<'_> {
        match self.is_one_call {
            true => CallLengths::Batched {
                q: Some(&lengths.nodes),
                kv: &lengths.cached,
            },
            false => TwoCalls::context_lengths(&lengths.before),
        }
    }

    /// How many of a sequence's tokens are nodes of its tree.
    fn cached_nodes(self, nodes: usize) -> usize {
        if self.is_latent { nodes } else { 0 }
    }
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

/// Numbers of tokens of the requests of a step, dummies included.
#[derive(Debug)]
struct TreeLengths {
    /// Tokens in the cache.
    cached: PerRequest,
    /// The tokens in the cache that come before the trees.
    before: PerRequest,
    /// Nodes of the trees.
    nodes: PerRequest,
}

impl TreeExtents {
    /// The longest lengths: the cached tokens before the trees are as many as the cache allows.
    fn longest(self) -> Result<TreeLengths> {
        let each = |tokens: usize| PerRequest::new(vec![tokens; self.requests]);
        Ok(TreeLengths {
            cached: each(self.keys)?,
            before: each(self.keys)?,
            nodes: each(self.nodes)?,
        })
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
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a scale that is 0 or not finite, and for sinks, which no
    /// verification has;
    /// [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs take too many streams; a broken rule of one of
    /// the two calls, with latents where the single call is refused too; as for
    /// [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
    ) -> Result<TreeGraphs<T>> {
        self.shape.check_cache(&cache.shape())?;
        cache.admits(stream)?;
        limits.check()?;
        if !limits.learnable_sinks.is_empty() {
            return Err(Error::invalid(
                "learnable_sinks",
                format_args!("sinks of {} layers", limits.learnable_sinks.len()),
                "none: trees are verified without",
            )
            .fix("verify trees of models with sinks without a graph"));
        }
        let captured = |is_one_call| {
            let form = TreeForm {
                is_latent: cache.shape().is_latent(),
                is_one_call,
            };
            self.capture_form(stream, cache, limits, form)
        };
        if !cache.shape().is_latent() {
            return captured(false);
        }
        tentatively(|| match captured(true) {
            Err(why) if has_no_such_call(&why) => captured(false),
            other => other,
        })
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
        let limits_of_keys = KeyLimits {
            keys: limits.keys.min(most),
            blocks: limits.blocks,
            block_size,
        };
        let extents = |rows: usize| TreeExtents {
            requests: each.requests(rows),
            nodes: each.0,
            keys: limits_of_keys.keys,
        };
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &limits.rows(),
            cache.shape().layers,
            |rows| self.buffers(stream, cache, extents(rows), form),
            |capture, rows, layer, buffers| {
                let longest = extents(rows).longest()?;
                self.record(
                    capture,
                    cache.layer(layer)?,
                    form.lengths(&longest),
                    buffers,
                )
            },
        )?;
        Ok(TreeGraphs {
            graphs,
            pool: pool.clone(),
            cache_entry: Arc::clone(cache.entry()),
            nodes: each,
            limits: limits_of_keys,
            form,
        })
    }

    fn buffers<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        extents: TreeExtents,
        form: TreeForm,
    ) -> Result<TreeBuffers<T>> {
        let (device, cached, heads) = (stream.device(), cache.shape(), self.shape.heads);
        let TreeExtents {
            requests,
            nodes,
            keys,
        } = extents;
        // Absorbed queries are as wide as latents, and so is their attention.
        let [query_dim, output_dim] = match form.is_latent {
            true => [cached.key_dim; 2],
            false => [self.shape.head_dim, cached.value_dim],
        };
        let tensor = |heads, dim| Tensor::<T>::empty(device, [requests, heads, nodes, dim]);
        let softmax_lse = || Tensor::<f32>::empty(device, [requests, heads, nodes, 1]);
        let part = || -> Result<Output<T>> {
            Ok(Output {
                attention: tensor(heads, output_dim)?,
                softmax_lse: Some(softmax_lse()?),
            })
        };
        let block_size = cache.pool().block_size();
        let columns = keys.div_ceil(block_size);
        Ok(TreeBuffers {
            block_table: BlockTable::zeroed(device, requests, columns, block_size)?,
            mask: Tensor::empty(device, [requests, nodes, nodes])?,
            tensors: GraphTensors {
                query: tensor(heads, query_dim)?,
                query_rope: match form.is_latent {
                    true => Some(tensor(heads, cached.value_dim)?),
                    false => None,
                },
                key: tensor(cached.kv_heads, cached.key_dim)?,
                value: tensor(cached.kv_heads, cached.value_dim)?,
                output: tensor(heads, output_dim)?,
            },
            two: match form.is_one_call {
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
        let TreeBuffers {
            block_table,
            mask,
            tensors: captured,
            two,
        } = buffers;
        let tensors = TreeTensors {
            query: &captured.query,
            key: &captured.key,
            value: &captured.value,
            query_rope: captured.query_rope.as_ref(),
            cache,
            block_table,
        };
        let over_cache = tensors.over_cache();
        let mut output = Output {
            attention: captured.output.clone(),
            softmax_lse: two.as_ref().map(|(_, merged)| merged.clone()),
        };
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
        let merge = TwoCalls::merge().plan(&parts)?;
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
        self.form.is_one_call
    }

    /// Begins a step: puts its trees and blocks into the buffers of the smallest size that holds it, which waits for
    /// the stream. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) without requests, [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE)
    /// for more requests than the largest size; for a request [`BLOCK_POOL`](crate::rules::BLOCK_POOL) if it is of
    /// another pool, [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) if it gave back tokens,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) if its copies were not queued,
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for another number of tokens than it is said to have before the
    /// tree, [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) without cached tokens in front of the tree or with more than
    /// were declared, also of all requests together if [blocks](GraphLimits::blocks) were;
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for more nodes than were captured;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`GraphPool::begin`](crate::GraphPool::begin).
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &[TreeRequest<'_>],
    ) -> Result<TreeGraphStep<'a, T>> {
        self.graphs.admits(stream)?;
        let (form, count) = (self.form, requests.len());
        if count == 0 {
            return Err(Violation::new(
                &rules::BATCH_EMPTY,
                "0 requests",
                "1 or more",
                "skip the step",
            )
            .into());
        }
        let rows = self.graphs.fitting(self.nodes.rows(count))?;
        let size = self.nodes.requests(rows);
        for (at, request) in requests.iter().enumerate() {
            self.check(at, request)?;
        }
        let trees: Vec<&DraftTree> = requests.iter().map(|request| request.tree).collect();
        let mask = tree_mask(&trees, size, self.nodes.0)?;
        // A dummy request has a tree of one node, and sees the first tokens of the first request, which are in the
        // cache.
        let dummies = size - count;
        let least = 1 + form.cached_nodes(1);
        let cached = requests.iter().map(|request| request.sequence.len());
        let cached = cached.chain(std::iter::repeat_n(least, dummies));
        let nodes = trees.iter().map(|tree| tree.nodes());
        let nodes = nodes.chain(std::iter::repeat_n(1, dummies));
        let (cached, nodes) = (cached.collect::<Vec<_>>(), nodes.collect::<Vec<_>>());
        self.limits.admits(&cached)?;
        let before = cached.iter().zip(&nodes);
        let before = before.map(|(cached, nodes)| cached - form.cached_nodes(*nodes));
        let of_step = TreeLengths {
            before: PerRequest::new(before.collect())?,
            cached: PerRequest::new(cached)?,
            nodes: PerRequest::new(nodes)?,
        };
        let first = requests.first().map(|request| request.sequence.row());
        let table = requests.iter().map(|request| request.sequence.row());
        let table = table.chain(std::iter::repeat_n(first.unwrap_or(&[]), dummies));
        let table: Vec<&[usize]> = table.collect();
        let progress = self.reads(requests)?;
        self.graphs.follow(stream)?;
        let step = self.graphs.start(
            stream,
            rows,
            vec![progress],
            |_, update| Ok(update.all(form.lengths(&of_step))?),
            |buffers| {
                buffers.block_table.overwrite(stream, &table)?;
                Ok(buffers.mask.overwrite_bytes(stream, mask.bytes())?)
            },
        )?;
        let lease = self.pool.begin_step(stream);
        Ok(TreeGraphStep::new(lease, step, stream, count))
    }

    fn check(&self, at: usize, request: &TreeRequest<'_>) -> Result<(), Violation> {
        let TreeRequest {
            sequence,
            cached,
            tree,
        } = *request;
        self.pool.check_same(
            sequence.pool(),
            format_args!("a sequence for request {at}"),
            "bring sequences of the pool of the captured cache",
        )?;
        let given_back = sequence.given_back();
        if given_back > 0 {
            return Err(Violation::new(
                &rules::BLOCK_WINDOW,
                format_args!("request {at}, whose first {given_back} tokens were given back"),
                "sequences that hold all their tokens, since every node sees them",
                "keep a sequence of its own for layers that see more than a window",
            ));
        }
        if let Some(block) = sequence.uncopied_in(Some(&self.cache_entry)) {
            return Err(uncopied(format_args!("block {block} of request {at}")));
        }
        let most = self.nodes.0;
        if tree.nodes() > most {
            return Err(Violation::new(
                &rules::DRAFT_TREE,
                format_args!("a tree of {} nodes for request {at}", tree.nodes()),
                format_args!("at most {most}, as captured"),
                "capture with more nodes (`GraphLimits::tokens_each`), or verify the tree without a graph",
            ));
        }
        let held = sequence.len();
        let nodes = self.form.cached_nodes(tree.nodes());
        if held != cached.saturating_add(nodes) {
            let fix = match self.form.is_latent {
                true => {
                    "grow the sequence by the nodes before the step begins, and write their latents to each layer before it \
                     is launched"
                }
                false => {
                    "verify trees whose nodes the sequence does not have: give the step their keys and values, and write the \
                     accepted ones afterwards"
                }
            };
            return Err(Violation::new(
                &rules::SEQUENCE_LENGTH,
                format_args!(
                    "a sequence of {held} tokens for request {at}, {cached} before the tree"
                ),
                format_args!("{} tokens", cached.saturating_add(nodes)),
                fix,
            ));
        }
        let most = self.limits.keys;
        if held <= nodes || held > most {
            return Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!("{held} tokens of request {at}, {nodes} of them nodes of its tree"),
                format_args!("{} to {most}", nodes + 1),
                match held <= nodes {
                    true => "verify trees with no tokens before them without a graph",
                    false => {
                        "declare more keys at the capture, and more blocks where `GraphLimits::blocks` limits them"
                    }
                },
            ));
        }
        Ok(())
    }

    /// Begins to read the tokens before the trees, which have to be computed: until all layers are queued, no other step
    /// of their sequences begins. The graphs write nothing to the cache, and of the nodes nothing is asked: their latents
    /// may be written after the step has begun, and the same tree may be verified again.
    fn reads(&self, requests: &[TreeRequest<'_>]) -> Result<StepProgress, Violation> {
        let tokens = requests.iter().map(|request| {
            let nodes = self.form.cached_nodes(request.tree.nodes());
            let before = request.sequence.len() - nodes;
            StepTokens {
                stamp: request.sequence.stamp(),
                cached: before,
                len: before,
                recompute: false,
            }
        });
        StepProgress::begin(&self.pool, Some(&self.cache_entry), tokens.enumerate())
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
