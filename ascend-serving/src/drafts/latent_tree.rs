//! Verifying drafted trees of multi-head latent attention: by one call where the release has the tree mask.

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::case::tentatively;
use ascend_attention::spec::{Layout, Level};
use ascend_attention::{AnyTensor, Element, FusedInferAttention, Mask, Plan, Stream, Tensor};

use crate::backends::{AttentionShape, RefusedBackend, no_backend};
use crate::error::{Error, Result};
use crate::kv::LayerCache;

use super::DraftTree;
use super::tree_verification::{TwoCalls, TwoPlans, check_nodes, same_batch, tree_mask};

/// Verifies a drafted tree for each request over a cache of latents and rotary parts
/// ([`CacheShape::latent`](crate::kv::CacheShape::latent)), with absorbed queries. Every node sees the cached tokens
/// of its request, its ancestors and itself.
///
/// | target | calls |
/// |---|---|
/// | Atlas A2 and A3 with CANN 9.1 | one over the cache, sparse mode 9, with the trees' mask `[B, nodes, nodes]` |
/// | Atlas A2 and A3 with CANN 8.5 and 9.0, Ascend 950 | one over the cached tokens, one over the nodes, merged |
///
/// The call over the nodes alone has the same mask.
/// The contract of the device's target decides: the single call is used wherever the operator takes it. On CANN 8.1
/// absorbed queries of a tree have no call.
///
/// In the [`AttentionShape`], `kv_heads` is 1 and the scale is that of the whole head ([`AttentionShape::latent`]).
///
/// Source: aclnnFusedInferAttentionScoreV3, multi-head latent attention.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LatentTreeVerification {
    /// The heads.
    pub shape: AttentionShape,
}

/// The tensors of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LatentTreeTensors<'a, T: Element> {
    /// Absorbed queries of the nodes, `[B, N, nodes, 512]`.
    pub query: &'a Tensor<T>,
    /// Their rotary parts, `[B, N, nodes, 64]`.
    pub query_rope: &'a Tensor<T>,
    /// Latents of the nodes, `[B, 1, nodes, 512]`.
    pub latent: &'a Tensor<T>,
    /// Rotary keys of the nodes, `[B, 1, nodes, 64]`.
    pub key_rope: &'a Tensor<T>,
    /// The layer's cache, which has the nodes after the cached tokens too.
    pub cache: &'a LayerCache<T>,
    /// Blocks of the cached tokens and of the nodes.
    pub block_table: &'a BlockTable,
}

/// A prepared verification. From [`LatentTreeVerification::plan`].
#[derive(Debug)]
pub struct LatentTreePlan {
    calls: Calls,
    refused: Option<RefusedBackend>,
}

#[derive(Debug)]
enum Calls {
    One(Box<Plan>),
    Two(Box<TwoPlans>),
}

impl LatentTreeVerification {
    /// A verification by attention of these heads.
    pub const fn new(shape: AttentionShape) -> Self {
        Self { shape }
    }

