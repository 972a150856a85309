//! Every node of a drafted tree gets attention over its request's cached tokens, its ancestors and itself.

use crate::harness;

use ascend_attention::attention::PerRequest;
use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::{Error as CallError, Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_emu::{Site, inject};
use ascend_serving::kv::{
    Cache, CacheShape, CacheWrite, PadPolicy, PageTable, PagedKvCache, Sequence,
};
use ascend_serving::{
    AttentionShape, Causality, DraftTree, Error, GraphLimits, LatentForm, LatentRows,
    LatentTensors, LatentTreePlan, LatentTreeTensors, LatentTreeVerification, LayerInputs,
    TreeGraphs, TreeRequest, TreeTensors, TreeVerification, UpProjected, rules,
};
use harness::reference::{Half, Logical, row};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const DIM: usize = 64;
const LAYERS: usize = 2;

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

/// What a layer of a verification is made of: a query, key and value for each cached token and node of each request.
struct Numbers<T> {
    queries: Vec<Logical<T>>,
    keys: Vec<Logical<T>>,
    values: Vec<Logical<T>>,
    /// What comes out by the definition, `[heads, nodes, dim]` of each request; a row behind its tree is left out.
    wanted: Vec<Vec<Option<Vec<f64>>>>,
}

/// Cached tokens of each request, and the tree behind them.
struct Trees {
    requests: Vec<(usize, DraftTree)>,
    /// Rows of a request's nodes, some of them behind its tree.
    nodes: usize,
}

impl Trees {
    fn of(requests: &[(usize, Vec<i64>)], spare: usize) -> Self {
        let trees = requests.iter().map(|(cached, parents)| {
            let tree = DraftTree::from_parents(parents).unwrap();
            (*cached, tree)
        });
        let requests: Vec<_> = trees.collect();
        let largest = requests.iter().map(|(_, tree)| tree.nodes()).max();
        Self {
            requests,
            nodes: largest.unwrap() + spare,
        }
    }

    fn trees(&self) -> Vec<DraftTree> {
        self.requests.iter().map(|(_, tree)| tree.clone()).collect()
    }

    fn cached(&self) -> PerRequest {
        let cached = self.requests.iter().map(|(cached, _)| *cached);
        PerRequest::new(cached.collect()).unwrap()
    }

    /// Numbers of every request's cached tokens and nodes.
    fn rows<T: Half>(&self, seed: u64, heads: usize, dim: usize) -> Vec<Logical<T>> {
        let each = self.requests.iter().zip(0u64..);
        each.map(|((cached, _), r)| {
            Logical::random(seed * 31 + r, [1, heads, cached + self.nodes, dim])
        })
        .collect()
    }

    /// Numbers, and every head of every node by the definition.
    fn numbers<T: Half>(
        &self,
        [queries, keys, values]: [Vec<Logical<T>>; 3],
        scale: f64,
    ) -> Numbers<T> {
        let of_request = |r: usize| {
            let (before, tree) = &self.requests[r];
            let [q, k, v] = [&queries, &keys, &values].map(|rows| rows[r].exact());
            let of_head = |head: usize, node: usize| {
                let sees = |key: usize| key < *before || tree.sees(node, key - before);
                let sees = (node < tree.nodes()).then_some(sees)?;
                let (wanted, _) = row(&q, &k, &v, (0, 0), head, before + node, scale, sees)?;
                Some(wanted)
            };
            let all = (0..q.heads).flat_map(|head| (0..self.nodes).map(move |node| (head, node)));
            all.map(|(head, node)| of_head(head, node)).collect()
        };
        let wanted = (0..self.requests.len()).map(of_request).collect();
        Numbers {
            queries,
            keys,
            values,
            wanted,
        }
    }

    /// Compares every head of the nodes of the requests with these numbers, in this order, with the definition.
    fn compare<T: Half>(
        &self,
        numbers: &Numbers<T>,
        out: &[T],
        of: &[usize],
    ) -> Result<(), TestCaseError> {
        let mut rows = out.chunks_exact(numbers.values[0].dim);
        let mut compared = 0;
        for &r in of {
            for (at, want) in numbers.wanted[r].iter().enumerate() {
                let got = rows.next().unwrap();
                let Some(want) = want else { continue };
                compared += 1;
                for (got, want) in got.iter().zip(want) {
                    let got = got.to();
                    prop_assert!(
                        (got - want).abs() <= 2.0 * T::TOLERANCE,
                        "request {r}, head {}, node {}: {got}, expected {want}",
                        at / self.nodes,
                        at % self.nodes
                    );
                }
            }
        }
        let nodes = of
            .iter()
            .map(|r| self.requests[*r].1.nodes())
            .sum::<usize>();
        prop_assert_eq!(compared, nodes * numbers.queries[0].heads);
        Ok(())
    }
}

/// Rows of the requests with these numbers, in this order.
fn picked<T: Half>(stream: &Stream, from: &Tensor<T>, of: &[usize]) -> Tensor<T> {
    let mut shape = from.shape().to_vec();
    shape[0] = of.len();
    let to = Tensor::empty(stream.device(), shape).unwrap();
    for (at, r) in of.iter().enumerate() {
        let row = from.narrow(0, *r..r + 1).unwrap();
        let place = to.narrow(0, at..at + 1).unwrap();
        place.copy_from(stream, &row).unwrap();
    }
    to
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let of_case = Trees::of(&case.requests, case.spare);
    let (trees, nodes) = (of_case.trees(), of_case.nodes);
    let shape_of_heads = AttentionShape::new(heads, kv_heads, DIM);
    let shape = CacheShape::new(LAYERS, kv_heads, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 16, 128, shape, pad).unwrap();
    let layers: Vec<Numbers<f16>> = (0..LAYERS as u64)
        .map(|layer| {
            let rows =
                |what: u64, heads| of_case.rows(9 * case.seed + 3 * layer + what, heads, DIM);
            let numbers = [rows(0, heads), rows(1, kv_heads), rows(2, kv_heads)];
            of_case.numbers(numbers, shape_of_heads.scale)
        })
        .collect();
    let mut sequences = Vec::new();
    for (r, (cached, _)) in case.requests.iter().enumerate() {
        let mut sequence = Sequence::new(cache.pool());
        let grown = sequence.grow(*cached).unwrap();
        for (layer, of) in layers.iter().enumerate().filter(|_| *cached > 0) {
            let upload = |of: &Logical<f16>| {
                let data = of.packed(0..*cached);
                stream.upload(&data, [*cached, kv_heads, DIM]).unwrap()
            };
            let (key, value) = (upload(&of.keys[r]), upload(&of.values[r]));
            let write = CacheWrite::plan(&cache, &stream, &grown.slots, &key, &value).unwrap();
            cache.write(&stream, &write, layer, &key, &value).unwrap();
        }
        cache.mark_computed(&sequence, *cached).unwrap();
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
    let upload = |of: &[Logical<f16>]| -> Tensor<f16> {
        let requests = of.iter().zip(&case.requests);
        let data: Vec<f16> = requests
            .flat_map(|(of, (cached, _))| of.narrow(*cached..cached + nodes).data)
            .collect();
        let shape = [trees.len(), of[0].heads, nodes, DIM];
        stream.upload(&data, shape).unwrap()
    };
    let uploaded = layers.iter().map(|of| {
        let Numbers {
            queries,
            keys,
            values,
            ..
        } = of;
        [queries, keys, values].map(|rows| upload(rows))
    });
    let uploaded: Vec<[Tensor<f16>; 3]> = uploaded.collect();
    let tensors = |layer: usize| {
        let [query, key, value] = &uploaded[layer];
        TreeTensors {
            query,
            key,
            value,
            cache: cache.layer(layer).unwrap(),
            block_table: &table,
        }
    };
    let verification = TreeVerification::new(shape_of_heads);
    let plan = verification
        .plan(&stream, &trees, &of_case.cached(), &tensors(0))
        .unwrap();
    let all: Vec<usize> = (0..trees.len()).collect();
    for (layer, numbers) in layers.iter().enumerate() {
        let out = plan.launch(&stream, &tensors(layer)).unwrap();
        let out = out.download(&stream).unwrap();
        of_case.compare(numbers, &out, &all)?;
    }

    // The same by graphs, of which one object serves steps of other requests and trees.
    let limits = GraphLimits::new([1, 4], 400).tokens_each(nodes);
    let captured = verification.capture(&stream, &cache, &limits);
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
            prop_assert!(error.breaks(&rules::GRAPH_LENGTHS), "{r}: {error}");
            continue;
        }
        let mut step = begun.unwrap();
        for (layer, numbers) in layers.iter().enumerate() {
            let [query, key, value] =
                (uploaded[layer].each_ref()).map(|of_all| picked(&stream, of_all, &of));
            let output = step.forward(layer, (&query, &key, &value)).unwrap();
            let out = output.download(&stream).unwrap();
            of_case.compare(numbers, &out, &of)?;
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
        let verification = TreeVerification::new(AttentionShape::new(1, 1, DIM));
        let cached = PerRequest::new(cached.to_vec()).unwrap();
        match verification.plan(&stream, trees, &cached, &tensors) {
            Err(Error::Violation(refused)) => refused.rule,
            other => panic!("{other:?}"),
        }
    };
    let chain = |drafts| DraftTree::chain(drafts).unwrap();
    assert_eq!(rule(&[chain(2)], &[5]), &rules::DRAFT_TREE);
    assert_eq!(rule(&[chain(1), chain(1)], &[5]), &rules::LENGTHS_BATCH);
    assert_eq!(rule(&[chain(1)], &[5, 6]), &rules::LENGTHS_BATCH);
    // A node without a key of its own would not see itself, and one with another's would see that.
    for other in [[1, 1, 1, DIM], [1, 1, 3, DIM], [2, 1, 2, DIM]] {
        let other = harness::tensor(&stream, other);
        let with = |key, value| TreeTensors {
            key,
            value,
            ..tensors
        };
        for tensors in [with(&other, &tokens), with(&tokens, &other)] {
            let verification = TreeVerification::new(AttentionShape::new(1, 1, DIM));
            let cached = PerRequest::new(vec![5]).unwrap();
            let why = verification.plan(&stream, &[chain(1)], &cached, &tensors);
            let why = why.unwrap_err();
            assert!(why.breaks(&rules::DRAFT_TREE), "{why}");
        }
    }
}

#[test]
fn graphs_of_trees_say_what_they_do_not_verify() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 6, 128, shape, pad).unwrap();
    let verification = TreeVerification::new(AttentionShape::new(1, 1, DIM));
    let limits = GraphLimits::new([2], 200).tokens_each(3);
    let mut graphs = verification.capture(&stream, &cache, &limits).unwrap();
    assert_eq!((graphs.sizes().collect(), graphs.nodes()), (vec![2], 3));
    let mut grown = |tokens: usize| {
        let mut sequence = Sequence::new(cache.pool());
        cache.grow(&stream, &mut sequence, tokens).unwrap();
        cache.mark_computed(&sequence, tokens).unwrap();
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
            Err(Error::Violation(refused)) => refused.rule,
            other => panic!("{other:?}"),
        }
    };
    let ok = (&short, &small);
    assert_eq!(rule(&mut graphs, &[]), &rules::BATCH_EMPTY);
    assert_eq!(rule(&mut graphs, &[ok, ok, ok]), &rules::GRAPH_SIZE);
    assert_eq!(
        rule(&mut graphs, &[ok, (&short, &large)]),
        &rules::DRAFT_TREE
    );
    assert_eq!(rule(&mut graphs, &[(&long, &small)]), &rules::GRAPH_LENGTHS);
    assert_eq!(rule(&mut graphs, &[(&slid, &small)]), &rules::BLOCK_WINDOW);
    assert_eq!(
        rule(&mut graphs, &[(&fork, &small)]),
        &rules::BLOCK_UNCOPIED
    );
    assert_eq!(rule(&mut graphs, &[(&foreign, &small)]), &rules::BLOCK_POOL);
    let request = TreeRequest {
        sequence: &short,
        tree: &small,
    };
    let mut step = graphs.begin(&stream, &[request]).unwrap();
    let tensor = |shape| harness::tensor(&stream, shape);
    let good = tensor([1, 1, 3, DIM]);
    let mut refused = |query: &Tensor<f16>| match step.forward(0, (query, &good, &good)) {
        Err(Error::Violation(refused)) => refused.rule,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&tensor([1, 1, 2, DIM])), &rules::STEP_TOKENS);
    assert_eq!(refused(&tensor([2, 1, 3, DIM])), &rules::STEP_TOKENS);
    assert_eq!(refused(&tensor([1, 2, 3, DIM])), &rules::STEP_HEADS);
    let inputs = LayerInputs::from((&good, &good, &good));
    let (mask, sink) = (Causality::Causal.into(), tensor([1, 1, 1, 1]));
    let latent = LatentTensors {
        query_rope: &good,
        form: LatentForm::Absorbed,
    };
    for inputs in [
        inputs.mask(&mask),
        inputs.learnable_sink(&sink),
        LayerInputs::latent(&good, &good, &good, latent),
    ] {
        let why = step.forward(0, inputs).map(drop).unwrap_err();
        assert!(why.breaks(&rules::GRAPH_INPUTS), "{why}");
    }
    assert!(step.forward(1, (&good, &good, &good)).is_err());
    let zeros = stream
        .upload(&[f16::ZERO; 3 * DIM], [1, 1, 3, DIM])
        .unwrap();
    step.forward(0, (&zeros, &zeros, &good)).unwrap();
    // All keys weigh the same: the cached ones, and those of the nodes up to each.
    let lse = step.softmax_lse().download(&stream).unwrap();
    for (node, lse) in lse[..3].iter().enumerate() {
        let keys = (short.len() + node + 1) as f32;
        assert!((lse - keys.ln()).abs() < 1e-3, "node {node}: {lse}");
    }
}

