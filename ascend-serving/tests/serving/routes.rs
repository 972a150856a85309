//! Steps by several calls and a merge: a cascade, a shared prefix read once. Whatever the batch, each
//! row is what one dense pass over the keys that it sees gives it.

use crate::harness;
use ascend_attention::spec::Rule;

use std::num::NonZeroUsize;

use crate::tokens::{DIM, packed};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionBackend, AttentionMetadata, AttentionShape, AttentionState, Backend, BackendFlags, Backends,
    BatchRequest, BatchSettings, Causality, Drafting, Error, GraphLimits, LayerTensors, Result, SharedPrefixDecode,
    SplitDecode, StatePolicy, StepContext, StepProgram, rules,
};
use ascend_testing::steps::{BLOCK_SIZE, BLOCKS, Case, DONATED, LAYERS, Ran, Request, fill, run, run_on};
use proptest::prelude::*;
use proptest::test_runner::Config;

fn case(new: impl Strategy<Value = usize> + Clone + 'static) -> impl Strategy<Value = Case> {
    let shares = prop_oneof![1 => Just(None), 3 => (0usize..2, 0..=DONATED).prop_map(Some)];
    let own = prop_oneof![1 => Just(0usize), 2 => 0usize..200];
    let request = (shares, own, new).prop_map(|(shares, own, new)| Request { shares, own, new, prompt: None });
    let requests = prop::collection::vec(request, 1..6);
    (1usize..3, 1usize..4, requests, 0usize..9, any::<u16>()).prop_map(|(kv_heads, group, requests, pad, seed)| Case {
        kv_heads,
        group,
        requests,
        pad,
        causality: Causality::Causal,
        seed: seed.into(),
    })
}

fn cascade() -> Backends<bf16> {
    Backends::none().with(Backend::CascadePrefill).with(Backend::Fused)
}

fn shared() -> Backends<bf16> {
    Backends::none().with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS)).with(Backend::Fused)
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(16) })]

    #[test]
    fn any_batch_as_a_cascade(case in case(prop_oneof![1 => Just(1usize), 3 => 1usize..120])) {
        let ran = run(&case, cascade(), &|_, _, _, _| true, &[])?;
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
        run(&case, shared(), &sees, &[])?;
        run(&case, cascade(), &sees, &[])?;
    }

    #[test]
    fn any_batch_over_shared_prefixes(case in case(prop_oneof![3 => Just(1usize), 1 => 1usize..20])) {
        let ran = run(&case, shared(), &|_, _, _, _| true, &[])?;
        let blocks = |r: &Request| r.shares.map(|(donor, n)| (donor, n / BLOCK_SIZE)).filter(|s| s.1 > 0);
        let pairs = case.requests.windows(2);
        let pays = pairs.into_iter().any(|pair| match (blocks(&pair[0]), blocks(&pair[1])) {
            (Some(one), Some(next)) => one.0 == next.0,
            _ => false,
        });
        prop_assert_eq!(ran.name, if pays { "shared_prefix_decode" } else { "fused" });
    }
}

