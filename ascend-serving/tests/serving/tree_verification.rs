//! Every node of a drafted tree gets attention over its request's cached tokens, its ancestors and itself.

use crate::harness;

use ascend_attention::attention::PerRequest;
use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::{CallRule, Machine, Runtime, Tensor, bf16, f16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PageTable, PagedKvCache, Sequence};
use ascend_serving::{
    AttentionShape, DraftTree, Error, GraphLimits, LatentTreePlan, LatentTreeTensors,
    LatentTreeVerification, Rule, TreeGraphs, TreeRequest, TreeTensors, TreeVerification,
};
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
    let out = plan.launch(&stream, &tensors).unwrap();
    let out = out.download(&stream).unwrap();
    // Rows of the requests with these numbers, in this order.
    let compare = |out: &[f16], of: &[usize]| {
        for (at, &r) in of.iter().enumerate() {
            let (before, tree) = (case.requests[r].0, &trees[r]);
            let (q, k, v) = (queries[r].exact(), keys[r].exact(), values[r].exact());
            for node in 0..tree.nodes() {
                let head = node % heads;
                let sees = |key: usize| key < before || tree.sees(node, key - before);
                let want = row(&q, &k, &v, (0, 0), head, before + node, shape.scale, sees)
                    .unwrap()
                    .0;
                let got = &out[((at * heads + head) * nodes + node) * DIM..][..DIM];
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
    };
    let all: Vec<usize> = (0..trees.len()).collect();
    compare(&out, &all)?;

    // The same by graphs, of which one object serves steps of other requests and trees.
    let limits = GraphLimits::new([1, 4], 400).tokens_each(nodes);
    let captured = TreeVerification { shape }.capture(&stream, &cache, &limits);
    let mut graphs = captured.unwrap();
    let reversed = all.iter().rev().copied().collect();
    for of in [all, vec![trees.len() - 1], reversed] {
        let request = |r: &usize| TreeRequest {
            sequence: &sequences[*r],
            tree: &trees[*r],
        };
        let requests: Vec<_> = of.iter().map(request).collect();
        let begun = graphs.begin(&stream, &requests);
        if let Some(r) = of.iter().find(|r| sequences[**r].is_empty()) {
            let error = begun.map(drop).unwrap_err();
            prop_assert!(error.breaks(CallRule::GraphLengths), "{r}: {error}");
            continue;
        }
        let mut step = begun.unwrap();
        let picked = |from: &Tensor<f16>| -> Tensor<f16> {
            let heads = from.shape()[1];
            let to = Tensor::empty(stream.device(), [of.len(), heads, nodes, DIM]).unwrap();
            for (at, r) in of.iter().enumerate() {
                let row = from.narrow(0, *r..r + 1).unwrap();
                to.narrow(0, at..at + 1)
                    .unwrap()
                    .copy_from(&stream, &row)
                    .unwrap();
            }
            to
        };
        let [query, key, value] = [tensors.query, tensors.key, tensors.value].map(picked);
        let output = step.forward(0, &query, &key, &value).unwrap();
        compare(&output.attention.download(&stream).unwrap(), &of)?;
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
    assert_eq!(rule(&[chain(1), chain(1)], &[5]), CallRule::LengthsBatch);
    assert_eq!(rule(&[chain(1)], &[5, 6]), CallRule::LengthsBatch);
}

#[test]
fn graphs_of_trees_say_what_they_do_not_verify() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 6, 128, shape, pad).unwrap();
    let verification = TreeVerification {
        shape: AttentionShape::new(1, 1, DIM),
    };
    let limits = GraphLimits::new([2], 200).tokens_each(3);
    let mut graphs = verification.capture(&stream, &cache, &limits).unwrap();
    assert_eq!((graphs.sizes().collect(), graphs.nodes()), (vec![2], 3));
    let mut grown = |tokens: usize| {
        let mut sequence = Sequence::new(cache.pool());
        cache.grow(&stream, &mut sequence, tokens).unwrap();
        sequence
    };
    let [short, long, mut slid] = [130, 201, 200].map(&mut grown);
    slid.drop_before(150).unwrap();
    let mut fork = short.fork();
    let _copies = fork.grow(1).unwrap();
    let other = PagedKvCache::<f16>::new(stream.device(), 2, 128, shape, pad).unwrap();
    let mut foreign = Sequence::new(other.pool());
    let _ = foreign.grow(1).unwrap();
    let [small, large] = [2, 3].map(|drafts| DraftTree::chain(drafts).unwrap());
    let rule = |graphs: &mut TreeGraphs<f16>, requests: &[(&Sequence, &DraftTree)]| {
        let requests = requests
            .iter()
            .map(|(sequence, tree)| TreeRequest { sequence, tree });
        match graphs
            .begin(&stream, &requests.collect::<Vec<_>>())
            .map(drop)
        {
            Err(Error::Refused(refused)) => refused.rule,
            other => panic!("{other:?}"),
        }
    };
    let ok = (&short, &small);
    assert_eq!(rule(&mut graphs, &[]), Rule::BatchEmpty);
    assert_eq!(rule(&mut graphs, &[ok, ok, ok]), Rule::GraphSize);
    assert_eq!(rule(&mut graphs, &[ok, (&short, &large)]), Rule::DraftTree);
    assert_eq!(
        rule(&mut graphs, &[(&long, &small)]),
        CallRule::GraphLengths
    );
    assert_eq!(rule(&mut graphs, &[(&slid, &small)]), Rule::BlockWindow);
    assert_eq!(rule(&mut graphs, &[(&fork, &small)]), Rule::BlockUncopied);
    assert_eq!(rule(&mut graphs, &[(&foreign, &small)]), Rule::TableGroup);
    let request = TreeRequest {
        sequence: &short,
        tree: &small,
    };
    let mut step = graphs.begin(&stream, &[request]).unwrap();
    let tensor = |shape| harness::tensor(&stream, shape);
    let good = tensor([1, 1, 3, DIM]);
    let mut refused = |query: &Tensor<f16>| match step.forward(0, query, &good, &good) {
        Err(Error::Refused(refused)) => refused.rule,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&tensor([1, 1, 2, DIM])), Rule::StepTokens);
    assert_eq!(refused(&tensor([2, 1, 3, DIM])), Rule::StepTokens);
    assert_eq!(refused(&tensor([1, 2, 3, DIM])), Rule::StepHeads);
    assert!(step.forward(1, &good, &good, &good).is_err());
    step.forward(0, &good, &good, &good).unwrap();
}