#[test]
fn steps_of_trees_with_more_blocks_than_were_declared_are_refused() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 12, 128, shape, pad).unwrap();
    let verification = TreeVerification::new(AttentionShape::new(1, 1, DIM));
    let mut sequences = [0; 2].map(|_| Sequence::new(cache.pool()));
    for (sequence, tokens) in sequences.iter_mut().zip([400, 130]) {
        cache.grow(&stream, sequence, tokens).unwrap();
        cache.mark_computed(sequence, tokens).unwrap();
    }
    let [long, short] = &sequences;
    let tree = &DraftTree::chain(1).unwrap();
    let limits = GraphLimits::new([1, 3], 1000).tokens_each(2).blocks(4);
    let mut graphs = verification.capture(&stream, &cache, &limits).unwrap();
    let mut begin = |requests: &[&Sequence]| {
        let requests = requests
            .iter()
            .map(|sequence| TreeRequest { sequence, tree });
        let requests: Vec<_> = requests.collect();
        graphs.begin(&stream, &requests).map(drop)
    };
    begin(&[long]).unwrap();
    // Four blocks, two, and one of a dummy.
    let error = begin(&[long, short]).unwrap_err();
    assert!(error.breaks(&rules::GRAPH_LENGTHS), "{error}");
    assert!(error.to_string().contains("7 blocks"), "{error}");
    // Blocks that requests share count for each.
    let shared = long.fork();
    assert!(begin(&[long, &shared, short]).is_err());
    // Without a limit the calls take any number of blocks that requests share, from CANN 8.5 on.
    if stream.device().target().unwrap().cann < Cann::V8_5 {
        return;
    }
    let limits = GraphLimits::new([4], 1000).tokens_each(2);
    let mut graphs = verification.capture(&stream, &cache, &limits).unwrap();
    let requests = [long, &shared, &shared, long].map(|sequence| TreeRequest { sequence, tree });
    graphs.begin(&stream, &requests).map(drop).unwrap();
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