fn split(split: SplitDecode) -> Backends<bf16> {
    Backends::none().with(Backend::SplitDecode(split)).with(Backend::Fused)
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(24) })]

    #[test]
    fn any_decodes_with_keys_in_parts(case in case(prop_oneof![9 => Just(1usize), 1 => 1usize..3]), tiles in 1usize..4, kind in 0usize..3, max_splits in 1usize..20, cores in 1usize..40) {
        let tiles = SplitDecode::Tiles(NonZeroUsize::new(tiles * BLOCK_SIZE).unwrap());
        let size = |size: usize| NonZeroUsize::new(size).unwrap();
        let how = match kind {
            0 => SplitDecode::Balanced { max_splits, cores },
            1 => SplitDecode::Capped { keys: size(cores), max_splits: size(max_splits) },
            _ => tiles,
        };
        let ran = run(&case, split(how), &|_, _, _, _| true, &[])?;
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
    let tile = SplitDecode::Tiles(NonZeroUsize::new(BLOCK_SIZE).unwrap());
    let bits_of = |others: &[usize]| -> Vec<u16> {
        let pad = PadPolicy::SkipNegative;
        let of = CacheShape::new(LAYERS, 1, DIM);
        let cache = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, of, pad).unwrap();
        let mut attention = Attention::new(shape, cache, split(tile));
        let lengths: Vec<usize> = others.iter().copied().chain([700]).collect();
        let mut sequences = Vec::new();
        for (at, len) in lengths.iter().enumerate() {
            // The last one has the same tokens always.
            let first = if at + 1 == lengths.len() { 0 } else { 10_000 * (at as u64 + 1) };
            let names: Vec<u64> = (first..first + *len as u64).collect();
            let mut sequence = Sequence::new(attention.cache().pool());
            fill(&stream, &mut attention, &mut sequence, &names[1..], 1);
            let _ = sequence.grow(1).unwrap();
            sequences.push((sequence, names[0]));
        }
        let batch: Vec<_> = sequences.iter().map(|(s, _)| BatchRequest::of(s, 1)).collect();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let names: Vec<u64> = sequences.iter().map(|(_, name)| *name).collect();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let [query, key, value] = [(0, 2), (1, 1), (2, 1)].map(|(what, heads)| packed(&stream, &names, 0, what, heads));
        let output: Tensor<bf16> = step.forward(0, (&query, &key, &value)).unwrap().clone();
        assert_eq!(step.selected(0).unwrap().name, "split_decode");
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
    let request = |own, new| Request { own, new, ..Request::default() };
    let case = |requests, causality| Case { kv_heads: 1, group: 1, requests, pad: 0, causality, seed: 5 };
    let tiles = |keys| SplitDecode::Tiles(NonZeroUsize::new(keys).unwrap());
    let window = Causality::from_flags(true, Some(9)).unwrap();
    let long = BLOCK_SIZE * SplitDecode::MAX_PARTS;
    for (how, requests, causality, rule) in [
        (tiles(128), vec![request(9, 2)], Causality::Causal, &rules::BACKEND_SPLIT),
        (tiles(128), vec![request(9, 1)], window, &rules::BACKEND_SPLIT),
        (tiles(100), vec![request(9, 1)], Causality::Causal, &rules::SPLIT_TILE),
        (tiles(128), vec![request(long, 1)], Causality::Causal, &rules::SPLIT_LIMITS),
        (
            SplitDecode::Balanced { max_splits: 4, cores: 0 },
            vec![request(9, 1)],
            Causality::Causal,
            &rules::SPLIT_LIMITS,
        ),
    ] {
        let sees = move |_: usize, _: usize, token: usize, key: usize| {
            causality.window().is_none_or(|keys| token - key < keys.get())
        };
        let ran = run(&case(requests, causality), split(how), &sees, &[]).unwrap();
        assert_eq!(ran.name, "fused");
        let (name, why) = &ran.refused[0];
        assert_eq!(*name, "split_decode");
        assert!(why.breaks(rule), "{why}");
    }
}

#[test]
fn a_step_that_a_flag_binds_is_told_to_name_another_backend_there() {
    let stream = Runtime::emulated().unwrap().device(0).unwrap().stream().unwrap();
    let shape = CacheShape::new(1, 1, DIM);
    let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
    let flags = BackendFlags { prefill: Some("paged_decode"), ..BackendFlags::default() };
    let backends = flags.backends(stream.device()).unwrap();
    let mut attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, 3)], Default::default()).unwrap();
    assert_eq!([metadata.longest(), metadata.longest_rows()], [3, 3]);
    let rows = stream.upload(&[bf16::ONE; 3 * DIM], [3, 1, DIM]).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let refused = step.forward(0, (&rows, &rows, &rows)).unwrap_err().to_string();
    assert!(refused.contains("binds steps of this kind"), "{refused}");
    assert!(refused.contains("add another one there") && !refused.contains("register "), "{refused}");
    // Advice on a backend stands beside that on the call, and is true of steps that are bound and of others.
    for (flag, said) in [
        ("quantised_mla", "make the inputs of layers of multi-head latent attention by `LayerInputs::latent`"),
        ("quantised_decode", "or add `Backend::Fused`"),
        ("split_decode:256", "add a backend such as `Backend::Fused` behind it"),
    ] {
        let flags = BackendFlags { decode: Some(flag), ..BackendFlags::default() };
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, flags.backends(stream.device()).unwrap());
        let refused = attention.capture(&stream, Causality::Causal, &GraphLimits::new([1], 300)).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains(said) && refused.contains("add another one there"), "{refused}");
        assert!(!refused.contains("register "), "{refused}");
    }
}

