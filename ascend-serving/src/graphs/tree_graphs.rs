//! Drafted trees verified by graphs, layer by layer.

use std::fmt;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::graph::Capturing;
use ascend_attention::merge::{MergeState, Part};
use ascend_attention::spec::Layout;
use ascend_attention::{CallRule, Element, Mask, Output, Stream, Tensor};

use crate::backends::size;
use crate::drafts::{DraftTree, TreeVerification, tree_mask};
use crate::error::{Error, Result};
use crate::kv::{
    BlockPool, LayerCache, PagedKvCache, Sequence, StepLease, capacity, no_layer, uncopied,
};
use crate::refusal::{Refused, Rule, refused};

use super::graph_limits::GraphLimits;
use super::graph_pool::{GraphPool, GraphStep};
use super::graph_tensors::GraphTensors;

/// A request of a step that verifies drafted trees.
#[derive(Clone, Copy, Debug)]
pub struct TreeRequest<'a> {
    /// The cached tokens, all of which every node sees: one or more, none of them given back.
    pub sequence: &'a Sequence,
    /// The tree behind them.
    pub tree: &'a DraftTree,
}

/// Verifications of drafted trees, replayed from graphs that were captured for a few numbers of requests: one graph of each
/// layer. From [`TreeVerification::capture`], which computes the same without graphs.
///
/// A graph has both calls and the merge. The mask of the trees is part of the buffers, so that each step has trees of its own
/// of up to the captured nodes; the cached tokens are the lengths that vary.
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
/// let verification = TreeVerification { shape: AttentionShape::new(1, 1, 64) };
/// // Up to 4 requests of up to 1000 cached tokens, and trees of up to 3 nodes.
/// let limits = GraphLimits::new([1, 4], 1000).tokens_each(3);
/// let mut graphs = verification.capture(&stream, &cache, &limits)?;
///
/// let mut sequence = Sequence::new(cache.pool());
/// cache.grow(&stream, &mut sequence, 200)?;
/// let tree = DraftTree::from_parents(&[-1, 0, 0])?;
/// let nodes = stream.upload(&[bf16::ONE; 3 * 64], [1, 1, 3, 64])?;
/// let mut step = graphs.begin(&stream, &[TreeRequest { sequence: &sequence, tree: &tree }])?;
/// for layer in 0..2 {
///     let output = step.forward(layer, &nodes, &nodes, &nodes)?;
///     assert_eq!(output.attention.shape(), [1, 1, 3, 64]);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct TreeGraphs<T: Element> {
    graphs: GraphPool<TreeBuffers<T>>,
    pool: BlockPool,
    nodes: usize,
    keys: usize,
}

/// What the graphs of a size read and write.
#[derive(Debug)]
struct TreeBuffers<T: Element> {
    table: BlockTable,
    /// `[requests, nodes, nodes]`.
    mask: Tensor<i8>,
    tensors: GraphTensors<T>,
    /// What is merged: the nodes among themselves, and over the cached tokens.
    parts: [Output<T>; 2],
}

