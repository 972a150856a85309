//! Verifying drafted trees by the stock operator: one call over the cached tokens and one over the tree, merged.

use std::borrow::Borrow;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::merge::{MergeState, Part, PartsOfRows, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::{
    AnyTensor, Element, FusedInferAttention, Mask, Output, Plan, Stream, Tensor, Violation,
};

use crate::backends::AttentionShape;
use crate::error::{Error, Result};
use crate::kv::LayerCache;
use crate::rules;

use super::DraftTree;

/// Verifies a drafted tree for each request. Every node sees the cached tokens of its request, its ancestors and
/// itself.
///
/// Packed calls take no mask tensor, and a mask over all keys would be as large as the context. So two calls are
/// merged by their log-sum-exps: one of all nodes over the cached tokens, which all of them see, and one over the
/// nodes alone with a mask `[B, nodes, nodes]`. Tensors are BNSD, whose log-sum-exps are in the order of the output's
/// rows.
///
/// The operator takes sparse mode 9, the tree mask of CANN 9.1, with rotary parts alone:
/// [`LatentTreeVerification`](crate::LatentTreeVerification) uses it.
///
/// Chains need none of this: they are causal, and a step of
/// [`AttentionState::SpecDecoding`](crate::AttentionState::SpecDecoding) verifies them.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TreeVerification {
    /// The heads.
    pub shape: AttentionShape,
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug)]
pub struct TreeTensors<'a, T: Element> {
    /// Queries of the nodes, `[B, N, nodes, D]`.
    pub query: &'a Tensor<T>,
    /// Keys of the nodes, `[B, Nkv, nodes, D]`; they need not be in the cache.
    pub key: &'a Tensor<T>,
    /// Values of the nodes.
    pub value: &'a Tensor<T>,
    /// The layer's cache.
    pub cache: &'a LayerCache<T>,
    /// Blocks of the cached tokens.
    pub block_table: &'a BlockTable,
}

/// A prepared verification. From [`TreeVerification::plan`].
#[derive(Debug)]
pub struct TreePlan {
    calls: TwoPlans,
}

impl TreeVerification {
    /// A verification by attention of these heads.
    pub const fn new(shape: AttentionShape) -> Self {
        Self { shape }
    }

    /// Prepares the verification of one tree for each request, after `cached` tokens each. Smaller trees are padded
    /// to the nodes of the tensors; the rows after a tree mean nothing. One plan serves all layers of a step.
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for another number of trees or lengths than requests,
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for a tree larger than the tensors, and for keys and values with
    /// another number of nodes than the query; as for
    /// [`FusedInferAttention::plan`](ascend_attention::FusedInferAttention::plan) and [`MergeState::plan`].
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        trees: &[DraftTree],
        cached: &PerRequest,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<TreePlan> {
        let &[requests, _, nodes, _] = tensors.query.shape() else {
            let given = tensors.query.desc();
            return Err(Error::invalid("query", given, "[B, N, nodes, D]")
                .fix("reshape the query, and fill trees up to one number of nodes"));
        };
        same_batch(trees, cached, requests)?;
        self.shape.check()?;
        check_nodes(
            [requests, nodes],
            [("key", tensors.key), ("value", tensors.value)],
        )?;
        let mask = tree_mask(trees, requests, nodes)?;
        let calls = self.two_calls(stream.device().masks().custom_matrix(&mask)?);
        let inputs = [&tree_nodes(tensors), &tree_paged(tensors)];
        let calls = TwoPlans::plan::<T>(calls, cached, inputs)?;
        Ok(TreePlan { calls })
    }

    /// The two calls, with a mask of the trees.
    pub(crate) fn two_calls(&self, mask: impl Into<AnyTensor>) -> TwoCalls {
        TwoCalls::new(self.shape, Mask::all_mask(mask))
    }
}

/// Refuses tensors `[B, N, nodes, D]` with another number of requests or nodes than the query: a node that has no key
/// of its own would not see itself.
pub(super) fn check_nodes<T: Element, const N: usize>(
    [requests, nodes]: [usize; 2],
    tensors: [(&str, &Tensor<T>); N],
) -> Result<(), Violation> {
    for (name, tensor) in tensors {
        if !matches!(*tensor.shape(), [b, _, rows, _] if [b, rows] == [requests, nodes]) {
            return Err(Violation::new(
                &rules::DRAFT_TREE,
                format_args!("{name} {:?}", tensor.shape()),
                format_args!(
                    "[{requests}, heads, {nodes}, elements], as the query has requests and nodes"
                ),
                "bring a row for each node of the query",
            ));
        }
    }
    Ok(())
}

/// Refuses another number of trees or lengths than the query has requests.
pub(super) fn same_batch(
    trees: &[DraftTree],
    cached: &PerRequest,
    requests: usize,
) -> Result<(), Violation> {
    if (trees.len(), cached.lengths().len()) == (requests, requests) {
        return Ok(());
    }
    Err(Violation::new(
        &rules::LENGTHS_BATCH,
        format_args!("{} trees, {} lengths", trees.len(), cached.lengths().len()),
        format_args!("{requests} of each, as the query has requests"),
        "make them from the same batch",
    ))
}

