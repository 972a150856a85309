//! What a step records: tokens that nothing computed are not read, metadata of an earlier step does not begin again,
//! and a step without some of its layers does not count.

use std::num::NonZeroUsize;

use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality,
    CrossAttention, DraftTree, Error, FusedAttention, GraphLimits, GroupedAttention,
    GroupedMetadata, GroupedRequest, GroupedSequence, LayerGroup, PagedDecode, PrefixCache,
    QuantisedDecode, QuantisedPrefill, StatePolicy, TreeRequest, TreeVerification, Violation,
    rules,
};

use crate::harness;
use crate::tokens::{DIM, dense, packed, row};

const LAYERS: usize = 3;
const PAD: PadPolicy = PadPolicy::SkipNegative;

/// An engine of one head and three layers.
struct Engine {
    stream: Stream,
    attention: Attention<bf16>,
}

impl Engine {
    fn over(cache: impl FnOnce(&Stream, CacheShape) -> PagedKvCache<bf16>) -> Self {
        let stream = harness::stream();
        let cache = cache(&stream, CacheShape::new(LAYERS, 1, DIM));
        let backends = match cache.is_quantised() {
            true => Backends::none()
                .with(QuantisedDecode)
                .with(QuantisedPrefill),
            false => Backends::none().with(FusedAttention).with(PagedDecode),
        };
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        Self { stream, attention }
    }

    /// A cache of this number of blocks of 128 tokens.
    fn new(blocks: usize) -> Self {
        Self::over(|stream, shape| {
            PagedKvCache::new(stream.device(), blocks, 128, shape, PAD).unwrap()
        })
    }

    fn sequence(&self) -> Sequence {
        Sequence::new(self.attention.cache().pool())
    }

    fn grow(&mut self, sequence: &mut Sequence, tokens: usize) {
        self.attention.grow(&self.stream, sequence, tokens).unwrap();
    }

    /// The metadata of a step of one request.
    fn of_request(&self, request: BatchRequest<'_>) -> Result<AttentionMetadata, Violation> {
        let settings = BatchSettings::of(self.attention.cache(), Causality::Causal);
        AttentionMetadata::new(&[request], settings)
    }

    /// The metadata of a step of the last `new` tokens.
    fn metadata(&self, sequence: &Sequence, new: usize) -> AttentionMetadata {
        self.of_request(BatchRequest::of(sequence, new)).unwrap()
    }

    /// As [`metadata`](Self::metadata), of a step whose tokens an earlier step may have computed.
    fn metadata_again(&self, sequence: &Sequence, new: usize) -> AttentionMetadata {
        let request = BatchRequest::of(sequence, new).recompute();
        self.of_request(request).unwrap()
    }