impl TreeVerification {
    /// Captures the verification of trees of up to [`GraphLimits::tokens_each`] nodes, behind as many cached tokens as the
    /// limits have keys, for every layer of a cache. The keys of the nodes are no part of the cache.
    ///
    /// # Errors
    /// [`Rule::GraphSize`] for limits without sizes, or with one of 0 nodes;
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a stream of another device, a scale that no scores
    /// are multiplied by, and sinks, which no verification has;
    /// [`CallRule::GraphStreams`] if so many graphs take too many streams; a broken rule of one of the calls; as for
    /// [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
    ) -> Result<TreeGraphs<T>> {
        cache.admits(stream)?;
        self.shape.check()?;
        if !limits.learnable_sinks.is_empty() {
            return Err(Error::invalid(
                "learnable_sinks",
                format_args!("sinks of {} layers", limits.learnable_sinks.len()),
                "none: each of two calls would count them",
            ));
        }
        let (nodes, pool) = (limits.tokens, cache.pool());
        let held = capacity(pool.blocks(), pool.block_size());
        let keys = limits.keys.min(held);
        let rows = limits.sizes.iter().map(|size| size.saturating_mul(nodes));
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &rows.collect::<Vec<_>>(),
            cache.shape().layers,
            |rows| {
                let requests = rows.checked_div(nodes).unwrap_or(0);
                self.buffers(stream, cache, [requests, nodes, keys])
            },
            |capture, _, layer, buffers| self.record(capture, cache.layer(layer)?, keys, buffers),
        )?;
        Ok(TreeGraphs {
            graphs,
            pool: pool.clone(),
            nodes,
            keys,
        })
    }

    fn buffers<T: Element>(
        &self,
        stream: &Stream,
        cache: &PagedKvCache<T>,
        [requests, nodes, keys]: [usize; 3],
    ) -> Result<TreeBuffers<T>> {
        let (device, of) = (stream.device(), cache.shape());
        let block_size = cache.pool().block_size();
        let columns = keys.div_ceil(block_size.max(1)).max(1);
        let tensor = |heads, dim| Tensor::empty(device, [requests, heads, nodes, dim]);
        let heads = self.shape.heads;
        let output = || -> Result<Output<T>> {
            Ok(Output {
                attention: tensor(heads, of.value_dim)?,
                softmax_lse: Some(Tensor::empty(device, [requests, heads, nodes, 1])?),
            })
        };
        Ok(TreeBuffers {
            table: BlockTable::zeroed(device, requests, columns, block_size)?,
            mask: Tensor::empty(device, [requests, nodes, nodes])?,
            tensors: GraphTensors {
                query: tensor(heads, self.shape.head_dim)?,
                key: tensor(of.kv_heads, of.key_dim)?,
                value: tensor(of.kv_heads, of.value_dim)?,
                output: output()?,
            },
            parts: [output()?, output()?],
        })
    }

    /// Records a layer: both calls and their merge.
    fn record<T: Element>(
        &self,
        capture: &mut Capturing<'_>,
        cache: &LayerCache<T>,
        keys: usize,
        buffers: &TreeBuffers<T>,
    ) -> Result<()> {
        let TreeBuffers {
            table,
            mask,
            tensors:
                GraphTensors {
                    query,
                    key,
                    value,
                    output,
                },
            parts: [own, before],
        } = buffers;
        let call = self.shape.call(Layout::Bnsd).softmax_lse(true);
        let inputs = Inputs::new(query, key, value);
        let masked = call.clone().mask(Mask::all_mask(mask.clone()));
        let nodes = masked.plan_with(&inputs)?;
        capture.launch_plan(&nodes, &inputs, own)?;
        let longest = PerRequest::new(vec![keys; table.sequences()])?;
        let inputs = Inputs::new(query, &cache.key, &cache.value).paged(table);
        let cached = capture.attention(&call, lengths(&longest), &inputs)?;
        capture.launch(cached, &inputs, before)?;
        let parts = [Part::of(own)?, Part::of(before)?];
        let merge = MergeState::new(Layout::Bnsd).plan(&parts)?;
        Ok(capture.merge(&merge, &parts, output)?)
    }
}

/// The lengths of the call over the cached tokens.
fn lengths(cached: &PerRequest) -> CallLengths<'_> {
    CallLengths::Batched {
        q: None,
        kv: cached,
    }
}

impl<T: Element> TreeGraphs<T> {
    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes().map(|rows| self.requests_of(rows))
    }

    /// Most nodes of a tree.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    fn requests_of(&self, rows: usize) -> usize {
        rows.checked_div(self.nodes).unwrap_or(0)
    }

    /// Begins a step: puts its trees and blocks into the buffers of the smallest size that holds it, which waits for the
    /// stream. Blocks given back from now on are handed out again when the stream has passed the end of the step.
    ///
    /// # Errors
    /// [`Rule::BatchEmpty`] without requests, [`Rule::GraphSize`] for more than all sizes have; for a request
    /// [`Rule::TableGroup`] of another pool, [`Rule::BlockWindow`] that gave back tokens, [`Rule::BlockUncopied`] whose copies
    /// were not queued, [`CallRule::GraphLengths`] without cached tokens or with more than were declared,
    /// [`Rule::DraftTree`] with more nodes; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a stream of
    /// another device; as for [`GraphPool::begin`].
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &[TreeRequest<'_>],
    ) -> Result<TreeGraphStep<'a, T>> {
        self.graphs.admits(stream)?;
        let count = requests.len();
        if count == 0 {
            return Err(
                refused(Rule::BatchEmpty, "0 requests", "1 or more", "skip the step").into(),
            );
        }
        let rows = self.graphs.fitting(count.saturating_mul(self.nodes))?;
        let size = self.requests_of(rows);
        for (at, request) in requests.iter().enumerate() {
            self.check(at, request.sequence)?;
        }
        let trees: Vec<&DraftTree> = requests.iter().map(|request| request.tree).collect();
        let mask = tree_mask(&trees, size, self.nodes)?;
        // A dummy request sees the first token of the first request, which is in the cache.
        let first = requests.first().and_then(|of| of.sequence.row().get(..1));
        let dummies = size.saturating_sub(count);
        let cached = requests.iter().map(|request| request.sequence.len());
        let cached = cached.chain(std::iter::repeat_n(1, dummies));
        let cached = PerRequest::new(cached.collect())?;
        let table = requests.iter().map(|request| request.sequence.row());
        let table = table.chain(std::iter::repeat_n(first.unwrap_or(&[]), dummies));
        let table: Vec<&[usize]> = table.collect();
        let step = self.graphs.start(
            stream,
            rows,
            |_| Ok(lengths(&cached)),
            |buffers| {
                buffers.table.overwrite(stream, &table)?;
                Ok(buffers.mask.overwrite_bytes(stream, mask.bytes())?)
            },
        )?;
        Ok(TreeGraphStep {
            lease: self.pool.begin_step(stream),
            step,
            stream,
            requests: count,
        })
    }

    fn check(&self, at: usize, sequence: &Sequence) -> Result<(), Refused> {
        let (own, other) = (self.pool.group(), sequence.pool().group());
        if own != other {
            return Err(refused(
                Rule::TableGroup,
                format_args!("a sequence of {other} for request {at}"),
                own,
                "bring sequences of the pool of the captured cache",
            ));
        }
        let given_back = sequence.given_back();
        if given_back > 0 {
            return Err(refused(
                Rule::BlockWindow,
                format_args!("request {at}, whose first {given_back} tokens were given back"),
                "sequences that hold all their tokens, since every node sees them",
                "keep a sequence of its own for layers that see more than a window",
            ));
        }
        if let Some(block) = sequence.uncopied() {
            return Err(uncopied(format_args!("block {block} of request {at}")));
        }
        let cached = sequence.len();
        if cached == 0 || cached > self.keys {
            return Err(refused(
                CallRule::GraphLengths,
                format_args!("{cached} cached tokens of request {at}"),
                format_args!("1 to {}", self.keys),
                "verify the trees without a graph, by `TreeVerification::plan`, or declare more keys at the capture",
            ));
        }
        Ok(())
    }
}

