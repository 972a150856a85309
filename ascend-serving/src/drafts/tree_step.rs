//! A verification of drafted trees in progress.

use std::fmt;

use ascend_attention::attention::{BlockTable, CallLengths, PerRequest};
use ascend_attention::merge::{Part, PartsOfRows, RowMergePlan};
use ascend_attention::{Element, Output, Plan, Stream, Tensor, Violation};

use crate::backends::{LatentFormKind, LayerInputs, RefusedBackend, names_of_keys, size};
use crate::error::Result;
use crate::graphs::{GraphTensors, LentTensors, Replays};
use crate::kv::{LayerCache, PageTable, PagedKvCache, QueuedLayers, StepLease, no_layer};
use crate::rules;

use super::DraftTree;
use super::node_writes::{NodeSlots, NodeWrites};
use super::tree_request::{CHAIN_FIX, TreeForm, TreeLengths, TreeRequest, begin_trees, check_nodes};
use super::tree_verification::{
    NodeAndContextCalls, NodeRows, TreeTensors, TreeVerification, tree_mask, with_fewest_calls,
};

/// A verification of drafted trees in progress, launched layer by layer. From [`TreeVerification::begin`], or replayed
/// from graphs, from [`TreeGraphs::begin`](crate::TreeGraphs::begin); [end](TreeStep::end) or drop it when the last
/// layer is queued.
pub struct TreeStep<'a, T: Element> {
    pub(super) verification: TreeVerification,
    pub(super) stream: &'a Stream,
    pub(super) _lease: StepLease<'a>,
    pub(super) layers: QueuedLayers,
    pub(super) caches: Vec<LayerCache<T>>,
    pub(super) block_table: BlockTable,
    pub(super) trees: Vec<DraftTree>,
    pub(super) lengths: TreeLengths,
    pub(super) rows: NodeRows,
    /// Where the nodes are in a cache of latents.
    pub(super) slots: Option<NodeSlots>,
    /// What the first layer has planned for all, or graphs replay.
    pub(super) planned: Option<PlannedTrees<'a, T>>,
    /// The loans of the graphs' tensors.
    pub(super) lent: LentTensors,
    /// The output of the layer that was queued last.
    pub(super) output: Option<Output<T>>,
}

/// The calls of a layer, and the number of nodes for which they are planned.
pub(super) struct PlannedTrees<'a, T: Element> {
    pub(super) nodes: usize,
    /// The writes of the nodes to a cache of latents.
    pub(super) writes: Option<NodeWrites>,
    pub(super) calls: Calls<'a, T>,
    /// Why a layer is not one call, over latents.
    pub(super) refused: Option<RefusedBackend>,
}

pub(super) enum Calls<'a, T: Element> {
    One(Box<Plan>),
    Two(Box<TwoPlans>),
    Graphs(Replays<'a, TreeBuffers<T>>),
}

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

impl<T: Element> TreeBuffers<T> {
    /// What the graph of a layer writes.
    pub(super) fn output(&self) -> Output<T> {
        let softmax_lse = self.two.as_ref().map(|(_, merged)| merged.clone());
        Output { attention: self.tensors.output.clone(), softmax_lse }
    }
}

