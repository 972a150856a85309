//! Layers that see different keys in one step, from one metadata: whatever the schedule, each has the attention that
//! its own mask gives by its definition.

use crate::harness;
use approx::abs_diff_eq;

use std::num::NonZeroUsize;

use crate::acts::{Act, Schedule, Scheduled, Turn, act, config};
use crate::tokens::{DIM, dense, packed};
use ascend_attention::spec::Cann;
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits, LayerGroup, LayerInputs, LayerMask, NamedMask, StatePolicy, rules,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const LAYERS: usize = 5;
/// Blocks that somebody else holds, since each row counts the blocks that it reads.
const BALLAST: usize = 60;

/// A mask, and what it shows: request, token, key.
struct Known {
    kind: LayerMask,
    sees: fn(&Model, usize, usize, usize) -> bool,
}

#[derive(Clone, Debug)]
struct Model {
    kv_heads: usize,
    group: usize,
    window: NonZeroUsize,
    chunk: usize,
    /// A chunk of whole blocks.
    blocks: NonZeroUsize,
    prefix: usize,
    /// The mask that the step has, and those of the layers that have their own.
    of_step: usize,
    of_layers: [Option<usize>; LAYERS],
    cap: Option<f64>,
}

impl Model {
    fn masks(&self) -> [Known; 6] {
        let (window, chunk, prefix) = (self.window, self.chunk, self.prefix);
        let named = |name: &str, sees: fn(&Model, usize, usize, usize) -> bool| {
            let model = self.clone();
            let mask = NamedMask::new(name, move |request, token, key| sees(&model, request, token, key));
            let kind = mask.into();
            Known { kind, sees }
        };
        assert!(chunk > 0 && prefix > 0);
        [
            Known { kind: Causality::Causal.into(), sees: |_, _, token, key| key <= token },
            Known {
                kind: Causality::Window(window).into(),
                sees: |model, _, token, key| key <= token && token - key < model.window.get(),
            },
            Known { kind: Causality::Bidirectional.into(), sees: |_, _, _, _| true },
            Known {
                kind: Causality::Chunk(self.blocks).into(),
                sees: |model, _, token, key| key <= token && token / model.blocks == key / model.blocks,
            },
            named("chunks by request", |model, request, token, key| {
                let chunk = model.chunk * (1 + request % 3);
                key <= token && token / chunk == key / chunk
            }),
            // A prefix that sees itself whole, as far as it is there.
            named("prefix", |model, _, token, key| key <= token || key < model.prefix && token < model.prefix),
        ]
    }
}

fn model() -> impl Strategy<Value = Model> {
    let of_layers = prop::array::uniform5(prop::option::weighted(0.8, 0usize..6));
    let heads = (1usize..3, 1usize..4);
    (heads, 1usize..200, 1usize..90, 1usize..3, 1usize..150, 0usize..6, of_layers).prop_map(
        |((kv_heads, group), window, chunk, blocks, prefix, of_step, of_layers)| Model {
            kv_heads,
            group,
            window: NonZeroUsize::new(window).unwrap(),
            chunk,
            blocks: NonZeroUsize::new(blocks * 128).unwrap(),
            prefix,
            of_step,
            of_layers,
            cap: None,
        },
    )
}

/// The heads with a cap, whose scores are then large beside it.
fn capped(shape: AttentionShape, cap: Option<f64>) -> AttentionShape {
    cap.map_or(shape, |cap| shape.scale(1.0).emulated_only_soft_cap(cap))
}

struct Engine<'a> {
    stream: &'a Stream,
    model: Model,
    masks: [Known; 6],
    settings: BatchSettings,
    attention: Attention<bf16>,
    schedule: Schedule,
    ballast: Sequence,
    checked: usize,
}