    /// Queues layers of a step of the last of these tokens. The rows of the last one.
    fn layers(
        &mut self,
        metadata: &AttentionMetadata,
        names: &[u64],
        layers: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<Vec<bf16>>, Error> {
        let new = &names[names.len() - metadata.tokens()..];
        let mut step = self.attention.begin(&self.stream, metadata)?;
        let mut last = Vec::new();
        for layer in layers {
            let [query, key, value] =
                [0, 1, 2].map(|what| packed(&self.stream, new, layer, what, 1));
            let output = step.forward(layer, (&query, &key, &value))?;
            let mut rows = output.download(&self.stream).unwrap();
            last.push(rows.split_off(rows.len() - DIM));
        }
        Ok(last)
    }

    /// A step of all layers, whose last row is compared with dense attention over all names.
    fn step(&mut self, metadata: &AttentionMetadata, names: &[u64]) {
        let away = self.distance(metadata, names).unwrap();
        assert!(away < 3e-2, "{away} away from dense attention");
    }

    fn distance(&mut self, metadata: &AttentionMetadata, names: &[u64]) -> Result<f64, Error> {
        let outputs = self.layers(metadata, names, 0..LAYERS)?;
        let shape = self.attention.shape();
        let layers = outputs.iter().enumerate().map(|(layer, got)| {
            let want = dense(names, layer, shape, |_| true);
            distance(got, &want)
        });
        Ok(layers.fold(0.0, f64::max))
    }

    /// Why a step does not begin.
    fn refused(&mut self, metadata: &AttentionMetadata, names: &[u64]) -> Violation {
        match self.distance(metadata, names) {
            Err(Error::Violation(refused)) => refused,
            Err(other) => panic!("{other}"),
            Ok(away) => panic!("accepted, and {away} away from dense attention"),
        }
    }

    /// Grows by the last of these tokens, and computes them.
    fn add(&mut self, sequence: &mut Sequence, names: &[u64]) {
        let new = names.len() - sequence.len();
        self.grow(sequence, new);
        let metadata = self.metadata(sequence, new);
        self.step(&metadata, names);
    }

    fn computed(&self, sequence: &Sequence) -> usize {
        self.attention.cache().computed_tokens(sequence).unwrap()
    }
}

fn distance(got: &[bf16], want: &[f64]) -> f64 {
    let both = got.iter().zip(want);
    both.map(|(got, want)| (got.to_f64() - want).abs())
        .fold(0.0, f64::max)
}

fn names(from: u64, tokens: usize) -> Vec<u64> {
    (from..from + tokens as u64).collect()
}

/// A plain cache, and one of INT8 with a scale for each token.
fn both_kinds(mut test: impl FnMut(Engine)) {
    test(Engine::new(2));
    test(Engine::over(|stream, shape| {
        PagedKvCache::quantised_by_token(stream.device(), 2, 128, shape, PAD).unwrap()
    }));
}

/// A new user makes room for a prompt and decodes behind it, or grows twice. Its blocks hold another request's old tokens.
#[test]
fn a_gap_is_refused_and_its_fix_computes_it() {
    both_kinds(|mut engine| {
        // Somebody else's tokens, in the blocks that are handed out again.
        let mut other = engine.sequence();
        engine.add(&mut other, &names(5000, 200));
        drop(other);
        engine.stream.synchronize().unwrap();

        let mut tokens = names(1, 100);
        let mut sequence = engine.sequence();
        engine.grow(&mut sequence, 100);
        let metadata = engine.metadata(&sequence, 1);
        let gap = engine.refused(&metadata, &tokens);
        assert_eq!(gap.rule, &rules::SEQUENCE_GAP);
        assert!(gap.given.contains("99 tokens of request 0"), "{gap}");
        assert!(gap.allowed.contains("`of(&sequence, 100)`"), "{gap}");
        // As it says.
        let metadata = engine.metadata(&sequence, 100);
        engine.step(&metadata, &tokens);

        engine.grow(&mut sequence, 1);
        engine.grow(&mut sequence, 1);
        tokens.extend([200, 201]);
        let metadata = engine.metadata(&sequence, 1);
        let gap = engine.refused(&metadata, &tokens);
        assert_eq!(gap.rule, &rules::SEQUENCE_GAP);
        assert!(gap.allowed.contains("`of(&sequence, 2)`"), "{gap}");
        let metadata = engine.metadata(&sequence, 2);
        engine.step(&metadata, &tokens);

        // The other fix that it names: what is not wanted is cut off.
        engine.grow(&mut sequence, 7);
        engine.grow(&mut sequence, 1);
        let metadata = engine.metadata(&sequence, 1);
        assert_eq!(
            engine.refused(&metadata, &tokens).rule,
            &rules::SEQUENCE_GAP
        );
        assert_eq!(engine.computed(&sequence), 102);
        sequence.truncate(102).unwrap();
        tokens.push(202);
        engine.add(&mut sequence, &tokens);
    });
}

/// A new user makes the metadata once and begins every step with it.
#[test]
fn metadata_of_an_earlier_step_is_refused_and_its_fix_works() {
    both_kinds(|mut engine| {
        let mut sequence = engine.sequence();
        let mut tokens = names(1, 10);
        engine.add(&mut sequence, &tokens);
        engine.grow(&mut sequence, 1);
        tokens.push(50);
        let mut metadata = engine.metadata(&sequence, 1);
        engine.step(&metadata, &tokens);
        // Once more, as where the next `grow` was forgotten, or on purpose.
        let again = engine.refused(&metadata, &tokens);
        assert_eq!(again.rule, &rules::SEQUENCE_COMPUTED);
        let again = engine.metadata_again(&sequence, 1);
        engine.step(&again, &tokens);

        engine.grow(&mut sequence, 1);
        tokens.push(51);
        let stale = engine.refused(&metadata, &tokens);
        assert_eq!(stale.rule, &rules::SEQUENCE_CHANGED);
        assert!(stale.fix.contains("renew"), "{stale}");
        metadata.renew(&[BatchRequest::of(&sequence, 1)]).unwrap();
        engine.step(&metadata, &tokens);

        // Whatever changed it: cut within a block, and grown to the same length again.
        let of_step = engine.metadata(&sequence, 1);
        sequence.truncate(11).unwrap();
        assert_eq!(
            engine.refused(&of_step, &tokens).rule,
            &rules::SEQUENCE_CHANGED
        );
        engine.grow(&mut sequence, 1);
        assert_eq!(
            engine.refused(&of_step, &tokens).rule,
            &rules::SEQUENCE_CHANGED
        );
        let again = engine.metadata(&sequence, 1);
        engine.step(&again, &tokens);
    });
}

#[test]
fn a_step_without_some_layers_does_not_count() {
    both_kinds(|mut engine| {
        let mut sequence = engine.sequence();
        let mut tokens = names(1, 10);
        engine.grow(&mut sequence, 10);
        let prompt = engine.metadata(&sequence, 10);
        let only = |engine: &mut Engine, layers: &[usize]| {
            let layers = layers.iter().copied();
            engine.layers(&prompt, &names(1, 10), layers).map(drop)
        };
        only(&mut engine, &[0, 2]).unwrap();
        assert_eq!(engine.computed(&sequence), 0);
        engine.grow(&mut sequence, 1);
        tokens.push(50);
        let decode = engine.metadata(&sequence, 1);
        let missing = engine.refused(&decode, &tokens);
        assert_eq!(missing.rule, &rules::STEP_LAYERS_MISSING);
        assert!(missing.given.contains("without layer 1"), "{missing}");
        assert!(missing.allowed.contains("`of(&sequence, 11)`"), "{missing}");
        let all = engine.metadata(&sequence, 11);
        engine.step(&all, &tokens);

        // A layer twice, layer 0 for every one, and one too many, as of a model with more layers than the cache.
        let again = engine.metadata_again(&sequence, 11);
        for layers in [&[0, 1, 1][..], &[0, 0, 0], &[0, 1, 2, 0]] {
            let layers = layers.iter().copied();
            let why = engine.layers(&again, &tokens, layers).unwrap_err();
            assert!(why.breaks(&rules::STEP_LAYER_REPEATED), "{why}");
            assert!(why.to_string().contains("a second time"), "{why}");
        }
        engine.step(&again, &tokens);
        assert_eq!(engine.computed(&sequence), 11);
    });
}

#[test]
fn a_step_can_be_asked_whether_all_layers_ran() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    engine.grow(&mut sequence, 1);
    let metadata = engine.metadata(&sequence, 1);
    let [query, key, value] = [0, 1, 2].map(|what| packed(&engine.stream, &[1], 0, what, 1));
    for ran in 0..=LAYERS {
        let mut step = engine.attention.begin(&engine.stream, &metadata).unwrap();
        for layer in 0..ran {
            step.forward(layer, (&query, &key, &value)).unwrap();
        }
        let ended = step.end();
        match ran {
            LAYERS => ended.unwrap(),
            _ => {
                let why = ended.unwrap_err();
                assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
                let left = match ran {
                    2 => "without layer 2,".to_owned(),
                    ran => format!("without layers {ran} to 2,"),
                };
                assert!(why.to_string().contains(&left), "{why}");
            }
        }
    }
}

