//! Drafted tokens: their trees and the walk that accepts some of them, masks for other kernels, and their verification.

mod custom_mask;
mod node_writes;
mod sampled_acceptance;
mod tree_graphs;
mod tree_request;
mod tree_step;
mod tree_verification;

use ascend_attention::Violation;
use ascend_attention::spec::geometry::{TokenTree, TreeError};

use crate::rules;

pub use custom_mask::CustomMask;
pub use sampled_acceptance::{DraftSource, SampledDrafts};
pub use tree_graphs::TreeGraphs;
pub use tree_request::TreeRequest;
pub use tree_step::TreeStep;
pub use tree_verification::TreeVerification;

/// Drafted tokens of one request. Node 0 is the last token that is certain; every other node is a draft that follows
/// its parent. A chain is a tree in which each node follows the one before.
///
/// Nodes are stored parents first, and siblings in the order in which they are tried. The contract defines what the
/// nodes see ([`TokenTree`]); this type adds the links that a walk needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftTree {
    tree: TokenTree,
    next_token: Vec<Option<usize>>,
    next_sibling: Vec<Option<usize>>,
}

impl DraftTree {
    /// A tree by the parent of each node, as [`TokenTree::new`] takes it: the first is the root, whose parent is -1;
    /// every other node's parent comes before it.
    ///
    /// # Errors
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) without a node, for a first node that is no root, another one that
    /// is, a parent that does not come before its child, and for more nodes than [`TokenTree::MAX_LEN`].
    pub fn from_parents(parents: &[i64]) -> Result<Self, Violation> {
        let refused = |given: String, allowed: String, fix: &'static str| {
            Err(Violation::new(&rules::DRAFT_TREE, given, allowed, fix))
        };
        let numbering = "begin with -1 for the last certain token, and number the drafts so that parents come first";
        let wrong_parent = |node: usize, parent: i64| {
            let allowed = match node.checked_sub(1) {
                None => "-1, since node 0 is the last certain token".to_owned(),
                Some(last) => format!("an earlier node, from 0 to {last}"),
            };
            refused(format!("parent {parent} of node {node}"), allowed, numbering)
        };
        match TokenTree::new(parents) {
            Ok(tree) => match (1..tree.len()).find(|node| tree.parent(*node).is_none()) {
                None if tree.is_empty() => refused("no node".to_owned(), "1 node or more".to_owned(), numbering),
                None => Ok(Self::linked(tree)),
                Some(second_root) => wrong_parent(second_root, -1),
            },
            Err(TreeError::Parent { token, parent }) => wrong_parent(token, parent),
            // More than there may be.
            Err(_) => refused(
                format!("{} nodes", parents.len()),
                format!("at most {}", TokenTree::MAX_LEN),
                "draft fewer tokens",
            ),
        }
    }

    /// `drafts` drafts, each following the one before.
    ///
    /// # Errors
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) for more than [`TokenTree::MAX_LEN`].
    pub fn chain(drafts: usize) -> Result<Self, Violation> {
        // One node more than there may be is refused.
        let last = drafts.min(TokenTree::MAX_LEN) as i64;
        Self::from_parents(&(-1..last).collect::<Vec<i64>>())
    }

    fn linked(tree: TokenTree) -> Self {
        let nodes = tree.len();
        let mut next_token: Vec<Option<usize>> = vec![None; nodes];
        let mut next_sibling = vec![None; nodes];
        // From the last node to the first, so that each list of siblings begins with the first.
        for (node, next) in next_sibling.iter_mut().enumerate().rev() {
            if let Some(parent) = tree.parent(node) {
                *next = next_token[parent].replace(node);
            }
        }
        Self { tree, next_token, next_sibling }
    }

    /// The tree of a beam search that keeps `topk` candidates a step: candidate `k` of all steps (`selected`,
    /// ascending) was proposed as one of the `topk` children of the entry `k / topk - 1` of `parents`, or of the root
    /// for the first `topk`.
    ///
    /// Drafters of the EAGLE family return trees in this form: `parents` names, for each group of `topk` candidates
    /// after the first, the candidate that it follows.
    ///
    /// # Errors
    /// [`DRAFT_TREE`](crate::rules::DRAFT_TREE) if `topk` is 0, `selected` does not rise, or names a candidate whose
    /// parent is not selected, and for more nodes than [`TokenTree::MAX_LEN`].
    pub fn from_candidates(selected: &[usize], parents: &[usize], topk: usize) -> Result<Self, Violation> {
        let wrong = |given: String, allowed: String| {
            Violation::new(
                &rules::DRAFT_TREE,
                given,
                allowed,
                "select candidates whose parents are selected, in ascending order",
            )
        };
        if topk == 0 {
            return Err(Violation::new(
                &rules::DRAFT_TREE,
                "topk 0",
                "1 or more",
                "pass the number of candidates that the beam search kept in each step",
            ));
        }
        let mut parents_of = vec![-1];
        for (place, &candidate) in selected.iter().enumerate() {
            let known = &selected[..place];
            if let Some(before) = known.last().filter(|before| **before >= candidate) {
                return Err(wrong(
                    format!("candidate {candidate} after candidate {before}"),
                    "ascending candidates".to_owned(),
                ));
            }
            let Some(group) = (candidate / topk).checked_sub(1) else {
                parents_of.push(0);
                continue;
            };
            let Some(parent) = parents.get(group) else {
                return Err(wrong(
                    format!("candidate {candidate}, of group {group} after the root's"),
                    format!("candidates of the {} groups whose parents are given", parents.len()),
                ));
            };
            let Ok(parent) = known.binary_search(parent) else {
                return Err(wrong(
                    format!("candidate {candidate}, whose parent {parent} is not selected"),
                    "candidates whose parent is selected".to_owned(),
                ));
            };
            // Node 0 is the root.
            parents_of.push(parent as i64 + 1);
        }
        Self::from_parents(&parents_of)
    }

    /// The tree as the contract has it, which defines what each node sees.
    pub fn tree(&self) -> &TokenTree {
        &self.tree
    }

    /// Number of nodes: the drafts and the certain token.
    pub fn nodes(&self) -> usize {
        self.tree.len()
    }

    /// The parent of a node; none for the root and nodes that do not exist.
    pub fn parent(&self, node: usize) -> Option<usize> {
        self.tree.parent(node)
    }

    /// Whether each node follows the one before, so that causal attention verifies the tree.
    pub fn is_chain(&self) -> bool {
        (1..self.nodes()).all(|node| self.parent(node) == node.checked_sub(1))
    }

    /// Distance of a node from the root.
    pub fn depth(&self, node: usize) -> Option<usize> {
        self.tree.depth(node)
    }

    /// Distance of each node from the root: with the root's position added, the position at which it is embedded.
    pub fn depths(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes()).filter_map(|node| self.depth(node))
    }

    /// The first child of each node (`retrieve_next_token`).
    pub fn next_token(&self) -> &[Option<usize>] {
        &self.next_token
    }

    /// The next child of the same parent (`retrieve_next_sibling`).
    pub fn next_sibling(&self) -> &[Option<usize>] {
        &self.next_sibling
    }

    /// Whether node `i` sees node `j`: a node sees itself and its ancestors.
    pub fn sees(&self, i: usize, j: usize) -> bool {
        self.tree.continues(i, j)
    }

    /// Walks the tree along the model's predictions: `tokens[k]` is the token of node `k`, `predicted[k]` the token
    /// that the model predicts after node `k`. A draft is accepted if it is what the model predicts after its parent;
    /// of several such siblings the first is.
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) unless there is a token and a prediction for every node.
    pub fn accept_greedy<T: PartialEq + Copy>(
        &self,
        tokens: &[T],
        predicted: &[T],
    ) -> Result<AcceptedDrafts<T>, Violation> {
        let nodes = self.nodes();
        if tokens.len() != nodes || predicted.len() != nodes {
            return Err(Violation::new(
                &rules::LENGTHS_BATCH,
                format_args!("{} tokens, {} predictions", tokens.len(), predicted.len()),
                format_args!("{nodes} of each"),
                "give the root's token and prediction too",
            ));
        }
        let mut path = vec![0];
        let mut node = 0;
        loop {
            let wanted = predicted[node];
            let mut child = self.next_token[node];
            while let Some(draft) = child
                && tokens[draft] != wanted
            {
                child = self.next_sibling[draft];
            }
            let Some(accepted) = child else {
                return Ok(AcceptedDrafts { nodes: path, bonus: wanted });
            };
            path.push(accepted);
            node = accepted;
        }
    }
}