impl<'a> Engine<'a> {
    fn new(stream: &'a Stream, model: Model) -> Self {
        let heads = model.kv_heads * model.group;
        let shape = capped(AttentionShape::new(heads, model.kv_heads, DIM), model.cap);
        let of = CacheShape::new(LAYERS, model.kv_heads, DIM);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(stream.device(), BALLAST + 8, 128, of, pad).unwrap();
        let mut ballast = Sequence::new(cache.pool());
        let _ = ballast.grow(BALLAST * 128).unwrap();
        let backends = Backends::none()
            .with(Backend::NamedMask)
            .with(Backend::ChunkedLocal)
            .with(Backend::PagedDecode)
            .with(Backend::Fused);
        let mut schedule = Schedule::of(6);
        schedule.begin = 4;
        schedule.tokens = 300;
        let settings = BatchSettings::of(&cache, Causality::Causal).policy(StatePolicy::new(true, None));
        Self {
            stream,
            masks: model.masks(),
            model,
            settings,
            attention: Attention::new(shape, cache, backends),
            schedule,
            ballast,
            checked: 0,
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
        metadata.set_mask(self.masks[self.model.of_step].kind.clone());
        let names = self.schedule.names(turns, pad);
        let shape = self.attention.shape();
        let mut results = Vec::new();
        let mut step = self.attention.begin(self.stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            let query = packed(self.stream, &names, layer, 0, shape.heads);
            let key = packed(self.stream, &names, layer, 1, shape.kv_heads);
            let value = packed(self.stream, &names, layer, 2, shape.kv_heads);
            let output = match self.model.of_layers[layer] {
                None => step.forward(layer, (&query, &key, &value)),
                Some(at) => {
                    let inputs = LayerInputs::from((&query, &key, &value));
                    step.forward(layer, inputs.mask(&self.masks[at].kind))
                }
            };
            results.push((layer, output.unwrap().clone()));
            if layer % 2 == 1 {
                // A layer that shares the keys of this one, with its mask.
                let mask = self.model.of_layers[layer].map(|at| &self.masks[at].kind);
                let inputs = LayerInputs::from((&query, &key, &value)).shared_keys();
                let inputs = mask.map_or(inputs, |mask| inputs.mask(mask));
                results.push((layer, step.forward(layer, inputs).unwrap().clone()));
            }
        }
        step.end().unwrap();
        for (layer, result) in results {
            let at = self.model.of_layers[layer].unwrap_or(self.model.of_step);
            let sees = self.masks[at].sees;
            let result = result.download(self.stream).unwrap();
            let width = shape.heads * DIM;
            for (nth, row) in self.schedule.rows(turns).into_iter().enumerate() {
                let token = row.names.len() - 1;
                let request = &self.schedule.requests[row.request];
                // All keys that there are, and behind them the token that asks.
                let mut names = request.names[..request.sequence.len()].to_vec();
                let keys = names.len();
                names.push(names[token]);
                // Three rows a turn.
                let place = nth / 3;
                let want = dense(&names, layer, shape, |key| key < keys && sees(&self.model, place, token, key));
                let got = &result[row.token * width..][..width];
                for (got, want) in got.iter().zip(&want) {
                    prop_assert!(
                        abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2),
                        "layer {layer}, mask {:?}, request {}, token {token}: {got}, expected {want}; {:?}",
                        self.masks[at].kind,
                        row.request,
                        metadata.state()
                    );
                }
                self.checked += 1;
            }
        }
        Ok(())
    }

    fn let_go(&mut self) {
        self.ballast.truncate(0).unwrap();
    }
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn any_schedule_under_any_masks_is_its_definition(model in model(), steps in prop::collection::vec((prop::collection::vec(act(120, 5), 1..5), 0usize..20), 1..6)) {
        let stream = harness::stream();
        let mut engine = Engine::new(&stream, model);
        engine.run(&steps)?;
    }

