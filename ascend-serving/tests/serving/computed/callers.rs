//! Whoever computes tokens besides a plain step: layers with windows, writes by hand, graphs, trees, encoders.

use std::num::NonZeroUsize;

use ascend_attention::bf16;
use ascend_serving::kv::{CacheShape, CacheWrite, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
    CrossAttention, DraftTree, GraphLimits, LayerGroup, StatePolicy, TreeRequest, TreeVerification, rules,
};

use crate::harness;
use crate::tokens::{DIM, dense, packed, row};

use super::{Engine, LAYERS, PAD, distance, names};

/// Blocks in front of a window are given back, and steps go on.
#[test]
fn windows_slide() {
    let stream = harness::stream();
    let window = NonZeroUsize::new(100).unwrap();
    let group = |layers: Vec<usize>, causality| {
        let shape = CacheShape::new(layers.len(), 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
        let backends = Backends::none().with(Backend::Fused);
        LayerGroup::new(layers, causality, AttentionShape::new(1, 1, DIM), cache, backends)
    };
    let groups = [group(vec![0], Causality::Causal), group(vec![1, 2], Causality::Window(window))];
    let mut attention = Attention::of_groups(LAYERS, groups).unwrap();
    let mut sequence = attention.sequence();
    let mut tokens: Vec<u64> = Vec::new();
    let run = |attention: &mut Attention<bf16>, tokens: &[u64], metadata: &AttentionMetadata, layers| {
        let mut step = attention.begin(&stream, metadata)?;
        let new = metadata.tokens();
        let names = &tokens[tokens.len() - new..];
        for layer in 0..layers {
            let [query, key, value] = [0, 1, 2].map(|what| packed(&stream, names, layer, what, 1));
            let output = step.forward(layer, (&query, &key, &value))?;
            let got = output.download(&stream)?;
            let first = match layer {
                0 => 0,
                _ => tokens.len().saturating_sub(100),
            };
            let shape = AttentionShape::new(1, 1, DIM);
            let want = dense(tokens, layer, shape, |key| key >= first);
            let away = distance(&got[(new - 1) * DIM..], &want);
            assert!(away < 8e-3, "layer {layer}: {away} away");
        }
        step.end()
    };
    for new in [300, 1, 90, 1] {
        tokens.extend(names(tokens.len() as u64 + 1, new));
        attention.grow(&stream, &mut sequence, new).unwrap();
        let request = BatchRequest::of(&sequence, new);
        let metadata = attention.metadata(&[request], StatePolicy::default()).unwrap();
        run(&mut attention, &tokens, &metadata, LAYERS).unwrap();
    }
    assert!(sequence.group(1).unwrap().given_back() > 0);
    // A layer of the second group is left out, then the step is forgotten.
    attention.grow(&stream, &mut sequence, 1).unwrap();
    tokens.push(9000);
    let metadata_of = |attention: &Attention<bf16>, sequence: &Sequence, new| {
        let request = BatchRequest::of(sequence, new);
        attention.metadata(&[request], StatePolicy::default())
    };
    let metadata = metadata_of(&attention, &sequence, 1).unwrap();
    let why = run(&mut attention, &tokens, &metadata, 2).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
    attention.grow(&stream, &mut sequence, 1).unwrap();
    tokens.push(9001);
    let stale = run(&mut attention, &tokens, &metadata, LAYERS).unwrap_err();
    assert!(stale.breaks(&rules::SEQUENCE_CHANGED), "{stale}");
    let behind = metadata_of(&attention, &sequence, 1).unwrap();
    let why = run(&mut attention, &tokens, &behind, LAYERS).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
    let both = metadata_of(&attention, &sequence, 2).unwrap();
    run(&mut attention, &tokens, &both, LAYERS).unwrap();
    // The layers of one group alone: the tokens count for no group, and the step can begin again.
    attention.grow(&stream, &mut sequence, 1).unwrap();
    tokens.push(9002);
    let metadata = metadata_of(&attention, &sequence, 1).unwrap();
    let why = run(&mut attention, &tokens, &metadata, 1).unwrap_err();
    assert!(why.to_string().contains("without layers 1 to 2"), "{why}");
    run(&mut attention, &tokens, &metadata, LAYERS).unwrap();
    let twice = metadata_of(&attention, &sequence, 1).unwrap();
    let again = attention.begin(&stream, &twice).map(drop).unwrap_err();
    assert!(again.breaks(&rules::SEQUENCE_COMPUTED), "{again}");
    // A fork has the tokens of every group, and a fault names the layer by the model's number.
    let mut fork = sequence.fork();
    attention.grow(&stream, &mut fork, 1).unwrap();
    tokens.push(9003);
    let metadata = metadata_of(&attention, &fork, 1).unwrap();
    let [query, wrong] = [1, 2].map(|heads| packed(&stream, &[9003], 1, 0, heads));
    let mut begun = attention.begin(&stream, &metadata).unwrap();
    let wrong = begun.forward(2, (&query, &wrong, &wrong)).unwrap_err();
    assert!(wrong.to_string().contains("layer 2 of the model"), "{wrong}");
    drop(begun);
    run(&mut attention, &tokens, &metadata, LAYERS).unwrap();
}

/// Tokens that come from elsewhere: a host cache, another rank, launches of one's own.
#[test]
fn tokens_that_are_written_by_hand_are_named() {
    let mut engine = Engine::new(4);
    let mut tokens = names(1, 140);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &tokens);

    // To the host, and back into other blocks.
    let cache = engine.attention.cache();
    let blocks = sequence.row().to_vec();
    let mut host = Vec::new();
    for layer in 0..LAYERS {
        let of = cache.layer(layer).unwrap();
        let saved = [&of.key, &of.value].map(|tensor| {
            let blocks = blocks.iter().map(|block| {
                let place = tensor.narrow(0, *block..block + 1).unwrap();
                place.download(&engine.stream).unwrap()
            });
            blocks.collect::<Vec<_>>()
        });
        host.push(saved);
    }
    let _elsewhere = engine.attention.cache().pool().allocate().unwrap();
    sequence.truncate(0).unwrap();
    assert_eq!(engine.computed(&sequence), 0);
    engine.grow(&mut sequence, 140);
    let cache = engine.attention.cache();
    for (layer, saved) in host.iter().enumerate() {
        let of = cache.layer(layer).unwrap();
        for (tensor, saved) in [&of.key, &of.value].into_iter().zip(saved) {
            for (block, numbers) in sequence.row().iter().zip(saved) {
                let place = tensor.narrow(0, *block..block + 1).unwrap();
                let from = engine.stream.upload(numbers, place.shape()).unwrap();
                place.copy_from(&engine.stream, &from).unwrap();
            }
        }
    }
    let more = cache.mark_computed(&sequence, 141).unwrap_err();
    assert_eq!(more.rule, &rules::SEQUENCE_LENGTH);
    let foreign = Engine::new(4);
    let other = foreign.attention.cache().mark_computed(&sequence, 1);
    assert_eq!(other.unwrap_err().rule, &rules::BLOCK_POOL);
    cache.mark_computed(&sequence, 140).unwrap();
    tokens.push(500);
    engine.add(&mut sequence, &tokens);

    // Writes of one's own.
    let (cache, stream) = (engine.attention.cache_mut(), &engine.stream);
    let slots = cache.grow(stream, &mut sequence, 2).unwrap();
    tokens.extend([501, 502]);
    let rows = |layer, what| packed::<bf16>(stream, &[501, 502], layer, what, 1);
    let write = CacheWrite::plan(cache, stream, &slots, &rows(0, 1), &rows(0, 2)).unwrap();
    for layer in 0..LAYERS {
        cache.write(stream, &write, layer, &rows(layer, 1), &rows(layer, 2)).unwrap();
    }
    cache.mark_computed(&sequence, sequence.len()).unwrap();
    tokens.push(503);
    engine.add(&mut sequence, &tokens);
}