/// The result of [`DraftTree::accept_greedy`] or [`DraftTree::accept_sampled`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcceptedDrafts<T> {
    /// The accepted nodes, from the root on; the root is always accepted.
    pub nodes: Vec<usize>,
    /// The token after the last accepted node.
    pub bonus: T,
}

impl<T> AcceptedDrafts<T> {
    /// Number of accepted drafts.
    pub fn drafts(&self) -> usize {
        self.nodes.iter().skip(1).len()
    }

    /// The tokens to move so that the accepted nodes are contiguous again, where `cached` tokens come before the tree:
    /// from which position to which, in an order in which no move overwrites what a later one reads. A chain needs no
    /// moves. [`PagedKvCache::move_tokens`](crate::kv::PagedKvCache::move_tokens) moves them.
    pub fn moves(&self, cached: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let places = self.nodes.iter().copied().enumerate();
        let moved = places.filter(|(to, from)| to != from);
        moved.map(move |(to, from)| (cached.saturating_add(from), cached.saturating_add(to)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parents of a root and up to `most` drafts.
    pub(in crate::drafts) fn parents(most: usize) -> impl Strategy<Value = Vec<i64>> {
        prop::collection::vec(any::<usize>(), 0..=most).prop_map(|picks| {
            let drafts = picks.iter().enumerate();
            let drafts = drafts.map(|(before, pick)| (pick % (before + 1)) as i64);
            std::iter::once(-1).chain(drafts).collect()
        })
    }

    #[test]
    fn links_and_depths_of_a_tree() {
        // 0 - 1 - 3, 0 - 2 - 4, 2 - 5
        let tree = DraftTree::from_parents(&[-1, 0, 0, 1, 2, 2]).unwrap();
        assert!(tree.depths().eq([0, 1, 1, 2, 2, 2]));
        assert_eq!(tree.next_token(), [Some(1), Some(3), Some(4), None, None, None]);
        assert_eq!(tree.next_sibling(), [None, Some(2), None, None, Some(5), None]);
        assert!(!tree.is_chain() && DraftTree::chain(3).unwrap().is_chain());
        assert!(tree.sees(5, 2) && !tree.sees(5, 1) && !tree.sees(6, 0));
        for (parents, given) in [
            (&[-1, 2][..], "parent 2 of node 1"),
            (&[0, 0], "parent 0 of node 0"),
            (&[-1, 0, -1], "parent -1 of node 2"),
            (&[], "no node"),
        ] {
            let error = DraftTree::from_parents(parents).unwrap_err();
            assert_eq!(error.rule, &rules::DRAFT_TREE);
            assert!(error.given.starts_with(given), "{error}");
        }
        let error = DraftTree::chain(usize::MAX).unwrap_err();
        assert_eq!(error.rule, &rules::DRAFT_TREE);
    }

    #[test]
    fn candidates_become_nodes() {
        // Two steps of two: candidates 0, 1 of the root; 2, 3 follow candidate 1; 4, 5 follow 0.
        let tree = DraftTree::from_candidates(&[0, 1, 3, 4], &[1, 0], 2).unwrap();
        assert_eq!(tree, DraftTree::from_parents(&[-1, 0, 0, 2, 1]).unwrap());
        let rule = |selected: &[usize], parents: &[usize], topk| {
            DraftTree::from_candidates(selected, parents, topk).unwrap_err().rule
        };
        assert_eq!(rule(&[0, 3], &[1, 0], 2), &rules::DRAFT_TREE);
        assert_eq!(rule(&[1, 0], &[1, 0], 2), &rules::DRAFT_TREE);
        assert_eq!(rule(&[0], &[], 0), &rules::DRAFT_TREE);
        assert_eq!(rule(&[0, 9], &[], 2), &rules::DRAFT_TREE);
    }

    #[test]
    fn the_walk_takes_the_branch_that_the_model_predicts() {
        let tree = DraftTree::from_parents(&[-1, 0, 0, 1, 2, 2]).unwrap();
        let tokens = [10, 11, 12, 13, 14, 15];
        let accepted = tree.accept_greedy(&tokens, &[12, 0, 15, 0, 0, 99]).unwrap();
        assert_eq!(accepted.nodes, [0, 2, 5]);
        assert_eq!((accepted.bonus, accepted.drafts()), (99, 2));
        assert_eq!(accepted.moves(10).collect::<Vec<_>>(), [(12, 11), (15, 12)]);
        let none = tree.accept_greedy(&tokens, &[77; 6]).unwrap();
        assert_eq!((none.nodes, none.bonus), (vec![0], 77));
        let error = tree.accept_greedy(&tokens, &[77; 5]).unwrap_err();
        assert_eq!(error.rule, &rules::LENGTHS_BATCH);
    }

    proptest! {
        #[test]
        fn a_chain_is_the_tree_of_its_parents(drafts in 0usize..20) {
            let parents: Vec<i64> = (-1..drafts as i64).collect();
            prop_assert_eq!(DraftTree::chain(drafts), DraftTree::from_parents(&parents));
            prop_assert!(DraftTree::chain(drafts).unwrap().is_chain());
        }

        /// The accepted path is the longest on which every draft is what the model predicts after its parent,
        /// siblings having different tokens.
        #[test]
        fn the_walk_finds_the_path(parents in parents(12), predicted in prop::collection::vec(0usize..4, 13)) {
            let tree = DraftTree::from_parents(&parents).unwrap();
            let nodes = tree.nodes();
            // The n-th child of its parent has token n.
            let tokens: Vec<usize> = (0..nodes).map(|node| {
                (1..node).filter(|other| tree.parent(*other) == tree.parent(node)).count()
            }).collect();
            let predicted = &predicted[..nodes];
            let accepted = tree.accept_greedy(&tokens, predicted).unwrap();
            let right = |node: usize| tree.parent(node).is_none_or(|p| predicted[p] == tokens[node]);
            let whole = |node: usize| (0..nodes).filter(|j| tree.sees(node, *j)).all(right);
            let best = (0..nodes).filter(|n| whole(*n)).max_by_key(|n| tree.depth(*n)).unwrap();
            prop_assert_eq!(*accepted.nodes.last().unwrap(), best);
            prop_assert_eq!(accepted.bonus, predicted[best]);
            let mut before = None;
            for (from, to) in accepted.moves(0) {
                prop_assert!(from > to && before < Some(to));
                before = Some(to);
            }
        }
    }
}
