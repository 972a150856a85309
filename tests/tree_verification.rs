//! Every node of a drafted tree gets attention over its request's cached tokens, its ancestors and itself.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use ascend_attention::kv::{CacheShape, PadPolicy, PageTable, PagedKvCache, Rule, Sequence};
use ascend_attention::serving::{
    AttentionShape, DraftTree, PerRequest, TreeTensors, TreeVerification,
};
use ascend_attention::{Error, Tensor, f16};
use harness::reference::{Half, Logical, row};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const DIM: usize = 64;

#[derive(Clone, Debug)]
struct Case {
    kv_heads: usize,
    group: usize,
    /// Cached tokens and parents of the nodes of each request.
    requests: Vec<(usize, Vec<i64>)>,
    /// Rows beyond the largest tree.
    spare: usize,
    seed: u64,
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let trees: Vec<DraftTree> = case
        .requests
        .iter()
        .map(|(_, parents)| DraftTree::from_parents(parents).unwrap())
        .collect();
    let nodes = trees.iter().map(DraftTree::nodes).max().unwrap() + case.spare;
    let shape = CacheShape::new(1, kv_heads, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 16, 128, shape, pad).unwrap();

    let rows = |salt: u64, heads: usize| -> Vec<Logical<f16>> {
        let requests = case.requests.iter().enumerate();
        let one = |(r, (cached, _)): (usize, &(usize, _))| {
            Logical::<f16>::random(
                case.seed * 31 + r as u64 * 3 + salt,
                [1, heads, cached + nodes, DIM],
            )
        };
        requests.map(one).collect()
    };
    let (queries, keys, values) = (rows(0, heads), rows(1, kv_heads), rows(2, kv_heads));
    let mut sequences = Vec::new();
    for (r, (cached, _)) in case.requests.iter().enumerate() {
        let mut sequence = Sequence::new(cache.pool());
        let grown = sequence.grow(*cached).unwrap();
        if *cached > 0 {
            let upload = |of: &Logical<f16>| {
                let data = of.packed(0..*cached);
                stream.upload(&data, [*cached, kv_heads, DIM]).unwrap()
            };
            let (key, value) = (upload(&keys[r]), upload(&values[r]));
            let write = cache
                .plan_write(&stream, &grown.slots, &key, &value)
                .unwrap();
            cache.write(&stream, &write, 0, &key, &value).unwrap();
        }
        sequences.push(sequence);
    }
    // A request without tokens has no block; its row is not read.
    let table: Vec<&[usize]> = sequences
        .iter()
        .map(|sequence| {
            if sequence.is_empty() {
                &[0][..]
            } else {
                sequence.row()
            }
        })
        .collect();
    let table = cache
        .block_table(&stream, &PageTable::from_rows(&table).unwrap())
        .unwrap();
    let upload = |of: &[Logical<f16>], heads: usize| -> Tensor<f16> {
        let requests = of.iter().zip(&case.requests);
        let data: Vec<f16> = requests
            .flat_map(|(of, (cached, _))| of.narrow(*cached..cached + nodes).data)
            .collect();
        stream
            .upload(&data, [trees.len(), heads, nodes, DIM])
            .unwrap()
    };
    let tensors = TreeTensors {
        query: &upload(&queries, heads),
        key: &upload(&keys, kv_heads),
        value: &upload(&values, kv_heads),
        cache: cache.layer(0).unwrap(),
        block_table: &table,
    };
    let shape = AttentionShape::new(heads, kv_heads, DIM);
    let cached = PerRequest::new(case.requests.iter().map(|(c, _)| *c).collect()).unwrap();
    let plan = TreeVerification { shape }
        .plan(&stream, &trees, &cached, &tensors)
        .unwrap();
    let out = plan
        .launch(&stream, &tensors)
        .unwrap()
        .download(&stream)
        .unwrap();
    for (r, tree) in trees.iter().enumerate() {
        let before = case.requests[r].0;
        let (q, k, v) = (queries[r].exact(), keys[r].exact(), values[r].exact());
        for node in 0..tree.nodes() {
            let head = node % heads;
            let sees = |key: usize| key < before || tree.sees(node, key - before);
            let want = row(&q, &k, &v, (0, 0), head, before + node, shape.scale, sees)
                .unwrap()
                .0;
            let got = &out[((r * heads + head) * nodes + node) * DIM..][..DIM];
            for (got, want) in got.iter().zip(&want) {
                let got = got.to_f64();
                prop_assert!(
                    (got - want).abs() <= 2.0 * f16::TOLERANCE,
                    "request {r}, node {node}, head {head}: {got}, expected {want}"
                );
            }
        }
    }
    Ok(())
}

fn case() -> impl Strategy<Value = Case> {
    let parents = prop::collection::vec(any::<usize>(), 0..9).prop_map(|picks| {
        let drafts = picks.iter().enumerate();
        let drafts = drafts.map(|(before, pick)| (pick % (before + 1)) as i64);
        std::iter::once(-1).chain(drafts).collect::<Vec<_>>()
    });
    let cached = prop_oneof![4 => 1usize..300, 1 => Just(0)];
    let requests = prop::collection::vec((cached, parents), 1..4);
    (1usize..3, 1usize..4, requests, 0usize..3, any::<u16>()).prop_map(
        |(kv_heads, group, requests, spare, seed)| Case {
            kv_heads,
            group,
            requests,
            spare,
            seed: seed.into(),
        },
    )
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(40) })]

    #[test]
    fn any_trees_behind_any_context(case in case()) {
        check(&case)?;
    }
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<f16>::new(stream.device(), 2, 128, shape, pad).unwrap();
    let table = cache
        .block_table(&stream, &PageTable::from_rows(&[[1]]).unwrap())
        .unwrap();
    let tokens = harness::tensor(&stream, [1, 1, 2, DIM]);
    let tensors = TreeTensors {
        query: &tokens,
        key: &tokens,
        value: &tokens,
        cache: cache.layer(0).unwrap(),
        block_table: &table,
    };
    let rule = |trees: &[DraftTree], cached: &[usize]| {
        let verification = TreeVerification {
            shape: AttentionShape::new(1, 1, DIM),
        };
        let cached = PerRequest::new(cached.to_vec()).unwrap();
        match verification.plan(&stream, trees, &cached, &tensors) {
            Err(Error::Refused(refused)) => refused.rule,
            other => panic!("{other:?}"),
        }
    };
    let chain = |drafts| DraftTree::chain(drafts).unwrap();
    assert_eq!(rule(&[chain(2)], &[5]), Rule::DraftTree);
    assert_eq!(rule(&[chain(1), chain(1)], &[5]), Rule::LengthsBatch);
    assert_eq!(rule(&[chain(1)], &[5, 6]), Rule::LengthsBatch);
}
