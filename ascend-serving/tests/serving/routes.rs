//! Steps by several calls and a merge: a cascade, a shared prefix read once, TriangleMix. Whatever the batch, each
//! row is what one dense pass over the keys that it sees gives it.

use crate::harness;
use ascend_attention::spec::Rule;

use std::num::NonZeroUsize;

use crate::tokens::{DIM, dense_with_sinks, packed};
use ascend_attention::mask::TriangleLayers;
use ascend_attention::spec::geometry::TriangleMix;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{BlockPool, CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings,
    CascadePrefill, Causality, Error, Fused, KeySplit, LayerInputs, SharedPrefixDecode,
    SharedPrefixGate, SplitDecode, StatePolicy, TriangleChoice, TriangleGate, TriangleMixPrefill,
    WhyDense, rules,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const LAYERS: usize = 2;
const BLOCK_SIZE: usize = 128;
const BLOCKS: usize = 96;
/// Tokens of each of the two prefixes that requests may share.
const DONATED: usize = 300;

/// A request of the step.
#[derive(Clone, Debug, Default)]
struct Request {
    /// Begins with so many tokens of one of the prefixes.
    shares: Option<(usize, usize)>,
    /// Cached tokens of its own.
    own: usize,
    /// Tokens of the step.
    new: usize,
    prompt: Option<usize>,
}

#[derive(Clone, Debug)]
struct Case {
    kv_heads: usize,
    group: usize,
    requests: Vec<Request>,
    /// Padding tokens.
    pad: usize,
    causality: Causality,
    seed: u64,
}

/// What a step did.
struct Ran {
    name: &'static str,
    refused: Vec<(&'static str, Error)>,
    metadata: AttentionMetadata,
}

/// Tokens that are cached before the step, written to every layer.
fn fill(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    sequence: &mut Sequence,
    names: &[u64],
    kv_heads: usize,
) {
    if names.is_empty() {
        return;
    }
    let grown = sequence.grow(names.len()).unwrap();
    let cache = attention.cache_mut();
    cache.copy_blocks(stream, &grown.copies).unwrap();
    for layer in 0..LAYERS {
        let key = packed(stream, names, layer, 1, kv_heads);
        let value = packed(stream, names, layer, 2, kv_heads);
        let write = CacheWrite::plan(cache, stream, &grown.slots, &key, &value);
        cache
            .write(stream, &write.unwrap(), layer, &key, &value)
            .unwrap();
    }
    cache.mark_computed(sequence, sequence.len()).unwrap();
}

/// Runs a step and compares every row of it, or of long ones some. `sees` says which keys a row sees: request, layer,
/// row, key.
fn run(
    case: &Case,
    backends: Backends<bf16>,
    sees: impl Fn(usize, usize, usize, usize) -> bool,
    marks: &[usize],
) -> Result<Ran, TestCaseError> {
    run_on(&harness::stream(), None, case, backends, sees, marks)
}

/// The same on a stream of any product, with sinks or without.
fn run_on(
    stream: &Stream,
    sinks: Option<&[f64]>,
    case: &Case,
    backends: Backends<bf16>,
    sees: impl Fn(usize, usize, usize, usize) -> bool,
    marks: &[usize],
) -> Result<Ran, TestCaseError> {
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let shape = AttentionShape::new(heads, kv_heads, DIM);
    let pad = PadPolicy::SkipNegative;
    let of = CacheShape::new(LAYERS, kv_heads, DIM);
    let cache = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, of, pad).unwrap();
    let pool = cache.pool().clone();
    let mut attention = Attention::new(shape, cache, backends);
    let mut next = case.seed * 100_000;
    let mut name = || {
        next += 1;
        next
    };
    let donors: Vec<(Sequence, Vec<u64>)> = (0..2)
        .map(|_| {
            let names: Vec<u64> = (0..DONATED).map(|_| name()).collect();
            let mut sequence = Sequence::new(&pool);
            fill(stream, &mut attention, &mut sequence, &names, kv_heads);
            (sequence, names)
        })
        .collect();
    let mut sequences = Vec::new();
    for request in &case.requests {
        let (mut sequence, mut names) = match request.shares {
            None => (Sequence::new(&pool), Vec::new()),
            Some((donor, tokens)) => {
                let (sequence, names) = &donors[donor];
                let shared = sequence.share_prefix(tokens).unwrap();
                (shared, names[..tokens].to_vec())
            }
        };
        let own: Vec<u64> = (0..request.own).map(|_| name()).collect();
        fill(stream, &mut attention, &mut sequence, &own, kv_heads);
        names.extend(own);
        names.extend((0..request.new).map(|_| name()));
        let grown = sequence.grow(request.new).unwrap();
        attention
            .cache_mut()
            .copy_blocks(stream, &grown.copies)
            .unwrap();
        sequences.push((sequence, names));
    }
    let batch: Vec<BatchRequest<'_>> = sequences
        .iter()
        .zip(&case.requests)
        .map(|((sequence, _), request)| {
            BatchRequest::of(sequence, request.new).prompt_len(request.prompt)
        })
        .collect();
    let settings =
        BatchSettings::of(attention.cache(), case.causality).policy(StatePolicy::new(true, None));
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    metadata.pad_to(metadata.tokens() + case.pad).unwrap();
    let mut tokens: Vec<u64> = Vec::new();
    for ((_, names), request) in sequences.iter().zip(&case.requests) {
        tokens.extend(&names[names.len() - request.new..]);
    }
    tokens.resize(metadata.tokens(), 0);
    let sink = sinks.map(|sinks| {
        let sinks: Vec<bf16> = sinks.iter().map(|sink| bf16::from_f64(*sink)).collect();
        stream.upload(&sinks[..heads], [heads]).unwrap()
    });
    let mut step = attention.begin(stream, &metadata).unwrap();
    let mut outputs = Vec::new();
    for layer in 0..LAYERS {
        let query = packed(stream, &tokens, layer, 0, heads);
        let key = packed(stream, &tokens, layer, 1, kv_heads);
        let value = packed(stream, &tokens, layer, 2, kv_heads);
        let mut inputs = LayerInputs::from((&query, &key, &value));
        inputs.learnable_sink = sink.as_deref();
        let output = step.forward(layer, inputs).unwrap();
        outputs.push(output.download(stream).unwrap());
    }
    let selected = step.selected().unwrap();
    let refused = selected.refused.iter();
    let ran = Ran {
        name: selected.name,
        refused: refused.map(|r| (r.name, r.why.clone())).collect(),
        metadata: metadata.clone(),
    };
    drop(step);
    for (layer, output) in outputs.iter().enumerate() {
        let mut start = 0;
        for (at, ((_, names), request)) in sequences.iter().zip(&case.requests).enumerate() {
            let new = request.new;
            let cached = names.len() - new;
            let all = (0..new).filter(|row| {
                let near = marks.iter().any(|mark| (cached + row).abs_diff(*mark) < 2);
                near || [0, new / 2, new - 1].contains(row)
            });
            for row in all {
                let position = cached + row;
                let seen = |key: usize| sees(at, layer, position, key);
                let names = &names[..=position];
                let want = dense_with_sinks(names, layer, shape, seen, sinks.unwrap_or(&[]));
                let got = &output[(start + row) * heads * DIM..][..heads * DIM];
                for (got, want) in got.iter().zip(&want) {
                    // Parts are rounded before they are merged.
                    prop_assert!(
                        (got.to_f64() - want).abs() <= 2e-2,
                        "layer {layer}, request {at}, position {position}: {got}, expected {want}, by {}",
                        ran.name
                    );
                }
            }
            start += new;
        }
    }
    drop(batch);
    drop((sequences, donors));
    stream.synchronize().unwrap();
    prop_assert_eq!((pool.held_blocks(), pool.steps_in_flight()), (0, 0));
    Ok(ran)
}

fn case(new: impl Strategy<Value = usize> + Clone + 'static) -> impl Strategy<Value = Case> {
    let shares = prop_oneof![1 => Just(None), 3 => (0usize..2, 0..=DONATED).prop_map(Some)];
    let own = prop_oneof![1 => Just(0usize), 2 => 0usize..200];
    let request = (shares, own, new).prop_map(|(shares, own, new)| Request {
        shares,
        own,
        new,
        prompt: None,
    });
    let requests = prop::collection::vec(request, 1..6);
    (1usize..3, 1usize..4, requests, 0usize..9, any::<u16>()).prop_map(
        |(kv_heads, group, requests, pad, seed)| Case {
            kv_heads,
            group,
            requests,
            pad,
            causality: Causality::Causal,
            seed: seed.into(),
        },
    )
}

fn cascade() -> Backends<bf16> {
    Backends::none().with(CascadePrefill).with(Fused)
}

fn shared() -> Backends<bf16> {
    let gate = SharedPrefixGate::ALWAYS;
    Backends::none()
        .with(SharedPrefixDecode { gate })
        .with(Fused)
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(16) })]

    #[test]
    fn any_batch_as_a_cascade(case in case(prop_oneof![1 => Just(1usize), 3 => 1usize..120])) {
        let ran = run(&case, cascade(), |_, _, _, _| true, &[])?;
        let behind = case.requests.iter().any(|r| {
            r.new > 1 && r.own + r.shares.map_or(0, |(_, tokens)| tokens) > 0
        });
        prop_assert_eq!(ran.name, if behind { "cascade_prefill" } else { "fused" });
    }

    #[test]
    fn any_batch_under_a_window(case in case(prop_oneof![3 => Just(1usize), 1 => 1usize..20]), window in 1usize..520) {
        let case = Case {
            causality: Causality::from_flags(true, Some(window)).unwrap(),
            ..case
        };
        let sees = |_: usize, _: usize, row: usize, key: usize| row - key < window;
        run(&case, shared(), sees, &[])?;
        run(&case, cascade(), sees, &[])?;
    }

    #[test]
    fn any_batch_over_shared_prefixes(case in case(prop_oneof![3 => Just(1usize), 1 => 1usize..20])) {
        let ran = run(&case, shared(), |_, _, _, _| true, &[])?;
        let blocks = |r: &Request| r.shares.map(|(donor, n)| (donor, n / BLOCK_SIZE)).filter(|s| s.1 > 0);
        let pairs = case.requests.windows(2);
        let pays = pairs.into_iter().any(|pair| match (blocks(&pair[0]), blocks(&pair[1])) {
            (Some(one), Some(next)) => one.0 == next.0,
            _ => false,
        });
        prop_assert_eq!(ran.name, if pays { "shared_prefix_decode" } else { "fused" });
    }
}

