//! Cards of the Atlas inference series (310P), which have neither FusedInferAttentionScore nor ScatterPaKvCache:
//! whatever the schedule, PromptFlashAttention, IncreFlashAttention and copies give what one dense pass gives.

use crate::harness;
use crate::harness::filled;

use std::num::NonZeroUsize;

use crate::acts::{Scheduled, act, config};
use crate::schedule::{Engine, Model, model};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{AnyTensor, Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{Cache, CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits, LayerInputs, NamedMask, rules,
};
use proptest::prelude::*;

const BLOCKS: usize = 8;

/// A card, unless the tests run on an NPU.
fn card() -> Option<Stream> {
    if harness::not_on_npu("the inference card is emulated") {
        return None;
    }
    // The harness looks at what is left behind.
    drop(harness::runtime());
    let machine = Machine::new(Soc::AtlasInference, Cann::V9_1);
    let card = Runtime::emulated_as(&machine).unwrap();
    Some(card.device(0).unwrap().stream().unwrap())
}

fn models() -> impl Strategy<Value = Model> {
    let block_size = prop_oneof![Just(16usize), Just(48), Just(128), Just(512)];
    (model(), block_size).prop_map(|(model, block_size)| Model {
        // Of several heads only a cache that decodes alone may be BnNBsD, and copies write no NZ.
        format: match (model.format, model.kv_heads) {
            (Cache::BnNBsD, 1) => Cache::BnNBsD,
            _ => Cache::BnBsH,
        },
        blocks: model.blocks * 128 / block_size.min(128),
        block_size,
        hybrid: false,
        merging: false,
        ..model
    })
}

fn older<T: ascend_attention::Element>() -> Backends<T> {
    Backends::none().with(Backend::Fused).with(Backend::PromptAndIncre)
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn any_schedule_on_an_inference_card_is_one_dense_pass(model in models(), steps in prop::collection::vec((prop::collection::vec(act(300, 6), 1..6), 0usize..20), 1..8)) {
        let Some(stream) = card() else { return Ok(()) };
        let mut engine = Engine::<f16>::new(&stream, model, older());
        for (acts, pad) in &steps {
            engine.act(acts, *pad)?;
        }
        prop_assert!(engine.served.iter().all(|name| *name == "prompt_and_incre"));
        engine.end();
    }

    /// Where there is a choice, the older operators compute the same.
    #[test]
    fn any_schedule_by_the_older_operators_is_one_dense_pass(model in models(), steps in prop::collection::vec((prop::collection::vec(act(150, 6), 1..6), 0usize..20), 1..6)) {
        let stream = harness::stream();
        let mut engine = Engine::<bf16>::new(&stream, model, Backends::none().with(Backend::PromptAndIncre));
        engine.run(&steps)?;
    }
}

/// One step of a request with cached tokens, with ones everywhere.
fn step<T: ascend_attention::Element>(
    stream: &Stream,
    one: T,
    (format, causality): (Cache, Causality),
    tokens: usize,
    backends: Backends<T>,
    sink: Option<&AnyTensor>,
) -> Result<Vec<(&'static str, Error)>, Error> {
    let shape = CacheShape::new(1, 1, 64).format(format);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), BLOCKS, 128, shape, pad)?;
    let mut attention = Attention::new(AttentionShape::new(2, 1, 64), cache, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(stream, &mut sequence, 300 + tokens)?;
    attention.cache().mark_computed(&sequence, 300)?;
    let settings = BatchSettings::of(attention.cache(), causality);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, tokens)], settings)?;
    let ones = |heads: usize| -> Result<Tensor<T>, Error> {
        Ok(stream.upload(&vec![one; tokens * heads * 64], [tokens, heads, 64])?)
    };
    let mut step = attention.begin(stream, &metadata)?;
    let (query, key) = (ones(2)?, ones(1)?);
    let mut inputs = LayerInputs::from((&query, &key, &key));
    inputs.learnable_sink = sink;
    step.forward(0, inputs)?;
    let refused = step.selected(0).unwrap().refused.iter();
    let refused = refused.map(|refused| (refused.name, refused.why.clone()));
    let refused = refused.collect();
    drop(step);
    stream.synchronize()?;
    Ok(refused)
}