/// The latent or absorbed part of rows, which stands first, or the rotary one.
fn latent_part<T: Half>(rows: &[T], rope: bool) -> Vec<T> {
    let rows = rows.chunks_exact(LATENT + ROPE);
    let range = if rope {
        LATENT..LATENT + ROPE
    } else {
        0..LATENT
    };
    rows.flat_map(|row| row[range.clone()].to_vec()).collect()
}

impl LatentCase<'_> {
    fn trees(&self) -> Trees {
        Trees::of(self.requests, self.spare)
    }

    /// Of every layer.
    fn numbers<T: Half>(&self) -> Vec<Numbers<T>> {
        let (trees, shape) = (self.trees(), AttentionShape::latent(self.heads));
        let layers = (0..LAYERS as u64).map(|layer| {
            let rows = |what: u64, heads| -> Vec<Logical<T>> {
                trees.rows(5 * self.seed + 2 * layer + what, heads, LATENT + ROPE)
            };
            let keys = rows(1, 1);
            let values = keys.iter().map(|key| Logical {
                data: latent_part(&key.data, false),
                dim: LATENT,
                ..*key
            });
            let values = values.collect();
            trees.numbers([rows(0, self.heads), keys, values], shape.scale)
        });
        layers.collect()
    }

    /// Verifies the trees on a machine, compares each node with the definition, and says how they were verified.
    fn check<T: Half>(
        &self,
        layers: &[Numbers<T>],
        machine: &Machine,
    ) -> Result<LatentTreePlan, Error> {
        let runtime = Runtime::emulated_as(machine)?;
        let stream = &runtime.device(0)?.stream()?;
        let (heads, requests) = (self.heads, self.requests.len());
        let of_case = self.trees();
        let (trees, nodes) = (of_case.trees(), of_case.nodes);
        let shape = CacheShape::latent(LAYERS).format(self.format);
        let pad = PadPolicy::SkipNegative;
        let mut cache = PagedKvCache::<T>::new(stream.device(), 16, 128, shape, pad)?;
        let mut sequences = Vec::new();
        for (r, (cached, tree)) in of_case.requests.iter().enumerate() {
            let mut sequence = Sequence::new(cache.pool());
            let tokens = cached + tree.nodes();
            let slots = sequence.grow(tokens)?.slots;
            for (layer, of) in layers.iter().enumerate() {
                let rows = of.keys[r].packed(0..tokens);
                let key = stream.upload(&latent_part(&rows, false), [tokens, 1, LATENT])?;
                let rope = stream.upload(&latent_part(&rows, true), [tokens, 1, ROPE])?;
                let write = CacheWrite::plan(&cache, stream, &slots, &key, &rope)?;
                cache.write(stream, &write, layer, &key, &rope)?;
            }
            cache.mark_computed(&sequence, tokens)?;
            sequences.push(sequence);
        }
        let table: Vec<&[usize]> = sequences.iter().map(Sequence::row).collect();
        let table = cache.block_table(stream, &PageTable::from_rows(&table)?)?;
        let upload = |of: &[Logical<T>], rope: bool| -> Result<Tensor<T>, Error> {
            let heads = of[0].heads;
            let of = of.iter().zip(self.requests);
            let data: Vec<T> = of
                .flat_map(|(of, (cached, _))| {
                    latent_part(&of.narrow(*cached..cached + nodes).data, rope)
                })
                .collect();
            let dim = if rope { ROPE } else { LATENT };
            Ok(stream.upload(&data, [requests, heads, nodes, dim])?)
        };
        let uploaded = layers.iter().map(|Numbers { queries, keys, .. }| {
            Ok([
                upload(queries, false)?,
                upload(queries, true)?,
                upload(keys, false)?,
                upload(keys, true)?,
            ])
        });
        let uploaded: Vec<[Tensor<T>; 4]> = uploaded.collect::<Result<_, Error>>()?;
        let tensors = |layer: usize| -> Result<LatentTreeTensors<'_, T>, Error> {
            let [query, query_rope, latent, key_rope] = &uploaded[layer];
            Ok(LatentTreeTensors {
                query,
                query_rope,
                latent,
                key_rope,
                cache: cache.layer(layer)?,
                block_table: &table,
            })
        };
        let shape = AttentionShape::latent(heads);
        let verification = LatentTreeVerification::new(shape);
        let plan = verification.plan(stream, &trees, &of_case.cached(), &tensors(0)?)?;
        let compare = |layer: usize, out: &Tensor<T>, of: &[usize]| {
            let out = out.download(stream).unwrap();
            let same = of_case.compare(&layers[layer], &out, of);
            same.unwrap_or_else(|why| panic!("{machine:?}, layer {layer}: {why}"));
        };
        let all: Vec<usize> = (0..requests).collect();
        for layer in 0..LAYERS {
            compare(layer, &plan.launch(stream, &tensors(layer)?)?, &all);
        }

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
            assert!(error.breaks(&rules::GRAPH_LENGTHS), "{error}");
        }
        for of in [&of[..of.len().min(1)], &of] {
            if of.is_empty() {
                continue;
            }
            let mut step = graphs.begin(stream, &of.iter().map(request).collect::<Vec<_>>())?;
            let [query, rope, latent, key_rope] = uploaded[0]
                .each_ref()
                .map(|of_all| picked(stream, of_all, of));
            let plain = |_: &Stream, _: usize, _: LatentRows<'_, T>, _: &UpProjected<T>| Ok(());
            let form = LatentForm::Plain(&plain);
            let tensors = LatentTensors {
                query_rope: &rope,
                form,
            };
            for inputs in [
                LayerInputs::from((&query, &latent, &key_rope)),
                LayerInputs::latent(&query, &latent, &key_rope, tensors),
            ] {
                let why = step.forward(0, inputs).map(drop).unwrap_err();
                assert!(why.breaks(&rules::GRAPH_INPUTS), "{why}");
            }
            for (layer, uploaded) in uploaded.iter().enumerate() {
                let uploaded = uploaded.each_ref();
                let [query, rope, latent, key_rope] =
                    uploaded.map(|of_all| picked(stream, of_all, of));
                let tensors = LatentTensors {
                    query_rope: &rope,
                    form: LatentForm::Absorbed,
                };
                let inputs = LayerInputs::latent(&query, &latent, &key_rope, tensors);
                let out = step.forward(layer, inputs)?;
                compare(layer, out, of);
            }
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
    let requests = forest();
    let case = |format| LatentCase {
        heads: 4,
        format,
        requests: &requests,
        spare: 2,
        seed: 5,
    };
    let of_bf16 = case(Cache::BnBsH).numbers::<bf16>();
    let of_f16 = case(Cache::BnBsH).numbers::<f16>();
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        for (soc, cann, one) in [
            (Soc::AtlasA2, Cann::V8_5, false),
            (Soc::AtlasA2, Cann::V9_0, false),
            (Soc::AtlasA2, Cann::V9_1, true),
            (Soc::AtlasA3, Cann::V9_1, true),
            (Soc::Ascend950, Cann::V9_1, false),
        ] {
            let (case, machine) = (case(format), Machine::new(soc, cann));
            for plan in [
                case.check(&of_bf16, &machine),
                case.check(&of_f16, &machine),
            ] {
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
    match case.check(
        &case.numbers::<bf16>(),
        &Machine::new(Soc::AtlasA2, Cann::V8_1),
    ) {
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

/// Where the library lacks the versions of the operator that take rotary parts, neither form has a call.
#[test]
fn trees_of_latent_attention_have_no_call_where_the_operator_is_too_old() {
    if harness::not_on_npu(RELEASES) {
        return;
    }
    let requests = forest();
    let case = LatentCase {
        heads: 4,
        format: Cache::BnBsH,
        requests: &requests,
        spare: 0,
        seed: 5,
    };
    let numbers = case.numbers::<bf16>();
    let machine = |newest| Machine::new(Soc::AtlasA2, Cann::V9_1).operator(newest);
    let plan = case.check(&numbers, &machine(Version::V3)).unwrap();
    assert!(plan.is_one_call());
    for newest in [Version::V2, Version::V1] {
        let machine = machine(newest);
        match case.check(&numbers, &machine) {
            Err(Error::NoBackend { reasons, .. }) => {
                for told in ["tree_mask, context_and_tree: ", "V3"] {
                    assert!(reasons.contains(told), "{newest:?}: {reasons}");
                }
            }
            other => panic!("{newest:?}: {other:?}"),
        }
        let runtime = Runtime::emulated_as(&machine).unwrap();
        let stream = &runtime.device(0).unwrap().stream().unwrap();
        let (shape, pad) = (CacheShape::latent(1), PadPolicy::SkipNegative);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 2, 128, shape, pad).unwrap();
        let verification = LatentTreeVerification::new(AttentionShape::latent(4));
        let limits = GraphLimits::new([1], 100).tokens_each(2);
        let captured = verification.capture(stream, &cache, &limits).map(drop);
        // That of the two calls: both forms were asked.
        let why = captured.unwrap_err();
        let version = matches!(why, Error::Attention(CallError::OperatorVersion { .. }));
        assert!(version, "{newest:?}: {why}");
    }
}

/// A device that fails is an error, not a reason for other calls.
#[test]
fn trees_of_latent_attention_have_no_other_call_for_a_device_that_fails() {
    /// A tree that no other test has, whose mask is on no device yet.
    const PARENTS: [i64; 9] = [-1, 0, 1, 1, 0, 4, 4, 2, 6];
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1)).unwrap();
    let stream = &runtime.device(0).unwrap().stream().unwrap();
    let (shape, pad) = (CacheShape::latent(1), PadPolicy::SkipNegative);
    let cache = PagedKvCache::<f16>::new(stream.device(), 2, 128, shape, pad).unwrap();
    let tensor = |heads, dim| harness::tensor(stream, [1, heads, PARENTS.len(), dim]);
    let tensors = LatentTreeTensors {
        query: &tensor(4, LATENT),
        query_rope: &tensor(4, ROPE),
        latent: &tensor(1, LATENT),
        key_rope: &tensor(1, ROPE),
        cache: cache.layer(0).unwrap(),
        block_table: &cache
            .block_table(stream, &PageTable::from_rows(&[[1]]).unwrap())
            .unwrap(),
    };
    let verification = LatentTreeVerification::new(AttentionShape::latent(4));
    let trees = [DraftTree::from_parents(&PARENTS).unwrap()];
    let cached = PerRequest::new(vec![5]).unwrap();
    let limits = GraphLimits::new([1], 100).tokens_each(PARENTS.len());
    let mut failed = 0;
    for nth in 1..=12 {
        let fault = inject(Site::Malloc, nth, 207_018);
        let plan = verification.plan(stream, &trees, &cached, &tensors);
        drop(fault);
        match plan {
            Ok(plan) => {
                assert!(plan.is_one_call(), "allocation {nth}: {:?}", plan.refused());
            }
            Err(Error::Attention(CallError::OutOfMemory { .. })) => failed += 1,
            Err(other) => panic!("allocation {nth}: {other:?}"),
        }
    }
    assert!(failed > 0);
    let fault = inject(Site::Malloc, 1, 207_018);
    let captured = verification.capture(stream, &cache, &limits).map(drop);
    drop(fault);
    let failed = matches!(
        captured,
        Err(Error::Attention(CallError::OutOfMemory { .. }))
    );
    assert!(failed, "{captured:?}");
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
        let numbers = latent.numbers::<bf16>();
        for (cann, one) in [(Cann::V9_0, false), (Cann::V9_1, true)] {
            let plan = latent.check(&numbers, &Machine::new(Soc::AtlasA2, cann)).unwrap();
            prop_assert_eq!(plan.is_one_call(), one);
        }
    }
}