fn split(split: KeySplit) -> Backends<bf16> {
    Backends::none().with(SplitDecode { split }).with(Fused)
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(24) })]

    #[test]
    fn any_decodes_with_keys_in_parts(case in case(prop_oneof![9 => Just(1usize), 1 => 1usize..3]), tiles in 1usize..4, balanced: bool, max_splits in 1usize..20, cores in 1usize..40) {
        let tiles = KeySplit::Tiles(NonZeroUsize::new(tiles * BLOCK_SIZE).unwrap());
        let how = if balanced { KeySplit::Balanced { max_splits, cores } } else { tiles };
        let ran = run(&case, split(how), |_, _, _, _| true, &[])?;
        let cached = |r: &Request| r.own + r.shares.map_or(0, |(_, tokens)| tokens) > 0;
        let decodes = case.requests.iter().all(|r| r.new == 1 && cached(r));
        prop_assert!(!decodes || ran.name == "split_decode", "{:?}", ran.refused);
    }
}

/// A request of a decode step, in tiles: its bits are the same in every batch.
#[test]
fn tiles_make_a_request_independent_of_its_batch() {
    let stream = harness::stream();
    let shape = AttentionShape::new(2, 1, DIM);
    let tile = KeySplit::Tiles(NonZeroUsize::new(BLOCK_SIZE).unwrap());
    let bits_of = |others: &[usize]| -> Vec<u16> {
        let pad = PadPolicy::SkipNegative;
        let of = CacheShape::new(LAYERS, 1, DIM);
        let cache = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, of, pad).unwrap();
        let mut attention = Attention::new(shape, cache, split(tile));
        let lengths: Vec<usize> = others.iter().copied().chain([700]).collect();
        let mut sequences = Vec::new();
        for (at, len) in lengths.iter().enumerate() {
            // The last one has the same tokens always.
            let first = if at + 1 == lengths.len() {
                0
            } else {
                10_000 * (at as u64 + 1)
            };
            let names: Vec<u64> = (first..first + *len as u64).collect();
            let mut sequence = Sequence::new(attention.cache().pool());
            fill(&stream, &mut attention, &mut sequence, &names[1..], 1);
            let _ = sequence.grow(1).unwrap();
            sequences.push((sequence, names[0]));
        }
        let batch: Vec<_> = sequences
            .iter()
            .map(|(s, _)| BatchRequest::of(s, 1))
            .collect();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let names: Vec<u64> = sequences.iter().map(|(_, name)| *name).collect();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let [query, key, value] =
            [(0, 2), (1, 1), (2, 1)].map(|(what, heads)| packed(&stream, &names, 0, what, heads));
        let output: Tensor<bf16> = step.forward(0, (&query, &key, &value)).unwrap();
        assert_eq!(step.selected().unwrap().name, "split_decode");
        let numbers = output.download(&stream).unwrap();
        let row = &numbers[numbers.len() - 2 * DIM..];
        row.iter().map(|x| x.to_bits()).collect()
    };
    let alone = bits_of(&[]);
    for others in [&[1usize][..], &[2000, 5], &[700, 699, 128, 129], &[40; 20]] {
        assert_eq!(bits_of(others), alone, "{others:?}");
    }
}