    #[test]
    fn capped_scores_under_any_masks_are_their_definition(
        mut model in model(),
        cap in prop::sample::select(vec![0.7, 3.0, 50.0]),
        steps in prop::collection::vec((prop::collection::vec(act(120, 5), 1..5), 0usize..20), 1..6),
    ) {
        if harness::not_on_npu(NO_CAP) {
            return Ok(());
        }
        let stream = harness::stream();
        model.cap = Some(cap);
        let mut engine = Engine::new(&stream, model);
        engine.run(&steps)?;
    }
}

const NO_CAP: &str = "no operator of an NPU caps scores";

/// A step with a cap that is no number above 0, or by operators that have none, and one on the way to an NPU.
#[test]
fn caps_that_cannot_be_computed_are_refused_by_name() {
    let stream = harness::stream();
    let refused = |cap: f64, backends: Backends<bf16>| {
        let cache = PagedKvCache::new(stream.device(), 8, 128, CacheShape::new(1, 1, DIM), PadPolicy::SkipNegative);
        let shape = AttentionShape::new(1, 1, DIM).emulated_only_soft_cap(cap);
        let mut attention = Attention::new(shape, cache.unwrap(), backends);
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 3).unwrap();
        let metadata = attention.metadata(&[BatchRequest::of(&sequence, 3)], StatePolicy::default()).unwrap();
        one_layer(&stream, &mut attention, &metadata, &Causality::Causal.into())
    };
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-40] {
        let error = refused(cap, Backends::none().with(Backend::Fused)).unwrap_err();
        assert!(error.to_string().contains("emulated_only_soft_cap"), "{error}");
        assert!(error.breaks(&rules::ARGUMENT_VALUE), "{error}");
    }
    let error = refused(50.0, Backends::none().with(Backend::PromptAndIncre)).unwrap_err();
    assert!(error.breaks(&rules::OPTION_SOFT_CAP), "{error}");
    let served = refused(50.0, Backends::none().with(Backend::Fused));
    match harness::not_on_npu(NO_CAP) {
        true => assert!(served.unwrap_err().breaks(&ascend_attention::rules::EMULATED_ONLY)),
        false => assert_eq!(served, Ok("fused")),
    }
}

#[test]
fn the_masks_are_checked_in_every_kind_of_step_and_release() {
    for cann in Cann::ALL {
        let Some(stream) = harness::stream_of(cann) else {
            continue;
        };
        every_kind_of_step(&stream);
    }
}

fn every_kind_of_step(stream: &Stream) {
    let model = Model {
        kv_heads: 1,
        group: 2,
        window: NonZeroUsize::new(20).unwrap(),
        chunk: 11,
        blocks: NonZeroUsize::new(128).unwrap(),
        prefix: 60,
        of_step: 5,
        of_layers: [Some(3), Some(1), Some(2), Some(4), None],
        cap: None,
    };
    let mut engine = Engine::new(stream, model);
    for acts in [
        vec![Act::Chunk(0, 70), Act::Chunk(3, 30)],
        vec![Act::Chunk(0, 1), Act::Chunk(1, 1)],
        vec![Act::Chunk(0, 9), Act::Verify(1, 3, 2)],
    ] {
        engine.act(&acts, 3).unwrap();
    }
    assert_eq!(engine.checked, 3 * 2 * 3 * (LAYERS + LAYERS / 2));
    engine.end();
}

/// An attention of layers with a single head, and a sequence of this number of tokens.
fn small(stream: &Stream, tokens: usize, backends: Backends<bf16>) -> (Attention<bf16>, Sequence) {
    small_of(stream, AttentionShape::new(1, 1, DIM), tokens, backends)
}

