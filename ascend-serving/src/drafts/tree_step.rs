//! A verification of drafted trees in progress, without a graph.

use std::fmt;

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::merge::{Part, PartsOfRows, RowMergePlan};
use ascend_attention::{Element, Output, Plan, Stream, Tensor, Violation};

use crate::backends::{RefusedBackend, size};
use crate::engine::{LayerInputs, QueuedLayers, names_of_keys};
use crate::error::Result;
use crate::kv::{LayerCache, PageTable, PagedKvCache, StepLease, no_layer};
use crate::rules;

use super::DraftTree;
use super::node_writes::{NodeSlots, NodeWrites};
use super::tree_request::{TreeForm, TreeLengths, TreeRequest, begin_trees, check_nodes};
use super::tree_verification::{
    NodeAndContextCalls, NodeRows, TreeTensors, TreeVerification, tree_mask, with_fewest_calls,
};

/// A verification of drafted trees in progress, launched layer by layer. From [`TreeVerification::begin`];
/// [end](TreeStep::end) or drop it when the last layer is queued.
pub struct TreeStep<'a, T: Element> {
    verification: TreeVerification,
    stream: &'a Stream,
    lease: StepLease<'a, Stream>,
    layers: QueuedLayers,
    caches: Vec<LayerCache<T>>,
    block_table: BlockTable,
    trees: Vec<DraftTree>,
    lengths: TreeLengths,
    rows: NodeRows,
    /// Where the nodes are in a cache of latents.
    nodes: Option<NodeSlots>,
    /// What the first layer has planned for all.
    planned: Option<PlannedTrees>,
}

/// How to verify again what ended without some layers.
pub(crate) const TREES_AGAIN: &str = "begin the verification again with the same requests and queue every layer";

/// The calls of a layer, and the number of nodes for which they are planned.
struct PlannedTrees {
    nodes: usize,
    /// The writes of the nodes to a cache of latents.
    writes: Option<NodeWrites>,
    calls: Calls,
    /// Why a layer is not one call, over latents.
    refused: Option<RefusedBackend>,
}

enum Calls {
    One(Box<Plan>),
    Two(Box<TwoPlans>),
}

impl TreeVerification {
    /// Begins to verify one tree for each request, in every layer of a cache. Until all layers are queued, no step that
    /// writes tokens of the requests' sequences begins; other verifications may, and the nodes may be written to the
    /// cache. Over a cache of latents the verification is itself a step that writes the nodes, and one of a sequence is
    /// in progress at a time. Blocks given back from now on are handed out again when the stream has passed the end of
    /// the step.
    ///
    /// # Errors
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) without requests; for a request
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) if it is of another pool, [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW)
    /// if it gave back tokens, [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) if its copies were not queued,
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for another number of tokens than it is said to have,
    /// [`TABLE_SHARED`](crate::rules::TABLE_SHARED) for nodes in a block that another sequence holds too,
    /// [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP) and
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) for tokens before the tree that are not computed,
    /// [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED) for nodes over latents that are,
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) while a step that writes some of them is in
    /// progress, [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for more than 16 nodes over latents;
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised
    /// cache; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a cache of other heads, and for a scale that is not
    /// above 0 or not finite; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`PagedKvCache::block_table`].
    pub fn begin<'a, T: Element>(
        &self,
        stream: &'a Stream,
        cache: &PagedKvCache<T>,
        requests: &[TreeRequest<'_>],
    ) -> Result<TreeStep<'a, T>> {
        self.check_cache(cache)?;
        cache.admits(stream)?;
        let layers = 0..cache.shape().layers;
        let caches = layers.map(|layer| cache.layer(layer).cloned());
        let caches: Vec<LayerCache<T>> = caches.collect::<Result<_>>()?;
        let lease = cache.pool().begin_step(stream);
        let progress = begin_trees(requests, cache.entry(), cache.shape().is_latent())?;
        let rows = requests.iter().map(|request| match request.sequence.row() {
            // A request without tokens has no block; its row is not read.
            [] => &[0],
            row => row,
        });
        let table = PageTable::from_rows(&rows.collect::<Vec<_>>())?;
        let block_table = cache.block_table(stream, &table)?;
        let cached = requests.iter().map(|request| request.cached);
        let nodes = requests.iter().map(|request| request.tree.nodes());
        Ok(TreeStep {
            verification: *self,
            stream,
            lease,
            layers: QueuedLayers::new(caches.len(), vec![progress], TREES_AGAIN),
            caches,
            block_table,
            lengths: TreeLengths::new(cached.collect(), nodes.collect())?,
            trees: (requests.iter().map(|request| request.tree.clone())).collect(),
            rows: self.node_rows(cache.shape()),
            nodes: match cache.shape().is_latent() {
                true => Some(NodeSlots::of(cache.pool(), cache.shape(), requests)?),
                false => None,
            },
            planned: None,
        })
    }
}