#[test]
fn what_is_not_split_is_refused_by_name() {
    let request = |own, new| Request {
        own,
        new,
        ..Request::default()
    };
    let case = |requests, causality| Case {
        kv_heads: 1,
        group: 1,
        requests,
        pad: 0,
        causality,
        seed: 5,
    };
    let tiles = |keys| KeySplit::Tiles(NonZeroUsize::new(keys).unwrap());
    let window = Causality::from_flags(true, Some(9)).unwrap();
    let long = BLOCK_SIZE * SplitDecode::MAX_PARTS;
    for (how, requests, causality, rule) in [
        (
            tiles(128),
            vec![request(9, 2)],
            Causality::Causal,
            &rules::BACKEND_SPLIT,
        ),
        (
            tiles(128),
            vec![request(9, 1)],
            window,
            &rules::BACKEND_SPLIT,
        ),
        (
            tiles(100),
            vec![request(9, 1)],
            Causality::Causal,
            &rules::SPLIT_TILE,
        ),
        (
            tiles(128),
            vec![request(long, 1)],
            Causality::Causal,
            &rules::SPLIT_LIMITS,
        ),
        (
            KeySplit::Balanced {
                max_splits: 4,
                cores: 0,
            },
            vec![request(9, 1)],
            Causality::Causal,
            &rules::SPLIT_LIMITS,
        ),
    ] {
        let sees = move |_: usize, _: usize, token: usize, key: usize| {
            causality
                .window()
                .is_none_or(|keys| token - key < keys.get())
        };
        let ran = run(&case(requests, causality), split(how), sees, &[]).unwrap();
        assert_eq!(ran.name, "fused");
        let (name, why) = &ran.refused[0];
        assert_eq!(*name, "split_decode");
        assert!(why.breaks(rule), "{why}");
    }
}

