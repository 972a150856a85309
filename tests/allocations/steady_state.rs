//! A launch into existing tensors allocates nothing on the host.

use crate::allocations;
use crate::harness;

use allocations::allocations;
use ascend_attention::attention::{
    Affine, AntiquantMode, Antiquantisation, BlockTable, Inputs, Quantisation,
};
use ascend_attention::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_attention::serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality,
    Fused, PagedDecode,
};
use ascend_attention::{Element, FusedInferAttention, Output, Tensor, bf16, f16};
use harness::{Sample, halves, poisoned};

/// Allocations of 50 rounds, after the first ones made the workspace and filled queues that grow once.
fn in_steady_state(mut round: impl FnMut()) -> usize {
    for _ in 0..8 {
        round();
    }
    let before = allocations();
    for _ in 0..50 {
        round();
    }
    allocations() - before
}

#[test]
fn a_launch_allocates_nothing() {
    let stream = harness::stream();
    let sample = Sample::new(1);
    let layers: Vec<_> = (0..4).map(|_| sample.upload(&stream)).collect();
    let [query, key, value] = &layers[0];
    let attention = Sample::attention(stream.device()).softmax_lse(true);
    let plan = attention.plan(query, key, value).unwrap();
    let mut outputs: Vec<_> = (0..4).map(|_| poisoned(&plan, &stream)).collect();
    let allocated = in_steady_state(|| {
        for ([query, key, value], output) in layers.iter().zip(&mut outputs) {
            plan.launch_into(&stream, query, key, value, output)
                .unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(allocated, 0, "200 launches allocated {allocated} times");
    let before = allocations();
    for output in outputs {
        sample.check(&output.attention.download(&stream).unwrap());
    }
    assert!(allocations() > before, "the allocator counts");
}

#[test]
fn a_launch_of_many_kinds_of_tensors_allocates_nothing() {
    let stream = harness::stream();
    let layer = |seed| {
        let query = stream
            .upload(&halves(seed, 2 * 2 * 64), [2, 2, 1, 64])
            .unwrap();
        let cache: Vec<i8> = (0..6 * 32 * 128).map(|x| (x % 13) as i8).collect();
        let cache = stream.upload(&cache, [6, 32, 128]).unwrap();
        let scales = stream.upload(&[0.01f32; 6 * 32], [6, 32]).unwrap();
        let table = BlockTable::from_rows(&stream, &[[4, 1], [0, 5]], 32).unwrap();
        (query, cache, scales, table)
    };
    let layers = [layer(1), layer(2), layer(3)];
    let inputs = layers.each_ref().map(|(query, cache, scales, table)| {
        let grid = Affine::scale(scales);
        let quantisation = Quantisation::KeyValue {
            antiquantisation: Antiquantisation::Split {
                mode: AntiquantMode::PerTokenPaged,
                key: grid,
                value: grid,
            },
            output: None,
        };
        Inputs::new(query, cache, cache)
            .paged(table)
            .quantisation(quantisation)
    });
    let plan = FusedInferAttention::new(ascend_attention::Layout::Bnsd)
        .scale(1.0)
        .heads(2)
        .actual_seq_lengths_kv([40, 64])
        .plan_with(&inputs[0])
        .unwrap();
    let mut outputs = layers.each_ref().map(|_| plan.output::<f16>().unwrap());
    let allocated = in_steady_state(|| {
        for (inputs, output) in inputs.iter().zip(&mut outputs) {
            plan.launch_with_into(&stream, inputs, output).unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(allocated, 0, "150 launches allocated {allocated} times");
}

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