fn small_of(
    stream: &Stream,
    shape: AttentionShape,
    tokens: usize,
    backends: Backends<bf16>,
) -> (Attention<bf16>, Sequence) {
    let of = CacheShape::new(LAYERS, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 8, 128, of, pad).unwrap();
    let mut attention = Attention::new(shape, cache, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(stream, &mut sequence, tokens).unwrap();
    attention.cache().mark_computed(&sequence, tokens).unwrap();
    (attention, sequence)
}

fn one_layer(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    metadata: &AttentionMetadata,
    mask: &LayerMask,
) -> Result<&'static str, Error> {
    let names: Vec<u64> = (0..metadata.tokens() as u64).collect();
    let rows = packed(stream, &names, 0, 0, 1);
    let mut step = attention.begin(stream, metadata)?;
    step.forward(0, LayerInputs::from((&rows, &rows, &rows)).mask(mask))?;
    let selected = step.selected(0).unwrap();
    Ok(selected.name)
}

#[test]
fn masks_that_cannot_be_served_are_refused_by_name() {
    let stream = harness::stream();
    let named = |name: &str, sees: fn(usize, usize, usize) -> bool| -> LayerMask { NamedMask::new(name, sees).into() };
    let itself = named("itself", |_, token, key| token == key);
    let both = || Backends::none().with(Backend::NamedMask).with(Backend::Fused);
    let settings = |attention: &Attention<bf16>, of| BatchSettings::of(attention.cache(), of);
    let refused = |backends, mask: &LayerMask| {
        let (mut attention, sequence) = small(&stream, 9, backends);
        let settings = settings(&attention, Causality::Causal);
        let request = BatchRequest::of(&sequence, 4).recompute();
        let metadata = AttentionMetadata::new(&[request], settings).unwrap();
        one_layer(&stream, &mut attention, &metadata, mask)
    };
    assert_eq!(refused(both(), &itself), Ok("named_mask"));
    assert_eq!(refused(both(), &Causality::Causal.into()), Ok("fused"));
    let error = refused(Backends::none().with(Backend::Fused), &itself).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_MASK), "{error}");
    assert!(error.to_string().contains("`.with(Backend::NamedMask)`, named `named_mask`, adds"), "{error}");
    let alone = refused(Backends::none().with(Backend::NamedMask), &Causality::Causal.into());
    assert!(alone.unwrap_err().breaks(&rules::BACKEND_MASK));
    let blind = named("blind", |_, token, key| token != 7 && key <= token);
    let error = refused(both(), &blind).unwrap_err();
    assert!(error.breaks(&rules::MASK_ROWS), "{error}");
    assert!(error.to_string().contains("token 7 of request 0"), "{error}");

    // What was given back is shown by no mask.
    let window = |keys| Causality::Window(NonZeroUsize::new(keys).unwrap());
    let (mut attention, mut sequence) = small(&stream, 400, both());
    sequence.drop_before(300).unwrap();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = settings(&attention, window(100));
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    for mask in [itself.clone(), Causality::Causal.into(), window(101).into()] {
        let error = one_layer(&stream, &mut attention, &metadata, &mask).unwrap_err();
        assert!(error.breaks(&rules::BLOCK_WINDOW), "{error}");
    }
    for keys in [1, 99, 100] {
        let mask = window(keys).into();
        let served = one_layer(&stream, &mut attention, &metadata, &mask);
        assert_eq!(served, Ok("fused"));
    }
}