#[test]
fn whoever_has_no_prefix_is_in_the_same_batch() {
    let request = |shares, own, new| Request {
        shares,
        own,
        new,
        prompt: None,
    };
    let case = Case {
        kv_heads: 1,
        group: 2,
        requests: vec![
            request(None, 0, 30),
            request(Some((0, 256)), 5, 1),
            request(Some((0, 300)), 0, 9),
            request(None, 0, 1),
            request(Some((1, 130)), 70, 1),
            request(Some((1, 299)), 0, 1),
        ],
        pad: 5,
        causality: Causality::Causal,
        seed: 3,
    };
    assert_eq!(
        run(&case, cascade(), |_, _, _, _| true, &[]).unwrap().name,
        "cascade_prefill"
    );
    let ran = run(&case, shared(), |_, _, _, _| true, &[]).unwrap();
    assert_eq!(ran.name, "shared_prefix_decode");
    let gate = SharedPrefixGate::ALWAYS;
    let groups = SharedPrefixDecode { gate }.groups(&ran.metadata);
    let groups: Vec<_> = groups.into_iter().map(|g| (g.requests, g.blocks)).collect();
    assert_eq!(groups, [(1..3, 2), (4..6, 1)]);
    // The gate counts keys: 256 are read once less, then 128.
    for (saved, served) in [(384, "shared_prefix_decode"), (385, "fused")] {
        let gate = SharedPrefixGate {
            min_saved_keys: saved,
            ..SharedPrefixGate::ALWAYS
        };
        let backends = Backends::none()
            .with(SharedPrefixDecode { gate })
            .with(Fused);
        assert_eq!(
            run(&case, backends, |_, _, _, _| true, &[]).unwrap().name,
            served
        );
    }
}