/// The inputs of the call over the nodes alone.
pub(crate) fn tree_nodes<'a, T: Element>(tensors: &TreeTensors<'a, T>) -> Inputs<'a, T> {
    Inputs::new(tensors.query, tensors.key, tensors.value)
}

/// The inputs of the call of the nodes over the cached tokens.
pub(crate) fn tree_paged<'a, T: Element>(tensors: &TreeTensors<'a, T>) -> Inputs<'a, T> {
    let TreeTensors {
        query,
        cache,
        block_table,
        ..
    } = *tensors;
    Inputs::new(query, &cache.key, &cache.value).paged(block_table)
}

/// The mask of the trees, `[requests, nodes, nodes]`, 1 hides. A row after the nodes of its tree sees itself, so that
/// no row is without keys.
pub(crate) fn tree_mask(
    trees: &[impl Borrow<DraftTree>],
    requests: usize,
    nodes: usize,
) -> Result<HostMask> {
    for (request, tree) in trees.iter().enumerate() {
        let own = tree.borrow().nodes();
        if own > nodes {
            return Err(Violation::new(
                &rules::DRAFT_TREE,
                format_args!("{own} nodes of request {request}"),
                format_args!("at most {nodes}, as the query has rows"),
                "pad the tensors to the largest tree",
            )
            .into());
        }
    }
    let sees = |request: usize, i, j| {
        i == j || (trees.get(request)).is_some_and(|tree| tree.borrow().sees(i, j))
    };
    Ok(HostMask::stack_from_fn(
        requests,
        nodes,
        nodes,
        MaskForm::INT8,
        sees,
    )?)
}

/// The calls of a verification in BNSD: the nodes among themselves, and all of them over the cached tokens, which
/// every node sees. Both return log-sum-exps, by which they are merged.
#[derive(Clone, Debug)]
pub(crate) struct TwoCalls {
    pub(crate) nodes: FusedInferAttention,
    pub(crate) context: FusedInferAttention,
}

impl TwoCalls {
    /// The two calls, with a mask of the trees.
    pub(super) fn new(shape: AttentionShape, mask: Mask) -> Self {
        let call = shape.call(Layout::Bnsd).softmax_lse(true);
        Self {
            nodes: call.clone().mask(mask),
            context: call,
        }
    }

    /// The lengths of the call over cached tokens.
    pub(crate) fn context_lengths(cached: &PerRequest) -> CallLengths<'_> {
        CallLengths::Batched {
            q: None,
            kv: cached,
        }
    }

    /// The merge of both outputs.
    pub(crate) fn merge() -> MergeState {
        MergeState::new(Layout::Bnsd)
    }
}

/// Both calls and their merge, planned.
#[derive(Debug)]
pub(super) struct TwoPlans {
    nodes: Plan,
    cached: Option<(Plan, RowMergePlan)>,
}

impl TwoPlans {
    /// Plans the calls, with the inputs of the nodes and those over the cached tokens.
    pub(super) fn plan<T: Element>(
        calls: TwoCalls,
        cached: &PerRequest,
        [own, paged]: [&Inputs<'_, T>; 2],
    ) -> Result<Self> {
        let TwoCalls { nodes, context } = calls;
        if cached.lengths().iter().all(|len| *len == 0) {
            return Ok(Self {
                nodes: nodes.softmax_lse(false).plan(own)?,
                cached: None,
            });
        }
        let nodes = nodes.plan(own)?;
        let lengths = TwoCalls::context_lengths(cached);
        let context = lengths.apply(context).plan(paged)?;
        let (of_nodes, of_cached): (Output<T>, Output<T>) = (nodes.output()?, context.output()?);
        let parts = cached.lengths().iter().map(|len| PartsOfRows {
            rows: 1,
            parts: if *len > 0 { 0b11 } else { 0b01 },
        });
        let parts: Vec<PartsOfRows> = parts.collect();
        let outputs = [Part::of(&of_nodes)?, Part::of(&of_cached)?];
        let merge = TwoCalls::merge().rows(&parts).plan(&outputs)?;
        Ok(Self {
            nodes,
            cached: Some((context, merge)),
        })
    }

    /// Queues both calls and the merge.
    pub(super) fn launch<T: Element>(
        &self,
        stream: &Stream,
        own: &Inputs<'_, T>,
        paged: &Inputs<'_, T>,
    ) -> Result<Tensor<T>> {
        let own: Output<T> = self.nodes.launch(stream, own)?;
        let Some((plan, merge)) = &self.cached else {
            return Ok(own.attention);
        };
        let cached = plan.launch(stream, paged)?;
        let parts = [Part::of(&own)?, Part::of(&cached)?];
        Ok(merge.launch(stream, &parts)?.attention)
    }
}

impl TreePlan {
    /// Queues the verification of a layer: the attention of the nodes, `[B, N, nodes, D]`.
    ///
    /// # Errors
    /// As for [`Plan::launch`] and [`RowMergePlan::launch`].
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<Tensor<T>> {
        self.calls
            .launch(stream, &tree_nodes(tensors), &tree_paged(tensors))
    }
}