/// Fused attention under another name.
struct Renamed;

impl AttentionBackend<bf16> for Renamed {
    fn name(&self) -> &'static str {
        "renamed"
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, bf16>) -> Result<StepProgram<bf16>> {
        Backend::Fused.program(step, first)
    }
}

/// An engine chooses no sparse mode, and its requests no mask: the refusal is of the step.
#[test]
fn a_step_that_the_operator_would_mask_otherwise_is_refused_by_its_backend() {
    let stream = harness::stream();
    for window in [None, Some(8)] {
        let shape = CacheShape::new(1, 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let causality = Causality::from_flags(true, window).unwrap();
        let backends = Backends::none().with(Backend::BatchedQueries);
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        let choices = attention.backend_choices(&stream, 0, causality, None).unwrap();
        let decode = choices.into_iter().find(|choice| choice.state == AttentionState::DecodeOnly).unwrap();
        let why = decode.served.unwrap_err();
        assert!(why.breaks(&rules::BACKEND_STEP), "{why}");
        let text = why.to_string();
        assert!(text.contains("batched_queries: ") && text.contains("add `Backend::Fused`"), "{text}");
        assert!(!text.contains("sparse"), "{text}");
    }
}

#[test]
fn a_backend_that_a_flag_keeps_from_a_step_is_named() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let choices = |bind: &dyn Fn(Backends<bf16>) -> Backends<bf16>| {
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let flags = BackendFlags { decode: Some("paged_decode"), verify: Some("mla"), ..BackendFlags::default() };
        let backends = bind(flags.backends(stream.device()).unwrap());
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        attention.backend_choices(&stream, 0, Causality::Causal, None).unwrap()
    };
    let own = || Backends::none().with(Renamed);
    for bind in [&|flags: Backends<bf16>| flags.append(own()), &|flags| own().append(flags)]
        as [&dyn Fn(Backends<bf16>) -> Backends<bf16>; 2]
    {
        for choice in choices(bind) {
            let kept: Vec<_> = choice.refused.iter().filter(|refused| refused.name == "renamed").collect();
            match choice.state {
                AttentionState::DecodeOnly => {
                    assert_eq!(choice.served, Ok("paged_decode"));
                    let why = kept[0].to_string();
                    assert!(kept[0].why.breaks(&rules::BACKEND_BOUND) && why.contains("named for it: paged_decode"));
                }
                AttentionState::SpecDecoding => {
                    let why = choice.served.unwrap_err();
                    assert!(
                        why.breaks(&rules::BACKEND_BOUND)
                            && why.to_string().contains("registered, not tried: renamed (backend.bound)"),
                        "{why}"
                    );
                    assert!(why.to_string().contains("give `Backends::for_steps` a list with this backend"), "{why}");
                }
                _ => assert!(choice.served.is_ok() && kept.is_empty(), "{choice}"),
            }
        }
    }
    // What it advises.
    let named = choices(&|flags| flags.for_steps(&[AttentionState::DecodeOnly, AttentionState::SpecDecoding], own()));
    for choice in named {
        let own = matches!(choice.state, AttentionState::DecodeOnly | AttentionState::SpecDecoding);
        assert_eq!(choice.served, Ok(if own { "renamed" } else { "fused" }));
    }
}