/// What each backend was refused for.
fn rules(ran: &Ran) -> Vec<(&'static str, &'static Rule)> {
    let refused = ran.refused.iter();
    let rule = |(name, why): &(&'static str, Error)| match why {
        Error::Violation(refused) => (*name, refused.rule),
        other => panic!("{name}: {other}"),
    };
    refused.map(rule).collect()
}

/// Two requests that share 256 tokens.
fn two_that_share(causality: Causality) -> Case {
    let request = |new| Request {
        shares: Some((0, 256)),
        new,
        prompt: Some(400),
        ..Request::default()
    };
    Case {
        kv_heads: 1,
        group: 1,
        requests: vec![request(3), request(1)],
        pad: 0,
        causality,
        seed: 8,
    }
}

/// Where a window hides keys, no part is seen whole by all rows: the ordinary backend serves the step, and the
/// refusals say why.
#[test]
fn windows_that_hide_what_is_cached_are_refused_by_name() {
    let window = Causality::from_flags(true, Some(40)).unwrap();
    let case = two_that_share(window);
    let backends = Backends::none()
        .with(CascadePrefill)
        .with(SharedPrefixDecode {
            gate: SharedPrefixGate::ALWAYS,
        })
        .with(triangle(TriangleMix::new(1, 2, 3), TriangleGate::ALWAYS))
        .with(Fused);
    let ran = run(&case, backends, |_, _, row, key| row - key < 40, &[]).unwrap();
    assert_eq!(ran.name, "fused");
    let expected = [
        ("cascade_prefill", &rules::BACKEND_CASCADE),
        ("shared_prefix_decode", &rules::BACKEND_SHARED_PREFIX),
        ("triangle_mix", &rules::BACKEND_TRIANGLE),
    ];
    assert_eq!(rules(&ran), expected);
}

#[test]
fn windows_that_hide_nothing_are_causal() {
    let window = |keys| Causality::from_flags(true, Some(keys)).unwrap();
    let tiles = KeySplit::Tiles(NonZeroUsize::new(128).unwrap());
    for (keys, hides) in [(259, false), (258, true)] {
        let ran = run(
            &two_that_share(window(keys)),
            cascade(),
            move |_, _, row, key| row - key < keys,
            &[],
        );
        assert_eq!(ran.unwrap().name == "fused", hides, "{keys}");
        let mut decodes = two_that_share(window(keys - 2));
        decodes.requests[0].new = 1;
        let sees = move |_: usize, _: usize, row: usize, key: usize| row - key < keys - 2;
        let ran = run(&decodes, split(tiles), sees, &[]).unwrap();
        assert_eq!(ran.name == "fused", hides, "{keys}");
    }
}

/// A window of 300 behind 256 shared tokens: of requests with 275 and 400 tokens both see the second shared block
/// whole.
#[test]
fn under_a_window_the_blocks_that_all_tokens_see_are_read_once() {
    let window = |keys| Causality::from_flags(true, Some(keys)).unwrap();
    let mut case = two_that_share(window(300));
    case.requests[0].own = 16;
    case.requests[1].own = 143;
    let name = |case: &Case, keys: usize| {
        let sees = move |_: usize, _: usize, row: usize, key: usize| row - key < keys;
        run(case, shared(), sees, &[]).unwrap().name
    };
    assert_eq!(name(&case, 300), "shared_prefix_decode");
    // The last token of the second sees keys 128 to 399, and one less is too few.
    case.causality = window(272);
    assert_eq!(name(&case, 272), "shared_prefix_decode");
    case.causality = window(271);
    assert_eq!(name(&case, 271), "fused");
    // A request of its own has all that it sees behind the window that is left, or the step is not divided.
    for (own, served) in [(171, "shared_prefix_decode"), (172, "fused")] {
        case.causality = window(300);
        case.requests.truncate(2);
        case.requests.push(Request {
            own,
            new: 1,
            ..Request::default()
        });
        assert_eq!(name(&case, 300), served, "{own}");
    }
}

