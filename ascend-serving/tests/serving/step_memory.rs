//! What a planned step says of the device's memory is what it takes.

use std::num::NonZeroUsize;

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, ChannelScales, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, Error, LayerMask, NamedMask, RefusedBackend, SharedPrefixDecode, SplitDecode, StatePolicy, rules,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::acts::config;
use crate::harness;
use crate::tokens::DIM;
use ascend_testing::step_memory::{self, BLOCK_SIZE, HEADS, KV_HEADS};

#[derive(Clone, Copy, Debug, PartialEq)]
enum StepBackend {
    Fused,
    InTwo,
    Decode,
    NamedMask,
    Chunks,
    Cascade,
    Shared,
    Split,
    Int8,
    Int8ByToken,
}

impl StepBackend {
    const ALL: [Self; 10] = [
        Self::Fused,
        Self::InTwo,
        Self::Decode,
        Self::NamedMask,
        Self::Chunks,
        Self::Cascade,
        Self::Shared,
        Self::Split,
        Self::Int8,
        Self::Int8ByToken,
    ];

    fn backends(self) -> Backends<bf16> {
        let none = Backends::none();
        match self {
            Self::Fused => none,
            Self::InTwo => none.with(Backend::FusedInTwo),
            Self::Decode => none.with(Backend::PagedDecode),
            Self::NamedMask => none.with(Backend::NamedMask),
            Self::Chunks => none.with(Backend::ChunkedLocal),
            Self::Cascade => none.with(Backend::CascadePrefill),
            Self::Shared => none.with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS)),
            Self::Split => none.with(Backend::SplitDecode(SplitDecode::Tiles(NonZeroUsize::new(256).unwrap()))),
            Self::Int8 | Self::Int8ByToken => none.with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill),
        }
        .with(Backend::Fused)
    }

    fn cache(self, stream: &Stream) -> PagedKvCache<bf16> {
        let shape = CacheShape::new(2, KV_HEADS, DIM);
        let (device, pad) = (stream.device(), PadPolicy::SkipNegative);
        let scales = [0, 1].map(|_| ChannelScales::uniform(&shape, 1.0, 1.0).unwrap());
        match self {
            Self::Int8 => PagedKvCache::quantised(stream, 64, BLOCK_SIZE, shape, pad, QuantisedType::Int8, &scales),
            Self::Int8ByToken => {
                PagedKvCache::quantised_by_token(device, 64, BLOCK_SIZE, shape, pad, QuantisedType::Int8)
            }
            _ => PagedKvCache::new(device, 64, BLOCK_SIZE, shape, pad),
        }
        .unwrap()
    }

    fn mask(self) -> LayerMask {
        match self {
            Self::NamedMask => {
                NamedMask::new("even keys", |_, token, key| key == token || key < token && key % 2 == 0).into()
            }
            Self::Chunks => Causality::Chunk(NonZeroUsize::new(256).unwrap()).into(),
            _ => Causality::Causal.into(),
        }
    }
}

fn check(backend: StepBackend, requests: &[(usize, usize)]) -> Result<(), TestCaseError> {
    let (name, cache) = (format!("{backend:?}"), |stream: &Stream| backend.cache(stream));
    step_memory::check(&name, backend.backends(), cache, backend.mask(), requests)
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn a_step_takes_the_memory_that_its_plan_says(at in 0..StepBackend::ALL.len(), single: bool, requests in prop::collection::vec((0usize..600, 1usize..200), 1..5)) {
        let decodes = requests.iter().map(|(cached, _)| (cached + 1, 1));
        let requests = if single { decodes.collect() } else { requests };
        check(StepBackend::ALL[at], &requests)?;
    }
}

/// Parts of 2048 rows and more are what a layer takes most of.
#[test]
fn parts_that_are_merged_are_counted() {
    check(StepBackend::Cascade, &[(512, 1500), (300, 700)]).unwrap();
    check(StepBackend::Shared, &[(1024, 600), (1024, 600)]).unwrap();
    check(StepBackend::NamedMask, &[(300, 900)]).unwrap();
}

