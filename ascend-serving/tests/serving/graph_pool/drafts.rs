//! Graphs of steps with several new tokens a request, and under named masks: whatever the schedule, replayed where
//! the graphs serve the step and eager otherwise, each layer has the attention that its mask gives by its definition.

use approx::abs_diff_eq;
use std::num::NonZeroUsize;

use ascend_attention::spec::Cann;
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionGraphs, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings,
    Causality, Error, GraphLimits, LayerGroup, LayerInputs, LayerMask, NamedMask, StatePolicy, Violation, rules,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::acts::{Act, Schedule, Scheduled, Turn, act, config};
use crate::harness;
use crate::tokens::{DIM, dense, packed};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const LAYERS: usize = 3;
const WINDOW: usize = 30;
const CHUNK: usize = 11;

/// A mask of a layer, and what it shows: the request's place, the token, the key.
struct Known {
    kind: LayerMask,
    sees: fn(usize, usize, usize) -> bool,
}

fn causal() -> Known {
    Known { kind: Causality::Causal.into(), sees: |_, token, key| key <= token }
}

fn windowed() -> Known {
    Known {
        kind: Causality::Window(NonZeroUsize::new(WINDOW).unwrap()).into(),
        sees: |_, token, key| key <= token && token - key < WINDOW,
    }
}

/// Chunks, of another size for each place.
fn chunks() -> Known {
    let sees = |place, token, key| {
        let chunk = CHUNK * (1 + place % 3);
        key <= token && token / chunk == key / chunk
    };
    Known { kind: NamedMask::new("chunks by request", sees).into(), sees }
}

/// All up to the token that follows.
fn one_ahead() -> Known {
    let sees = |_, token, key| key <= token + 1;
    Known { kind: NamedMask::new("one ahead", sees).into(), sees }
}

struct Engine<'a> {
    stream: &'a Stream,
    masks: [Known; LAYERS],
    attention: Attention<bf16>,
    graphs: AttentionGraphs<bf16>,
    settings: BatchSettings,
    schedule: Schedule,
    replayed: usize,
}

impl<'a> Engine<'a> {
    fn new(stream: &'a Stream, masks: [Known; LAYERS], tokens: usize, block_size: usize) -> Self {
        let of = CacheShape::new(LAYERS, KV_HEADS, DIM);
        // Dump slots are for no more padding than there is room for.
        let pad = match block_size {
            0..64 => PadPolicy::SkipNegative,
            _ => PadPolicy::DumpSlot(3),
        };
        let blocks = 24 * 128 / block_size;
        let cache = PagedKvCache::new(stream.device(), blocks, block_size, of, pad).unwrap();
        let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
        let backends = Backends::none().with(Backend::NamedMask).with(Backend::Fused);
        let attention = Attention::new(shape, cache, backends);
        let limits = GraphLimits::new([1, 3, 5], 500).tokens_each(tokens);
        let graphs = attention.capture_layers(stream, |layer| masks[layer].kind.clone(), &limits).unwrap();
        assert_eq!(graphs.sizes().collect::<Vec<_>>(), [1, 3, 5]);
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let mut schedule = Schedule::of(5);
        schedule.begin = 4;
        schedule.tokens = 300;
        Self {
            stream,
            masks,
            attention,
            graphs,
            settings: settings.policy(StatePolicy::new(true, None)),
            schedule,
            replayed: 0,
        }
    }
}

