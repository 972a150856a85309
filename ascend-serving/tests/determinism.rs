//! Deterministic attention: the bits of a request's rows depend on the request alone, and what cannot promise that is
//! refused by name. A program of its own, since the option counts for a whole device.

#![cfg(feature = "emulation")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Device, Stream, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence, StatePool, StateShape};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, Error, GraphLimits, LayerGroup, NamedMask, SharedPrefixDecode, SplitDecode, rules,
};
use ascend_testing::harness;
use ascend_testing::tokens::{DIM, packed};
use proptest::prelude::*;

const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// The device of a product. Tests that ask for other options take other products.
fn device_for(soc: Soc) -> Device {
    harness::emulated_stream(soc, Cann::NEWEST).device().clone()
}

fn attention(device: &Device, blocks: usize, block_size: usize, backends: Backends<bf16>) -> Attention<bf16> {
    let shape = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let cache = PagedKvCache::new(device, blocks, block_size, shape, PadPolicy::SkipNegative).unwrap();
    Attention::new(AttentionShape::new(HEADS, KV_HEADS, DIM), cache, backends)
}

/// The order of backends whose steps have a rule as their mask.
const NAMED: usize = 5;

/// How the tokens of some requests come to steps.
#[derive(Clone, Debug)]
struct Schedule {
    block_size: usize,
    /// Which backends are tried first.
    order: usize,
    causality: Causality,
    /// Tokens of each request.
    tokens: Vec<usize>,
    /// For each step and request how many tokens it adds, and whether a step of single tokens is replayed from a
    /// graph. When the steps are used up, what is left comes in one step.
    steps: Vec<(Vec<usize>, bool)>,
}

/// Backends that serve every step, in one of several orders.
fn backends(order: usize) -> Backends<bf16> {
    let none = Backends::none;
    match order {
        0 => none().with(Backend::Fused),
        1 => none().with(Backend::PagedDecode).with(Backend::Fused),
        2 => none().with(Backend::BatchedQueries).with(Backend::Fused),
        3 => none().with(Backend::FusedInTwo).with(Backend::PagedDecode).with(Backend::Fused),
        4 => none().with(Backend::PromptAndIncre).with(Backend::Fused),
        _ => none().with(Backend::NamedMask).with(Backend::Fused),
    }
    .with(Backend::ChunkedLocal)
}

/// The bits of each row of each request, layer by layer.
type Bits = Vec<Vec<[Vec<u16>; LAYERS]>>;

fn name(request: usize, token: usize) -> u64 {
    (request * 100_000 + token) as u64
}

/// Computes the requests by a schedule.
fn computed(stream: &Stream, schedule: &Schedule, deterministic: bool) -> Bits {
    let longest = schedule.tokens.iter().copied().max().unwrap();
    let blocks = schedule.tokens.iter().map(|tokens| tokens.div_ceil(schedule.block_size) + 1).sum::<usize>() + 4;
    let attention = attention(stream.device(), blocks, schedule.block_size, backends(schedule.order));
    let mut attention = attention.deterministic(deterministic).unwrap();
    let limits = GraphLimits::new([1, 4], longest);
    let named = (schedule.order == NAMED).then(|| NamedMask::new("causal", |_, token, key| key <= token));
    let graphs = schedule.steps.iter().any(|(_, graph)| *graph) && named.is_none();
    let mut graphs = graphs.then(|| attention.capture(stream, schedule.causality, &limits).unwrap());
    let settings = BatchSettings::of(attention.cache(), schedule.causality);
    let mut sequences: Vec<Sequence> = schedule.tokens.iter().map(|_| attention.sequence()).collect();
    let mut bits: Bits = schedule.tokens.iter().map(|_| Vec::new()).collect();
    let rest = (schedule.tokens.clone(), false);
    for (adds, graph) in schedule.steps.iter().chain([&rest]) {
        let left = |request: usize| schedule.tokens[request] - bits[request].len();
        let adds: Vec<_> = (0..adds.len()).map(|request| (request, adds[request].min(left(request)))).collect();
        let adds: Vec<_> = adds.into_iter().filter(|(_, add)| *add > 0).collect();
        if adds.is_empty() {
            continue;
        }
        for (request, add) in &adds {
            attention.grow(stream, &mut sequences[*request], *add).unwrap();
        }
        let requests: Vec<_> = adds.iter().map(|(request, add)| BatchRequest::of(&sequences[*request], *add)).collect();
        let mut metadata = AttentionMetadata::new(&requests, settings).unwrap();
        if let Some(mask) = &named {
            metadata.set_mask(mask.clone());
        }
        let names = adds.iter().flat_map(|(request, add)| {
            let first = bits[*request].len();
            (first..first + add).map(|token| name(*request, token))
        });
        let names: Vec<u64> = names.collect();
        let rows = |layer: usize| {
            [(0, HEADS), (1, KV_HEADS), (2, KV_HEADS)].map(|(what, heads)| packed(stream, &names, layer, what, heads))
        };
        let single = adds.iter().all(|(_, add)| *add == 1);
        let mut outputs = Vec::new();
        match graphs.as_mut().filter(|_| *graph && single) {
            Some(graphs) => {
                let mut step = graphs.begin(stream, &mut metadata).unwrap();
                for layer in 0..LAYERS {
                    let [query, key, value] = rows(layer);
                    let output = step.forward(layer, (&query, &key, &value)).unwrap();
                    outputs.push(output.download(stream).unwrap());
                }
                step.end().unwrap();
            }
            None => {
                let mut step = attention.begin(stream, &metadata).unwrap();
                for layer in 0..LAYERS {
                    let [query, key, value] = rows(layer);
                    let output = step.forward(layer, (&query, &key, &value)).unwrap();
                    outputs.push(output.download(stream).unwrap());
                }
                step.end().unwrap();
            }
        }
        let mut row = 0;
        for (request, add) in adds {
            for row in row..row + add {
                let of_row = |output: &Vec<bf16>| {
                    let row = &output[row * HEADS * DIM..(row + 1) * HEADS * DIM];
                    row.iter().map(|number| number.to_bits()).collect()
                };
                bits[request].push([of_row(&outputs[0]), of_row(&outputs[1])]);
            }
            row += add;
        }
    }
    bits
}