#[test]
fn chunks_are_whole_blocks_and_begin_where_the_context_does() {
    let stream = harness::stream();
    let chunk = |tokens| Causality::Chunk(NonZeroUsize::new(tokens).unwrap());
    let both = || Backends::none().with(Backend::ChunkedLocal).with(Backend::Fused);
    let serve = |backends, given_back: usize, of: Causality, mask: Causality| {
        let (mut attention, mut sequence) = small(&stream, 400, backends);
        sequence.drop_before(given_back).unwrap();
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let settings = BatchSettings::of(attention.cache(), of);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings)?;
        one_layer(&stream, &mut attention, &metadata, &mask.into())
    };
    let served = |given_back, of, mask| serve(both(), given_back, of, mask);
    assert_eq!(served(0, chunk(256), chunk(256)), Ok("chunked_local"));
    assert_eq!(served(256, chunk(256), chunk(256)), Ok("chunked_local"));
    assert_eq!(served(256, chunk(256), chunk(128)), Ok("chunked_local"));
    assert_eq!(served(0, Causality::Causal, chunk(128)), Ok("chunked_local"));
    for (given_back, of, mask, rule) in [
        (0, Causality::Causal, chunk(64), &rules::CHUNK_SIZE),
        (0, Causality::Causal, chunk(129), &rules::CHUNK_SIZE),
        // Half a chunk, and more than the next token can do without.
        (128, chunk(256), chunk(256), &rules::BLOCK_WINDOW),
        (384, chunk(256), chunk(256), &rules::BLOCK_WINDOW),
        (256, chunk(256), Causality::Causal, &rules::BLOCK_WINDOW),
        (256, chunk(256), chunk(512), &rules::BLOCK_WINDOW),
        // Where chunks begin is not known behind what a window gave back.
        (128, Causality::Window(NonZeroUsize::new(256).unwrap()), chunk(128), &rules::BLOCK_WINDOW),
    ] {
        let error = served(given_back, of, mask).unwrap_err();
        assert!(error.breaks(rule), "{of:?}, {mask:?}: {error}");
    }
    let error = serve(Backends::none().with(Backend::Fused), 0, chunk(128), chunk(128)).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_CHUNK), "{error}");
    assert!(error.to_string().contains("`.with(Backend::ChunkedLocal)`, named `chunked_local`, adds"), "{error}");
    let error = serve(Backends::none().with(Backend::ChunkedLocal), 0, Causality::Causal, Causality::Causal);
    assert!(error.unwrap_err().breaks(&rules::BACKEND_CHUNK));

    let (attention, _) = small(&stream, 1, Backends::none().with(Backend::Fused));
    let limits = GraphLimits::new([2], 500);
    let error = attention.capture_layers(&stream, |_| chunk(128), &limits).unwrap_err();
    assert!(error.breaks(&rules::BACKEND_CHUNK), "{error}");
}

proptest! {
    #![proptest_config(config(24))]

    /// A model of global layers and of layers within chunks: the latter keep no more than a chunk and the step, and
    /// prefixes are shared by both.
    #[test]
    fn layers_within_chunks_keep_a_chunk(blocks in 1usize..3, steps in prop::collection::vec(prop_oneof![2 => Just(1usize), 1 => 1usize..200], 1..9), cut in 0usize..40) {
        let stream = harness::stream();
        let chunk = blocks * 128;
        let kinds = [Causality::Causal, Causality::Chunk(NonZeroUsize::new(chunk).unwrap())];
        let group = |layer: usize| {
            let of = CacheShape::new(1, 1, DIM);
            let pad = PadPolicy::SkipNegative;
            let cache = PagedKvCache::<bf16>::new(stream.device(), 40, 128, of, pad).unwrap();
            let backends = Backends::none().with(Backend::ChunkedLocal).with(Backend::Fused);
            LayerGroup::new([layer], kinds[layer], AttentionShape::new(1, 1, DIM), cache, backends)
        };
        let groups = [0, 1].map(group);
        let mut model = Attention::of_groups(2, groups).unwrap();
        let mut sequence = model.sequence();
        let mut names: Vec<u64> = Vec::new();
        let policy = StatePolicy::new(true, None);
        for (nth, new) in steps.into_iter().enumerate() {
            model.grow(&stream, &mut sequence, new).unwrap();
            let first = names.len();
            names.extend((0..new).map(|at| (1000 * nth + at) as u64 + 1));
            let held = sequence.group(1).unwrap();
            let held = held.row().len() - held.given_back() / 128;
            prop_assert!(held <= (chunk + new).div_ceil(128) + 1, "{held} blocks");
            let metadata = model.metadata(&[BatchRequest::of(&sequence, new)], policy).unwrap();
            let mut step = model.begin(&stream, &metadata).unwrap();
            for (layer, kind) in kinds.iter().enumerate() {
                let [query, key, value] = [0, 1, 2].map(|what| packed::<bf16>(&stream, &names[first..], layer, what, 1));
                let got = step.forward(layer, (&query, &key, &value)).unwrap();
                let got = got.download(&stream).unwrap();
                for row in [0, new / 2, new - 1] {
                    let token = first + row;
                    let shape = AttentionShape::new(1, 1, DIM);
                    let want = dense(&names[..=token], layer, shape, |key| {
                        *kind == Causality::Causal || key / chunk == token / chunk
                    });
                    for (got, want) in got[row * DIM..][..DIM].iter().zip(&want) {
                        prop_assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2), "{kind:?}, token {token}: {got}, {want}");
                    }
                }
            }
            drop(step);
            // Tokens that were refused, as far as the sequence still has what the next one sees.
            let kept = names.len() - cut.min(new - 1);
            if nth % 3 == 2 && sequence.truncate(kept).is_ok() {
                names.truncate(kept);
            }
        }
        drop(sequence);
        stream.synchronize().unwrap();
        for group in model.groups() {
            prop_assert_eq!(group.cache().pool().held_blocks(), 0);
        }
    }
}