/// Rejected drafts are cut off, and what grows in their place is computed anew.
#[test]
fn drafts_are_verified_and_rejected() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 126);
    engine.add(&mut sequence, &tokens);
    tokens.extend([200, 201, 202, 203]);
    engine.add(&mut sequence, &tokens);
    // One draft of three.
    sequence.truncate(128).unwrap();
    tokens.truncate(128);
    assert_eq!(engine.computed(&sequence), 128);
    engine.grow(&mut sequence, 2);
    tokens.extend([300, 301]);
    let behind = engine.metadata(&sequence, 1);
    assert_eq!(engine.refused(&behind, &tokens).rule, &rules::SEQUENCE_GAP);
    let metadata = engine.metadata(&sequence, 2);
    engine.step(&metadata, &tokens);
}

/// Tokens that are cut off and grown again while their step is in progress are not what it computes.
#[test]
fn a_step_computes_nothing_that_came_behind_its_beginning() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 4));
    engine.grow(&mut sequence, 4);
    let metadata = engine.metadata(&sequence, 4);
    let inputs: Vec<_> = (0..LAYERS)
        .map(|layer| [0, 1, 2].map(|what| packed(&engine.stream, &names(10, 4), layer, what, 1)))
        .collect();
    let mut step = engine.attention.begin(&engine.stream, &metadata).unwrap();
    sequence.truncate(6).unwrap();
    let _ = sequence.grow(2).unwrap();
    for (layer, [query, key, value]) in inputs.iter().enumerate() {
        step.forward(layer, (query, key, value)).unwrap();
    }
    step.end().unwrap();
    assert_eq!(engine.computed(&sequence), 6);
    let mut tokens = names(1, 4);
    tokens.extend([10, 11, 500, 501]);
    let metadata = engine.metadata(&sequence, 2);
    engine.step(&metadata, &tokens);
}