    /// Prepares the verification of one tree for each request, after `cached` tokens each. Smaller trees are padded
    /// to the nodes of the tensors; the rows after a tree mean nothing. One plan serves all layers of a step.
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for another number of trees or lengths
    /// than requests, [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for a tree larger than the tensors, and for tensors
    /// with another number of nodes than the query; [`Error::NoBackend`] with the reasons where neither form has a
    /// call; errors of the device, such as [`OutOfMemory`](ascend_attention::Error::OutOfMemory).
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        trees: &[DraftTree],
        cached: &PerRequest,
        tensors: &LatentTreeTensors<'_, T>,
    ) -> Result<LatentTreePlan> {
        let &[requests, _, nodes, _] = tensors.query.shape() else {
            let given = tensors.query.desc();
            return Err(Error::invalid("query", given, "[B, N, nodes, 512]")
                .fix("reshape the query, and fill trees up to one number of nodes"));
        };
        same_batch(trees, cached, requests)?;
        self.shape.check()?;
        let LatentTreeTensors {
            query_rope,
            latent,
            key_rope,
            ..
        } = *tensors;
        let named = [
            ("query_rope", query_rope),
            ("latent", latent),
            ("key_rope", key_rope),
        ];
        check_nodes([requests, nodes], named)?;
        let mask = tree_mask(trees, requests, nodes)?;
        let mask = stream.device().masks().custom_matrix(&mask)?;
        tentatively(|| self.planned(stream, trees, cached, tensors, mask))
    }

    fn planned<T: Element>(
        &self,
        stream: &Stream,
        trees: &[DraftTree],
        cached: &PerRequest,
        tensors: &LatentTreeTensors<'_, T>,
        mask: AnyTensor,
    ) -> Result<LatentTreePlan> {
        let device = stream.device();
        let refused = |name, why| RefusedBackend::new(name, why, device);
        let one = match self.plan_one(trees, cached, tensors, &mask) {
            Ok(plan) => {
                return Ok(LatentTreePlan {
                    calls: Calls::One(Box::new(plan)),
                    refused: None,
                });
            }
            Err(why) if has_no_such_call(&why) => refused("tree_mask", why),
            Err(why) => return Err(why),
        };
        let inputs = [&latent_nodes(tensors), &latent_paged(tensors)];
        match TwoPlans::plan::<T>(self.two_calls(mask), cached, inputs) {
            Ok(calls) => Ok(LatentTreePlan {
                calls: Calls::Two(Box::new(calls)),
                refused: Some(one),
            }),
            Err(why) if has_no_such_call(&why) => {
                Err(no_backend(&[one, refused("context_and_tree", why)], None))
            }
            Err(why) => Err(why),
        }
    }

    /// The single call: all nodes over the cache, which has them too, with a mask of the trees.
    pub(crate) fn one_call(&self, mask: impl Into<AnyTensor>) -> FusedInferAttention {
        self.shape.call(Layout::Bnsd).mask(Mask::tree_mask(mask))
    }

    /// The two calls, with a mask of the trees.
    pub(crate) fn two_calls(&self, mask: impl Into<AnyTensor>) -> TwoCalls {
        // The absorbed form takes full masks in mode 0 alone.
        let mask = Mask::default_mask(mask, Mask::ALL_TOKENS, Mask::ALL_TOKENS);
        TwoCalls::new(self.shape, mask)
    }

    fn plan_one<T: Element>(
        &self,
        trees: &[DraftTree],
        cached: &PerRequest,
        tensors: &LatentTreeTensors<'_, T>,
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
        Ok(call.plan(latent_paged(tensors))?)
    }
}

/// Whether an error means that the operator has no call of this form on the device's product and release, so that
/// another form may serve. A device that fails, or has no memory left, is no reason for another form.
pub(crate) fn has_no_such_call(why: &Error) -> bool {
    use ascend_attention::Error::{MissingOperator, OperatorVersion};
    match why {
        Error::Violation(violation) => violation.rule.level != Level::Library,
        Error::Attention(why) => matches!(why, OperatorVersion { .. } | MissingOperator { .. }),
        Error::NoBackend { .. } => false,
    }
}

/// The inputs of the call over the nodes alone: their latents are keys and values.
pub(crate) fn latent_nodes<'a, T: Element>(tensors: &LatentTreeTensors<'a, T>) -> Inputs<'a, T> {
    Inputs::new(tensors.query, tensors.latent, tensors.latent)
        .rope(tensors.query_rope, tensors.key_rope)
}

pub(crate) fn latent_paged<'a, T: Element>(tensors: &LatentTreeTensors<'a, T>) -> Inputs<'a, T> {
    let LayerCache { key, value } = tensors.cache;
    Inputs::new(tensors.query, key, key)
        .rope(tensors.query_rope, value)
        .paged(tensors.block_table)
}

impl LatentTreePlan {
    /// Whether a launch is one call of the operator.
    pub fn is_one_call(&self) -> bool {
        matches!(self.calls, Calls::One(_))
    }

    /// Why a launch is not one call, and which product and release would take that call; `None` if it is one.
    pub fn refused(&self) -> Option<&RefusedBackend> {
        self.refused.as_ref()
    }

    /// Queues the verification of a layer: the attention of the nodes, `[B, N, nodes, 512]`, to be projected.
    ///
    /// # Errors
    /// As for [`Plan::launch`] and [`RowMergePlan::launch`](ascend_attention::merge::RowMergePlan::launch).
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        tensors: &LatentTreeTensors<'_, T>,
    ) -> Result<Tensor<T>> {
        match &self.calls {
            Calls::One(plan) => Ok(plan.launch(stream, latent_paged(tensors))?.attention),
            Calls::Two(calls) => {
                calls.launch(stream, &latent_nodes(tensors), &latent_paged(tensors))
            }
        }
    }
}
