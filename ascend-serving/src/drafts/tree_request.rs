//! What a step verifies: drafted trees behind the tokens of their requests.

use std::sync::Arc;

use ascend_attention::Violation;
use ascend_attention::attention::{CallLengths, PerRequest};
use ascend_attention::spec::geometry::TokenTree;
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;

use crate::error::Result;
use crate::kv::{CacheEntry, Sequence, StepProgress, StepTokens, uncopied};
use crate::rules;

use super::DraftTree;

/// A request of a step that verifies drafted trees.
#[derive(Clone, Copy, Debug)]
pub struct TreeRequest<'a> {
    /// The request's sequence, none of whose tokens were given back, since every node sees those before the tree. Its
    /// last tokens may be the nodes; over a cache of latents they are. It is of a single group of layers, such as one
    /// of [`Sequence::new`].
    pub sequence: &'a Sequence,
    /// The tokens before the tree, which are computed: all of the sequence's, or all but the nodes.
    pub cached: usize,
    /// The tree, whose nodes follow the cached tokens.
    pub tree: &'a DraftTree,
}

/// How layers are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeForm {
    /// A call over the cached tokens and one over the nodes, merged.
    TwoCalls,
    /// Two calls over a cache of latents, which has the nodes after the cached tokens, merged.
    TwoLatentCalls,
    /// One call over a cache of latents, with a tree mask.
    OneLatentCall,
}

impl TreeForm {
    pub(crate) fn is_latent(self) -> bool {
        self != Self::TwoCalls
    }

    pub(crate) fn is_one_call(self) -> bool {
        self == Self::OneLatentCall
    }

    /// The keys of each request that count against the limits of a capture: over latents its nodes are among them.
    pub(crate) fn keys_in_limits(self, lengths: &TreeLengths) -> &PerRequest {
        match self.is_latent() {
            true => &lengths.with_nodes,
            false => &lengths.cached,
        }
    }

    /// The lengths of the call over the cache.
    pub(crate) fn lengths(self, lengths: &TreeLengths) -> CallLengths<'_> {
        match self.is_one_call() {
            true => CallLengths::Batched { q: Some(&lengths.nodes), kv: &lengths.with_nodes },
            false => CallLengths::Batched { q: None, kv: &lengths.cached },
        }
    }
}

/// Numbers of tokens of the requests of a step.
#[derive(Debug)]
pub(crate) struct TreeLengths {
    /// The tokens before the trees.
    pub(crate) cached: PerRequest,
    /// Nodes of the trees.
    pub(crate) nodes: PerRequest,
    /// The tokens before the trees and the nodes together; of a capture the most that they may be.
    pub(crate) with_nodes: PerRequest,
}

impl TreeLengths {
    pub(crate) fn new(cached: Vec<usize>, nodes: Vec<usize>) -> Result<Self> {
        let both = cached.iter().zip(&nodes);
        let both = both.map(|(cached, nodes)| cached.saturating_add(*nodes));
        Ok(Self {
            with_nodes: PerRequest::new(both.collect())?,
            cached: PerRequest::new(cached)?,
            nodes: PerRequest::new(nodes)?,
        })
    }
}

/// How to verify drafts of layers that see less than all cached tokens, or have sinks.
pub(super) const CHAIN_FIX: &str = "verify a chain of drafts (`BatchRequest::drafts`) in a step of these layers";