impl<'a, T: Element> TreeStep<'a, T> {
    /// Queues one layer: the attention of the nodes' query `[B, N, nodes, D]` over the cached tokens, and over the
    /// nodes' key and value `[B, Nkv, nodes, D]`, which need not be in the cache. Over a cache of latents absorbed
    /// queries and rotary parts, latents and rotary keys ([`LayerInputs::latent`]), which the step writes to the cache,
    /// behind the cached tokens. The attention is of the query's shape. Returns at once.
    ///
    /// Smaller trees are filled up to the nodes of the tensors, which are those of the first layer; rows after a tree
    /// mean nothing. The first layer plans for all.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for another number of requests or nodes,
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for other heads, [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for a tree of
    /// more nodes than the tensors have, [`DRAFT_INPUTS`](crate::rules::DRAFT_INPUTS) for a mask, sinks, queries that
    /// are not absorbed, and latents where the cache has none;
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have; as for
    /// [`FusedInferAttention::plan`](ascend_attention::FusedInferAttention::plan), [`Plan::launch`] and
    /// [`RowMergePlan::launch`]. Over latents [`Error::NoBackend`](crate::Error::NoBackend) with the reasons where
    /// neither form has a call.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<Tensor<T>> {
        let outcome = self.queue_layer(layer, &inputs.into());
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer(&mut self, layer: usize, inputs: &LayerInputs<'_, T>) -> Result<Tensor<T>> {
        self.layers.check_not_repeated(layer)?;
        let layers = self.caches.len();
        let cache = self.caches.get(layer);
        let cache = cache.ok_or_else(|| no_layer(layer, layers))?;
        let query_rope = check_inputs(layer, inputs, self.rows.query_rope.is_some())?;
        let tensors = TreeTensors {
            query: inputs.query,
            key: inputs.key,
            value: inputs.value,
            query_rope,
            cache,
            block_table: &self.block_table,
        };
        self.check_rows(layer, &tensors)?;
        let planned = match self.planned.take() {
            Some(planned) => planned,
            None => self.plan(&tensors)?,
        };
        let planned = &*self.planned.insert(planned);
        if let Some(writes) = &planned.writes {
            self.layers.begin_write();
            writes.queue(cache, self.stream, [tensors.key, tensors.value])?;
        }
        match &planned.calls {
            Calls::One(plan) => {
                let output: Result<Output<T>, _> = plan.launch(self.stream, tensors.over_cache());
                output.map(|output| output.attention).map_err(Into::into)
            }
            Calls::Two(plans) => plans.launch(self.stream, &tensors),
        }
    }

    /// Refuses tensors of other requests, nodes or heads: a node that has no key of its own would not see itself.
    fn check_rows(&self, layer: usize, tensors: &TreeTensors<'_, T>) -> Result<(), Violation> {
        let nodes = match (&self.planned, tensors.query.shape()) {
            (Some(planned), _) => planned.nodes,
            (None, &[_, _, nodes, _]) => nodes,
            (None, shape) => {
                return Err(Violation::new(
                    &rules::STEP_TOKENS,
                    format_args!("query {shape:?} in layer {layer}"),
                    "four axes: requests, heads, nodes, elements of a head",
                    "reshape the layer's tensors, and fill trees up to one number of nodes",
                ));
            }
        };
        let NodeRows { query, query_rope, key, value, .. } = self.rows;
        let [key_name, value_name] = names_of_keys(query_rope.is_some());
        let rope = tensors.query_rope.zip(query_rope);
        let rows = [("query", tensors.query, query), (key_name, tensors.key, key), (value_name, tensors.value, value)];
        let rows = rows.into_iter().chain(rope.map(|(rope, rows)| ("query_rope", rope, rows)));
        for (name, tensor, [heads, elements]) in rows {
            check_rows(name, layer, tensor, [self.trees.len(), heads, nodes, elements])?;
        }
        Ok(())
    }

    fn plan(&self, tensors: &TreeTensors<'_, T>) -> Result<PlannedTrees> {
        let nodes = size(tensors.query, 2);
        let is_latent = tensors.query_rope.is_some();
        check_nodes(nodes, is_latent)?;
        let mut trees = self.trees.iter().enumerate();
        if let Some((request, tree)) = trees.find(|(_, tree)| tree.nodes() > nodes) {
            return Err(Violation::new(
                &rules::DRAFT_TREE,
                format_args!("{} nodes of request {request}", tree.nodes()),
                format_args!("at most {nodes}, as the query has rows"),
                "pad the tensors to the largest tree",
            )
            .into());
        }
        let mask = tree_mask(&self.trees, self.trees.len(), nodes)?;
        let device = self.stream.device();
        let mask = device.masks().custom_matrix(&mask)?;
        let (calls, refused) = with_fewest_calls(device, is_latent, |form| {
            let lengths = form.lengths(&self.lengths);
            if form == TreeForm::OneLatentCall {
                let call = lengths.apply(self.verification.one_call(mask.clone()));
                return Ok(Calls::One(Box::new(call.plan(tensors.over_cache())?)));
            }
            let calls = self.verification.two_calls(mask.clone(), is_latent);
            let plans = TwoPlans::plan(calls, lengths, &self.lengths.cached, tensors)?;
            Ok(Calls::Two(Box::new(plans)))
        })?;
        let rows = [tensors.key, tensors.value];
        let writes = self.nodes.as_ref();
        let writes = writes.map(|of| of.plan(tensors.cache, self.stream, rows));
        Ok(PlannedTrees { nodes, writes: writes.transpose()?, calls, refused })
    }

    /// Whether a layer is one call over the cache, with a mask of the trees, once the first layer is queued. If not, a
    /// layer is a call over the nodes and, where a request has cached tokens, another over these.
    pub fn is_one_call(&self) -> Option<bool> {
        let planned = self.planned.as_ref()?;
        Some(matches!(planned.calls, Calls::One(_)))
    }

    /// Over latents, why a layer is not one call, and which product and release would take that call.
    pub fn refused(&self) -> Option<&RefusedBackend> {
        self.planned.as_ref()?.refused.as_ref()
    }

    /// Ends the step, and checks that all its layers were queued.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING).
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'a, Stream> {
        &self.lease
    }
}

