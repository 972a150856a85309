//! A beam search of several steps drafts a tree: each branch is a fork of the request's sequence, of which a step
//! decodes one token each, and what was selected is verified as one tree.

use crate::harness;
use crate::tokens::{DIM, dense, packed, row};
use approx::abs_diff_eq;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionShape, Backend, Backends, BatchRequest, DraftTree, StatePolicy, TreeRequest, TreeVerification,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

use super::LAYERS;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, DIM)
}

fn attention(stream: &Stream) -> Attention<bf16> {
    let of = CacheShape::new(LAYERS, shape().kv_heads, DIM);
    let cache = PagedKvCache::new(stream.device(), 24, 128, of, PadPolicy::SkipNegative).unwrap();
    Attention::new(shape(), cache, Backends::none().with(Backend::Fused))
}

/// Compares the heads of a token, the last of `names`, with dense attention over all of them.
fn compare(got: &[bf16], names: &[u64], layer: usize) -> Result<(), TestCaseError> {
    let want = dense(names, layer, shape(), |_| true);
    prop_assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        prop_assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2), "{names:?}: {got}, expected {want}");
    }
    Ok(())
}

/// A token that the drafter proposes.
struct Candidate {
    name: u64,
    /// The candidate that it follows; none follows the last certain token.
    parent: Option<usize>,
    /// The logarithm of the probability of the tokens up to it, which falls from parent to child.
    score: f64,
}

/// A branch that goes on: a fork with the tokens up to a candidate, all of which are computed.
struct Branch {
    sequence: Sequence,
    names: Vec<u64>,
    candidate: Option<usize>,
    /// What the last layer computed of its last token.
    output: Vec<bf16>,
}

/// Computes the last `new` tokens of each branch in one step, which leaves the outputs of the last one.
fn step(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    branches: &mut [Branch],
    new: usize,
) -> Result<(), TestCaseError> {
    for branch in branches.iter_mut() {
        attention.grow(stream, &mut branch.sequence, new).unwrap();
    }
    let requests: Vec<_> = branches.iter().map(|branch| BatchRequest::of(&branch.sequence, new)).collect();
    let metadata = attention.metadata(&requests, StatePolicy::default()).unwrap();
    let names: Vec<u64> = branches.iter().flat_map(|of| of.names[of.names.len() - new..].to_vec()).collect();
    let mut step = attention.begin(stream, &metadata).unwrap();
    for layer in 0..LAYERS {
        let heads = [shape().heads, shape().kv_heads, shape().kv_heads];
        let [query, key, value] =
            [0, 1, 2].map(|what| packed::<bf16>(stream, &names, layer, what, heads[what as usize]));
        let output = step.forward(layer, (&query, &key, &value)).unwrap().download(stream).unwrap();
        let rows = output.chunks_exact(output.len() / names.len()).skip(new - 1).step_by(new);
        for (branch, row) in branches.iter_mut().zip(rows) {
            compare(row, &branch.names, layer)?;
            branch.output = row.to_vec();
        }
    }
    step.end().unwrap();
    Ok(())
}

impl Branch {
    /// Proposes `topk` tokens behind the branch.
    fn propose(&self, topk: usize, candidates: &mut Vec<Candidate>) {
        let before = self.candidate.map_or(0.0, |parent| candidates[parent].score);
        let names = (candidates.len()..).map(|at| 10_000 + at as u64).take(topk);
        let logit = |name| {
            let embedding = row(name, LAYERS, 0, shape().heads);
            let products = embedding.iter().zip(&self.output).map(|(a, b)| a.to_f64() * b.to_f64());
            (name, products.sum::<f64>())
        };
        let logits: Vec<(u64, f64)> = names.map(logit).collect();
        let sum: f64 = logits.iter().map(|(_, logit)| logit.exp()).sum();
        candidates.extend(logits.into_iter().map(|(name, logit)| Candidate {
            name,
            parent: self.candidate,
            score: before + logit - sum.ln(),
        }));
    }
}