/// Trees of latent attention: cached tokens and parents of the nodes of each request.
struct LatentCase<'a> {
    heads: usize,
    format: Cache,
    requests: &'a [(usize, Vec<i64>)],
    /// Rows beyond the largest tree.
    spare: usize,
    seed: u64,
}

/// Why a test needs the emulation.
const RELEASES: &str = "an installed toolkit is of one release";

const LATENT: usize = 512;
const ROPE: usize = 64;

impl LatentCase<'_> {
    /// Verifies the trees on a machine, compares each node with the definition, and says how they were verified.
    fn check<T: Half>(&self, soc: Soc, cann: Cann) -> Result<LatentTreePlan, Error> {
        let runtime = Runtime::emulated_as(&Machine::new(soc, cann))?;
        let stream = &runtime.device(0)?.stream()?;
        let (heads, requests) = (self.heads, self.requests.len());
        let trees: Vec<DraftTree> = (self.requests.iter())
            .map(|(_, parents)| DraftTree::from_parents(parents).unwrap())
            .collect();
        let nodes = trees.iter().map(DraftTree::nodes).max().unwrap() + self.spare;
        let rows = |salt: u64, heads: usize| -> Vec<Logical<T>> {
            let each = self.requests.iter().zip(0u64..);
            each.map(|((cached, _), r)| {
                let seed = self.seed * 31 + r * 2 + salt;
                Logical::random(seed, [1, heads, cached + nodes, LATENT + ROPE])
            })
            .collect()
        };
        let (queries, keys) = (rows(0, heads), rows(1, 1));
        // The first elements of a row are its latent or absorbed part, the others the rotary one.
        let part = |rows: &[T], rope: bool| -> Vec<T> {
            let rows = rows.chunks_exact(LATENT + ROPE);
            let range = if rope {
                LATENT..LATENT + ROPE
            } else {
                0..LATENT
            };
            rows.flat_map(|row| row[range.clone()].to_vec()).collect()
        };
        let shape = CacheShape::latent(1).format(self.format);
        let pad = PadPolicy::SkipNegative;
        let mut cache = PagedKvCache::<T>::new(stream.device(), 16, 128, shape, pad)?;
        let mut sequences = Vec::new();
        for (r, ((cached, _), tree)) in self.requests.iter().zip(&trees).enumerate() {
            let mut sequence = Sequence::new(cache.pool());
            let tokens = cached + tree.nodes();
            let slots = sequence.grow(tokens)?.slots;
            let rows = keys[r].packed(0..tokens);
            let key = stream.upload(&part(&rows, false), [tokens, 1, LATENT])?;
            let rope = stream.upload(&part(&rows, true), [tokens, 1, ROPE])?;
            let write = cache.plan_write(stream, &slots, &key, &rope)?;
            cache.write(stream, &write, 0, &key, &rope)?;
            sequences.push(sequence);
        }
        let table: Vec<&[usize]> = sequences.iter().map(Sequence::row).collect();
        let table = cache.block_table(stream, &PageTable::from_rows(&table)?)?;
        let upload = |of: &[Logical<T>], heads: usize, rope: bool| -> Result<Tensor<T>, Error> {
            let of = of.iter().zip(self.requests);
            let data: Vec<T> = of
                .flat_map(|(of, (cached, _))| part(&of.narrow(*cached..cached + nodes).data, rope))
                .collect();
            let dim = if rope { ROPE } else { LATENT };
            Ok(stream.upload(&data, [requests, heads, nodes, dim])?)
        };
        let tensors = LatentTreeTensors {
            query: &upload(&queries, heads, false)?,
            query_rope: &upload(&queries, heads, true)?,
            latent: &upload(&keys, 1, false)?,
            key_rope: &upload(&keys, 1, true)?,
            cache: cache.layer(0)?,
            block_table: &table,
        };
        let shape = AttentionShape::latent(heads);
        let cached = PerRequest::new(self.requests.iter().map(|(c, _)| *c).collect())?;
        let verification = LatentTreeVerification { shape };
        let plan = verification.plan(stream, &trees, &cached, &tensors)?;
        // Rows of the requests with these numbers, in this order.
        let compare = |out: &[T], of: &[usize]| {
            for (at, &r) in of.iter().enumerate() {
                let (before, tree) = (self.requests[r].0, &trees[r]);
                let (q, k) = (queries[r].exact(), keys[r].exact());
                let mut v = k.clone();
                v.data = k
                    .data
                    .chunks_exact(LATENT + ROPE)
                    .flat_map(|row| row[..LATENT].to_vec())
                    .collect();
                v.dim = LATENT;
                for node in 0..tree.nodes() {
                    let head = node % heads;
                    let sees = |key: usize| key < before || tree.sees(node, key - before);
                    let want = row(&q, &k, &v, (0, 0), head, before + node, shape.scale, sees);
                    let got = &out[((at * heads + head) * nodes + node) * LATENT..][..LATENT];
                    for (got, want) in got.iter().zip(want.unwrap().0) {
                        assert!(
                            (got.to() - want).abs() <= 2.0 * T::TOLERANCE,
                            "{soc} with CANN {cann}: request {r}, node {node}, head {head}: {}, expected {want}",
                            got.to()
                        );
                    }
                }
            }
        };
        let all: Vec<usize> = (0..requests).collect();
        let out = plan.launch(stream, &tensors)?.download(stream)?;
        compare(&out, &all);

        // The same by graphs, of the requests that have something cached.
        let limits = GraphLimits::new([1, requests + 1], 600).tokens_each(nodes);
        let mut graphs = verification.capture(stream, &cache, &limits)?;
        assert_eq!(graphs.is_one_call(), plan.is_one_call());
        let request = |r: &usize| TreeRequest {
            sequence: &sequences[*r],
            tree: &trees[*r],
        };
        let behind = |r: &usize| self.requests[*r].0 > 0;
        let of: Vec<usize> = all.iter().rev().copied().filter(behind).collect();
        if of.len() < requests {
            let begun = graphs.begin(stream, &all.iter().map(request).collect::<Vec<_>>());
            let error = begun.map(drop).unwrap_err();
            assert!(error.breaks(CallRule::GraphLengths), "{error}");
        }
        for of in [&of[..of.len().min(1)], &of] {
            if of.is_empty() {
                continue;
            }
            let mut step = graphs.begin(stream, &of.iter().map(request).collect::<Vec<_>>())?;
            let picked = |from: &Tensor<T>| -> Result<Tensor<T>, Error> {
                let shape = from.shape();
                let to = Tensor::empty(stream.device(), [of.len(), shape[1], nodes, shape[3]])?;
                for (at, r) in of.iter().enumerate() {
                    let row = from.narrow(0, *r..r + 1)?;
                    to.narrow(0, at..at + 1)?.copy_from(stream, &row)?;
                }
                Ok(to)
            };
            let (query, rope) = (picked(tensors.query)?, picked(tensors.query_rope)?);
            let (latent, key_rope) = (picked(tensors.latent)?, picked(tensors.key_rope)?);
            let out = step.forward(0, [&query, &rope], [&latent, &key_rope])?;
            compare(&out.download(stream)?, of);
        }
        Ok(plan)
    }
}