#[test]
fn backends_that_need_too_much_are_refused_with_the_bytes() {
    let stream = harness::stream();
    let asked = |backends: Backends<bf16>| {
        let shape = CacheShape::new(1, KV_HEADS, DIM);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(stream.device(), 16, BLOCK_SIZE, shape, pad).unwrap();
        let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
        let mut attention = Attention::new(shape, cache, backends);
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, 400).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let batch = [BatchRequest::of(&sequence, 100)];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let choice = attention.backend_choice(&stream, &metadata, 0, None, None);
        choice.unwrap()
    };
    let free = asked(StepBackend::Cascade.backends());
    assert_eq!(free.served, Ok("cascade_prefill"));
    let needed = free.memory.total(1);
    // Two parts with their log-sum-exps, and those of what they become.
    assert_eq!(free.memory.layer, 100 * HEADS * (2 * (DIM * 2 + 4) + 4));
    let fused = asked(Backends::none().with(Backend::Fused)).memory;
    assert!(fused.layer == 0 && fused.total(9) < needed);
    for (bytes, layers, served) in [
        (needed, 1, "cascade_prefill"),
        (needed - 1, 1, "fused"),
        (needed, 2, "fused"),
        (free.memory.total(2), 2, "cascade_prefill"),
    ] {
        let choice = asked(StepBackend::Cascade.backends().memory_limit(bytes, layers));
        assert_eq!(choice.served, Ok(served), "{bytes} bytes, {layers} layers");
        if let [refused] = &choice.refused[..] {
            assert!(refused.why.breaks(&rules::BACKEND_MEMORY));
            let said = refused.to_string();
            let total = free.memory.total(layers);
            assert!(said.contains(&format!("{total} bytes besides the cache")), "{said}");
        }
    }
    // A backend that a layer prefers is one that is tried first.
    for (bytes, served) in [(needed, "cascade_prefill"), (needed - 1, "fused")] {
        let backends = Backends::none().with(Backend::Fused).with(Backend::CascadePrefill).memory_limit(bytes, 1);
        let choice = asked(backends.prefer([0], &AttentionState::ALL, "cascade_prefill").unwrap());
        assert_eq!(choice.served, Ok(served), "{bytes} bytes");
        let over = |refused: &RefusedBackend| refused.why.breaks(&rules::BACKEND_MEMORY);
        assert!(choice.refused.iter().all(over));
    }
    let none = asked(StepBackend::Cascade.backends().memory_limit(0, 1));
    match none.served {
        Err(Error::NoBackend { rules, .. }) => assert_eq!(rules, [&rules::BACKEND_MEMORY; 2]),
        other => panic!("{other:?}"),
    }
}