impl Scheduled for Engine<'_> {
    type Element = bf16;

    fn parts(&mut self) -> (&mut Schedule, &Stream, &mut PagedKvCache<bf16>) {
        (&mut self.schedule, self.stream, self.attention.cache_mut())
    }

    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError> {
        let mut metadata = self.schedule.metadata(turns, self.settings, pad);
        metadata.set_mask(self.masks[0].kind.clone());
        let served = self.graphs.serves(&metadata);
        // Graphs take the rows without their padding too.
        let names = self.schedule.names(turns, if served { 0 } else { pad });
        let tensors = |layer: usize| {
            [(0, HEADS), (1, KV_HEADS), (2, KV_HEADS)]
                .map(|(what, heads)| packed::<bf16>(self.stream, &names, layer, what, heads))
        };
        let mut results = Vec::new();
        if served {
            self.replayed += 1;
            let mut step = self.graphs.begin(self.stream, &mut metadata).unwrap();
            for layer in 0..LAYERS {
                let [query, key, value] = tensors(layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap();
                results.push(output.download(self.stream).unwrap());
            }
        } else {
            let before = metadata.clone();
            let refused = self.graphs.begin(self.stream, &mut metadata).map(drop);
            let Err(Error::Violation(Violation { rule, .. })) = refused else {
                panic!("{refused:?}");
            };
            let limits = &rules::GRAPH_LENGTHS;
            prop_assert!(rule == &rules::GRAPH_SIZE || rule == limits, "{rule}");
            prop_assert_eq!(&before, &metadata);
            let mut step = self.attention.begin(self.stream, &metadata).unwrap();
            for (layer, mask) in self.masks.iter().enumerate() {
                let [query, key, value] = tensors(layer);
                let inputs = LayerInputs::from((&query, &key, &value));
                let output = step.forward(layer, inputs.mask(&mask.kind));
                results.push(output.unwrap().download(self.stream).unwrap());
            }
        }
        let shape = self.attention.shape();
        for (layer, result) in results.iter().enumerate() {
            for (nth, row) in self.schedule.rows(turns).into_iter().enumerate() {
                let token = row.names.len() - 1;
                let request = &self.schedule.requests[row.request];
                // All keys that there are, and behind them the token that asks.
                let mut names = request.names[..request.sequence.len()].to_vec();
                let keys = names.len();
                names.push(names[token]);
                let sees = self.masks[layer].sees;
                // Three rows a turn.
                let want = dense(&names, layer, shape, |key| key < keys && sees(nth / 3, token, key));
                let got = &result[row.token * HEADS * DIM..][..HEADS * DIM];
                for (got, want) in got.iter().zip(&want) {
                    prop_assert!(
                        abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2),
                        "layer {layer}, request {}, token {token}, served {served}: {got}, expected {want}",
                        row.request,
                    );
                }
            }
        }
        Ok(())
    }
}

/// Steps of any acts, and those in which all requests verify as many drafts.
fn steps(tokens: usize) -> impl Strategy<Value = Vec<(Vec<Act>, usize)>> {
    let any = prop::collection::vec(act(100, 5), 1..5);
    let verified = (prop::bool::ANY, 0..tokens).prop_map(move |(many, right)| {
        let requests = if many { 0..5 } else { 1..3 };
        requests.map(|r| Act::Verify(r, tokens - 1, right)).collect()
    });
    let acts = prop_oneof![2 => any, 3 => verified];
    prop::collection::vec((acts, prop_oneof![3 => Just(0usize), 1 => 0usize..9]), 1..8)
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn requests_may_add_each_its_own_number_of_tokens(size in prop::sample::select(vec![16, 48, 128, 256]), (tokens, steps) in (1usize..6).prop_flat_map(|tokens| (Just(tokens), steps(tokens)))) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, [causal(), windowed(), causal()], tokens, size);
        engine.run(&steps)?;
    }

    #[test]
    fn named_masks_are_those_of_the_step(size in prop::sample::select(vec![128, 256]), (tokens, steps) in (1usize..5).prop_flat_map(|tokens| (Just(tokens), steps(tokens)))) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, [causal(), chunks(), one_ahead()], tokens, size);
        engine.run(&steps)?;
    }
}

/// Three requests behind prompts, and how many steps with these drafts of each were replayed.
fn replays(stream: &Stream, masks: [Known; LAYERS], drafts: &[[usize; 3]]) -> usize {
    let mut engine = Engine::new(stream, masks, 4, 128);
    for prompt in [90, 200, 60] {
        engine.act(&[Act::Chunk(3, prompt)], 0).unwrap();
        let requests = engine.schedule.requests.len();
        engine.schedule.begin = requests + 1;
    }
    assert_eq!((engine.replayed, engine.schedule.requests.len()), (0, 3));
    engine.schedule.begin = 0;
    for drafts in drafts {
        let acts = drafts.iter().enumerate();
        let acts: Vec<_> = acts.map(|(r, drafts)| Act::Verify(r, *drafts, 1)).collect();
        engine.act(&acts, 0).unwrap();
    }
    let replayed = engine.replayed;
    engine.end();
    replayed
}

#[test]
fn ragged_drafts_and_whole_ones_are_replayed() {
    let stream = harness::stream();
    let drafts = [[3, 3, 3], [0, 0, 0], [3, 1, 2], [0, 3, 0]];
    let masks = [causal(), windowed(), causal()];
    assert_eq!(replays(&stream, masks, &drafts), 4);
}

#[test]
fn named_masks_are_replayed_on_every_release_that_has_them() {
    for cann in Cann::ALL {
        let Some(stream) = harness::stream_of(cann) else {
            continue;
        };
        let masks = [one_ahead(), chunks(), causal()];
        assert_eq!(replays(&stream, masks, &[[3; 3], [3; 3], [2, 3, 3]]), 2);
    }
}