#[test]
fn replayed_steps_are_recorded() {
    let mut engine = Engine::new(4);
    let mut graphs = engine.graphs();
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 20);
    engine.grow(&mut sequence, 20);
    engine.grow(&mut sequence, 1);
    tokens.push(30);
    let mut replay = |engine: &Engine, metadata: &mut AttentionMetadata, tokens: &[u64], layers: usize| {
        let stream = &engine.stream;
        let mut step = graphs.begin(stream, metadata)?;
        for layer in 0..layers {
            let name = &tokens[tokens.len() - 1..];
            let [query, key, value] = [0, 1, 2].map(|what| packed(stream, name, layer, what, 1));
            let output = step.forward(layer, (&query, &key, &value))?;
            let got = output.download(stream)?;
            let want = dense(tokens, layer, AttentionShape::new(1, 1, DIM), |_| true);
            let away = distance(&got[..DIM], &want);
            assert!(away < 8e-3, "{away} away");
        }
        step.end()
    };
    let mut decode = engine.metadata(&sequence, 1);
    let gap = replay(&engine, &mut decode, &tokens, LAYERS).unwrap_err();
    assert!(gap.breaks(&rules::SEQUENCE_GAP), "{gap}");
    let prompt = engine.metadata(&sequence, 21);
    engine.step(&prompt, &tokens);

    // By graphs, then without, then by graphs.
    engine.grow(&mut sequence, 1);
    tokens.push(31);
    let mut decode = engine.metadata(&sequence, 1);
    replay(&engine, &mut decode, &tokens, LAYERS).unwrap();
    tokens.push(32);
    engine.add(&mut sequence, &tokens);
    let stale = replay(&engine, &mut decode, &tokens, LAYERS).unwrap_err();
    assert!(stale.breaks(&rules::SEQUENCE_CHANGED), "{stale}");
    engine.grow(&mut sequence, 1);
    tokens.push(33);
    let mut decode = engine.metadata(&sequence, 1);
    let missing = replay(&engine, &mut decode, &tokens, 1).unwrap_err();
    assert!(missing.breaks(&rules::STEP_LAYERS_MISSING), "{missing}");
    assert_eq!(engine.computed(&sequence), 23);
    let mut decode = engine.metadata(&sequence, 1);
    replay(&engine, &mut decode, &tokens, LAYERS).unwrap();
    assert_eq!(engine.computed(&sequence), 24);
}