#[test]
fn a_mask_is_made_once_for_steps_of_the_same_lengths() {
    let stream = harness::stream();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = asked.clone();
    let mask = NamedMask::new("counted", move |_, token, key| {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        key <= token
    });
    let count = || asked.load(std::sync::atomic::Ordering::Relaxed);
    let backends = Backends::none().with(Backend::NamedMask);
    let (mut attention, sequence) = small(&stream, 200, backends);
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut seen = Vec::new();
    for new in [5, 5, 6, 5] {
        // Steps of one layer, whose cached keys are not compared.
        attention.cache().mark_computed(&sequence, 200).unwrap();
        let request = BatchRequest::of(&sequence, new).recompute();
        let metadata = AttentionMetadata::new(&[request], settings).unwrap();
        let mask = mask.clone().into();
        one_layer(&stream, &mut attention, &metadata, &mask).unwrap();
        seen.push(count());
    }
    assert_eq!(seen, [5 * 200, 5 * 200, 11 * 200, 11 * 200]);
    assert_eq!(mask.kept_bytes(), 11 * 256);
}

/// Forgotten while another thread asks its rule, here by the rule itself.
#[test]
fn a_mask_that_is_forgotten_while_it_is_made_is_not_kept() {
    use std::sync::{Arc, Mutex};

    let stream = harness::stream();
    let own: Arc<Mutex<Option<NamedMask>>> = Arc::default();
    let forgetting = own.clone();
    let mask = NamedMask::new("forgets itself", move |_, token, key| {
        if let Some(mask) = forgetting.lock().unwrap().take() {
            mask.forget();
        }
        key <= token
    });
    let (mut attention, sequence) = small(&stream, 9, Backends::none().with(Backend::NamedMask));
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let request = BatchRequest::of(&sequence, 9).recompute();
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let kind = mask.clone().into();
    *own.lock().unwrap() = Some(mask.clone());
    one_layer(&stream, &mut attention, &metadata, &kind).unwrap();
    assert_eq!(mask.kept_bytes(), 0, "made in part by what was forgotten");
    one_layer(&stream, &mut attention, &metadata, &kind).unwrap();
    assert!(mask.kept_bytes() > 0);
}

