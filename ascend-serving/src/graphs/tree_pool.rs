//! Graphs that verify drafted trees, for some numbers of requests.

use std::fmt;
use std::sync::Arc;

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::{apart, size};
use crate::drafts::{DraftTree, tree_mask};
use crate::engine::LayerInputs;
use crate::error::{Error, Result};
use crate::kv::{
    BlockPool, CacheEntry, PagedKvCache, Sequence, StepLease, StepTokens, no_layer, uncopied,
};
use crate::rules;

use super::graph_limits::{GraphLimits, RowsEach};
use super::graph_pool::{GraphPool, GraphStep};

/// A request of a step that verifies drafted trees.
#[derive(Clone, Copy, Debug)]
pub struct TreeRequest<'a> {
    /// The cached tokens, all of which every node sees: one or more, none of them given back. With
    /// [`LatentTreeGraphs`](crate::LatentTreeGraphs) the nodes follow them in the sequence, too.
    pub sequence: &'a Sequence,
    /// The tree, whose nodes follow the cached tokens.
    pub tree: &'a DraftTree,
}

/// The buffers that every step fills, whatever the form of attention.
#[derive(Debug)]
pub(super) struct TreeTables {
    pub(super) block_table: BlockTable,
    /// The mask of the trees, `[requests, nodes, nodes]`.
    pub(super) mask: Tensor<i8>,
}

impl TreeTables {
    pub(super) fn new(stream: &Stream, block_size: usize, extents: TreeExtents) -> Result<Self> {
        let TreeExtents {
            requests,
            nodes,
            keys,
        } = extents;
        let columns = keys.div_ceil(block_size.max(1)).max(1);
        let device = stream.device();
        Ok(Self {
            block_table: BlockTable::zeroed(device, requests, columns, block_size)?,
            mask: Tensor::empty(device, [requests, nodes, nodes])?,
        })
    }
}

/// The buffers of a size.
pub(super) trait TreeBuffers {
    /// The tables, which every step fills.
    fn tables(&self) -> &TreeTables;
}

/// The numbers for which a size is captured.
#[derive(Clone, Copy, Debug)]
pub(super) struct TreeExtents {
    pub(super) requests: usize,
    /// Most nodes of each request.
    pub(super) nodes: usize,
    /// Most keys of each request in the cache.
    pub(super) keys: usize,
}

impl TreeExtents {
    /// The longest lengths: the cached tokens before the trees are as many as the cache allows.
    pub(super) fn longest(self) -> Result<TreeLengths> {
        let each = |tokens: usize| PerRequest::new(vec![tokens; self.requests]);
        Ok(TreeLengths {
            cached: each(self.keys)?,
            before: each(self.keys)?,
            nodes: each(self.nodes)?,
        })
    }
}

/// Numbers of tokens of the requests of a step, dummies included.
#[derive(Debug)]
pub(super) struct TreeLengths {
    /// Tokens in the cache.
    pub(super) cached: PerRequest,
    /// The tokens in the cache that come before the trees.
    pub(super) before: PerRequest,
    /// Nodes of the trees.
    pub(super) nodes: PerRequest,
}

/// Buffers and graphs for some numbers of requests.
pub(super) struct TreePool<B> {
    graphs: GraphPool<B>,
    pool: BlockPool,
    cache_entry: Arc<CacheEntry>,
    /// Most nodes of a tree.
    nodes: RowsEach,
    /// Limits of the requests' tokens in the cache.
    limits: KeyLimits,
    /// Whether these tokens include the nodes.
    holds_nodes: bool,
}

impl<B: TreeBuffers> TreePool<B> {
    /// Captures every layer of a cache: `buffers` makes the buffers of a size, `record` launches a layer.
    pub(super) fn capture<T: Element>(
        stream: &Stream,
        cache: &PagedKvCache<T>,
        limits: &GraphLimits,
        holds_nodes: bool,
        buffers: impl Fn(TreeExtents) -> Result<B>,
        record: impl Fn(&Capturing<'_>, TreeExtents, usize, &B) -> Result<()>,
    ) -> Result<Self> {
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
            |rows| buffers(extents(rows)),
            |capture, rows, layer, buffers| record(capture, extents(rows), layer, buffers),
        )?;
        Ok(Self {
            graphs,
            pool: pool.clone(),
            cache_entry: Arc::clone(cache.entry()),
            nodes: each,
            limits: limits_of_keys,
            holds_nodes,
        })
    }