/// Layers that prefer different backends hold the plans of all of them: where these are too much together, later ones
/// take what fits beside the first.
#[test]
fn the_plans_of_a_step_are_within_the_limit_together() {
    let stream = harness::stream();
    let split = || Backend::SplitDecode(SplitDecode::Tiles(NonZeroUsize::new(2 * BLOCK_SIZE).unwrap()));
    let served = |limit: Option<usize>| {
        let backends = Backends::none()
            .with(Backend::Fused)
            .with(split())
            .with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS));
        let backends = match limit {
            Some(bytes) => backends.memory_limit(bytes, 1),
            None => backends,
        };
        let backends = backends.prefer([0], &AttentionState::ALL, "split_decode").unwrap();
        let backends = backends.prefer([1], &[AttentionState::DecodeOnly], "shared_prefix_decode").unwrap();
        let shape = CacheShape::new(2, KV_HEADS, DIM);
        let cache = PagedKvCache::new(stream.device(), 32, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let mut attention = Attention::<bf16>::new(AttentionShape::new(HEADS, KV_HEADS, DIM), cache, backends);
        let mut first = attention.sequence();
        attention.grow(&stream, &mut first, 3 * BLOCK_SIZE).unwrap();
        attention.cache().mark_computed(&first, first.len()).unwrap();
        let mut sequences = [first.fork(), first.fork()];
        for sequence in &mut sequences {
            attention.grow(&stream, sequence, 1).unwrap();
        }
        let batch = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
        let metadata = attention.metadata(&batch, StatePolicy::default()).unwrap();
        let rows = |heads: usize| {
            let zeros = vec![bf16::ZERO; 2 * heads * DIM];
            stream.upload(&zeros, [2, heads, DIM]).unwrap()
        };
        let mut step = attention.begin(&stream, &metadata).unwrap();
        for layer in 0..2 {
            step.forward(layer, (&rows(HEADS), &rows(KV_HEADS), &rows(KV_HEADS))).unwrap();
        }
        let plans = [0, 1].map(|layer| step.selected(layer).unwrap());
        (plans.map(|plan| plan.name), plans.map(|plan| plan.plan.memory()))
    };
    let (names, [of_first, of_second]) = served(None);
    assert_eq!(names, ["split_decode", "shared_prefix_decode"]);
    let both = of_first.beside(of_second).total(1);
    assert!(both > of_first.total(1).max(of_second.total(1)));
    assert_eq!(served(Some(both)).0, names);
    assert_eq!(served(Some(both - 1)).0, ["split_decode", "fused"]);
}

/// What plans hold, a step holds for each scale of its layers: a backend serves all of them within the limit, or none.
#[test]
fn the_plans_of_all_scales_are_within_the_limit_together() {
    let stream = harness::stream();
    let served = |limit: usize, scales: [f64; 3]| {
        let backends = StepBackend::Split.backends().memory_limit(limit, 1);
        let shape = CacheShape::new(3, KV_HEADS, DIM);
        let cache = PagedKvCache::new(stream.device(), 32, BLOCK_SIZE, shape, PadPolicy::SkipNegative).unwrap();
        let attention = Attention::<bf16>::new(AttentionShape::new(HEADS, KV_HEADS, DIM), cache, backends);
        let mut attention = attention.layer_scales(|layer| scales[layer]).unwrap();
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 3 * BLOCK_SIZE).unwrap();
        attention.cache().mark_computed(&sequence, sequence.len()).unwrap();
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let batch = [BatchRequest::of(&sequence, 1)];
        let metadata = attention.metadata(&batch, StatePolicy::default()).unwrap();
        let choice = attention.backend_choice(&stream, &metadata, 0, None, None).unwrap();
        let rows = |heads: usize| Tensor::empty(stream.device(), [1, heads, DIM]).unwrap();
        let [query, key, value] = [HEADS, KV_HEADS, KV_HEADS].map(rows);
        for tensor in [&query, &key, &value] {
            tensor.clear(&stream).unwrap();
        }
        let mut step = attention.begin(&stream, &metadata).unwrap();
        for layer in 0..3 {
            step.forward(layer, (&query, &key, &value)).unwrap();
        }
        let plans = [0, 1, 2].map(|layer| step.selected(layer).unwrap());
        assert_eq!(choice.served, Ok(plans[0].name));
        (plans.map(|plan| plan.name), plans[0].plan.memory())
    };
    let (names, memory) = served(usize::MAX, [0.1; 3]);
    assert!(names == ["split_decode"; 3] && memory.held > 0, "{names:?}, {memory:?}");
    for (scales, count) in [([0.1; 3], 1), ([0.1, 0.2, 0.1], 2), ([0.1, 0.2, 0.3], 3)] {
        let needed = memory.total(1) + (count - 1) * memory.held;
        assert_eq!(served(needed, scales).0, ["split_decode"; 3], "{scales:?}");
        assert_eq!(served(needed - 1, scales).0, ["fused"; 3], "{scales:?}");
    }
}
