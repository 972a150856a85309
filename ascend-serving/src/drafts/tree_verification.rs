//! Verifying drafted trees: one call over the cached tokens and one over the tree, merged, or one call with a tree
//! mask.

use std::borrow::Borrow;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::case::tentatively;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::merge::MergeState;
use ascend_attention::spec::Layout;
use ascend_attention::{AnyTensor, Device, Element, FusedInferAttention, Mask, Tensor, Violation};

use crate::backends::{AttentionShape, RefusedBackend, no_backend};
use crate::error::{Error, Result};
use crate::kv::{CacheShape, LayerCache, PagedKvCache};
use crate::rules;

use super::DraftTree;
use super::tree_request::TreeForm;

/// Verifies a drafted tree for each request. Every node sees the cached tokens of its request, its ancestors and
/// itself.
///
/// Packed calls take no mask but the operator's causal one, and a mask over all keys would be as large as the context.
/// So two calls are merged by their log-sum-exps: one of all nodes over the cached tokens, which all of them see, and
/// one over the nodes alone with a mask `[B, nodes, nodes]`. Tensors are BNSD, whose log-sum-exps are in the order of
/// the output's rows.
///
/// Latent attention ([`CacheShape::latent`](crate::kv::CacheShape::latent)) is verified with absorbed queries, and by
/// a single call where the device's product and release have a mask for trees, sparse mode 9, which CANN takes only
/// with rotary parts:
///
/// | heads | target | calls |
/// |---|---|---|
/// | grouped queries | all | one over the cached tokens, one over the nodes, merged |
/// | latent | Atlas A2 and A3 from CANN 9.1 on | one over the cache, which has the nodes too |
/// | latent | Atlas A2 and A3 with CANN 8.5 and 9.0, Ascend 950 | cached tokens and nodes apart, merged |
/// | latent | CANN 8.1 | none: refused |
///
/// Over latents a tree has at most 16 nodes, padding included: absorbed attention takes no more query rows of a
/// request.
///
/// Chains need none of this: they are causal, and any step verifies them
/// ([`BatchRequest::drafts`](crate::BatchRequest::drafts)).
///
/// Source: aclnnFusedInferAttentionScoreV3, multi-head latent attention and sparse mode 9.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TreeVerification {
    /// The heads. [`AttentionShape::latent`] for latent attention: one key head, and the scale of the whole head.
    pub shape: AttentionShape,
}

/// Heads and elements of the tensors of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeRows {
    pub(crate) query: [usize; 2],
    /// The rotary parts of queries, over latents.
    pub(crate) query_rope: Option<[usize; 2]>,
    pub(crate) key: [usize; 2],
    pub(crate) value: [usize; 2],
    pub(crate) output: [usize; 2],
}

/// The tensors of one layer, and its cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeTensors<'a, T: Element> {
    /// Queries of the nodes, `[B, N, nodes, D]`; with latents `[B, N, nodes, 512]`.
    pub(crate) query: &'a Tensor<T>,
    /// Keys of the nodes, `[B, Nkv, nodes, D]`; with latents the latents, `[B, 1, nodes, 512]`.
    pub(crate) key: &'a Tensor<T>,
    /// Values of the nodes; with latents their rotary keys, `[B, 1, nodes, 64]`.
    pub(crate) value: &'a Tensor<T>,
    /// The rotary parts of absorbed queries, `[B, N, nodes, 64]`; only over a cache of latents.
    pub(crate) query_rope: Option<&'a Tensor<T>>,
    pub(crate) cache: &'a LayerCache<T>,
    /// Blocks of the cached tokens, and with latents of the nodes.
    pub(crate) block_table: &'a BlockTable,
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
        self.cache.inputs(self.query, self.query_rope).paged(self.block_table)
    }
}

impl TreeVerification {
    /// A verification by attention of these heads.
    pub const fn new(shape: AttentionShape) -> Self {
        Self { shape }
    }

    /// Refuses a cache of other heads, and a quantised one.
    pub(crate) fn check_cache<T: Element>(&self, cache: &PagedKvCache<T>) -> Result<()> {
        self.shape.check_cache(&cache.shape())?;
        if cache.is_quantised() {
            return Err(Violation::new(
                &rules::CACHE_QUANTISED,
                "a tree over a quantised cache",
                "a cache of the query's type",
                "verify a chain of drafts instead, in a step whose requests have `BatchRequest::drafts`, or make the \
                 cache by `PagedKvCache::new`",
            )
            .into());
        }
        Ok(())
    }

