//! Verifying drafted trees: one call over the cached tokens and one over the tree, merged, or one call with a tree mask.

use std::borrow::Borrow;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::case::tentatively;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::merge::{MergeState, Part, PartsOfRows, RowMergePlan};
use ascend_attention::spec::Layout;
use ascend_attention::{
    AnyTensor, Element, FusedInferAttention, Mask, Output, Plan, Stream, Tensor, Violation,
};

use crate::backends::{AttentionShape, RefusedBackend, no_backend, size};
use crate::error::{Error, Result};
use crate::kv::{CacheShape, LayerCache};
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
/// Latent attention ([`CacheShape::latent`](crate::kv::CacheShape::latent)) is verified with absorbed queries, and by
/// a single call where the device's product and release have a mask for trees, sparse mode 9, which CANN takes only
/// with rotary parts:
///
/// | heads | target | calls |
/// |---|---|---|
/// | grouped queries | all | one over the cached tokens, one over the nodes, merged |
/// | latent | Atlas A2 and A3 with CANN 9.1 | one over the cache, which has the nodes too |
/// | latent | Atlas A2 and A3 with CANN 8.5 and 9.0, Ascend 950 | one over the cached tokens, one over the nodes, merged |
/// | latent | CANN 8.1 | none: refused |
///
/// Chains need none of this: they are causal, and a step of
/// [`AttentionState::SpecDecoding`](crate::AttentionState::SpecDecoding) verifies them.
///
/// Source: aclnnFusedInferAttentionScoreV3, multi-head latent attention and sparse mode 9.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TreeVerification {
    /// The heads. [`AttentionShape::latent`] for latent attention: one key head, and the scale of the whole head.
    pub shape: AttentionShape,
}

/// The tensors of one layer. With latents, queries are absorbed, and the cache has the nodes after the cached tokens.
#[derive(Clone, Copy, Debug)]
pub struct TreeTensors<'a, T: Element> {
    /// Queries of the nodes, `[B, N, nodes, D]`; with latents `[B, N, nodes, 512]`.
    pub query: &'a Tensor<T>,
    /// Keys of the nodes, `[B, Nkv, nodes, D]`, which need not be in the cache; with latents the latents,
    /// `[B, 1, nodes, 512]`.
    pub key: &'a Tensor<T>,
    /// Values of the nodes; with latents their rotary keys, `[B, 1, nodes, 64]`.
    pub value: &'a Tensor<T>,
    /// The rotary parts of absorbed queries, `[B, N, nodes, 64]`; only for a cache of latents.
    pub query_rope: Option<&'a Tensor<T>>,
    /// The layer's cache.
    pub cache: &'a LayerCache<T>,
    /// Blocks of the cached tokens, and with latents of the nodes.
    pub block_table: &'a BlockTable,
}

impl<'a, T: Element> TreeTensors<'a, T> {
    /// The inputs of the call of the nodes among themselves. Latents are keys and values.
    pub(crate) fn of_nodes(&self) -> Inputs<'a, T> {
        match self.query_rope {
            None => Inputs::new(self.query, self.key, self.value),
            Some(rope) => Inputs::new(self.query, self.key, self.key).rope(rope, self.value),
        }
    }

    /// The inputs of the call of the nodes over the cache.
    pub(crate) fn over_cache(&self) -> Inputs<'a, T> {
        let LayerCache { key, value } = self.cache;
        let inputs = match self.query_rope {
            None => Inputs::new(self.query, key, value),
            Some(rope) => Inputs::new(self.query, key, key).rope(rope, value),
        };
        inputs.paged(self.block_table)
    }

    /// Refuses tensors with another number of requests or nodes than the query, since a node that has no key of its
    /// own would not see itself, and rotary parts where the cache has none.
    fn check_nodes(&self, [requests, nodes]: [usize; 2]) -> Result<(), Violation> {
        let tensors = [("key", self.key), ("value", self.value)];
        let rope = self.query_rope.map(|rope| ("query_rope", rope));
        for (name, tensor) in tensors.into_iter().chain(rope) {
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
        let CacheShape {
            key_dim, value_dim, ..
        } = CacheShape::latent(1);
        let sizes = self.cache.token_sizes(self.block_table.block_size());
        let is_latent = sizes == [key_dim, value_dim];
        match self.query_rope {
            Some(rope) if is_latent => {
                let wanted = [
                    ("query", self.query, key_dim),
                    ("query_rope", rope, value_dim),
                    ("key", self.key, key_dim),
                    ("value", self.value, value_dim),
                ];
                let other = |(_, tensor, dim): &(_, &Tensor<T>, usize)| size(tensor, 3) != *dim;
                match wanted.into_iter().find(other) {
                    None => Ok(()),
                    Some((name, tensor, dim)) => Err(Violation::new(
                        &rules::DRAFT_INPUTS,
                        format_args!("{name} {:?} over a cache of latents", tensor.shape()),
                        format_args!("[{requests}, heads, {nodes}, {dim}]"),
                        "bring absorbed queries, latents as keys, and rotary parts in the places of `query_rope` and `value`",
                    )),
                }
            }
            Some(_) => Err(Violation::new(
                &rules::DRAFT_INPUTS,
                "rotary parts of queries over a cache of keys and values",
                "no rotary parts, or a cache of latents",
                "leave `query_rope` out; keys of the cache have their rotary parts in them",
            )),
            None if is_latent => Err(Violation::new(
                &rules::DRAFT_INPUTS,
                "queries without rotary parts over a cache of latents",
                "absorbed queries with their rotary parts",
                "bring the rotary parts as `query_rope`",
            )),
            None => Ok(()),
        }
    }
}

