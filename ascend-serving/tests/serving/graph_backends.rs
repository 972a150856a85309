//! Graphs record the calls of whatever backend serves a step: their results are those of the step without a graph.

use std::num::NonZeroUsize;

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, bf16, f16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, GraphLimits, LayerMask, NamedMask, SharedPrefixDecode, SplitDecode, rules,
};

use crate::harness;
use crate::harness::reference::Half;
use crate::tokens::{DIM, packed};

pub(crate) const LAYERS: usize = 2;
pub(crate) const HEADS: usize = 4;
pub(crate) const KV_HEADS: usize = 2;

pub(crate) fn attention<T: Half>(stream: &Stream, backends: Backends<T>) -> Attention<T> {
    let shape = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 16, 128, shape, pad).unwrap();
    Attention::new(AttentionShape::new(HEADS, KV_HEADS, DIM), cache, backends)
}

fn numbers<T: Half>(rows: &[T]) -> Vec<f64> {
    rows.iter().map(|number| number.to_f64()).collect()
}

/// Replays steps of requests that add `each` tokens, and compares them with the steps without a graph, bit by bit.
/// Returns the backend whose calls were captured.
fn replayed<T: Half>(stream: &Stream, backends: Backends<T>, mask: impl Into<LayerMask>, each: usize) -> &'static str {
    let mut attention = attention(stream, backends);
    let mask = mask.into();
    let limits = GraphLimits::new([1, 4], 300).tokens_each(each);
    let mut graphs = attention.capture(stream, mask.clone(), &limits).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut sequences = [3, 126, 60].map(|tokens| {
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(stream, &mut sequence, tokens).unwrap();
        attention.cache().mark_computed(&sequence, tokens).unwrap();
        sequence
    });
    for step in 0..4 {
        let running = &mut sequences[..3 - step % 3];
        for sequence in &mut *running {
            attention.grow(stream, sequence, each).unwrap();
        }
        let batch = running.iter();
        let batch: Vec<_> = batch.map(|s| BatchRequest::of(s, each).recompute()).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        metadata.set_mask(mask.clone());
        assert!(graphs.serves(&metadata));
        let rows = |layer: usize, what, heads, rows: usize| {
            let names: Vec<u64> = (0..rows as u64).map(|row| 100 * step as u64 + row).collect();
            packed::<T>(stream, &names, layer, what, heads)
        };
        let mut step = graphs.begin(stream, &mut metadata).unwrap();
        let padded = step.tokens();
        let mut results = Vec::new();
        for layer in 0..LAYERS {
            let query = rows(layer, 0, HEADS, padded);
            let (key, value) = (rows(layer, 1, KV_HEADS, padded), rows(layer, 2, KV_HEADS, padded));
            let output = step.forward(layer, (&query, &key, &value)).unwrap();
            results.push(numbers(&output.download(stream).unwrap()));
        }
        step.end().unwrap();
        let mut step = attention.begin(stream, &metadata).unwrap();
        for (layer, replayed) in results.iter().enumerate() {
            let query = rows(layer, 0, HEADS, padded);
            let (key, value) = (rows(layer, 1, KV_HEADS, padded), rows(layer, 2, KV_HEADS, padded));
            let output = step.forward(layer, (&query, &key, &value)).unwrap();
            let actual = metadata.actual_tokens() * HEADS * DIM;
            let eager = numbers(&output.download(stream).unwrap());
            assert_eq!(eager[..actual], replayed[..actual]);
        }
        let served = step.selected(0).unwrap().name;
        assert_eq!(Some(served), graphs.backend(0));
    }
    graphs.backend(LAYERS - 1).unwrap()
}

