//! Trees of keys and values, by two calls of the operator and a merge, and by graphs.

use super::{Case, LAYERS, Numbers, Trees, case, picked};
use crate::harness;
use approx::abs_diff_eq;
use ascend_attention::spec::Cann;
use ascend_attention::{Tensor, f16};
use ascend_serving::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionShape, Backends, Causality, CustomMask, DraftTree, Error, GraphLimits, LatentForm,
    LatentTensors, LayerGroup, LayerInputs, TreeGraphs, TreeRequest, TreeVerification, rules,
};
use harness::reference::Logical;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};
use std::num::NonZeroUsize;

const DIM: usize = 64;

/// The trees of a case as a drafter brings them: its packed mask, with the cached keys in front or without.
fn of_packed_mask(case: &Case) -> Vec<DraftTree> {
    let (mut visible, mut mask_indptr, mut qo_indptr, mut extents) = (vec![], vec![0], vec![0], vec![]);
    for (cached, parents) in &case.requests {
        let (rows, front) = (parents.len(), if case.seed.is_multiple_of(2) { *cached } else { 0 });
        for node in 0..rows {
            let mut own = vec![false; rows];
            let mut at = node as i64;
            while let Some(sees) = usize::try_from(at).ok().map(|at| &mut own[at]) {
                *sees = true;
                at = parents[at as usize];
            }
            visible.extend([vec![true; front], own].concat());
        }
        mask_indptr.push(visible.len());
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + rows);
        extents.push((rows, front + rows));
    }
    let (words, word_indptr) = CustomMask::new(visible, mask_indptr, qo_indptr).unwrap().pack::<u32>();
    CustomMask::unpack(&words, &word_indptr, &extents).unwrap().trees().unwrap()
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let of_case = Trees::of(&case.requests, case.spare);
    let (trees, nodes) = (of_packed_mask(case), of_case.nodes);
    let shape_of_heads = AttentionShape::new(heads, kv_heads, DIM);
    let shape = CacheShape::new(LAYERS, kv_heads, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 16, 128, shape, pad).unwrap();
    let layers: Vec<Numbers<f16>> = (0..LAYERS as u64)
        .map(|layer| {
            let rows = |what: u64, heads| of_case.rows(9 * case.seed + 3 * layer + what, heads, DIM);
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
    let upload = |of: &[Logical<f16>]| -> Tensor<f16> {
        let requests = of.iter().zip(&case.requests);
        let data: Vec<f16> = requests.flat_map(|(of, (cached, _))| of.narrow(*cached..cached + nodes).data).collect();
        let shape = [trees.len(), of[0].heads, nodes, DIM];
        stream.upload(&data, shape).unwrap()
    };
    let uploaded = layers.iter().map(|of| {
        let Numbers { queries, keys, values, .. } = of;
        [queries, keys, values].map(|rows| upload(rows))
    });
    let uploaded: Vec<[Tensor<f16>; 3]> = uploaded.collect();
    let verification = TreeVerification::new(shape_of_heads);
    let all: Vec<usize> = (0..trees.len()).collect();
    let request = |r: &usize| TreeRequest { sequence: &sequences[*r], cached: sequences[*r].len(), tree: &trees[*r] };
    let requests: Vec<_> = all.iter().map(request).collect();
    let mut step = verification.begin(&stream, &cache, &requests).unwrap();
    prop_assert!(step.tensors(0).unwrap_err().breaks(&rules::STEP_IN_PLACE));
    for (layer, numbers) in layers.iter().enumerate() {
        let [query, key, value] = &uploaded[layer];
        let out = step.forward(layer, (query, key, value)).unwrap();
        let out = out.download(&stream).unwrap();
        of_case.compare(numbers, &out, &all)?;
    }
    step.end().unwrap();

    // The same by graphs, of which one object serves steps of other requests and trees.
    let limits = GraphLimits::new([1, 4], 400).tokens_each(nodes);
    let captured = verification.capture(&stream, &cache, &limits);
    let mut graphs = captured.unwrap();
    let reversed = all.iter().rev().copied().collect();
    for of in [all, vec![trees.len() - 1], reversed] {
        let requests: Vec<_> = of.iter().map(request).collect();
        let begun = graphs.begin(&stream, &requests);
        if let Some(r) = of.iter().find(|r| sequences[**r].is_empty()) {
            let error = begun.map(drop).unwrap_err();
            prop_assert!(error.breaks(&rules::GRAPH_LENGTHS), "{r}: {error}");
            continue;
        }
        let mut step = begun.unwrap();
        for (layer, numbers) in layers.iter().enumerate() {
            let [query, key, value] = (uploaded[layer].each_ref()).map(|of_all| picked(&stream, of_all, &of));
            let output = step.forward(layer, (&query, &key, &value)).unwrap();
            let out = output.download(&stream).unwrap();
            of_case.compare(numbers, &out, &of)?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(40) })]

    #[test]
    fn any_trees_behind_any_context(case in case()) {
        check(&case)?;
    }
}