/// How to verify again what ended without some layers.
pub(super) const TREES_AGAIN: &str = "begin the verification again with the same requests and queue every layer";

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
        let cached = requests.iter().map(|request| request.cached);
        let nodes = requests.iter().map(|request| request.tree.nodes());
        Ok(TreeStep {
            verification: *self,
            stream,
            _lease: lease,
            block_table: cache.block_table(stream, &table)?,
            lengths: TreeLengths::new(cached.collect(), nodes.collect())?,
            trees: (requests.iter().map(|request| request.tree.clone())).collect(),
            rows: self.node_rows(cache.shape()),
            slots: match cache.shape().is_latent() {
                true => Some(NodeSlots::of(cache.pool(), cache.shape(), requests)?),
                false => None,
            },
            layers: QueuedLayers::new(caches.len(), vec![progress], TREES_AGAIN),
            caches,
            planned: None,
            lent: LentTensors::default(),
            output: None,
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
    /// The output is lent until the next call of this step; a clone of the tensor is the same memory. In a step that is
    /// replayed all layers write the same output, which has the size's padding: queue work that reads it on the step's
    /// stream before the next layer, or copy it there. Inputs have the captured number of nodes then, and are copied
    /// into the graph's tensors, unless they are in their [places](Self::tensors) there.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for another number of requests or nodes,
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for other heads, [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for a tree of
    /// more nodes than the tensors have, [`DRAFT_INPUTS`](crate::rules::DRAFT_INPUTS) for a mask, sinks, queries that
    /// are not absorbed, and latents where the cache has none;
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have; as for
    /// [`FusedInferAttention::plan`](ascend_attention::FusedInferAttention::plan), [`Plan::launch`] and
    /// [`RowMergePlan::launch`]; of replays [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for an input that shares
    /// memory with a tensor of the graph and is not in its own place,
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) while the [tensors](Self::tensors) are lent for another layer and
    /// for inputs in tensors that were not lent for this one, and as for
    /// [`GraphStep::launch`](crate::GraphStep::launch). Over latents [`Error::NoBackend`](crate::Error::NoBackend) with
    /// the reasons where neither form has a call.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<&Tensor<T>> {
        let outcome = self.queue_layer(layer, &inputs.into());
        let output = self.layers.note_outcome(layer, outcome)?;
        Ok(&self.output.insert(output).attention)
    }

    fn queue_layer(&mut self, layer: usize, inputs: &LayerInputs<'_, T>) -> Result<Output<T>> {
        self.layers.check_not_repeated(layer)?;
        let cache = self.caches.get(layer).ok_or_else(|| no_layer(layer, self.caches.len()))?;
        let query_rope = check_inputs(layer, inputs, self.rows.query_rope.is_some())?;
        let LayerInputs { query, key, value, .. } = *inputs;
        let tensors = TreeTensors { query, key, value, query_rope, cache, block_table: &self.block_table };
        self.check_rows(layer, &tensors)?;
        let planned = match self.planned.take() {
            Some(planned) => planned,
            None => self.plan(&tensors)?,
        };
        let PlannedTrees { writes, calls, .. } = self.planned.insert(planned);
        let mut rows = [key, value];
        if let Calls::Graphs(replays) = calls {
            let own = &replays.buffers().tensors;
            self.lent.check_lent(layer, &self.layers)?;
            self.lent.check_taken(layer, own.places(inputs, query_rope))?;
            own.copy_in(self.stream, inputs, query_rope)?;
            rows = [&own.key, &own.value];
        }
        // Its memory may serve the next one.
        self.output = None;
        if let Some(writes) = writes {
            self.layers.begin_write();
            writes.queue(cache, self.stream, rows)?;
        }
        match calls {
            Calls::One(plan) => Ok(plan.launch(self.stream, tensors.over_cache())?),
            Calls::Two(plans) => plans.launch(self.stream, &tensors),
            Calls::Graphs(replays) => {
                replays.launch(layer, &mut self.layers)?;
                Ok(replays.buffers().output())
            }
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
            let wanted = [self.trees.len(), heads, nodes, elements];
            if tensor.shape() == wanted {
                continue;
            }
            let (rule, fix) = match (size(tensor, 0), size(tensor, 2)) == (wanted[0], nodes) {
                true => (
                    &rules::STEP_HEADS,
                    "bring the heads of the `AttentionShape` and the cache; over latents the query, the latents, the \
                     rotary keys and the rotary parts of the query, each in its place of `LayerInputs::latent`",
                ),
                false => (
                    &rules::STEP_TOKENS,
                    "bring the requests of the step, and fill trees up to one number of nodes, in graphs the captured \
                     one; what stands behind a tree means nothing",
                ),
            };
            return Err(Violation::new(
                rule,
                format_args!("{name} {:?} in layer {layer}", tensor.shape()),
                format_args!("{wanted:?}: requests, heads, nodes, elements of a head"),
                fix,
            ));
        }
        Ok(())
    }

    fn plan(&self, tensors: &TreeTensors<'_, T>) -> Result<PlannedTrees<'a, T>> {
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
        let writes = self.slots.as_ref().map(|slots| slots.plan(tensors.cache, self.stream, rows));
        Ok(PlannedTrees { nodes, writes: writes.transpose()?, calls, refused })
    }

    /// The graphs' tensors of a layer in a step that is replayed, `[size, heads, nodes, D]`, whose rows may be filled
    /// in place on the step's stream: [`forward`](Self::forward) copies none of the inputs that are the first rows of
    /// their own tensor. Rows of padding, and rows after the nodes of a tree, may hold any finite numbers. All layers
    /// have these tensors: until this layer is queued, no other one can be queued, nor its tensors taken. Inputs in
    /// tensors that were not taken for their layer are refused.
    ///
    /// # Errors
    /// [`STEP_IN_PLACE`](crate::rules::STEP_IN_PLACE) for a step without graphs, and while the tensors are lent for
    /// another layer that is not queued; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not
    /// exist.
    pub fn tensors(&mut self, layer: usize) -> Result<&'a GraphTensors<T>> {
        if layer >= self.caches.len() {
            return Err(no_layer(layer, self.caches.len()));
        }
        let Some(Calls::Graphs(replays)) = self.planned.as_ref().map(|planned| &planned.calls) else {
            let given = format_args!("tensors of layer {layer}, in a step without graphs");
            return Err(rules::STEP_IN_PLACE.broken(given, "a step of `TreeGraphs::begin`").into());
        };
        self.lent.lend(layer, &self.layers)?;
        Ok(&replays.buffers().tensors)
    }

    /// The log-sum-exps over all keys, `[requests, N, nodes, 1]`, of the layer that was queued last, in a replayed step
    /// with the size's padding; `None` where a layer is one call.
    pub fn softmax_lse(&self) -> Option<&Tensor<f32>> {
        self.output.as_ref()?.softmax_lse.as_ref()
    }

    /// Whether a layer is one call over the cache, with a mask of the trees, once the first layer is queued. If not, a
    /// layer is a call over the nodes and, where a request has cached tokens, another over these.
    pub fn is_one_call(&self) -> Option<bool> {
        Some(match &self.planned.as_ref()?.calls {
            Calls::One(_) => true,
            Calls::Two(_) => false,
            Calls::Graphs(replays) => replays.buffers().two.is_none(),
        })
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
}

impl<T: Element> fmt::Debug for TreeStep<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeStep")
            .field("verification", &self.verification)
            .field("requests", &self.trees.len())
            .finish_non_exhaustive()
    }
}