#[test]
fn sinks_are_counted_once_where_log_sum_exps_are_known_to_have_them() {
    if harness::not_on_npu("an installed toolkit is of one product") {
        return;
    }
    let sinks = [1.5, -2.0];
    let machine = Machine::new(Soc::Ascend950, Cann::V9_1);
    let runtime = Runtime::emulated_as(&machine).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let mut decodes = two_that_share(Causality::Causal);
    decodes.requests[0].new = 1;
    decodes.group = 2;
    let mut prefills = two_that_share(Causality::Causal);
    prefills.group = 2;
    let all = |_: usize, _: usize, _: usize, _: usize| true;
    for (case, backends, name, rule) in [
        (
            &prefills,
            cascade as fn() -> _,
            "cascade_prefill",
            &rules::BACKEND_CASCADE,
        ),
        (
            &decodes,
            shared,
            "shared_prefix_decode",
            &rules::BACKEND_SHARED_PREFIX,
        ),
        (
            &decodes,
            || split(KeySplit::Tiles(NonZeroUsize::new(128).unwrap())),
            "split_decode",
            &rules::BACKEND_SPLIT,
        ),
    ] {
        let ran = run_on(&stream, Some(&sinks), case, backends(), all, &[]).unwrap();
        assert_eq!(ran.name, name);
        let elsewhere = harness::stream();
        let ran = run_on(&elsewhere, Some(&sinks), case, backends(), all, &[]).unwrap();
        assert_eq!((ran.name, rules(&ran)), ("fused", vec![(name, rule)]));
    }
}

/// TriangleMix in the second layer.
fn triangle(sizes: TriangleMix, gate: TriangleGate) -> TriangleMixPrefill {
    TriangleMixPrefill {
        layers: TriangleLayers::explicit([1]).unwrap(),
        sizes,
        gate,
    }
}

/// The triangle by its definition.
fn in_triangle(sizes: TriangleMix, prompt: Option<usize>, row: usize, key: usize) -> bool {
    let Some(prompt) = prompt else { return true };
    let near = (row - key) as u64 <= sizes.sliding_window_size;
    near || (key as u64) < sizes.num_sink_tokens
        || row as u64 + sizes.num_last_tokens >= prompt as u64
}

/// Runs a step and says how many requests left keys out.
fn run_triangle(case: &Case, sizes: TriangleMix) -> Result<usize, TestCaseError> {
    let backend = triangle(sizes, TriangleGate::ALWAYS);
    let sees = |at: usize, layer: usize, row: usize, key: usize| {
        let request: &Request = &case.requests[at];
        // Single rows are decoding, which is dense, as is the first layer.
        layer == 0 || request.new == 1 || in_triangle(sizes, request.prompt, row, key)
    };
    let first = (sizes.num_sink_tokens + sizes.sliding_window_size + 1) as usize;
    let last = |r: &Request| Some(r.prompt?.saturating_sub(sizes.num_last_tokens as usize));
    let mut marks: Vec<usize> = case.requests.iter().filter_map(last).collect();
    marks.push(first);
    let ran = run(
        case,
        Backends::none().with(backend.clone()).with(Fused),
        sees,
        &marks,
    )?;
    let choices = backend.choices(&ran.metadata);
    let sparse = choices
        .iter()
        .filter(|c| matches!(c, TriangleChoice::Sparse { .. }))
        .count();
    prop_assert_eq!(ran.name, if sparse > 0 { "triangle_mix" } else { "fused" });
    if sparse == 0 {
        prop_assert_eq!(ran.refused.len(), 1);
    }
    Ok(sparse)
}

fn prompts() -> impl Strategy<Value = Case> {
    // A request: cached tokens, tokens of the step, and how many of the prompt come later.
    let cached = prop_oneof![1 => Just(0usize), 1 => 1usize..300];
    let new = prop_oneof![1 => Just(1usize), 4 => 1usize..200];
    let later =
        prop_oneof![1 => Just(None), 2 => Just(Some(0usize)), 2 => (0usize..200).prop_map(Some)];
    let request = (cached, new, later).prop_map(|(own, new, later)| Request {
        shares: None,
        own,
        new,
        prompt: later.map(|later| own + new + later),
    });
    let any_cached = prop::collection::vec(request, 1..5);
    (
        1usize..3,
        1usize..4,
        any_cached,
        any::<bool>(),
        0usize..9,
        any::<u16>(),
    )
        .prop_map(|(kv_heads, group, mut requests, cached, pad, seed)| {
            if !cached {
                requests.iter_mut().for_each(|request| request.own = 0);
            }
            Case {
                kv_heads,
                group,
                requests,
                pad,
                causality: Causality::Causal,
                seed: seed.into(),
            }
        })
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(16) })]

    #[test]
    fn any_batch_with_triangles(case in prompts(), sinks in 0u64..150, window in 0u64..150, last in 0u64..60) {
        run_triangle(&case, TriangleMix::new(sinks, window, last))?;
    }
}