    /// The rows of a node in tensors `[requests, heads, nodes, elements]`.
    pub(crate) fn node_rows(&self, cache: CacheShape) -> NodeRows {
        let heads = self.shape.heads;
        // Absorbed queries are as wide as latents, and so is their attention.
        let [query, output] = match cache.is_latent() {
            true => [cache.key_dim; 2],
            false => [self.shape.head_dim, cache.value_dim],
        };
        NodeRows {
            query: [heads, query],
            query_rope: cache.is_latent().then_some([heads, cache.value_dim]),
            key: [cache.kv_heads, cache.key_dim],
            value: [cache.kv_heads, cache.value_dim],
            output: [heads, output],
        }
    }

    /// The single call of latent attention: all nodes over the cache, which has them too, with a mask of the trees.
    pub(crate) fn one_call(&self, mask: impl Into<AnyTensor>) -> FusedInferAttention {
        self.shape.call(Layout::Bnsd).mask(Mask::tree_mask(mask))
    }

    /// The two calls, with a mask of the trees.
    pub(crate) fn two_calls(&self, mask: impl Into<AnyTensor>, is_latent: bool) -> NodeAndContextCalls {
        let mask = match is_latent {
            false => Mask::all_mask(mask),
            // The absorbed form takes full masks in mode 0 alone.
            true => Mask::default_mask(mask, Mask::ALL_TOKENS, Mask::ALL_TOKENS),
        };
        NodeAndContextCalls::new(self.shape, mask)
    }
}

/// Calls `make` with the form of fewest calls of the operator; where the product or the release has no such call, with
/// the next one. Returns what it made, and why the form of fewer calls was refused.
///
/// # Errors
/// Those of `make`; [`Error::NoBackend`] with the reasons where no form has a call.
pub(crate) fn with_fewest_calls<R>(
    device: &Device,
    is_latent: bool,
    make: impl Fn(TreeForm) -> Result<R>,
) -> Result<(R, Option<RefusedBackend>)> {
    if !is_latent {
        return Ok((make(TreeForm::TwoCalls)?, None));
    }
    let refused = |name, why| RefusedBackend::new(name, why, device);
    tentatively(|| {
        let one = match make(TreeForm::OneLatentCall) {
            Ok(made) => return Ok((made, None)),
            Err(why) if has_no_such_call(&why) => refused("tree_mask", why),
            Err(why) => return Err(why),
        };
        match make(TreeForm::TwoLatentCalls) {
            Ok(made) => Ok((made, Some(one))),
            Err(why) if has_no_such_call(&why) => Err(no_backend(&[one, refused("context_and_tree", why)], None)),
            Err(why) => Err(why),
        }
    })
}

/// Whether an error means that the operator has no call of this form on the device's product and release, and another
/// may have one, so that another form may serve. A device that fails, or has no memory left, is no reason for another
/// form, nor is a call that no target takes.
fn has_no_such_call(why: &Error) -> bool {
    use ascend_attention::Error::{MissingOperator, OperatorVersion};
    match why {
        Error::Violation(violation) => violation.taken_by.is_some(),
        Error::Attention(why) => matches!(why, OperatorVersion { .. } | MissingOperator { .. }),
        Error::NoBackend { .. } => false,
    }
}

/// The mask of the trees, `[requests, nodes, nodes]`, 1 hides. A row after the nodes of its tree sees itself, so that
/// no row is without keys. No tree has more than `nodes` nodes.
pub(crate) fn tree_mask(trees: &[impl Borrow<DraftTree>], requests: usize, nodes: usize) -> Result<HostMask> {
    let sees = |request: usize, i, j| i == j || (trees.get(request)).is_some_and(|tree| tree.borrow().sees(i, j));
    Ok(HostMask::stack_from_fn(requests, nodes, nodes, MaskForm::INT8, sees)?)
}

/// The calls of a verification in BNSD: the nodes among themselves, and all of them over the cached tokens, which
/// every node sees. Both return log-sum-exps, by which they are merged.
#[derive(Clone, Debug)]
pub(crate) struct NodeAndContextCalls {
    pub(crate) nodes: FusedInferAttention,
    pub(crate) context: FusedInferAttention,
}

impl NodeAndContextCalls {
    /// The two calls, with a mask of the trees.
    fn new(shape: AttentionShape, mask: Mask) -> Self {
        let call = shape.call(Layout::Bnsd).softmax_lse(true);
        Self { nodes: call.clone().mask(mask), context: call }
    }

    /// The merge of both outputs.
    pub(crate) fn merge() -> MergeState {
        MergeState::new(Layout::Bnsd)
    }
}