/// The rotary parts of a layer's absorbed queries, `None` where the cache has no latents. Inputs that no
/// verification has are refused.
fn check_inputs<'i, T: Element>(
    layer: usize,
    inputs: &LayerInputs<'i, T>,
    is_latent: bool,
) -> Result<Option<&'i Tensor<T>>, Violation> {
    inputs.check_own_keys(layer, &rules::DRAFT_INPUTS)?;
    let form = is_latent.then_some(LatentFormKind::Absorbed);
    let own = match (inputs.mask, inputs.learnable_sink) {
        (None, None) => return inputs.absorbed_rope(layer, form, &rules::DRAFT_INPUTS),
        (Some(mask), _) => format!("a layer's own mask, {mask},"),
        (None, Some(sink)) => format!("sinks {:?}", sink.shape()),
    };
    Err(Violation::new(
        &rules::DRAFT_INPUTS,
        format_args!("{own} in layer {layer}"),
        "the masks of the trees, without sinks",
        CHAIN_FIX,
    ))
}

/// Both calls and their merge, planned.
#[derive(Debug)]
pub(super) struct TwoPlans {
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
    fn launch<T: Element>(&self, stream: &Stream, tensors: &TreeTensors<'_, T>) -> Result<Output<T>> {
        let own: Output<T> = self.nodes.launch(stream, tensors.of_nodes())?;
        let Some((plan, merge)) = &self.cached else {
            return Ok(own);
        };
        let cached = plan.launch(stream, tensors.over_cache())?;
        let parts = [Part::of(&own)?, Part::of(&cached)?];
        Ok(merge.launch(stream, &parts)?)
    }
}