#[test]
fn the_selection_says_why_not_the_newer_operator() {
    let Some(stream) = card() else { return };
    let causal = (Cache::BnBsH, Causality::Causal);
    for tokens in [1, 7] {
        let backends = Backends::none().with(Backend::Fused).with(Backend::PagedDecode).with(Backend::PromptAndIncre);
        let refused = step(&stream, f16::ONE, causal, tokens, backends, None).unwrap();
        let [(fused, why), (decode, _)] = &refused[..] else {
            panic!("{refused:?}");
        };
        assert_eq!((*fused, *decode), ("fused", "paged_decode"));
        assert!(why.to_string().contains("call.product"), "{why}");
    }
}

#[test]
fn what_an_inference_card_has_not_is_refused_by_name() {
    let Some(stream) = card() else { return };
    let causal = (Cache::BnBsH, Causality::Causal);
    let told = |outcome: Result<_, Error>| outcome.unwrap_err().to_string();
    // Without the backend the error says which one there is.
    let alone = Backends::none().with(Backend::Fused).with(Backend::PagedDecode);
    let why = told(step(&stream, f16::ONE, causal, 1, alone, None));
    assert!(why.contains("`.with(Backend::PromptAndIncre)`, named `prompt_and_incre`, adds"), "{why}");
    let sink: AnyTensor = stream.upload(&[f16::ONE; 2], [2]).unwrap().into();
    let sinks = step(&stream, f16::ONE, causal, 3, older(), Some(&sink)).unwrap_err();
    assert!(sinks.breaks(&rules::BACKEND_PROMPT_AND_INCRE), "{sinks}");
    for (tokens, rule) in [(3, "prompt.dtype"), (1, "incre.registered")] {
        let why = told(step(&stream, bf16::ONE, causal, tokens, older(), None));
        assert!(why.contains(rule), "{why}");
    }
    let why = told(step(&stream, 1i8, causal, 3, older(), None));
    assert!(why.contains("prompt_and_incre: prompt."), "{why}");
    let nz = (Cache::Nz, Causality::Causal);
    let why = told(step(&stream, f16::ONE, nz, 3, older(), None));
    assert!(why.contains("whose tokens are contiguous"), "{why}");
    let cache = |format| {
        let shape = CacheShape::new(1, 1, 64).format(format);
        let pad = PadPolicy::SkipNegative;
        PagedKvCache::<f16>::new(stream.device(), BLOCKS, 128, shape, pad).unwrap()
    };
    let rows = |dim| stream.upload(&vec![f16::ONE; dim], [1, 1, dim]).unwrap();
    let (row, wide) = (rows(64), rows(128));
    let write = |cache: &PagedKvCache<f16>, row| CacheWrite::plan(cache, &stream, &[5], row, row);
    write(&cache(Cache::BnBsH), &row).unwrap();
    let why = told(write(&cache(Cache::BnBsH), &wide).map(|_| Vec::new()));
    assert!(why.contains("[tokens, 1, 64]"), "{why}");
    let why = told(write(&cache(Cache::Nz), &row).map(|_| Vec::new()));
    assert!(why.contains("ScatterPaKvCache"), "{why}");
    // Nor are steps captured: that operator is a part of their graphs.
    let shape = AttentionShape::new(2, 1, 64);
    let attention = Attention::new(shape, cache(Cache::BnBsH), older());
    let limits = GraphLimits::new([1], 128);
    let why = attention.capture(&stream, Causality::Causal, &limits);
    let why = why.unwrap_err().to_string();
    assert!(why.contains("scatter.product"), "{why}");
}

/// A windowed layer copies the window, and a window of any length decodes.
#[test]
fn windows_are_served() {
    let Some(stream) = card() else { return };
    for keys in [1, 2, 299, 301, 9999] {
        let window = Causality::Window(NonZeroUsize::new(keys).unwrap());
        for tokens in [1, 5] {
            let of = (Cache::BnBsH, window);
            step(&stream, f16::ONE, of, tokens, older(), None).unwrap();
        }
    }
}