/// Two steps of one sequence would both write its next token.
#[test]
fn a_step_does_not_begin_while_another_of_its_sequence_is_in_progress() {
    let mut engine = Engine::new(4);
    let mut graphs = engine.graphs();
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 20);
    engine.add(&mut sequence, &tokens);
    engine.grow(&mut sequence, 1);
    tokens.push(30);
    let stream = engine.stream.device().stream().unwrap();
    let mut decode = engine.metadata(&sequence, 1);
    let in_progress = graphs.begin(&stream, &mut decode).unwrap();
    let metadata = engine.metadata(&sequence, 1);
    let refused = engine.refused(&metadata, &tokens);
    assert_eq!(refused.rule, &rules::SEQUENCE_IN_PROGRESS);
    assert!(refused.to_string().contains("in progress"), "{refused}");
    // Its fix.
    drop(in_progress);
    engine.step(&metadata, &tokens);
    assert_eq!(engine.computed(&sequence), 21);
}

/// A verification that began during a step, and goes on behind it, does not hide what the step has computed.
#[test]
fn a_verification_outlives_a_step() {
    let mut engine = Engine::new(8);
    let verification = TreeVerification::new(engine.attention.shape());
    let limits = GraphLimits::new([1], 256).tokens_each(1);
    let mut trees = verification.capture(&engine.stream, engine.attention.cache(), &limits).unwrap();
    let mut graphs = engine.graphs();
    let tree = DraftTree::from_parents(&[-1]).unwrap();
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 5));
    engine.grow(&mut sequence, 1);
    let mut metadata = engine.metadata(&sequence, 1);
    let stream = engine.stream.device().stream().unwrap();
    let mut step = graphs.begin(&engine.stream, &mut metadata).unwrap();
    let of = |sequence, cached| TreeRequest { sequence, cached, tree: &tree };
    let refused = trees.begin(&stream, &[of(&sequence, 6)]).map(drop);
    assert!(refused.unwrap_err().breaks(&rules::SEQUENCE_GAP));
    let verified = trees.begin(&stream, &[of(&sequence, 5)]).unwrap();
    for layer in 0..LAYERS {
        let rows = [0, 1, 2].map(|what| packed(&engine.stream, &[30], layer, what, 1));
        let [query, key, value] = &rows;
        step.forward(layer, (query, key, value)).unwrap();
    }
    step.end().unwrap();
    assert_eq!(engine.computed(&sequence), 6);
    let fork = sequence.fork();
    drop(verified);
    assert_eq!(engine.computed(&fork), 6);
}