#[test]
fn forks_have_what_was_computed_of_them() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 130);
    engine.add(&mut sequence, &tokens);
    let mut late = sequence.fork();
    let mut prefix = sequence.share_prefix(129).unwrap();
    tokens.push(200);
    engine.add(&mut late, &tokens);
    let mut other = names(1, 129);
    other.extend([300, 301]);
    engine.add(&mut prefix, &other);
    tokens.truncate(130);
    tokens.push(400);
    engine.add(&mut sequence, &tokens);
}

/// A forgotten `grow` would write over tokens that another sequence or the prefix reads.
#[test]
fn tokens_that_another_sequence_reads_are_not_written_again() {
    let mut engine = Engine::new(8);
    let pool = engine.attention.cache().pool().clone();
    let mut prefixes = PrefixCache::<u64>::new(&pool, Causality::Causal).unwrap();
    let mut tokens = names(1, 128);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &tokens);
    prefixes.insert(b"", &tokens, &sequence).unwrap();
    tokens.push(300);
    let fork = sequence.fork();
    drop(sequence);
    let hit = prefixes.share(b"", &tokens).unwrap();
    for mut sequence in [fork, hit] {
        let again = engine.of_request(BatchRequest::of(&sequence, 1));
        assert_eq!(again.unwrap_err().rule, &rules::TABLE_SHARED);
        engine.add(&mut sequence, &tokens);
        // Its last block is its own.
        engine.metadata(&sequence, 1);
    }
}

