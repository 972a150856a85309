//! Whatever numbers a public function gets, it answers: no panic, no allocation of absurd size, no call that never
//! ends.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroU64;

use ascend_attention::spec::geometry::TriangleMix;
use ascend_attention::{Error, Result, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
};
use ascend_testing::draw::Draw;
use ascend_testing::limits::{Call, Limited, device, stream, try_all};
use ascend_trianglemix::{
    BlockSparseUse, TriangleForecast, TriangleLayers, TriangleMasks, TriangleMixBackend, TrianglePrefill,
    TriangleProbe, TriangleThresholds,
};

#[global_allocator]
static ALLOCATOR: Limited = Limited;

fn ask_device<T>(made: Result<T>) {
    // Refused or made: either is an answer.
    drop(made);
}

fn thresholds(draw: &mut Draw) -> TriangleThresholds {
    TriangleThresholds {
        min_sparse_rows: draw.usize(),
        min_saved_pairs: u128::from(draw.u64()),
        block_sparse: match draw.usize() % 3 {
            0 => BlockSparseUse::Never,
            1 => BlockSparseUse::WhereCheaper,
            _ => BlockSparseUse::Always,
        },
    }
}

const CALLS: &[Call] = &[
    ("Masks of TriangleMix", |draw| {
        let device = device();
        let (sizes, part, rows) = draw.triangle();
        ask_device(device.masks().triangle_mix(sizes, part, rows));
        let layers = TriangleLayers::first(2).unwrap();
        let rows = (draw.u64(), draw.u64());
        let prompt = Some(draw.u64());
        ask_device(device.masks().triangle_layer(sizes, &layers, draw.usize(), rows, prompt));
    }),
    ("TriangleLayers", |draw| {
        ask_device(TriangleLayers::first(draw.usize()));
        ask_device(TriangleLayers::from_start(draw.usize(), draw.usize()));
        let layers = draw.few(Draw::usize);
        if let Ok(layers) = TriangleLayers::explicit(layers) {
            let _ = (layers.to_string(), layers.contains(draw.usize()));
        }
        let measured = draw.few(Draw::f64);
        let _ = TriangleLayers::least(&measured, draw.usize());
    }),
    ("TriangleProbe", |draw| {
        let (sizes, ..) = draw.triangle();
        if let Ok(mut probe) = TriangleProbe::new(draw.usize(), sizes) {
            let gradient = draw.few(|draw| draw.f64() as f32);
            let _ = probe.record(draw.usize(), draw.usize(), &gradient);
            let _ = (probe.layers(draw.usize()), probe.contributions());
        }
    }),
    ("TrianglePrefill", |draw| {
        let stream = stream();
        let prefill = TrianglePrefill {
            shape: AttentionShape::new(1, 1, 64),
            sizes: draw.triangle().0,
            thresholds: thresholds(draw),
        };
        let any = draw.usize();
        let first_row = draw.of(&[0, 1, 2, any]);
        let of = |rows: usize| stream.upload(&vec![bf16::ONE; rows * 64], [rows, 1, 64]).unwrap();
        let (query, key) = (of(3), of(3 + first_row % 3));
        let prompt = draw.bool().then(|| draw.usize());
        let _ = prefill.plan(&stream, (first_row, prompt), (&query, &key, &key));
    }),
    ("TriangleForecast", |draw| {
        let (kv_heads, dim) = (draw.usize(), draw.usize());
        let prefill = TrianglePrefill {
            shape: AttentionShape::new(draw.of(&[1, 2, kv_heads]), kv_heads, dim),
            sizes: draw.triangle().0,
            thresholds: thresholds(draw),
        };
        let block = NonZeroU64::new(draw.u64()).unwrap_or(NonZeroU64::MIN);
        let sparse = TriangleLayers::first(2).unwrap();
        let any = draw.usize();
        let tokens = draw.of(&[any, 100, 1000]);
        if let Ok(forecast) = TriangleForecast::new(&prefill, tokens, (draw.usize(), sparse), block) {
            let _ = (forecast.share(), forecast.block_share());
            let _ = (forecast.model_pairs(), forecast.dense_flops());
            let _ = forecast.model(draw.f64(), draw.f64());
        }
    }),
    ("a step of an engine", |draw| {
        let stream = stream();
        let shape = CacheShape::new(1, 1, 64);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, pad).unwrap();
        let settings = BatchSettings::of(&cache, Causality::Causal);
        let triangle = TriangleMixBackend {
            layers: TriangleLayers::first(2).unwrap(),
            sizes: draw.triangle().0,
            thresholds: thresholds(draw),
        };
        let backends = Backends::none().with(triangle.clone()).with(Backend::Fused);
        let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
        let numbers = draw.few(|draw| [draw.usize(), draw.usize(), draw.usize()]);
        let requests = numbers
            .iter()
            .map(|[cached, new, prompt]| BatchRequest::in_row(&[0, 1, 2, 3], *cached, *new).prompt_len(*prompt));
        let requests: Vec<_> = requests.collect();
        let Ok(metadata) = AttentionMetadata::new(&requests, settings) else {
            return;
        };
        let _ = triangle.choices(&metadata);
        if let Ok(choice) = attention.backend_choice(&stream, &metadata, 0, None, None) {
            let _ = choice.memory.total(draw.usize());
        }
        let Ok(mut step) = attention.begin(&stream, &metadata) else {
            return;
        };
        let tokens = metadata.tokens();
        let ones = vec![bf16::ONE; tokens * 64];
        let rows = stream.upload(&ones, [tokens, 1, 64]).unwrap();
        let _ = step.forward(0, (&rows, &rows, &rows));
        drop(step);
        stream.synchronize().unwrap();
    }),
];

#[test]
fn everything_answers_any_numbers() {
    try_all(CALLS);
}

#[test]
fn layers_beyond_any_model_are_refused() {
    assert!(TriangleLayers::first(usize::MAX).is_err());
    assert!(TriangleLayers::from_start(0, usize::MAX).is_err());
    assert!(TriangleLayers::from_start(usize::MAX, usize::MAX).is_err());
    assert!(TriangleLayers::explicit(0..usize::MAX).is_err());
    assert!(TriangleLayers::explicit([usize::MAX]).is_err());
    let endless = TriangleLayers::explicit(std::iter::repeat(3)).unwrap_err();
    assert!(matches!(&endless, Error::Violation(violation) if violation.rule.id == "argument.value"), "{endless}");
    assert!(TriangleProbe::new(usize::MAX, TriangleMix::PROBE).is_err());
    let most = TriangleLayers::MAX_LAYERS;
    assert_eq!(TriangleLayers::first(most).unwrap().indices().len(), most);
}