    /// The captured sizes, in requests, ascending.
    pub(super) fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes().map(|rows| self.nodes.requests(rows))
    }

    /// Most nodes of a tree.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.0
    }

    /// Begins a step: puts its trees and blocks into the buffers of the smallest size that holds it.
    pub(super) fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        requests: &[TreeRequest<'_>],
        lengths: fn(&TreeLengths) -> CallLengths<'_>,
    ) -> Result<TreePoolStep<'a, B>> {
        self.graphs.admits(stream)?;
        let count = requests.len();
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
        let dummies = size.saturating_sub(count);
        let least = 1usize.saturating_add(usize::from(self.holds_nodes));
        let cached = requests.iter().map(|request| request.sequence.len());
        let cached = cached.chain(std::iter::repeat_n(least, dummies));
        let nodes = trees.iter().map(|tree| tree.nodes());
        let nodes = nodes.chain(std::iter::repeat_n(1, dummies));
        let (cached, nodes) = (cached.collect::<Vec<_>>(), nodes.collect::<Vec<_>>());
        self.limits.admits(&cached)?;
        let before = cached.iter().zip(&nodes).map(|(cached, nodes)| {
            let held = if self.holds_nodes { *nodes } else { 0 };
            cached.saturating_sub(held)
        });
        let of_step = TreeLengths {
            before: PerRequest::new(before.collect())?,
            cached: PerRequest::new(cached)?,
            nodes: PerRequest::new(nodes)?,
        };
        let first = requests.first().map(|request| request.sequence.row());
        let table = requests.iter().map(|request| request.sequence.row());
        let table = table.chain(std::iter::repeat_n(first.unwrap_or(&[]), dummies));
        let table: Vec<&[usize]> = table.collect();
        self.graphs.follow(stream)?;
        let step = self.graphs.start(
            stream,
            rows,
            // The graphs write nothing to the cache.
            Vec::new(),
            |_, update| Ok(update.all(lengths(&of_step))?),
            |buffers| {
                let TreeTables {
                    block_table,
                    mask: place,
                } = buffers.tables();
                block_table.overwrite(stream, &table)?;
                Ok(place.overwrite_bytes(stream, mask.bytes())?)
            },
        )?;
        Ok(TreePoolStep {
            lease: self.pool.begin_step(stream),
            step,
            stream,
            requests: count,
        })
    }

    fn check(&self, at: usize, request: &TreeRequest<'_>) -> Result<(), Violation> {
        let TreeRequest { sequence, tree } = request;
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
        let held = sequence.len();
        let nodes = if self.holds_nodes { tree.nodes() } else { 0 };
        let most = self.limits.keys;
        if held <= nodes || held > most {
            return Err(Violation::new(
                &rules::GRAPH_LENGTHS,
                format_args!("{held} tokens of request {at}, {nodes} of them nodes of its tree"),
                format_args!("{} to {most}", nodes.saturating_add(1)),
                "verify trees with nothing in front without a graph, or declare more keys at the capture",
            ));
        }
        // The nodes may be queued to the cache after the step has begun.
        self.cache_entry.check(
            &format_args!("request {at}"),
            StepTokens {
                stamp: sequence.stamp(),
                cached: held.saturating_sub(nodes),
                len: held,
                recompute: true,
            },
        )
    }
}

impl<B> fmt::Debug for TreePool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreePool")
            .field("graphs", &self.graphs)
            .field("nodes", &self.nodes.0)
            .finish_non_exhaustive()
    }
}

/// The refusal of inputs that verifications of trees are not captured with.
#[cold]
pub(super) fn not_of_trees(
    given: impl fmt::Display,
    allowed: &'static str,
    fix: &'static str,
) -> Violation {
    Violation::new(&rules::GRAPH_INPUTS, given, allowed, fix)
}

/// A verification in progress.
pub(super) struct TreePoolStep<'a, B> {
    /// The lease, which ends after the last replay.
    pub(super) lease: StepLease<'a, Stream>,
    pub(super) step: GraphStep<'a, B>,
    stream: &'a Stream,
    requests: usize,
}

impl<B> TreePoolStep<'_, B> {
    /// Copies tensors of a layer, `[requests, heads, nodes, dim]`, to the first requests in the graph's tensors.
    pub(super) fn bring<T: Element>(
        &self,
        layer: usize,
        inputs: &LayerInputs<'_, T>,
        copies: &[(&'static str, &Tensor<T>, &Tensor<T>)],
    ) -> Result<()> {
        let more = match (inputs.mask, inputs.learnable_sink) {
            (None, None) => None,
            (Some(mask), _) => Some(format!("a layer's own mask, {mask}, in layer {layer}")),
            (None, Some(sink)) => Some(format!("sinks {:?} in layer {layer}", sink.shape())),
        };
        if let Some(given) = more {
            return Err(not_of_trees(
                given,
                "the masks of the trees, without sinks",
                "leave masks and sinks out: the trees of the step are its masks, and no verification has sinks",
            )
            .into());
        }
        let layers = self.step.layers();
        if layer >= layers {
            return Err(no_layer(layer, layers));
        }
        for (name, from, to) in copies {
            self.check(name, layer, from, to)?;
        }
        // An input in another input's place would be overwritten before it is copied.
        for (at, (name, from, _)) in copies.iter().enumerate() {
            let others = copies.iter().enumerate().filter(|(other, _)| *other != at);
            apart(
                name,
                from,
                others.map(|(_, (_, _, to))| ("another of the graph's tensors", &***to)),
            )?;
        }
        for (_, from, to) in copies {
            let place = to.narrow(0, 0..self.requests)?;
            place.copy_from(self.stream, from)?;
        }
        Ok(())
    }

    fn check<T: Element>(
        &self,
        name: &str,
        layer: usize,
        from: &Tensor<T>,
        to: &Tensor<T>,
    ) -> Result<(), Violation> {
        let wanted = [self.requests, size(to, 1), size(to, 2), size(to, 3)];
        if from.shape() == wanted {
            return Ok(());
        }
        let rows = (size(from, 0), size(from, 2)) != (wanted[0], wanted[2]);
        Err(Violation::new(
            if rows {
                &rules::STEP_TOKENS
            } else {
                &rules::STEP_HEADS
            },
            format_args!("{name} {:?} in layer {layer}", from.shape()),
            format_args!("{wanted:?}: requests, heads, captured nodes, elements of a head"),
            "fill trees up to the captured nodes; what stands behind a tree means nothing",
        ))
    }
}