/// Trees of several shapes and sizes, one of them without anything cached.
fn forest() -> Vec<(usize, Vec<i64>)> {
    vec![
        (130, vec![-1, 0, 0, 1, 1, 2, 3]),
        (1, vec![-1]),
        (0, vec![-1, 0, 1, 0]),
        (257, vec![-1, 0, 0, 0, 0]),
    ]
}

#[test]
fn trees_of_latent_attention_are_one_call_where_the_release_has_the_tree_mask() {
    if harness::not_on_npu(RELEASES) {
        return;
    }
    let newest = Target::new(Soc::AtlasA2, Cann::V9_1);
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        for (soc, cann, one) in [
            (Soc::AtlasA2, Cann::V8_5, false),
            (Soc::AtlasA2, Cann::V9_0, false),
            (Soc::AtlasA2, Cann::V9_1, true),
            (Soc::AtlasA3, Cann::V9_1, true),
            (Soc::Ascend950, Cann::V9_1, false),
        ] {
            let case = LatentCase {
                heads: 4,
                format,
                requests: &forest(),
                spare: 2,
                seed: 5,
            };
            for plan in [case.check::<bf16>(soc, cann), case.check::<f16>(soc, cann)] {
                let plan = plan.unwrap();
                assert_eq!(
                    plan.is_one_call(),
                    one,
                    "{soc} with CANN {cann}, {format:?}"
                );
                let refused = plan.refused();
                assert_eq!(refused.is_none(), one);
                if let Some(refused) = refused {
                    assert_eq!(refused.taken_by, Some(newest), "{refused}");
                    let told = "Atlas A2 with CANN 9.1 takes the call";
                    assert!(refused.to_string().ends_with(told), "{refused}");
                }
            }
        }
    }
}