/// Both would write their next token into one block.
#[test]
fn a_fork_in_front_of_the_step_that_computes_its_tokens_is_refused() {
    for tokens in [50, 128] {
        let mut engine = Engine::new(8);
        let mut sequence = engine.sequence();
        let mut names = names(1, tokens);
        engine.add(&mut sequence, &names);
        engine.grow(&mut sequence, 1);
        let early = engine.metadata(&sequence, 1);
        let mut fork = sequence.fork();
        names.push(200);
        // Before and after the fork.
        assert_eq!(engine.refused(&early, &names).rule, &rules::TABLE_SHARED);
        let late = engine.of_request(BatchRequest::of(&sequence, 1));
        let late = late.unwrap_err();
        assert_eq!(late.rule, &rules::TABLE_SHARED);
        let says = format!("`truncate` its sequence to {tokens}");
        assert!(late.fix.contains(&says), "{late}");
        // As it says, once for either of them.
        fork.truncate(tokens).unwrap();
        engine.add(&mut fork, &names);
        let alone = engine.metadata(&sequence, 1);
        engine.step(&alone, &names);
        for mut sequence in [sequence, fork] {
            let mut names = names.clone();
            names.push(300);
            engine.add(&mut sequence, &names);
        }
    }
}

/// A fork that comes and goes leaves the block to its sequence.
#[test]
fn a_fork_that_is_dropped_again_hurts_nobody() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 50);
    engine.add(&mut sequence, &tokens);
    engine.grow(&mut sequence, 1);
    tokens.push(60);
    let metadata = engine.metadata(&sequence, 1);
    drop(sequence.fork());
    engine.step(&metadata, &tokens);
}

/// Of blocks that another sequence holds none is written, whichever of them they are.
#[test]
fn a_block_behind_the_first_may_be_shared_too() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    engine.add(&mut sequence, &names(1, 300));
    let made_before = engine.metadata_again(&sequence, 300);
    let mut fork = sequence.fork();
    fork.drop_before(128).unwrap();
    let again = engine.of_request(BatchRequest::of(&sequence, 300).recompute());
    assert_eq!(again.unwrap_err().rule, &rules::TABLE_SHARED);
    let refused = engine.refused(&made_before, &names(1, 300));
    assert_eq!(refused.rule, &rules::TABLE_SHARED);
}

/// A step that begins too early by some tokens is refused with the number that is meant.
#[test]
fn a_step_that_begins_among_computed_tokens_is_refused() {
    let mut engine = Engine::new(2);
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 8);
    engine.add(&mut sequence, &tokens);
    engine.grow(&mut sequence, 1);
    tokens.push(20);
    let metadata = engine.metadata(&sequence, 3);
    let early = engine.refused(&metadata, &tokens);
    assert_eq!(early.rule, &rules::SEQUENCE_COMPUTED);
    assert!(early.given.contains("tokens 6 to 7"), "{early}");
    assert!(early.allowed.contains("`of(&sequence, 1)`"), "{early}");
    let metadata = engine.metadata(&sequence, 1);
    engine.step(&metadata, &tokens);
}

/// Who computes tokens once more takes them back and grows by them, which copies the block that others read.
#[test]
fn shared_tokens_are_computed_once_more_in_a_copied_block() {
    let mut engine = Engine::new(8);
    let mut sequence = engine.sequence();
    let tokens = names(1, 130);
    engine.add(&mut sequence, &tokens);
    let mut fork = sequence.fork();
    let refused = engine.of_request(BatchRequest::of(&fork, 1).recompute());
    let refused = refused.unwrap_err();
    assert_eq!(refused.rule, &rules::TABLE_SHARED);
    assert!(
        refused.fix.contains("`truncate` its sequence to 129"),
        "{refused}"
    );
    fork.truncate(129).unwrap();
    engine.add(&mut fork, &tokens);
    engine.metadata_again(&fork, 1);
    engine.metadata(&sequence, 1);
}

#[test]
fn a_request_has_the_row_of_its_sequence() {
    let mut engine = Engine::new(8);
    let [mut one, mut other] = [engine.sequence(), engine.sequence()];
    engine.grow(&mut one, 3);
    engine.grow(&mut other, 3);
    let mut request = BatchRequest::of(&one, 3);
    request.row = other.row();
    let error = engine.of_request(request).unwrap_err();
    assert_eq!(error.rule, &rules::TABLE_ROW);
    let copied = one.row().to_vec();
    request.row = &copied;
    engine.of_request(request).unwrap();
}