impl<T: Element> fmt::Debug for TreeStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeStep")
            .field("verification", &self.verification)
            .field("requests", &self.trees.len())
            .finish_non_exhaustive()
    }
}

/// Refuses a layer's tensor of another shape than `[requests, heads, nodes, elements]`.
pub(crate) fn check_rows<T: Element>(
    name: &str,
    layer: usize,
    tensor: &Tensor<T>,
    wanted: [usize; 4],
) -> Result<(), Violation> {
    if tensor.shape() == wanted {
        return Ok(());
    }
    let (rule, fix) = match (size(tensor, 0), size(tensor, 2)) == (wanted[0], wanted[2]) {
        true => (
            &rules::STEP_HEADS,
            "bring the heads of the `AttentionShape` and the cache; over latents the query, the latents, the rotary \
             keys and the rotary parts of the query, each in its place of `LayerInputs::latent`",
        ),
        false => (
            &rules::STEP_TOKENS,
            "bring the requests of the step, and fill trees up to one number of nodes, in graphs the captured one; \
             what stands behind a tree means nothing",
        ),
    };
    Err(Violation::new(
        rule,
        format_args!("{name} {:?} in layer {layer}", tensor.shape()),
        format_args!("{wanted:?}: requests, heads, nodes, elements of a head"),
        fix,
    ))
}