/// The best candidates from `first` on, at most `count`, ascending. Of equal ones those in front, so that parents come
/// with their children.
fn best(candidates: &[Candidate], first: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (first..candidates.len()).collect();
    order.sort_by(|a, b| candidates[*b].score.total_cmp(&candidates[*a].score).then(a.cmp(b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

fn check(before: usize, (topk, depth): (usize, usize), drafts: usize) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let mut attention = attention(&stream);
    let context: Vec<u64> = (0..before as u64).collect();
    let (sequence, output) = (attention.sequence(), Vec::new());
    let mut request = [Branch { sequence, names: context.clone(), candidate: None, output }];
    step(&stream, &mut attention, &mut request, before)?;
    let [request] = request;

    // The last certain token is the root of the tree.
    let root = [&context[..], &[5_000]].concat();
    let mut branches =
        vec![Branch { sequence: request.sequence.fork(), names: root.clone(), candidate: None, output: Vec::new() }];
    let (mut candidates, mut parents) = (Vec::new(), Vec::new());
    for at in 0..depth {
        step(&stream, &mut attention, &mut branches, 1)?;
        let first = candidates.len();
        for branch in &branches {
            parents.extend(branch.candidate);
            branch.propose(topk, &mut candidates);
        }
        if at + 1 == depth {
            break;
        }
        let fork = |candidate: usize| {
            let Candidate { name, parent, .. } = candidates[candidate];
            let from = branches.iter().find(|branch| branch.candidate == parent).unwrap();
            let names = [&from.names[..], &[name]].concat();
            Branch { sequence: from.sequence.fork(), names, candidate: Some(candidate), output: Vec::new() }
        };
        branches = best(&candidates, first, topk).into_iter().map(fork).collect();
    }
    drop(branches);
    prop_assert_eq!(attention.cache().pool().held_blocks(), before.div_ceil(128), "every branch was given back");

    // The nodes in the order of the candidates, the root first, and the tokens up to each by the candidates' own links.
    let selected = best(&candidates, 0, drafts);
    let tree = DraftTree::from_candidates(&selected, &parents, topk).unwrap();
    let up_to = |candidate: usize| {
        let mut names = vec![candidates[candidate].name];
        let mut at = candidates[candidate].parent;
        while let Some(parent) = at {
            names.push(candidates[parent].name);
            at = candidates[parent].parent;
        }
        names.extend(root.iter().rev());
        names.reverse();
        names
    };
    let paths: Vec<Vec<u64>> = std::iter::once(root.clone()).chain(selected.iter().map(|at| up_to(*at))).collect();
    prop_assert_eq!(tree.nodes(), paths.len());

    let verification = TreeVerification::new(shape());
    let requests = [TreeRequest { sequence: &request.sequence, cached: before, tree: &tree }];
    let mut step = verification.begin(&stream, attention.cache(), &requests).unwrap();
    for layer in 0..LAYERS {
        // `[B, N, nodes, D]`.
        let [query, key, value]: [Tensor<bf16>; 3] = [(0, shape().heads), (1, shape().kv_heads), (2, shape().kv_heads)]
            .map(|(what, heads)| {
                let rows: Vec<_> = paths.iter().map(|path| row(*path.last().unwrap(), layer, what, heads)).collect();
                let head = |head: usize| rows.iter().flat_map(move |row| row[head * DIM..][..DIM].to_vec());
                stream.upload(&(0..heads).flat_map(head).collect::<Vec<_>>(), [1, heads, paths.len(), DIM]).unwrap()
            });
        let output = step.forward(layer, (&query, &key, &value)).unwrap().download(&stream).unwrap();
        for (node, path) in paths.iter().enumerate() {
            let heads = (0..shape().heads).flat_map(|head| &output[(head * paths.len() + node) * DIM..][..DIM]);
            compare(&heads.copied().collect::<Vec<_>>(), path, layer)?;
        }
    }
    step.end().unwrap();
    Ok(())
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(12) })]

    #[test]
    fn a_beam_of_several_steps_is_verified_as_a_tree(
        before in 1usize..300, topk in 2usize..5, depth in 1usize..5, drafts in 1usize..20,
    ) {
        check(before, (topk, depth), drafts)?;
    }
}