#[test]
fn trees_begin_behind_computed_tokens() {
    let mut engine = Engine::new(4);
    let verification = TreeVerification::new(engine.attention.shape());
    let limits = GraphLimits::new([1], 256).tokens_each(3);
    let mut graphs = verification.capture(&engine.stream, engine.attention.cache(), &limits).unwrap();
    let tree = DraftTree::from_parents(&[-1, 0, 0]).unwrap();
    let mut sequence = engine.sequence();
    let stream = engine.stream.device().stream().unwrap();
    engine.grow(&mut sequence, 20);
    let request = TreeRequest { sequence: &sequence, cached: 20, tree: &tree };
    let gap = graphs.begin(&engine.stream, &[request]).map(drop);
    let gap = gap.unwrap_err();
    assert!(gap.breaks(&rules::SEQUENCE_GAP), "{gap}");
    let metadata = engine.metadata(&sequence, 20);
    engine.step(&metadata, &names(1, 20));
    let request = TreeRequest { sequence: &sequence, cached: 20, tree: &tree };
    let verified = graphs.begin(&stream, &[request]).unwrap();
    // Its later layers would see another token than its first ones.
    sequence.truncate(19).unwrap();
    engine.grow(&mut sequence, 1);
    let metadata = engine.metadata(&sequence, 1);
    let refused = engine.refused(&metadata, &names(2, 20));
    assert_eq!(refused.rule, &rules::SEQUENCE_IN_PROGRESS);
    drop(verified);
    let mut tokens = names(1, 19);
    tokens.push(40);
    engine.step(&metadata, &tokens);
}