impl<T: Element> fmt::Debug for TreeGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeGraphs")
            .field("graphs", &self.graphs)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

/// A verification in progress. From [`TreeGraphs::begin`]; drop it when the last layer is queued.
pub struct TreeGraphStep<'a, T: Element> {
    /// Ended behind the last replay.
    lease: StepLease<'a, Stream>,
    step: GraphStep<'a, TreeBuffers<T>>,
    stream: &'a Stream,
    requests: usize,
}

impl<'a, T: Element> TreeGraphStep<'a, T> {
    /// The tensors of the captured size, to be filled in place on the step's stream before [`TreeGraphStep::replay`]:
    /// `[size, N, nodes, D]`. Rows of padding, and rows behind a tree, may hold any finite numbers.
    pub fn tensors(&self) -> &'a GraphTensors<T> {
        &self.step.buffers().tensors
    }

    /// Queues the replay of a layer, whose tensors were filled. Returns at once. The output of all layers is one, lent until
    /// the next call of this step: queue on its stream what reads it before that, or copy it there.
    ///
    /// # Errors
    /// As for [`GraphStep::replay`].
    pub fn replay(&mut self, layer: usize) -> Result<&Output<T>> {
        self.step.replay(layer)?;
        Ok(&self.tensors().output)
    }

    /// Copies the nodes' query `[requests, N, nodes, D]`, key and value `[requests, Nkv, nodes, D]` of a layer into the
    /// buffers and queues the replay. They have the captured number of nodes, whose rows behind a tree mean nothing. The
    /// output has the size's padding, too; its log-sum-exps are those over all keys.
    ///
    /// # Errors
    /// [`Rule::StepTokens`] for another number of requests or nodes, [`Rule::StepHeads`] for other heads; as for
    /// [`AnyTensor::copy_from`](ascend_attention::AnyTensor::copy_from) and [`TreeGraphStep::replay`].
    pub fn forward(
        &mut self,
        layer: usize,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<&Output<T>> {
        let tensors = self.tensors();
        let layers = self.step.layers();
        if layer >= layers {
            return Err(no_layer(layer, layers));
        }
        let copies = [
            ("query", query, &tensors.query),
            ("key", key, &tensors.key),
            ("value", value, &tensors.value),
        ];
        for (name, from, to) in copies {
            self.check(name, layer, from, to)?;
        }
        for (_, from, to) in copies {
            to.narrow(0, 0..self.requests)?
                .copy_from(self.stream, from)?;
        }
        self.replay(layer)
    }

    fn check(
        &self,
        name: &str,
        layer: usize,
        from: &Tensor<T>,
        to: &Tensor<T>,
    ) -> Result<(), Refused> {
        let wanted = [self.requests, size(to, 1), size(to, 2), size(to, 3)];
        if from.shape() == wanted {
            return Ok(());
        }
        let rows = (size(from, 0), size(from, 2)) != (wanted[0], wanted[2]);
        Err(refused(
            if rows {
                Rule::StepTokens
            } else {
                Rule::StepHeads
            },
            format_args!("{name} {:?} in layer {layer}", from.shape()),
            format_args!("{wanted:?}: requests, heads, captured nodes, elements of a head"),
            "fill trees up to the captured nodes; what stands behind a tree means nothing",
        ))
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'a, Stream> {
        &self.lease
    }
}

impl<T: Element> fmt::Debug for TreeGraphStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeGraphStep")
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}