/// A prepared verification. From [`TreeVerification::plan`].
#[derive(Debug)]
pub struct TreePlan {
    calls: Calls,
    refused: Option<RefusedBackend>,
    /// Requests, and the nodes of each.
    rows: [usize; 2],
}

#[derive(Debug)]
enum Calls {
    One(Box<Plan>),
    Two(Box<TwoPlans>),
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
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for a tree larger than the tensors, and for tensors with another
    /// number of nodes than the query; [`DRAFT_INPUTS`](crate::rules::DRAFT_INPUTS) for rotary parts where the cache has
    /// no latents, and for none where it has; as for
    /// [`FusedInferAttention::plan`](ascend_attention::FusedInferAttention::plan) and [`MergeState::plan`]. With
    /// latents [`Error::NoBackend`] with the reasons where neither form has a call; errors of the device, such as
    /// [`OutOfMemory`](ascend_attention::Error::OutOfMemory).
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
        if tensors.query_rope.is_some() {
            self.shape.check_latent()?;
        }
        let rows = [requests, nodes];
        tensors.check_nodes(rows)?;
        let mask = tree_mask(trees, requests, nodes)?;
        let mask = stream.device().masks().custom_matrix(&mask)?;
        let is_latent = tensors.query_rope.is_some();
        let two = |mask| {
            let calls = self.two_calls(mask, is_latent);
            Ok(Calls::Two(Box::new(TwoPlans::plan(
                calls, cached, tensors,
            )?)))
        };
        if !is_latent {
            return Ok(TreePlan {
                calls: two(mask)?,
                refused: None,
                rows,
            });
        }
        let refused = |name, why| RefusedBackend::new(name, why, stream.device());
        tentatively(|| {
            let one = match self.plan_one(trees, cached, tensors, &mask) {
                Ok(plan) => {
                    return Ok(TreePlan {
                        calls: Calls::One(Box::new(plan)),
                        refused: None,
                        rows,
                    });
                }
                Err(why) if has_no_such_call(&why) => refused("tree_mask", why),
                Err(why) => return Err(why),
            };
            match two(mask) {
                Ok(calls) => Ok(TreePlan {
                    calls,
                    refused: Some(one),
                    rows,
                }),
                Err(why) if has_no_such_call(&why) => {
                    Err(no_backend(&[one, refused("context_and_tree", why)], None))
                }
                Err(why) => Err(why),
            }
        })
    }

    /// The single call of latent attention: all nodes over the cache, which has them too, with a mask of the trees.
    pub(crate) fn one_call(&self, mask: impl Into<AnyTensor>) -> FusedInferAttention {
        self.shape.call(Layout::Bnsd).mask(Mask::tree_mask(mask))
    }

    /// The two calls, with a mask of the trees.
    pub(crate) fn two_calls(&self, mask: impl Into<AnyTensor>, is_latent: bool) -> TwoCalls {
        let mask = match is_latent {
            false => Mask::all_mask(mask),
            // The absorbed form takes full masks in mode 0 alone.
            true => Mask::default_mask(mask, Mask::ALL_TOKENS, Mask::ALL_TOKENS),
        };
        TwoCalls::new(self.shape, mask)
    }

    fn plan_one<T: Element>(
        &self,
        trees: &[DraftTree],
        cached: &PerRequest,
        tensors: &TreeTensors<'_, T>,
        mask: &AnyTensor,
    ) -> Result<Plan> {
        let rows = trees.iter().map(DraftTree::nodes);
        let keys = rows.clone().zip(cached.lengths());
        let keys = keys.map(|(nodes, cached)| cached + nodes);
        let (q, kv) = (
            PerRequest::new(rows.collect())?,
            PerRequest::new(keys.collect())?,
        );
        let lengths = CallLengths::Batched {
            q: Some(&q),
            kv: &kv,
        };
        let call = lengths.apply(self.one_call(mask.clone()));
        Ok(call.plan(tensors.over_cache())?)
    }
}