/// An appended list may bind steps to backends without the one that a layer prefers, or the reverse.
#[test]
fn a_preference_that_an_appended_list_would_hide_is_refused() {
    let stream = harness::stream();
    let decodes = [AttentionState::DecodeOnly];
    let both = || Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
    let prefers = || both().prefer([0], &decodes, "fused").unwrap();
    let bound = |backends| Backends::none().with(Backend::Fused).for_steps(&decodes, backends);
    let paged = || bound(Backends::none().with(Backend::PagedDecode));
    for (backends, served) in [
        (prefers().append(paged()), None),
        (paged().append(prefers()), None),
        // What is advised.
        (prefers().append(bound(both())), Some("fused")),
        (paged().append(both()), Some("paged_decode")),
    ] {
        let shape = CacheShape::new(1, 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let mut attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        let mut sequence = attention.sequence();
        for tokens in [2, 1] {
            attention.grow(&stream, &mut sequence, tokens).unwrap();
            let metadata = attention.metadata(&[BatchRequest::of(&sequence, tokens)], Default::default()).unwrap();
            let rows = stream.upload(&vec![bf16::ONE; tokens * DIM], [tokens, 1, DIM]).unwrap();
            let mut step = attention.begin(&stream, &metadata).unwrap();
            let outcome = step.forward(0, (&rows, &rows, &rows)).map(drop);
            match served {
                None if tokens == 1 => {
                    let why = outcome.unwrap_err();
                    assert!(why.breaks(&rules::BACKEND_NAME) && why.to_string().contains("for_steps"), "{why}");
                }
                _ => outcome.unwrap(),
            }
        }
        let graphs = attention.capture(&stream, Causality::Causal, &GraphLimits::new([1], 300));
        match served {
            Some(name) => assert_eq!(graphs.unwrap().backend(0), Some(name)),
            None => assert!(graphs.map(drop).unwrap_err().breaks(&rules::BACKEND_NAME)),
        }
    }
}

#[test]
fn graphs_that_verify_drafts_record_the_backend_of_their_flag() {
    let stream = harness::stream();
    let cases = [
        (None, None, "fused"),
        (None, Some("batched_queries"), "batched_queries"),
        (Some("batched_queries"), None, "batched_queries"),
        (Some("batched_queries"), Some("fused"), "fused"),
    ];
    for (prefill, verify, wanted) in cases {
        let flags = BackendFlags { all: Some("fused"), decode: Some("paged_decode"), prefill, verify };
        let shape = CacheShape::new(1, 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 8, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let backends = flags.backends(stream.device()).unwrap();
        let attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        let recorded = |each| {
            let limits = GraphLimits::new([2], 300).tokens_each(each);
            attention.capture(&stream, Causality::Causal, &limits).unwrap().backend(0)
        };
        assert_eq!([recorded(1), recorded(3)], [Some("paged_decode"), Some(wanted)]);
    }
    // What a layer prefers in steps that verify drafts, and in those of chunks where nothing is said of the former.
    for state in [AttentionState::SpecDecoding, AttentionState::ChunkedPrefill] {
        let shape = CacheShape::new(2, 1, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 8, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let backends = Backends::none().with(Backend::Fused).with(Renamed);
        let backends = backends.prefer([1], &[state], "renamed").unwrap();
        let mut attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
        for (each, wanted) in [(1, "fused"), (3, "renamed")] {
            let limits = GraphLimits::new([2], 300).tokens_each(each);
            let graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
            assert_eq!([0, 1].map(|layer| graphs.backend(layer)), [Some("fused"), Some(wanted)], "{state:?}");
        }
        // Where the limits say how drafts are made, the list is that of the kind which such steps are of.
        let is_verifying = state == AttentionState::SpecDecoding;
        for (drafting, each, is_renamed) in [
            (Drafting::Mtp, 1, is_verifying),
            (Drafting::Mtp, 3, is_verifying),
            (Drafting::Other, 1, false),
            (Drafting::Other, 3, !is_verifying),
        ] {
            let limits = GraphLimits::new([2], 300).tokens_each(each).drafting(drafting);
            let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
            let wanted = if is_renamed { "renamed" } else { "fused" };
            assert_eq!(graphs.backend(1), Some(wanted), "{state:?} with {drafting:?}, {each} tokens a request");
            // A step of the engine without graphs has the same backend.
            let policy = StatePolicy::new(true, Some(drafting));
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, 5).unwrap();
            attention.mark_computed(&sequence, 5).unwrap();
            attention.grow(&stream, &mut sequence, each).unwrap();
            let request = [BatchRequest::of(&sequence, each).drafts(each - 1)];
            let mut metadata = attention.metadata(&request, policy).unwrap();
            let rows = stream.upload(&vec![bf16::ONE; each * DIM], [each, 1, DIM]).unwrap();
            let mut step = attention.begin(&stream, &metadata).unwrap();
            step.forward(1, (&rows, &rows, &rows)).unwrap();
            assert_eq!(step.selected(1).map(|selected| selected.name), Some(wanted), "{:?}", metadata.state());
            drop(step);
            assert!(graphs.serves(&metadata));
            graphs.begin(&stream, &mut metadata).unwrap();
        }
    }
}

#[test]
fn whoever_has_no_prefix_is_in_the_same_batch() {
    let request = |shares, own, new| Request { shares, own, new, prompt: None };
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
    assert_eq!(run(&case, cascade(), &|_, _, _, _| true, &[]).unwrap().name, "cascade_prefill");
    let ran = run(&case, shared(), &|_, _, _, _| true, &[]).unwrap();
    assert_eq!(ran.name, "shared_prefix_decode");
    // Of the second and third request 256 keys are read once less, of the last two 128.
    for (saved, served) in [(384, "shared_prefix_decode"), (385, "fused")] {
        let backend = SharedPrefixDecode { min_saved_keys: saved, ..SharedPrefixDecode::ALWAYS };
        let backends = Backends::none().with(Backend::SharedPrefixDecode(backend)).with(Backend::Fused);
        assert_eq!(run(&case, backends, &|_, _, _, _| true, &[]).unwrap().name, served);
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
    let request = |new| Request { shares: Some((0, 256)), new, prompt: Some(400), ..Request::default() };
    Case { kv_heads: 1, group: 1, requests: vec![request(3), request(1)], pad: 0, causality, seed: 8 }
}

/// Where a window hides keys, no part is seen whole by all rows: the ordinary backend serves the step, and the
/// refusals say why.
#[test]
fn windows_that_hide_what_is_cached_are_refused_by_name() {
    let window = Causality::from_flags(true, Some(40)).unwrap();
    let case = two_that_share(window);
    let backends = Backends::none()
        .with(Backend::CascadePrefill)
        .with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS))
        .with(Backend::Fused);
    let ran = run(&case, backends, &|_, _, row, key| row - key < 40, &[]).unwrap();
    assert_eq!(ran.name, "fused");
    let expected =
        [("cascade_prefill", &rules::BACKEND_CASCADE), ("shared_prefix_decode", &rules::BACKEND_SHARED_PREFIX)];
    assert_eq!(rules(&ran), expected);
}

#[test]
fn windows_that_hide_nothing_are_causal() {
    let window = |keys| Causality::from_flags(true, Some(keys)).unwrap();
    let tiles = SplitDecode::Tiles(NonZeroUsize::new(128).unwrap());
    for (keys, hides) in [(259, false), (258, true)] {
        let ran = run(&two_that_share(window(keys)), cascade(), &move |_, _, row, key| row - key < keys, &[]);
        assert_eq!(ran.unwrap().name == "fused", hides, "{keys}");
        let mut decodes = two_that_share(window(keys - 2));
        decodes.requests[0].new = 1;
        let sees = move |_: usize, _: usize, row: usize, key: usize| row - key < keys - 2;
        let ran = run(&decodes, split(tiles), &sees, &[]).unwrap();
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
        run(case, shared(), &sees, &[]).unwrap().name
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
        case.requests.push(Request { own, new: 1, ..Request::default() });
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
        (&prefills, cascade as fn() -> _, "cascade_prefill", &rules::BACKEND_CASCADE),
        (&decodes, shared, "shared_prefix_decode", &rules::BACKEND_SHARED_PREFIX),
        (
            &decodes,
            || split(SplitDecode::Tiles(NonZeroUsize::new(128).unwrap())),
            "split_decode",
            &rules::BACKEND_SPLIT,
        ),
    ] {
        let ran = run_on(&stream, Some(&sinks), case, backends(), &all, &[]).unwrap();
        assert_eq!(ran.name, name);
        let elsewhere = harness::stream();
        let ran = run_on(&elsewhere, Some(&sinks), case, backends(), &all, &[]).unwrap();
        assert_eq!((ran.name, rules(&ran)), ("fused", vec![(name, rule)]));
    }
}