#[test]
fn trees_that_do_not_fit_are_refused() {
    let stream = harness::stream();
    let shape = CacheShape::new(2, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<f16>::new(stream.device(), 4, 128, shape, pad).unwrap();
    let mut sequence = Sequence::new(cache.pool());
    cache.grow(&stream, &mut sequence, 5).unwrap();
    let verification = TreeVerification::new(AttentionShape::new(1, 1, DIM));
    let refused = |cached, drafts| {
        let tree = &DraftTree::chain(drafts).unwrap();
        let request = TreeRequest { sequence: &sequence, cached, tree };
        match verification.begin(&stream, &cache, &[request]).map(drop) {
            Err(Error::Violation(refused)) => refused,
            other => panic!("{other:?}"),
        }
    };
    // Five tokens that no step has computed; neither the tokens before the tree alone nor with the nodes; more tokens
    // before the tree than the sequence has.
    let gap = refused(5, 1);
    assert_eq!(gap.rule, &rules::SEQUENCE_GAP);
    assert!(gap.fix.contains("how many tokens come before the tree"), "{gap}");
    assert_eq!(refused(4, 1).rule, &rules::SEQUENCE_LENGTH);
    assert_eq!(refused(6, 1).rule, &rules::SEQUENCE_LENGTH);
    cache.mark_computed(&sequence, 3).unwrap();
    let tree = &DraftTree::chain(1).unwrap();
    let request = TreeRequest { sequence: &sequence, cached: 3, tree };
    let why = verification.begin(&stream, &cache, &[]).unwrap_err();
    assert!(why.breaks(&rules::BATCH_EMPTY), "{why}");
    // Verifications only read: one may begin beside another, whichever has more tokens before its tree.
    let root = &DraftTree::chain(2).unwrap();
    let fork = sequence.fork();
    let why = verification.begin(&stream, &cache, &[request]).unwrap_err();
    assert!(why.breaks(&rules::TABLE_SHARED), "{why}");
    drop(fork);
    let earlier = TreeRequest { cached: 2, tree: root, ..request };
    for [first, second] in [[request, earlier], [earlier, request]] {
        let first = verification.begin(&stream, &cache, &[first]).unwrap();
        assert_eq!(cache.computed_tokens(&sequence).unwrap(), 3);
        verification.begin(&stream, &cache, &[second]).map(drop).unwrap();
        drop(first);
    }
    let mut step = verification.begin(&stream, &cache, &[request, request]).unwrap();
    let tensor = |shape| harness::tensor(&stream, shape);
    let good = tensor([2, 1, 2, DIM]);
    for (other, rule) in [
        ([2, 1, 1, DIM], &rules::STEP_TOKENS),
        ([2, 1, 3, DIM], &rules::STEP_TOKENS),
        ([1, 1, 2, DIM], &rules::STEP_TOKENS),
        ([2, 2, 2, DIM], &rules::STEP_HEADS),
    ] {
        // A node without a key of its own would not see itself, and one with another's would see that.
        let other = tensor(other);
        for inputs in [(&good, &other, &good), (&good, &good, &other)] {
            let why = step.forward(0, inputs).unwrap_err();
            assert!(why.breaks(rule), "{why}");
        }
    }
    let few = tensor([2, 1, 1, DIM]);
    let why = step.forward(0, (&few, &few, &few)).unwrap_err();
    assert!(why.breaks(&rules::DRAFT_TREE), "{why}");
    // Rotary parts would make values of the keys.
    let latent = LatentTensors { query_rope: &good, form: LatentForm::Absorbed };
    let inputs = LayerInputs::latent(&good, &good, &good, latent);
    let why = step.forward(0, inputs).unwrap_err();
    assert!(why.breaks(&rules::DRAFT_INPUTS), "{why}");
    step.forward(0, (&good, &good, &good)).unwrap();
    let flat = tensor([4, DIM, 1, 1]).reshape([4, DIM]).unwrap();
    let why = step.forward(1, (&flat, &flat, &flat)).unwrap_err();
    assert!(why.breaks(&rules::STEP_TOKENS), "{why}");
    // Other nodes than the first layer had, a layer twice, a layer that is none, and one that is left out.
    let more = tensor([2, 1, 3, DIM]);
    let why = step.forward(1, (&more, &more, &more)).unwrap_err();
    assert!(why.breaks(&rules::STEP_TOKENS), "{why}");
    let why = step.forward(0, (&good, &good, &good)).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYER_REPEATED), "{why}");
    let why = step.forward(2, (&good, &good, &good)).unwrap_err();
    assert!(why.breaks(&rules::ARGUMENT_VALUE), "{why}");
    let why = step.end().unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
}