#[test]
fn masks_of_one_name_and_two_rules_are_two_masks() {
    let stream = harness::stream();
    let masks: [fn(usize, usize, usize) -> bool; 2] =
        [|_, token, key| key <= token, |_, token, key| key / 4 == token / 4];
    let masks = masks.map(|sees| (LayerMask::from(NamedMask::new("one name", sees)), sees));
    let (mut attention, sequence) = small(&stream, 9, Backends::none().with(Backend::NamedMask));
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let request = BatchRequest::of(&sequence, 9).recompute();
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let names: Vec<u64> = (1..10).collect();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    for (layer, (mask, sees)) in masks.iter().enumerate() {
        let rows = |what| packed::<bf16>(&stream, &names, layer, what, 1);
        let (query, key, value) = (rows(0), rows(1), rows(2));
        let output = step.forward(layer, LayerInputs::from((&query, &key, &value)).mask(mask)).unwrap();
        let got = output.download(&stream).unwrap();
        for token in 0..names.len() {
            // The row is that of the last name.
            let keys = [&names[..], &[names[token]]].concat();
            let shape = AttentionShape::new(1, 1, DIM);
            let want = dense(&keys, layer, shape, |key| key < names.len() && sees(0, token, key));
            for (got, want) in got[token * DIM..][..DIM].iter().zip(&want) {
                assert!(
                    abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2),
                    "layer {layer}, token {token}: {got}, {want}"
                );
            }
        }
    }
}

/// Full and windowed layers over one cache, replayed from graphs with one metadata.
#[test]
fn graphs_replay_full_and_windowed_layers_of_one_cache() {
    replay_full_and_windowed(AttentionShape::new(1, 1, DIM));
}

/// The layers of Gemma 2: full and windowed ones in turn, with a cap.
#[test]
fn graphs_replay_capped_layers() {
    if !harness::not_on_npu(NO_CAP) {
        replay_full_and_windowed(capped(AttentionShape::new(1, 1, DIM), Some(1.5)));
    }
}

fn replay_full_and_windowed(shape: AttentionShape) {
    let stream = harness::stream();
    let window = NonZeroUsize::new(30).unwrap();
    let of = |layer: usize| match layer % 2 {
        0 => Causality::Causal,
        _ => Causality::Window(window),
    };
    let (mut attention, mut sequence) = small_of(&stream, shape, 90, Backends::none().with(Backend::Fused));
    let limits = GraphLimits::new([2], 500);
    let mut graphs = attention.capture_layers(&stream, of, &limits).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut names: Vec<u64> = (1..91).collect();
    let request = [BatchRequest::of(&sequence, 90).recompute()];
    let metadata = AttentionMetadata::new(&request, settings).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    for layer in 0..LAYERS {
        let rows = |what| packed(&stream, &names, layer, what, 1);
        let mask = of(layer).into();
        let [query, key, value] = [0, 1, 2].map(rows);
        let inputs = LayerInputs::from((&query, &key, &value));
        step.forward(layer, inputs.mask(&mask)).unwrap();
    }
    drop(step);
    for name in 91..95 {
        attention.grow(&stream, &mut sequence, 1).unwrap();
        names.push(name);
        let request = [BatchRequest::of(&sequence, 1)];
        let mut metadata = AttentionMetadata::new(&request, settings).unwrap();
        let mut step = graphs.begin(&stream, &mut metadata).unwrap();
        for layer in 0..LAYERS {
            let rows = |what| packed::<bf16>(&stream, &[name], layer, what, 1);
            let output = step.forward(layer, (&rows(0), &rows(1), &rows(2))).unwrap();
            let output = output.download(&stream).unwrap();
            let from = of(layer).window().map_or(0, |keys| names.len() - keys.get());
            let want = dense(&names, layer, shape, |key| key >= from);
            for (got, want) in output.iter().zip(&want) {
                assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2), "layer {layer}: {got}, {want}");
            }
        }
        drop(step);
        // No layer was captured with this one.
        metadata = AttentionMetadata::new(&request, settings).unwrap();
        metadata.set_mask(NamedMask::new("itself", |_, token, key| token == key));
        assert!(!graphs.serves(&metadata));
        let error = graphs.begin(&stream, &mut metadata).unwrap_err();
        assert!(error.breaks(&rules::STEP_CAUSALITY), "{error}");
    }
}