/// The rotary parts of a layer's absorbed queries, `None` where the cache has no latents. Inputs that no
/// verification has are refused.
pub(crate) fn check_inputs<'i, T: Element>(
    layer: usize,
    inputs: &LayerInputs<'i, T>,
    is_latent: bool,
) -> Result<Option<&'i Tensor<T>>, Violation> {
    inputs.check_own_keys(layer, &rules::DRAFT_INPUTS)?;
    let own = match (inputs.mask, inputs.learnable_sink) {
        (None, None) => return inputs.absorbed_rope(layer, is_latent, &rules::DRAFT_INPUTS),
        (Some(mask), _) => format!("a layer's own mask, {mask},"),
        (None, Some(sink)) => format!("sinks {:?}", sink.shape()),
    };
    Err(Violation::new(
        &rules::DRAFT_INPUTS,
        format_args!("{own} in layer {layer}"),
        "the masks of the trees, without sinks",
        "leave masks and sinks out: the trees of the step are its masks; where layers have sinks, verify a chain of \
         drafts (`BatchRequest::drafts`) in a step",
    ))
}

/// Both calls and their merge, planned.
#[derive(Debug)]
struct TwoPlans {
    nodes: Plan,
    cached: Option<(Plan, RowMergePlan)>,
}

impl TwoPlans {
    fn plan<T: Element>(
        calls: NodeAndContextCalls,
        lengths: CallLengths<'_>,
        cached: &PerRequest,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<Self> {
        let NodeAndContextCalls { nodes, context } = calls;
        if cached.lengths().iter().all(|len| *len == 0) {
            return Ok(Self { nodes: nodes.softmax_lse(false).plan(tensors.of_nodes())?, cached: None });
        }
        let nodes = nodes.plan(tensors.of_nodes())?;
        let context = lengths.apply(context).plan(tensors.over_cache())?;
        let (of_nodes, of_cached): (Output<T>, Output<T>) = (nodes.output()?, context.output()?);
        let parts =
            cached.lengths().iter().map(|len| PartsOfRows { rows: 1, parts: if *len > 0 { 0b11 } else { 0b01 } });
        let parts: Vec<PartsOfRows> = parts.collect();
        let outputs = [Part::of(&of_nodes)?, Part::of(&of_cached)?];
        let merge = NodeAndContextCalls::merge().rows(&parts).plan(&outputs)?;
        Ok(Self { nodes, cached: Some((context, merge)) })
    }

    /// Queues both calls and the merge.
    fn launch<T: Element>(&self, stream: &Stream, tensors: &TreeTensors<'_, T>) -> Result<Tensor<T>> {
        let own: Output<T> = self.nodes.launch(stream, tensors.of_nodes())?;
        let Some((plan, merge)) = &self.cached else {
            return Ok(own.attention);
        };
        let cached = plan.launch(stream, tensors.over_cache())?;
        let parts = [Part::of(&own)?, Part::of(&cached)?];
        Ok(merge.launch(stream, &parts)?.attention)
    }
}