/// Whether an error means that the operator has no call of this form on the device's product and release, and another
/// may have one, so that another form may serve. A device that fails, or has no memory left, is no reason for another
/// form, nor is a call that no target takes.
pub(crate) fn has_no_such_call(why: &Error) -> bool {
    use ascend_attention::Error::{MissingOperator, OperatorVersion};
    match why {
        Error::Violation(violation) => violation.taken_by.is_some(),
        Error::Attention(why) => matches!(why, OperatorVersion { .. } | MissingOperator { .. }),
        Error::NoBackend { .. } => false,
    }
}

/// Refuses another number of trees or lengths than the query has requests.
fn same_batch(trees: &[DraftTree], cached: &PerRequest, requests: usize) -> Result<(), Violation> {
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
    fn new(shape: AttentionShape, mask: Mask) -> Self {
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
struct TwoPlans {
    nodes: Plan,
    cached: Option<(Plan, RowMergePlan)>,
}

impl TwoPlans {
    fn plan<T: Element>(
        calls: TwoCalls,
        cached: &PerRequest,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<Self> {
        let TwoCalls { nodes, context } = calls;
        if cached.lengths().iter().all(|len| *len == 0) {
            return Ok(Self {
                nodes: nodes.softmax_lse(false).plan(tensors.of_nodes())?,
                cached: None,
            });
        }
        let nodes = nodes.plan(tensors.of_nodes())?;
        let lengths = TwoCalls::context_lengths(cached);
        let context = lengths.apply(context).plan(tensors.over_cache())?;
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
    fn launch<T: Element>(
        &self,
        stream: &Stream,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<Tensor<T>> {
        let own: Output<T> = self.nodes.launch(stream, tensors.of_nodes())?;
        let Some((plan, merge)) = &self.cached else {
            return Ok(own.attention);
        };
        let cached = plan.launch(stream, tensors.over_cache())?;
        let parts = [Part::of(&own)?, Part::of(&cached)?];
        Ok(merge.launch(stream, &parts)?.attention)
    }
}

impl TreePlan {
    /// Whether a launch is one call over the cache, with a mask of the trees. If not, a launch is a call over the
    /// nodes and, where a request has cached tokens, another over these.
    pub fn is_one_call(&self) -> bool {
        matches!(self.calls, Calls::One(_))
    }

    /// With latents, why a launch is not one call, and which product and release would take that call.
    pub fn refused(&self) -> Option<&RefusedBackend> {
        self.refused.as_ref()
    }

    /// Queues the verification of a layer: the attention of the nodes, `[B, N, nodes, D]`; with latents
    /// `[B, N, nodes, 512]`, to be projected.
    ///
    /// # Errors
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) and [`DRAFT_INPUTS`](crate::rules::DRAFT_INPUTS) as for
    /// [`TreeVerification::plan`]; as for [`Plan::launch`] and [`RowMergePlan::launch`].
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        tensors: &TreeTensors<'_, T>,
    ) -> Result<Tensor<T>> {
        tensors.check_nodes(self.rows)?;
        match &self.calls {
            Calls::One(plan) => Ok(plan.launch(stream, tensors.over_cache())?.attention),
            Calls::Two(calls) => calls.launch(stream, tensors),
        }
    }
}