#[test]
fn graphs_have_the_calls_of_the_backend_that_serves_the_step() {
    let stream = harness::stream();
    let none = Backends::<bf16>::none;
    let window = Causality::Window(NonZeroUsize::new(70).unwrap());
    let chunk = Causality::Chunk(NonZeroUsize::new(128).unwrap());
    let near = NamedMask::new("near", |_, token, key| key <= token && token - key < 9);
    let both =
        || none().with(Backend::ChunkedLocal).with(Backend::NamedMask).with(Backend::PagedDecode).with(Backend::Fused);
    assert_eq!(replayed(&stream, both(), Causality::Causal, 1), "paged_decode");
    assert_eq!(replayed(&stream, both(), Causality::Causal, 3), "fused");
    assert_eq!(replayed(&stream, both(), window, 1), "fused");
    assert_eq!(replayed(&stream, both(), chunk, 1), "chunked_local");
    assert_eq!(replayed(&stream, both(), near.clone(), 1), "named_mask");
    assert_eq!(replayed(&stream, both(), near, 3), "named_mask");
    let last = |name| {
        let backends = both().prefer([0], &AttentionState::ALL, "fused").unwrap();
        backends.prefer([LAYERS - 1], &AttentionState::ALL, name).unwrap()
    };
    for name in ["paged_decode", "fused"] {
        assert_eq!(replayed(&stream, last(name), Causality::Causal, 1), name);
    }
    // The decode path takes one token a request: the next backend is recorded.
    assert_eq!(replayed(&stream, last("paged_decode"), Causality::Causal, 3), "fused");
}

/// Backends whose calls depend on the lengths of a step are passed over, and named where no other is left.
#[test]
fn calls_that_depend_on_lengths_are_not_captured() {
    let stream = harness::stream();
    let split = Backend::SplitDecode(SplitDecode::Tiles(NonZeroUsize::new(128).unwrap()));
    let varying = || {
        Backends::<bf16>::none()
            .with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS))
            .with(split)
            .with(Backend::CascadePrefill)
            .with(Backend::FusedInTwo)
    };
    for each in [1, 2] {
        let limits = GraphLimits::new([2], 300).tokens_each(each);
        let attention = attention(&stream, varying());
        let refused = attention.capture(&stream, Causality::Causal, &limits).unwrap_err();
        let told = refused.to_string();
        let by_form = told.contains("calls of the backend `split_decode` whose number, rows or merge");
        assert_eq!((by_form, refused.breaks(&rules::GRAPH_BACKEND)), (each == 1, each == 1), "{told}");
        assert!(refused.breaks(&rules::BACKEND_SHARED_PREFIX), "{told}");
        assert_eq!(told.contains("add a backend such as `Backend::Fused` behind it"), each == 1, "{told}");
        let attention = self::attention(&stream, varying().with(Backend::Fused));
        let graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
        assert_eq!((graphs.backend(0), graphs.backend(LAYERS)), (Some("fused"), None));
    }
}

/// Tiles as long as the longest request are one part of each request, whatever the step.
#[test]
fn calls_that_happen_not_to_depend_on_lengths_are_captured() {
    let stream = harness::stream();
    let split = Backend::SplitDecode(SplitDecode::Tiles(NonZeroUsize::new(384).unwrap()));
    let backends = Backends::<bf16>::none().with(split);
    assert_eq!(replayed(&stream, backends, Causality::Causal, 1), "split_decode");
}

/// FLOAT16 on CANN 8.1, whose packed calls take BF16 alone: drafts are verified by batched calls, also in graphs.
#[test]
fn batched_queries_are_captured_where_packed_ones_are_not_taken() {
    if harness::not_on_npu("CANN 8.1 is emulated") {
        return;
    }
    // The harness looks at what is left behind.
    drop(harness::runtime());
    let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V8_1)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let backends = || Backends::<f16>::none().with(Backend::Fused).with(Backend::BatchedQueries);
    let window = Causality::Window(NonZeroUsize::new(70).unwrap());
    for each in [1, 4] {
        for causality in [Causality::Causal, window] {
            assert_eq!(replayed(&stream, backends(), causality, each), "batched_queries");
        }
    }
    // Requests of such graphs all add the tokens that were declared.
    let mut attention = attention(&stream, backends());
    let limits = GraphLimits::new([4], 300).tokens_each(4);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let batch = [BatchRequest::of(&sequence, 3)];
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    assert!(!graphs.serves(&metadata));
    let fewer = graphs.begin(&stream, &mut metadata).map(drop).unwrap_err();
    assert!(fewer.breaks(&rules::GRAPH_SIZE), "{fewer}");
    assert!(fewer.to_string().contains("the backend `batched_queries`"), "{fewer}");
}