/// Of a windowed group a request has few keys, and the one dummy of this step more: 5 requests of one token leave 43
/// of 48 rows.
#[test]
fn a_dummy_may_be_longer_than_a_window() {
    let stream = harness::stream();
    let window = Causality::Window(NonZeroUsize::new(8).unwrap());
    let group = |layer, causality| {
        let of = CacheShape::new(1, KV_HEADS, DIM);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(stream.device(), 30, 16, of, pad).unwrap();
        let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
        LayerGroup::<bf16>::new([layer], causality, shape, cache, Backends::none().with(Backend::Fused))
    };
    let groups = [group(0, Causality::Causal), group(1, window)];
    let mut model = Attention::of_groups(2, groups).unwrap();
    let limits = GraphLimits::new([6], 200).tokens_each(8);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
    let mut sequences: Vec<_> = (0..5).map(|_| model.sequence()).collect();
    for sequence in &mut sequences {
        model.grow(&stream, sequence, 30).unwrap();
        model.mark_computed(sequence, 30).unwrap();
        model.grow(&stream, sequence, 1).unwrap();
    }
    let policy = StatePolicy::default();
    let batch: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
    let mut metadata = model.metadata(&batch, policy).unwrap();
    assert!(graphs.serves(&metadata));
    let step = graphs.begin(&stream, &mut metadata).unwrap();
    assert_eq!(step.tokens(), 48);
    drop(step);
    let windowed = metadata.group(1).unwrap().kv_lengths();
    assert_eq!(windowed.lengths().last(), Some(&43));
}

#[test]
fn what_a_step_would_need_is_said() {
    let stream = harness::stream();
    let mut engine = Engine::new(&stream, [causal(), windowed(), chunks()], 4, 128);
    let grown = |tokens: usize| {
        let mut sequence = Sequence::new(engine.attention.cache().pool());
        let _ = sequence.grow(tokens).unwrap();
        sequence
    };
    let sequences = [50, 60, 70, 80, 90].map(grown);
    let settings = engine.settings;
    let refused = |graphs: &mut AttentionGraphs<bf16>, news: &[usize]| {
        let batch = sequences.iter().zip(news);
        let batch: Vec<_> = batch.map(|(s, new)| BatchRequest::of(s, *new)).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        match graphs.begin(&stream, &mut metadata).map(drop) {
            Err(Error::Violation(refused)) => refused,
            other => panic!("{other:?}"),
        }
    };
    let fewer = refused(&mut engine.graphs, &[4, 3]);
    assert_eq!(fewer.rule, &rules::GRAPH_SIZE);
    assert_eq!(fewer.given, "3 new tokens of request 1");
    assert!(fewer.allowed.contains("chunks by request"), "{fewer}");
    let limits = GraphLimits::new([5], 500).tokens_each(4);
    let causal = engine.attention.capture(&stream, Causality::Causal, &limits);
    let mut causal = causal.unwrap();
    let more = refused(&mut causal, &[4, 5]);
    assert_eq!(more.given, "5 new tokens of request 1");
    assert_eq!(more.allowed, "at most 4 a request");
    let spare = refused(&mut causal, &[4, 4, 4, 4, 3]);
    assert_eq!(spare.rule, &rules::GRAPH_SIZE);
    assert!(spare.fix.contains("one request more"), "{spare}");
    let other = engine.attention.capture(&stream, engine.masks[2].kind.clone(), &limits);
    let other = refused(&mut other.unwrap(), &[4, 4]);
    assert_eq!(other.rule, &rules::STEP_CAUSALITY);
    assert!(other.allowed.contains("chunks by request"), "{other}");
    // A mask without a key for some token changes nothing.
    let blind: LayerMask = NamedMask::new("blind", |_, token, key| token != 58 && key <= token).into();
    let graphs = engine.attention.capture(&stream, blind.clone(), &limits);
    let mut graphs = graphs.unwrap();
    let cache = engine.attention.cache();
    cache.mark_computed(&sequences[1], 56).unwrap();
    let batch = [BatchRequest::of(&sequences[1], 4)];
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    metadata.set_mask(blind);
    let before = metadata.clone();
    let error = graphs.begin(&stream, &mut metadata).map(drop).unwrap_err();
    assert!(error.breaks(&rules::MASK_ROWS), "{error}");
    assert_eq!(metadata, before);
    drop(sequences);
    engine.end();
}
