//! What a step verifies: drafted trees behind the tokens of their requests.

use std::sync::Arc;

use ascend_attention::Violation;
use ascend_attention::attention::{CallLengths, PerRequest};

use crate::error::Result;
use crate::kv::{CacheEntry, Sequence, StepProgress, StepTokens, uncopied};
use crate::rules;

use super::DraftTree;

/// A request of a step that verifies drafted trees.
#[derive(Clone, Copy, Debug)]
pub struct TreeRequest<'a> {
    /// The request's sequence, none of whose tokens were given back, since every node sees those before the tree. Its
    /// last tokens may be the nodes; over a cache of latents they are.
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
    /// The same over a cache of latents, which has the nodes behind the cached tokens.
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

    /// The keys of each request that the call over the cache reads. Over latents all calls of a captured size have room
    /// for the nodes too.
    pub(crate) fn keys(self, lengths: &TreeLengths) -> &PerRequest {
        match self.is_latent() {
            true => &lengths.with_nodes,
            false => &lengths.cached,
        }
    }

    /// The lengths of the call over the cache.
    pub(crate) fn lengths(self, lengths: &TreeLengths) -> CallLengths<'_> {
        match self.is_one_call() {
            true => CallLengths::Batched {
                q: Some(&lengths.nodes),
                kv: &lengths.with_nodes,
            },
            false => CallLengths::Batched {
                q: None,
                kv: &lengths.cached,
            },
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
    /// The sum of both.
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

impl TreeRequest<'_> {
    /// Refuses a sequence that does not have the tokens which the request says, in this cache.
    fn check(&self, at: usize, cache: &CacheEntry, is_latent: bool) -> Result<(), Violation> {
        let Self {
            sequence,
            cached,
            tree,
        } = *self;
        cache.pool().check_same(
            sequence.pool(),
            format_args!("a sequence for request {at}"),
            "bring sequences of the pool of the verified cache",
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
        if let Some(block) = sequence.uncopied_in(Some(cache)) {
            return Err(uncopied(format_args!("block {block} of request {at}")));
        }
        let (held, nodes) = (sequence.len(), tree.nodes());
        let with_nodes = cached.saturating_add(nodes);
        if held == with_nodes || held == cached && !is_latent {
            return Ok(());
        }
        let given = format_args!("a sequence of {held} tokens for request {at}, {cached} before the tree of {nodes} nodes")
            .to_string();
        let rule = &rules::SEQUENCE_LENGTH;
        Err(match is_latent {
            true => Violation::new(
                rule,
                given,
                format_args!("{with_nodes} tokens"),
                "grow the sequence by the nodes before the step begins, and write their latents to each layer before it is \
                 computed",
            ),
            false => Violation::new(
                rule,
                given,
                format_args!("{cached} tokens, or {with_nodes} with the nodes"),
                "say in `cached` how many tokens come before the tree, and truncate drafts of earlier steps that were not \
                 accepted",
            ),
        })
    }
}

/// Begins to read the tokens before the trees, which have to be computed: until all layers are queued, no other step of
/// their sequences begins. The step writes nothing to the cache, and of the nodes nothing is asked: they may be written
/// after the step has begun, and the same tree may be verified again.
///
/// # Errors
/// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY), [`BLOCK_POOL`](crate::rules::BLOCK_POOL),
/// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW), [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED),
/// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH); as for [`StepProgress::begin`].
pub(crate) fn begin_reading(
    requests: &[TreeRequest<'_>],
    cache: &Arc<CacheEntry>,
    is_latent: bool,
) -> Result<StepProgress, Violation> {
    if requests.is_empty() {
        return Err(Violation::new(
            &rules::BATCH_EMPTY,
            "0 requests",
            "1 or more",
            "skip the step",
        ));
    }
    for (at, request) in requests.iter().enumerate() {
        request.check(at, cache, is_latent)?;
    }
    let tokens = requests.iter().map(|request| StepTokens {
        stamp: request.sequence.stamp(),
        cached: request.cached,
        len: request.cached,
        recompute: false,
    });
    StepProgress::begin(cache.pool(), Some(cache), tokens.enumerate())
}