#[test]
fn trees_of_latent_attention_without_a_call_are_refused_with_the_release_that_has_one() {
    if harness::not_on_npu(RELEASES) {
        return;
    }
    let case = LatentCase {
        heads: 4,
        format: Cache::BnBsH,
        requests: &forest(),
        spare: 0,
        seed: 5,
    };
    match case.check::<bf16>(Soc::AtlasA2, Cann::V8_1) {
        Err(Error::NoBackend { reasons, .. }) => {
            for told in [
                "tree_mask: ",
                "context_and_tree: ",
                "CANN 9.1 takes the call",
            ] {
                assert!(reasons.contains(told), "{reasons}");
            }
        }
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(6) })]

    #[test]
    fn any_latent_trees_behind_any_context(case in case(), heads in 0u32..4, nz: bool) {
        if harness::not_on_npu(RELEASES) {
            return Ok(());
        }
        let latent = LatentCase {
            heads: 1 << heads,
            format: if nz { Cache::Nz } else { Cache::BnBsH },
            requests: &case.requests,
            spare: case.spare,
            seed: case.seed,
        };
        for (cann, one) in [(Cann::V9_0, false), (Cann::V9_1, true)] {
            let plan = latent.check::<bf16>(Soc::AtlasA2, cann).unwrap();
            prop_assert_eq!(plan.is_one_call(), one);
        }
    }
}