/// Prompts that end around the first row that leaves a key out and the last ones, whole and in chunks that begin there.
#[test]
fn triangles_at_their_boundaries() {
    let sizes = TriangleMix::new(3, 140, 10);
    let first = 3 + 140 + 1;
    let mut sparse = Vec::new();
    for (prompt, cached) in [
        (1, 0),
        (first, 0),
        (first + 1, 0),
        (first + 10, 0),
        (first + 11, 0),
        (first + 11, 1),
        (300, first),
        (300, first + 1),
        (300, 290),
        (300, 289),
        (300, 128),
    ] {
        let request = Request {
            own: cached,
            new: prompt - cached,
            prompt: Some(prompt),
            ..Request::default()
        };
        let decode = Request {
            own: 5,
            new: 1,
            ..Request::default()
        };
        let alone = Case {
            kv_heads: 1,
            group: 2,
            requests: vec![request.clone()],
            pad: 0,
            causality: Causality::Causal,
            seed: 4,
        };
        let beside = Case {
            requests: vec![decode.clone(), request, decode],
            ..alone.clone()
        };
        let left_out = [&alone, &beside].map(|case| run_triangle(case, sizes).unwrap());
        assert_eq!(left_out[0], left_out[1]);
        sparse.push(left_out[0]);
    }
    assert_eq!(sparse, [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]);
}

/// Chunks with the length of the prompt are the prompt at once; without it they are dense, and the choice says so.
#[test]
fn chunks_need_the_length_of_the_prompt() {
    let sizes = TriangleMix::new(4, 20, 10);
    for (prompt, sparse) in [(Some(250), 1), (None, 0)] {
        for (own, new) in [(0, 100), (100, 100), (200, 50)] {
            let request = Request {
                shares: None,
                own,
                new,
                prompt,
            };
            let case = Case {
                kv_heads: 1,
                group: 1,
                requests: vec![request],
                pad: 3,
                causality: Causality::Causal,
                seed: 6,
            };
            assert_eq!(run_triangle(&case, sizes).unwrap(), sparse);
        }
    }
    let row = [0, 1];
    let requests = [
        (Some(250), 100),
        (None, 100),
        (Some(250), 1),
        (Some(60), 60),
    ];
    let batch: Vec<_> = requests
        .iter()
        .enumerate()
        .map(|(at, (prompt_len, new))| {
            BatchRequest::in_row(&row[at % 2..], 0, *new).prompt_len(*prompt_len)
        })
        .collect();
    let settings = |blocks| {
        let pool = BlockPool::new(blocks, 128, PadPolicy::SkipNegative).unwrap();
        BatchSettings::of(&pool, Causality::Causal)
    };
    let gate = TriangleGate {
        min_sparse_rows: 50,
        min_saved_pairs: 1,
    };
    let choice = |request: &BatchRequest<'_>| {
        let metadata = AttentionMetadata::new(&[*request], settings(2)).unwrap();
        triangle(sizes, gate).choices(&metadata).remove(0)
    };
    let pairs = 75 * 76 / 2;
    let rows = 25..100;
    assert_eq!(
        choice(&batch[0]),
        TriangleChoice::Sparse {
            rows,
            saved_pairs: pairs
        }
    );
    assert_eq!(
        choice(&batch[1]),
        TriangleChoice::Dense(WhyDense::PromptUnknown)
    );
    assert_eq!(
        choice(&batch[2]),
        TriangleChoice::Dense(WhyDense::SingleRow)
    );
    let why = WhyDense::Gate {
        rows: 25,
        pairs: 25 * 26 / 2,
    };
    assert_eq!(choice(&batch[3]), TriangleChoice::Dense(why));
}