impl TreeRequest<'_> {
    /// Refuses a sequence that does not have the tokens which the request says, in this cache, or whose layers do not
    /// see them all.
    fn check(&self, index: usize, cache: &CacheEntry, is_latent: bool) -> Result<(), Violation> {
        let Self { sequence, cached, tree } = *self;
        sequence.check_groups(1).map_err(|mut why| {
            why.fix = "verify trees with sequences of the verified cache alone (`Sequence::new` of its pool)".into();
            why
        })?;
        cache.pool().check_same(
            sequence.pool(),
            format_args!("a sequence for request {index}"),
            "bring sequences of the pool of the verified cache",
        )?;
        if let Some(causality) = sequence.hiding() {
            return Err(Violation::new(
                &rules::STEP_CAUSALITY,
                format_args!("a tree of request {index}, whose layers see {causality:?}"),
                "layers that see all cached tokens, as every node does",
                CHAIN_FIX,
            ));
        }
        let given_back = sequence.given_back();
        if given_back > 0 {
            return Err(Violation::new(
                &rules::BLOCK_WINDOW,
                format_args!("request {index}, whose first {given_back} tokens were given back"),
                "sequences that hold all their tokens, since every node sees them",
                CHAIN_FIX,
            ));
        }
        if let Some(block) = sequence.uncopied_in(cache) {
            return Err(uncopied(format_args!("block {block} of request {index}")));
        }
        let (held, nodes) = (sequence.len(), tree.nodes());
        let with_nodes = cached.saturating_add(nodes);
        if held != with_nodes && (is_latent || held != cached) {
            let allowed = match is_latent {
                true => format!("{with_nodes} tokens"),
                false => format!("{cached} tokens, or {with_nodes} with the nodes"),
            };
            let fix = match (is_latent, held > with_nodes) {
                (true, false) => "grow the sequence by the nodes before the step begins",
                (true, true) => "truncate the sequence to the tokens before the tree, then grow it by the nodes",
                (false, _) => {
                    "say in `cached` how many tokens come before the tree, and truncate drafts of earlier steps that \
                     were not accepted"
                }
            };
            return Err(Violation::new(
                &rules::SEQUENCE_LENGTH,
                format_args!(
                    "a sequence of {held} tokens for request {index}, {cached} before the tree of {nodes} nodes"
                ),
                allowed,
                fix,
            ));
        }
        if is_latent && cache.computed_tokens(sequence.stamp()) > cached {
            return Err(Violation::new(
                &rules::SEQUENCE_COMPUTED,
                format_args!(
                    "a tree behind the first {cached} tokens of request {index}, behind which others are computed"
                ),
                "nodes that no step has computed, which the step writes to the cache",
                "say how many tokens the sequence had before it grew by the nodes; to verify nodes once more, truncate \
                 it to these and grow it by the nodes again",
            ));
        }
        let block_size = sequence.pool().block_size();
        let of_nodes = cached / block_size..held.div_ceil(block_size);
        let mut of_nodes = of_nodes.filter_map(|column| sequence.block(column));
        if held == with_nodes
            && let Some(block) = of_nodes.find(|block| block.is_shared())
        {
            return Err(Violation::new(
                &rules::TABLE_SHARED,
                format_args!(
                    "nodes of request {index} in block {}, which another sequence holds too, or which a step was \
                     writing when this one was forked",
                    block.id()
                ),
                "nodes in blocks of their sequence alone",
                "truncate the sequence to the tokens before the tree, and grow it by the nodes after it was forked, \
                 which copies the block",
            ));
        }
        check_nodes(nodes, is_latent)
    }
}

/// Refuses more nodes than a tree may have, and over latents than the operator's absorbed form takes query rows of a
/// request.
pub(crate) fn check_nodes(nodes: usize, is_latent: bool) -> Result<(), Violation> {
    let (most, of) = match is_latent {
        true => (FiaCall::MOST_DECODE_ROWS as usize, "the query rows of a request that attention over latents takes"),
        false => (TokenTree::MAX_LEN, "the nodes of a tree"),
    };
    if nodes <= most {
        return Ok(());
    }
    Err(Violation::new(
        &rules::DRAFT_TREE,
        format_args!("{nodes} nodes, padding included"),
        format_args!("at most {most}, {of}"),
        "draft fewer tokens, and fill trees up to the nodes of the largest one",
    ))
}

/// Begins to read the tokens before the trees, which have to be computed: until all layers are queued, no step that
/// writes tokens of their sequences begins. Elsewhere than over latents the verification writes nothing to the cache,
/// and of the nodes nothing is asked: they may be written after it has begun, and the same tree may be verified again.
/// Over latents the verification is a step that writes the nodes, and is not begun twice at a time.
///
/// # Errors
/// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY), [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS),
/// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY), [`BLOCK_POOL`](crate::rules::BLOCK_POOL),
/// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW),
/// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED),
/// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH), [`TABLE_SHARED`](crate::rules::TABLE_SHARED),
/// [`DRAFT_TREE`](crate::rules::DRAFT_TREE); as for [`StepProgress::begin`].
pub(crate) fn begin_trees(
    requests: &[TreeRequest<'_>],
    cache: &Arc<CacheEntry>,
    is_latent: bool,
) -> Result<StepProgress, Violation> {
    if requests.is_empty() {
        return Err(rules::no_requests());
    }
    for (index, request) in requests.iter().enumerate() {
        request.check(index, cache, is_latent)?;
    }
    let tokens = requests.iter().map(|request| StepTokens {
        stamp: request.sequence.stamp(),
        cached: request.cached,
        // Over latents the step computes the nodes too; elsewhere it only reads.
        len: match is_latent {
            true => request.cached.saturating_add(request.tree.nodes()),
            false => request.cached,
        },
        recompute: false,
    });
    StepProgress::begin(cache.pool(), Some(cache), tokens.enumerate()).map_err(|why| {
        if ![&rules::SEQUENCE_GAP, &rules::STEP_LAYERS_MISSING].contains(&why.rule) {
            return why;
        }
        let allowed = "as many tokens as come before the tree, all of them computed";
        let fix = "say in `cached` how many tokens come before the tree: its nodes, the root among them, are not \
                   counted, and are not marked as computed before they are accepted; tokens in front of the tree are \
                   computed by a step first";
        Violation::new(why.rule, why.given, allowed, fix)
    })
}