#[test]
fn encoder_tokens_are_read_once_all_layers_have_them() {
    let stream = harness::stream();
    let shape = CacheShape::new(LAYERS, 1, DIM);
    let cache = || PagedKvCache::<bf16>::new(stream.device(), 4, 128, shape, PAD).unwrap();
    let mut cross = CrossAttention::new(AttentionShape::new(1, 1, DIM), cache()).unwrap();
    let mut encoded = Sequence::new(cross.cache().pool());
    let own = cache();
    let mut sequence = Sequence::new(own.pool());
    let _ = sequence.grow(1).unwrap();
    let settings = BatchSettings::of(&own, Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let rows = |layer, what| packed::<bf16>(&stream, &[7, 8, 9], layer, what, 1);
    let encode = |cross: &mut CrossAttention<bf16>, encoded: &mut Sequence, layers: &[usize]| {
        let mut encoding = cross.encode(&stream, &mut [(encoded, 3)])?;
        for &layer in layers {
            encoding.write(layer, &rows(layer, 1), &rows(layer, 2))?;
        }
        encoding.end()
    };
    for (layers, rule) in [(&[0, 1][..], &rules::STEP_LAYERS_MISSING), (&[0, 1, 1], &rules::STEP_LAYER_REPEATED)] {
        let why = encode(&mut cross, &mut encoded, layers).unwrap_err();
        assert!(why.breaks(rule), "{why}");
        let why = cross.begin(&stream, &metadata, &[&encoded]).map(drop);
        let why = why.unwrap_err();
        assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
        encoded.truncate(0).unwrap();
    }
    encode(&mut cross, &mut encoded, &[0, 1, 2]).unwrap();
    let mut step = cross.begin(&stream, &metadata, &[&encoded]).unwrap();
    for layer in 0..LAYERS {
        let query = stream.upload(&row(9, layer, 0, 1), [1, 1, DIM]).unwrap();
        let output = step.forward(layer, &query).unwrap();
        let got = output.download(&stream).unwrap();
        let want = dense(&[7, 8, 9], layer, AttentionShape::new(1, 1, DIM), |_| true);
        let away = distance(&got, &want);
        assert!(away < 8e-3, "{away} away");
    }
}

#[test]
fn keys_of_other_heads_with_as_many_elements_are_not_written() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 2, DIM);
    let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 128, shape, PAD).unwrap();
    let mut cross = CrossAttention::new(AttentionShape::new(2, 2, DIM), cache).unwrap();
    let mut encoded = Sequence::new(cross.cache().pool());
    let rows = vec![bf16::ONE; 3 * 2 * DIM];
    let rows = |shape: [usize; 3]| stream.upload(&rows, shape).unwrap();
    let good = rows([3, 2, DIM]);
    let mut encoding = cross.encode(&stream, &mut [(&mut encoded, 3)]).unwrap();
    for other in [[3, DIM, 2], [3, 1, 2 * DIM], [3, 4, DIM / 2]] {
        for (key, value) in [(&rows(other), &good), (&good, &rows(other))] {
            let why = encoding.write(0, key, value).unwrap_err();
            assert!(why.breaks(&rules::STEP_HEADS), "{why}");
        }
    }
    encoding.write(0, &good, &good).unwrap();
    encoding.end().unwrap();
}

#[test]
fn a_refused_encoding_leaves_its_sequences() {
    let stream = harness::stream();
    let shape = CacheShape::new(LAYERS, 1, DIM);
    let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
    let mut cross = CrossAttention::new(AttentionShape::new(1, 1, DIM), cache).unwrap();
    let (mut first, mut second) = (Sequence::new(cross.cache().pool()), Sequence::new(cross.cache().pool()));
    // No layer is written: the tokens are not computed, and others behind them are refused.
    drop(cross.encode(&stream, &mut [(&mut second, 100)]).unwrap());
    let held = cross.cache().pool().held_blocks();
    for _ in 0..3 {
        let why = cross.encode(&stream, &mut [(&mut first, 10), (&mut second, 100)]);
        let why = why.map(drop).unwrap_err();
        assert!(why.breaks(&rules::SEQUENCE_GAP), "{why}");
        assert_eq!((first.len(), second.len()), (0, 100));
        assert_eq!(cross.cache().pool().held_blocks(), held);
    }
}

#[test]
fn an_endless_list_of_moves_is_refused() {
    let mut engine = Engine::new(4);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 20));
    let stream = engine.stream.device().stream().unwrap();
    let cache = engine.attention.cache_mut();
    let why = cache.move_tokens(&stream, &sequence, std::iter::repeat((1, 0))).unwrap_err();
    assert!(why.breaks(&rules::SEQUENCE_MOVED), "{why}");
    let why = cache.move_tokens(&stream, &sequence, (0..).map(|token| (token, token))).unwrap_err();
    assert!(why.breaks(&rules::SEQUENCE_LENGTH), "{why}");
}