#[test]
fn prefixes_are_found_once_they_are_computed() {
    let mut engine = Engine::new(8);
    let pool = engine.attention.cache().pool().clone();
    let mut prefixes = PrefixCache::<u64>::new(&pool, Causality::Causal).unwrap();
    let mut tokens = names(1, 140);
    let mut sequence = engine.sequence();
    engine.grow(&mut sequence, 140);
    let early = prefixes.insert(b"", &tokens, &sequence).unwrap_err();
    assert_eq!(early.rule, &rules::SEQUENCE_GAP);
    let metadata = engine.metadata(&sequence, 140);
    engine.step(&metadata, &tokens);
    // Tokens behind the last full block need not be computed.
    engine.grow(&mut sequence, 1);
    tokens.push(600);
    assert_eq!(prefixes.insert(b"", &tokens, &sequence).unwrap(), 1);
    drop(sequence);
    let mut hit = prefixes.share(b"", &tokens).unwrap();
    assert_eq!((hit.len(), engine.computed(&hit)), (128, 128));
    tokens.truncate(128);
    tokens.extend(names(700, 3));
    engine.add(&mut hit, &tokens);
}

/// Blocks in front of a window are given back, and steps go on.
#[test]
fn windows_slide() {
    let stream = harness::stream();
    let window = NonZeroUsize::new(100).unwrap();
    let group = |layers: Vec<usize>, causality| {
        let shape = CacheShape::new(layers.len(), 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PAD).unwrap();
        let backends = Backends::none().with(FusedAttention);
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        LayerGroup::new(layers, causality, attention)
    };
    let groups = [
        group(vec![0], Causality::Causal),
        group(vec![1, 2], Causality::Window(window)),
    ];
    let mut attention = GroupedAttention::new(LAYERS, groups).unwrap();
    let mut sequence = attention.sequence();
    let mut tokens: Vec<u64> = Vec::new();
    let run = |attention: &mut GroupedAttention<bf16>,
               tokens: &[u64],
               metadata: &GroupedMetadata,
               layers| {
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
            assert!(away < 3e-2, "layer {layer}: {away} away");
        }
        step.end()
    };
    for new in [300, 1, 90, 1] {
        tokens.extend(names(tokens.len() as u64 + 1, new));
        attention.grow(&stream, &mut sequence, new).unwrap();
        let request = GroupedRequest::of(&sequence, new);
        let metadata = attention
            .metadata(&[request], StatePolicy::default())
            .unwrap();
        run(&mut attention, &tokens, &metadata, LAYERS).unwrap();
    }
    assert!(sequence.group(1).unwrap().given_back() > 0);
    // A layer of the second group is left out, then the step is forgotten.
    attention.grow(&stream, &mut sequence, 1).unwrap();
    tokens.push(9000);
    let of = |attention: &GroupedAttention<bf16>, sequence: &GroupedSequence, new| {
        let request = GroupedRequest::of(sequence, new);
        attention.metadata(&[request], StatePolicy::default())
    };
    let metadata = of(&attention, &sequence, 1).unwrap();
    let why = run(&mut attention, &tokens, &metadata, 2).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
    attention.grow(&stream, &mut sequence, 1).unwrap();
    tokens.push(9001);
    let stale = run(&mut attention, &tokens, &metadata, LAYERS).unwrap_err();
    assert!(stale.breaks(&rules::SEQUENCE_CHANGED), "{stale}");
    let behind = of(&attention, &sequence, 1).unwrap();
    let why = run(&mut attention, &tokens, &behind, LAYERS).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING), "{why}");
    let both = of(&attention, &sequence, 2).unwrap();
    run(&mut attention, &tokens, &both, LAYERS).unwrap();
    // The layers of one group alone: the tokens count for no group, and the step can begin again.
    attention.grow(&stream, &mut sequence, 1).unwrap();
    tokens.push(9002);
    let metadata = of(&attention, &sequence, 1).unwrap();
    let why = run(&mut attention, &tokens, &metadata, 1).unwrap_err();
    assert!(why.to_string().contains("without layers 1 to 2"), "{why}");
    run(&mut attention, &tokens, &metadata, LAYERS).unwrap();
    let twice = of(&attention, &sequence, 1).unwrap();
    let again = attention.begin(&stream, &twice).map(drop).unwrap_err();
    assert!(again.breaks(&rules::SEQUENCE_COMPUTED), "{again}");
    // A fork has the tokens of every group, and a fault names the layer by the model's number.
    let mut fork = sequence.fork();
    attention.grow(&stream, &mut fork, 1).unwrap();
    tokens.push(9003);
    let metadata = of(&attention, &fork, 1).unwrap();
    let [query, wrong] = [1, 2].map(|heads| packed(&stream, &[9003], 1, 0, heads));
    let mut begun = attention.begin(&stream, &metadata).unwrap();
    let wrong = begun.forward(2, (&query, &wrong, &wrong)).unwrap_err();
    assert!(
        wrong.to_string().contains("layer 2 of the model"),
        "{wrong}"
    );
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
        cache
            .write(stream, &write, layer, &rows(layer, 1), &rows(layer, 2))
            .unwrap();
    }
    cache.mark_computed(&sequence, sequence.len()).unwrap();
    tokens.push(503);
    engine.add(&mut sequence, &tokens);
}