/// Every node sees all cached tokens: layers that hide some are refused, also where none is hidden yet.
#[test]
fn trees_of_layers_that_hide_tokens_are_refused() {
    let stream = harness::stream();
    let shape = AttentionShape::new(1, 1, DIM);
    for causality in
        [Causality::Window(NonZeroUsize::new(16).unwrap()), Causality::Chunk(NonZeroUsize::new(128).unwrap())]
    {
        let cache = CacheShape::new(1, 1, DIM);
        let cache = PagedKvCache::<f16>::new(stream.device(), 6, 128, cache, PadPolicy::SkipNegative).unwrap();
        let group = LayerGroup::new([0], causality, shape, cache, Backends::standard(stream.device()));
        let mut model = Attention::of_groups(1, [group]).unwrap();
        let mut sequence = model.sequence();
        model.grow(&stream, &mut sequence, 8).unwrap();
        model.mark_computed(&sequence, 8).unwrap();
        let tree = DraftTree::chain(2).unwrap();
        let request = TreeRequest { sequence: &sequence, cached: 8, tree: &tree };
        let verification = TreeVerification::new(shape);
        let limits = GraphLimits::new([1], 200).tokens_each(3);
        let mut graphs = verification.capture(&stream, model.cache(), &limits).unwrap();
        for begun in [
            verification.begin(&stream, model.cache(), &[request]).map(drop),
            graphs.begin(&stream, &[request]).map(drop),
        ] {
            let why = begun.unwrap_err();
            assert!(why.breaks(&rules::STEP_CAUSALITY), "{why}");
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
    let copies = fork.grow(1).unwrap();
    let other = PagedKvCache::<f16>::new(stream.device(), 2, 128, shape, pad).unwrap();
    let mut foreign = Sequence::new(other.pool());
    let _ = foreign.grow(1).unwrap();
    let [small, large] = [2, 3].map(|drafts| DraftTree::chain(drafts).unwrap());
    let rule = |graphs: &mut TreeGraphs<f16>, requests: &[(&Sequence, &DraftTree)]| {
        let requests = requests.iter().map(|(sequence, tree)| TreeRequest { sequence, cached: sequence.len(), tree });
        match graphs.begin(&stream, &requests.collect::<Vec<_>>()).map(drop) {
            Err(Error::Violation(refused)) => refused.rule,
            other => panic!("{other:?}"),
        }
    };
    let ok = (&short, &small);
    assert_eq!(rule(&mut graphs, &[]), &rules::BATCH_EMPTY);
    assert_eq!(rule(&mut graphs, &[ok, ok, ok]), &rules::GRAPH_SIZE);
    assert_eq!(rule(&mut graphs, &[ok, (&short, &large)]), &rules::DRAFT_TREE);
    assert_eq!(rule(&mut graphs, &[(&long, &small)]), &rules::GRAPH_LENGTHS);
    assert_eq!(rule(&mut graphs, &[(&slid, &small)]), &rules::BLOCK_WINDOW);
    assert_eq!(rule(&mut graphs, &[(&fork, &small)]), &rules::BLOCK_UNCOPIED);
    assert_eq!(rule(&mut graphs, &[(&foreign, &small)]), &rules::BLOCK_POOL);
    let request = TreeRequest { sequence: &short, cached: short.len(), tree: &small };
    // The nodes may be tokens of the sequence, others are not.
    let grown = |nodes: usize| TreeRequest { cached: short.len() - nodes, ..request };
    let why = graphs.begin(&stream, &[grown(2)]).map(drop).unwrap_err();
    assert!(why.breaks(&rules::SEQUENCE_LENGTH), "{why}");
    let why = graphs.begin(&stream, &[grown(3)]).map(drop).unwrap_err();
    assert!(why.breaks(&rules::TABLE_SHARED), "{why}");
    drop((fork, copies));
    graphs.begin(&stream, &[grown(3)]).map(drop).unwrap();
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
    let latent = LatentTensors { query_rope: &good, form: LatentForm::Absorbed };
    for inputs in [inputs.mask(&mask), inputs.learnable_sink(&sink), LayerInputs::latent(&good, &good, &good, latent)] {
        let why = step.forward(0, inputs).map(drop).unwrap_err();
        assert!(why.breaks(&rules::DRAFT_INPUTS), "{why}");
    }
    let why = step.forward(1, (&good, &good, &good)).unwrap_err();
    assert!(why.breaks(&rules::ARGUMENT_VALUE), "{why}");
    assert!(step.softmax_lse().is_none() && step.is_one_call() == Some(false));
    // Inputs in the first rows of their tensors stay there, and none may be in another's.
    assert!(step.tensors(1).unwrap_err().breaks(&rules::ARGUMENT_VALUE));
    let tensors = step.tensors(0).unwrap();
    let own = [&tensors.query, &tensors.key, &tensors.value].map(|tensor| tensor.narrow(0, 0..1).unwrap());
    let [query, key, value] = &own;
    let why = step.forward(0, (key, query, value)).unwrap_err();
    assert!(why.breaks(&rules::ARGUMENT_MEMORY), "{why}");
    for (tensor, number) in [(query, f16::ZERO), (key, f16::ZERO), (value, f16::ONE)] {
        tensor.overwrite(&stream, &[number; 3 * DIM]).unwrap();
    }
    let output = step.forward(0, (query, key, value)).unwrap().download(&stream).unwrap();
    assert_eq!(output.len(), 2 * 3 * DIM, "with the padding");
    // All keys weigh the same: the cached ones, and those of the nodes up to each. The cached values are zeros.
    let check = |lse: &[f32], output: &[f16]| {
        for (node, (lse, row)) in lse.iter().zip(output.chunks(DIM)).take(3).enumerate() {
            let keys = (short.len() + node + 1) as f32;
            assert!(abs_diff_eq!(*lse, keys.ln(), epsilon = 1e-3), "node {node}: {lse}");
            let want = (node + 1) as f64 / f64::from(keys);
            assert!(row.iter().all(|got| abs_diff_eq!(got.to_f64(), want, epsilon = 1e-3)), "node {node}: {row:?}");
        }
    };
    check(&step.softmax_lse().unwrap().download(&stream).unwrap(), &output);
    step.end().unwrap();
    // In the next step they are to be taken anew.
    let mut step = graphs.begin(&stream, &[request]).unwrap();
    let why = step.forward(0, (query, key, value)).unwrap_err();
    assert!(why.breaks(&rules::STEP_IN_PLACE), "{why}");
    drop(step);
    // As without a graph.
    let mut step = verification.begin(&stream, &cache, &[request]).unwrap();
    let ones = stream.upload(&[f16::ONE; 3 * DIM], [1, 1, 3, DIM]).unwrap();
    let zeros = stream.upload(&[f16::ZERO; 3 * DIM], [1, 1, 3, DIM]).unwrap();
    let output = step.forward(0, (&zeros, &zeros, &ones)).unwrap().download(&stream).unwrap();
    check(&step.softmax_lse().unwrap().download(&stream).unwrap(), &output);
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
        let requests = requests.iter().map(|sequence| TreeRequest { sequence, cached: sequence.len(), tree });
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
    let error = begin(&[long, &shared, short]).unwrap_err();
    assert!(error.to_string().contains("10 blocks"), "{error}");
    // Without a limit the calls take any number of blocks that requests share, from CANN 8.5 on.
    if stream.device().target().unwrap().cann < Cann::V8_5 {
        return;
    }
    let limits = GraphLimits::new([4], 1000).tokens_each(2);
    let mut graphs = verification.capture(&stream, &cache, &limits).unwrap();
    let requests =
        [long, &shared, &shared, long].map(|sequence| TreeRequest { sequence, cached: sequence.len(), tree });
    graphs.begin(&stream, &requests).map(drop).unwrap();
}
