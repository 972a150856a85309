//! The layers of a decode step allocate nothing on the host.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

#[path = "../../ascend-spec/tests/allocations/mod.rs"]
mod allocations;
#[path = "../../tests/harness/mod.rs"]
mod harness;

use allocations::in_steady_state;
use ascend_attention::{Element, Output, Tensor, bf16, f16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality,
    Fused, PagedDecode,
};

/// Layers of a decode step after the first, which plans: keys and values written, then attended to.
fn layers_of_a_step<T: Element + Default>(backends: Backends<T>) -> usize {
    const LAYERS: usize = 4;
    const REQUESTS: usize = 3;
    let stream = harness::stream();
    let device = stream.device();
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(LAYERS, 2, 64);
    let cache = PagedKvCache::<T>::new(device, 8, 128, shape, pad).unwrap();
    let pool = cache.pool().clone();
    let mut sequences = [3, 130, 60].map(|len| {
        let mut sequence = Sequence::new(&pool);
        let _ = sequence.grow(len).unwrap();
        sequence
    });
    let mut engine = Attention::new(AttentionShape::new(4, 2, 64), cache, backends);
    for sequence in &mut sequences {
        let _ = sequence.grow(1).unwrap();
    }
    let batch: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
    let settings = BatchSettings::of(&pool, Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let rows = |heads: usize| {
        let zeros = vec![T::default(); REQUESTS * heads * 64];
        stream.upload(&zeros, [REQUESTS, heads, 64]).unwrap()
    };
    let layers: Vec<_> = (0..LAYERS).map(|_| [rows(4), rows(2), rows(2)]).collect();
    let mut outputs: Vec<_> = (0..LAYERS)
        .map(|_| Output {
            attention: Tensor::<T>::empty(device, [REQUESTS, 4, 64]).unwrap(),
            softmax_lse: None,
        })
        .collect();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    in_steady_state(|| {
        for (at, ([query, key, value], output)) in layers.iter().zip(&mut outputs).enumerate() {
            step.forward_into(at, query, key, value, None, output)
                .unwrap();
        }
        stream.synchronize().unwrap();
    })
}

#[test]
fn a_layer_of_a_decode_step_allocates_nothing() {
    let packed = layers_of_a_step(Backends::<bf16>::none().with(Fused));
    assert_eq!(packed, 0, "200 packed layers allocated {packed} times");
    let decode = layers_of_a_step(Backends::<f16>::none().with(PagedDecode));
    assert_eq!(decode, 0, "200 layers allocated {decode} times");
}