#[test]
fn a_write_that_is_refused_leaves_the_cache_as_it_was() {
    let Some(stream) = card() else { return };
    let cache = |blocks| {
        let shape = CacheShape::new(1, 2, 64);
        PagedKvCache::<f16>::new(stream.device(), blocks, 16, shape, PadPolicy::SkipNegative)
    };
    let rows = |shape: [usize; 3]| filled(&stream, f16::ONE, shape);
    let good = rows([2, 2, 64]);
    let strided = rows([2, 2, 128]).narrow(2, 0..64).unwrap();
    let mut large = cache(8).unwrap();
    let refused = CacheWrite::plan(&large, &stream, &[5, 100], &good, &strided);
    assert!(matches!(refused, Err(Error::Violation(_))), "{refused:?}");
    let write = CacheWrite::plan(&large, &stream, &[5, 100], &good, &good).unwrap();
    for value in [&strided, &rows([2, 1, 32]), &rows([3, 2, 64]), &rows([1, 2, 64])] {
        let refused = large.write(&stream, &write, 0, &good, value);
        assert!(refused.is_err(), "{:?}", value.desc());
    }
    let key = large.layer(0).unwrap().key.download(&stream).unwrap();
    assert!(key.iter().all(|x| *x == f16::ZERO));
    // A cache without the second slot.
    let mut small = cache(2).unwrap();
    assert!(small.write(&stream, &write, 0, &good, &good).is_err());
    let key = small.layer(0).unwrap().key.download(&stream).unwrap();
    assert!(key.iter().all(|x| *x == f16::ZERO));
    large.write(&stream, &write, 0, &good, &good).unwrap();
    let key = large.layer(0).unwrap().key.download(&stream).unwrap();
    assert_eq!(key.iter().filter(|x| **x == f16::ONE).count(), 2 * 2 * 64);
}

/// One step of requests with these numbers of cached and new tokens, whose queries, keys and values are ones.
fn batch(stream: &Stream, blocks: usize, causality: Causality, requests: &[(usize, usize)]) -> Result<Vec<f16>, Error> {
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), blocks, 128, CacheShape::new(1, 1, 16), pad)?;
    let mut attention = Attention::new(AttentionShape::new(1, 1, 16), cache, older());
    let tokens = requests.iter().map(|(_, new)| new).sum::<usize>();
    let ones = stream.upload(&vec![f16::ONE; tokens * 16], [tokens, 1, 16])?;
    let mut sequences = Vec::new();
    for &(cached, new) in requests {
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(stream, &mut sequence, cached + new)?;
        attention.cache().mark_computed(&sequence, cached)?;
        sequences.push(sequence);
    }
    let batch: Vec<_> =
        (sequences.iter().zip(requests)).map(|(sequence, (_, new))| BatchRequest::of(sequence, *new)).collect();
    let settings = BatchSettings::of(attention.cache(), causality);
    let metadata = AttentionMetadata::new(&batch, settings)?;
    let mut step = attention.begin(stream, &metadata)?;
    let output = step.forward(0, (&ones, &ones, &ones))?.clone();
    drop(step);
    Ok(output.download(stream)?)
}

/// A call takes 128 prompts, or 256 single rows.
#[test]
fn large_batches_are_cut() {
    let Some(stream) = card() else { return };
    for (requests, new) in [(300, 1), (300, 3), (129, 16)] {
        let got = batch(&stream, requests + 1, Causality::Causal, &vec![(0, new); requests]).unwrap();
        assert_eq!(got, vec![f16::ONE; requests * new * 16]);
    }
}

#[test]
fn contexts_beyond_what_a_call_takes_are_refused_by_name() {
    let Some(stream) = card() else { return };
    for (new, rule) in [(1, "incre.card_size"), (2, "prompt.card_size")] {
        let longest = (65_536 - new, new);
        // A causal chunk would cost what a prompt of all its keys does.
        let batch = |of| batch(&stream, 520, Causality::Bidirectional, &[of]);
        batch(longest).unwrap();
        let why = batch((65_536, new)).unwrap_err();
        assert!(why.to_string().contains(rule), "{why}");
    }
}

#[test]
fn named_masks_are_refused_by_name() {
    let Some(stream) = card() else { return };
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<f16>::new(stream.device(), 4, 128, CacheShape::new(1, 1, 16), pad).unwrap();
    let backends = Backends::none().with(Backend::NamedMask).with(Backend::PromptAndIncre);
    let mut attention = Attention::new(AttentionShape::new(1, 1, 16), cache, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
    metadata.set_mask(NamedMask::new("causal", |_, token, key| key <= token));
    let ones = stream.upload(&[f16::ONE; 48], [3, 1, 16]).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let why = step.forward(0, (&ones, &ones, &ones)).unwrap_err();
    assert!(why.breaks(&rules::BACKEND_MASK) && why.to_string().contains("call.product"), "{why}");
}