#[test]
fn replayed_steps_are_recorded() {
    let mut engine = Engine::new(4);
    let limits = GraphLimits::new([1], 256);
    let mut graphs = engine
        .attention
        .capture(&engine.stream, Causality::Causal, &limits)
        .unwrap();
    let mut sequence = engine.sequence();
    let mut tokens = names(1, 20);
    engine.grow(&mut sequence, 20);
    engine.grow(&mut sequence, 1);
    tokens.push(30);
    let mut replay =
        |engine: &Engine, metadata: &mut AttentionMetadata, tokens: &[u64], layers: usize| {
            let stream = &engine.stream;
            let mut step = graphs.begin(stream, metadata)?;
            for layer in 0..layers {
                let name = &tokens[tokens.len() - 1..];
                let [query, key, value] =
                    [0, 1, 2].map(|what| packed(stream, name, layer, what, 1));
                let output = step.forward(layer, (&query, &key, &value))?;
                let got = output.download(stream)?;
                let want = dense(tokens, layer, AttentionShape::new(1, 1, DIM), |_| true);
                let away = distance(&got[..DIM], &want);
                assert!(away < 3e-2, "{away} away");
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

#[test]
fn trees_are_verified_behind_computed_tokens() {
    let mut engine = Engine::new(4);
    let verification = TreeVerification::new(engine.attention.shape());
    let limits = GraphLimits::new([1], 256).tokens_each(3);
    let mut graphs = verification
        .capture(&engine.stream, engine.attention.cache(), &limits)
        .unwrap();
    let tree = DraftTree::from_parents(&[-1, 0, 0]).unwrap();
    let mut sequence = engine.sequence();
    engine.grow(&mut sequence, 20);
    let request = TreeRequest {
        sequence: &sequence,
        tree: &tree,
    };
    let gap = graphs.begin(&engine.stream, &[request]).map(drop);
    let gap = gap.unwrap_err();
    assert!(gap.breaks(&rules::SEQUENCE_GAP), "{gap}");
    let metadata = engine.metadata(&sequence, 20);
    engine.step(&metadata, &names(1, 20));
    let request = TreeRequest {
        sequence: &sequence,
        tree: &tree,
    };
    assert!(graphs.begin(&engine.stream, &[request]).is_ok());
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
    for (layers, rule) in [
        (&[0, 1][..], &rules::STEP_LAYERS_MISSING),
        (&[0, 1, 1], &rules::STEP_LAYER_REPEATED),
    ] {
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
        assert!(away < 3e-2, "{away} away");
    }
}