/// Each request alone, in one step.
fn alone(stream: &Stream, schedule: &Schedule, deterministic: bool) -> Bits {
    let requests = 0..schedule.tokens.len();
    let each = requests.map(|request| {
        let tokens = (0..schedule.tokens.len()).map(|other| if other == request { schedule.tokens[other] } else { 0 });
        let tokens: Vec<usize> = tokens.collect();
        // A chunk is a whole number of blocks.
        let block_size = if let Causality::Chunk(_) = schedule.causality { schedule.block_size } else { 128 };
        let alone = Schedule { block_size, order: 0, tokens, steps: Vec::new(), ..schedule.clone() };
        computed(stream, &alone, deterministic).swap_remove(request)
    });
    each.collect()
}

fn schedule() -> impl Strategy<Value = Schedule> {
    let tokens = prop::collection::vec(prop_oneof![2 => 1usize..130, 1 => 130usize..420], 1..4);
    let block_size = prop::sample::select(vec![16usize, 48, 128, 512]);
    let kinds = (0usize..=NAMED, 0usize..5, 1usize..300);
    (block_size, kinds, tokens).prop_flat_map(|(block_size, (order, kind, window), tokens)| {
        let keys = |keys| NonZeroUsize::new(keys).unwrap();
        let causality = match kind {
            // The backend of named masks has one rule here, and the one that copies keys refuses windows.
            _ if order >= NAMED - 1 => Causality::Causal,
            0 => Causality::Window(keys(window)),
            1 => Causality::Chunk(keys(block_size * 2)),
            _ => Causality::Causal,
        };
        let add = prop_oneof![3 => Just(1usize), 1 => Just(0usize), 3 => 2usize..150];
        let adds = prop::collection::vec(add, tokens.len());
        let decode = Just(vec![1; tokens.len()]);
        let step = (prop_oneof![2 => adds.boxed(), 1 => decode.boxed()], any::<bool>());
        prop::collection::vec(step, 0..12).prop_map(move |steps| Schedule {
            block_size,
            order,
            causality,
            tokens: tokens.clone(),
            steps,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Neither the batch, chunks, blocks, backends nor graphs change a bit.
    #[test]
    fn rows_depend_on_their_request_alone(schedule in schedule()) {
        let stream = device_for(Soc::AtlasA2).stream().unwrap();
        let (got, want) = (computed(&stream, &schedule, true), alone(&stream, &schedule, true));
        for (request, (got, want)) in got.iter().zip(&want).enumerate() {
            let other = got.iter().zip(want).position(|(got, want)| got != want);
            prop_assert_eq!(other, None, "request {}", request);
        }
    }
}

/// Longer than a range of keys that one task computes; and the test above sees differences where there are some.
#[test]
fn long_requests_do_too_and_without_the_switch_bits_change() {
    let schedule = Schedule {
        block_size: 16,
        order: 1,
        causality: Causality::Causal,
        tokens: vec![3200, 40],
        steps: vec![(vec![3100, 1], false), (vec![1, 1], true), (vec![1, 7], false), (vec![17, 1], false)],
    };
    let stream = device_for(Soc::AtlasA2).stream().unwrap();
    assert!(computed(&stream, &schedule, true) == alone(&stream, &schedule, true));
    let stream = device_for(Soc::AtlasA3).stream().unwrap();
    assert!(computed(&stream, &schedule, false) != alone(&stream, &schedule, false));
}

/// Why a backend would not serve a step of this many tokens behind as many cached ones.
fn refusal(backends: Backends<bf16>, deterministic: bool) -> Vec<(AttentionState, Error)> {
    let device = device_for(Soc::AtlasA2);
    let stream = device.stream().unwrap();
    let attention = attention(&device, 8, 128, backends).deterministic(deterministic).unwrap();
    let choices = attention.backend_choices(&stream, 0, Causality::Causal, None).unwrap();
    choices.into_iter().filter_map(|choice| Some((choice.state, choice.served.err()?))).collect()
}

#[test]
fn backends_that_merge_are_refused_by_name() {
    let none = Backends::none;
    let tile = NonZeroUsize::new(128).unwrap();
    let shared =
        Backend::SharedPrefixDecode(SharedPrefixDecode { min_requests: 1, min_shared_keys: 1, min_saved_keys: 0 });
    for backends in [
        none().with(Backend::SplitDecode(SplitDecode::Tiles(tile))),
        none().with(Backend::SplitDecode(SplitDecode::Balanced { max_splits: 4, cores: 8 })),
        none().with(Backend::CascadePrefill),
        none().with(shared),
    ] {
        let name = backends.names().next().unwrap();
        let refused = refusal(backends, true);
        assert_eq!(refused.len(), 5, "{name}");
        for (state, why) in refused {
            assert!(why.breaks(&rules::BACKEND_DETERMINISTIC), "{name}, {state:?}: {why}");
            assert!(why.to_string().contains(&format!("the backend `{name}`")), "{why}");
        }
    }
    // Those behind them serve.
    let behind = none().with(Backend::SplitDecode(SplitDecode::Tiles(tile))).with(Backend::Fused);
    assert!(refusal(behind, true).is_empty());
}

/// Somebody else of the process takes the option back: nothing is computed as if it held.
#[test]
fn steps_and_graphs_need_the_option_of_the_device() {
    let device = device_for(Soc::Ascend950);
    let stream = device.stream().unwrap();
    let mut attention = attention(&device, 8, 128, Backends::standard(&device)).deterministic(true).unwrap();
    assert!(attention.is_deterministic() && device.is_batch_invariant().unwrap());
    let limits = GraphLimits::new([1], 128);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    device.set_deterministic(false).unwrap();
    assert!(!device.is_batch_invariant().unwrap());
    let rule = &rules::DEVICE_DETERMINISTIC;
    assert!(attention.begin(&stream, &metadata).unwrap_err().breaks(rule));
    assert!(graphs.begin(&stream, &mut metadata).err().unwrap().breaks(rule));
    assert!(attention.capture(&stream, Causality::Causal, &limits).err().unwrap().breaks(rule));
    device.set_deterministic(true).unwrap();
    // Between the beginning of a step and its first layer, which plans.
    let rows = |heads| packed(&stream, &[7], 0, 1, heads);
    let mut step = attention.begin(&stream, &metadata).unwrap();
    device.set_deterministic(false).unwrap();
    assert!(step.forward(0, (&rows(HEADS), &rows(KV_HEADS), &rows(KV_HEADS))).unwrap_err().breaks(rule));
    device.set_deterministic(true).unwrap();
    for layer in 0..LAYERS {
        step.forward(layer, (&rows(HEADS), &rows(KV_HEADS), &rows(KV_HEADS))).unwrap();
    }
    step.end().unwrap();
    // The switch can be turned off again.
    let attention = attention.deterministic(false).unwrap();
    assert!(!attention.is_deterministic() && !device.is_deterministic().unwrap());
}

/// Groups that give tokens back, and layers of linear attention, promise nothing.
#[test]
fn groups_whose_keys_begin_elsewhere_are_refused() {
    let device = device_for(Soc::AtlasA3);
    let group = |layer: usize, causality| {
        let shape = CacheShape::new(1, KV_HEADS, DIM);
        let cache = PagedKvCache::<bf16>::new(&device, 4, 128, shape, PadPolicy::SkipNegative).unwrap();
        let heads = AttentionShape::new(HEADS, KV_HEADS, DIM);
        LayerGroup::new([layer], causality, heads, cache, Backends::standard(&device))
    };
    let window = Causality::Window(NonZeroUsize::new(100).unwrap());
    let windowed = [group(0, Causality::Causal), group(1, window)];
    let refused = Attention::of_groups(2, windowed).unwrap().deterministic(true).unwrap_err();
    assert!(refused.breaks(&rules::BACKEND_DETERMINISTIC), "{refused}");
    assert!(refused.to_string().contains("give tokens back"), "{refused}");
    let causal = [group(0, Causality::Causal), group(1, Causality::Causal)];
    assert!(!Attention::of_groups(2, causal).unwrap().deterministic(false).unwrap().is_deterministic());

    let stream = device.stream().unwrap();
    let shape = StateShape {
        layers: 1,
        key_heads: 2,
        value_heads: 2,
        value_dim: 16,
        key_dim: 16,
        scale: 0.25,
        g: false,
        gk: false,
        drafts: 1,
        convolution: None,
    };
    let hybrid = |slots| {
        let states = StatePool::new::<bf16>(&stream, slots, shape)?;
        Ok::<_, Error>(Attention::of_hybrid(2, [group(0, Causality::Causal)], [1], states)?)
    };
    let refused = hybrid(2).unwrap().deterministic(true).unwrap_err();
    assert!(refused.breaks(&rules::BACKEND_DETERMINISTIC), "{refused}");
    assert!(hybrid(1).unwrap_err().breaks(&rules::ARGUMENT_VALUE));
}
