//! Verifying drafted trees by the stock operator: the cached tokens and the tree apart, merged.

use std::borrow::Borrow;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::merge::{MergeState, Part, PartsOfRows, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::{
    CallRule, Element, FusedInferAttention, Mask, Output, Plan, Stream, Tensor,
};

use crate::backends::AttentionShape;
use crate::error::{Error, Result};
use crate::kv::LayerCache;
use crate::refusal::{Refused, Rule, refused};

use super::draft_tree::DraftTree;

/// Verifies a drafted tree for each request. Every node sees the cached tokens of its request, its ancestors and itself.
///
/// Packed calls take no mask tensor, and one over all keys would be as large as the context. So two calls are merged by
/// their log-sum-exps: one of all nodes over the cached tokens, which all of them see, and one over the nodes alone with a
/// mask `[B, nodes, nodes]`. Tensors are BNSD, whose log-sum-exps are in the order of the output's rows.
///
/// Sparse mode 9, the tree mask of CANN 9.1, goes with rotary parts alone:
/// [`LatentTreeVerification`](crate::LatentTreeVerification) uses it.
///
/// Chains need none of this: they are causal, and a step of
/// [`AttentionState::SpecDecoding`](crate::AttentionState::SpecDecoding) verifies them.
#[derive(Clone, Copy, Debug)]
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

/// A verification that was prepared. From [`TreeVerification::plan`].
#[derive(Debug)]
pub struct TreePlan {
    calls: TwoCalls,
}

impl TreeVerification {
    /// Prepares the verification of a tree a request behind `cached` tokens each. Smaller trees are padded to the nodes of
    /// the tensors; the rows behind mean nothing. One plan serves all layers of a step.
    ///
    /// # Errors
    /// [`CallRule::LengthsBatch`] for another number of trees or lengths than requests, [`Rule::DraftTree`] for a tree
    /// larger than the tensors; as for [`FusedInferAttention::plan_with`](ascend_attention::FusedInferAttention::plan_with)
    /// and [`MergeState::plan`].
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        trees: &[DraftTree],
        cached: &PerRequest,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<TreePlan> {
        let &[requests, _, nodes, _] = tensors.query.shape() else {
            let given = tensors.query.desc();
            return Err(Error::invalid("query", given, "[B, N, nodes, D]"));
        };
        same_batch(trees, cached, requests)?;
        self.shape.check()?;
        let mask = tree_mask(trees, requests, nodes)?;
        let mask = Mask::all_mask(stream.device().masks().custom_matrix(&mask)?);
        let call = self.shape.call(Layout::Bnsd);
        let calls = TwoCalls::plan::<T>(&call, mask, cached, &own(tensors), &before(tensors))?;
        Ok(TreePlan { calls })
    }
}

/// Refuses trees and lengths of another batch than the query's.
pub(super) fn same_batch(
    trees: &[DraftTree],
    cached: &PerRequest,
    requests: usize,
) -> Result<(), Refused> {
    if (trees.len(), cached.lengths().len()) == (requests, requests) {
        return Ok(());
    }
    Err(refused(
        CallRule::LengthsBatch,
        format_args!("{} trees, {} lengths", trees.len(), cached.lengths().len()),
        format_args!("{requests} of each, as the query has requests"),
        "make them from the same batch",
    ))
}

fn own<'a, T: Element>(tensors: &TreeTensors<'a, T>) -> Inputs<'a> {
    Inputs::new(tensors.query, tensors.key, tensors.value)
}

fn before<'a, T: Element>(tensors: &TreeTensors<'a, T>) -> Inputs<'a> {
    let TreeTensors {
        query,
        cache,
        block_table,
        ..
    } = *tensors;
    Inputs::new(query, &cache.key, &cache.value).paged(block_table)
}

/// `[requests, nodes, nodes]`, 1 hides. A row behind its tree sees itself, so that no row is without keys.
pub(crate) fn tree_mask(
    trees: &[impl Borrow<DraftTree>],
    requests: usize,
    nodes: usize,
) -> Result<HostMask> {
    for (request, tree) in trees.iter().enumerate() {
        let given = tree.borrow().nodes();
        if given > nodes {
            return Err(refused(
                Rule::DraftTree,
                format_args!("{given} nodes of request {request}"),
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

/// All nodes over the cached tokens and the nodes among themselves, merged by their log-sum-exps.
#[derive(Debug)]
pub(super) struct TwoCalls {
    nodes: Plan,
    cached: Option<(Plan, RowMergePlan)>,
}

impl TwoCalls {
    /// Prepares both for inputs in BNSD, of which the second are paged.
    pub(super) fn plan<T: Element>(
        call: &FusedInferAttention,
        mask: Mask,
        cached: &PerRequest,
        own: &Inputs<'_>,
        before_inputs: &Inputs<'_>,
    ) -> Result<Self> {
        let any = cached.lengths().iter().any(|len| *len > 0);
        let nodes = call.clone().mask(mask).softmax_lse(any).plan_with(own)?;
        if !any {
            return Ok(Self {
                nodes,
                cached: None,
            });
        }
        let lengths = CallLengths::Batched {
            q: None,
            kv: cached,
        };
        let before = lengths.apply(call.clone().softmax_lse(true));
        let before = before.plan_with(before_inputs)?;
        let (own_out, before_out): (Output<T>, Output<T>) = (nodes.output()?, before.output()?);
        let parts = cached.lengths().iter().map(|len| PartsOfRows {
            rows: 1,
            parts: if *len > 0 { 0b11 } else { 0b01 },
        });
        let parts: Vec<PartsOfRows> = parts.collect();
        let merge = MergeState::new(Layout::Bnsd)
            .plan_rows(&parts, &[Part::of(&own_out)?, Part::of(&before_out)?])?;
        Ok(Self {
            nodes,
            cached: Some((before, merge)),
        })
    }

    /// Queues both and the merge.
    pub(super) fn launch<T: Element>(
        &self,
        stream: &Stream,
        own: &Inputs<'_>,
        before: &Inputs<'_>,
    ) -> Result<Tensor<T>> {
        let own: Output<T> = self.nodes.launch_with(stream, own)?;
        let Some((plan, merge)) = &self.cached else {
            return Ok(own.attention);
        };
        let cached = plan.launch_with(stream, before)?;
        let parts = [Part::of(&own)?, Part::of(&cached)?];
        Ok(merge.launch(stream, &parts)?.attention)
    }
}

impl TreePlan {
    /// Queues the verification of a layer: the attention of the nodes, `[B, N, nodes, D]`.
    ///
    /// # Errors
    /// As for [`Plan::launch_with`] and [`RowMergePlan::launch`].
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<Tensor<T>> {
        self.calls.launch(stream, &own(tensors), &before(tensors))
    }
}
