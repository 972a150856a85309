//! A launch into existing tensors allocates nothing on the host.

use crate::allocations;
use crate::harness;

use allocations::{allocations, in_steady_state};
use ascend_attention::attention::{Affine, AntiquantMode, Antiquantisation, BlockTable, Inputs, Quantisation};
use ascend_attention::{FusedInferAttention, f16};
use harness::{Sample, halves, poisoned};

#[test]
fn a_launch_allocates_nothing() {
    let stream = harness::stream();
    let sample = Sample::new(1);
    let layers: Vec<_> = (0..4).map(|_| sample.upload(&stream)).collect();
    let [query, key, value] = &layers[0];
    let attention = Sample::attention(stream.device()).softmax_lse(true);
    let plan = attention.plan((query, key, value)).unwrap();
    let mut outputs: Vec<_> = (0..4).map(|_| poisoned(&plan, &stream)).collect();
    let allocated = in_steady_state(|| {
        for ([query, key, value], output) in layers.iter().zip(&mut outputs) {
            plan.launch_into(&stream, (query, key, value), output).unwrap();
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
        let query = stream.upload(&halves(seed, 2 * 2 * 64), [2, 2, 1, 64]).unwrap();
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
            antiquantisation: Antiquantisation::Split { mode: AntiquantMode::PerTokenPaged, key: grid, value: grid },
            output: None,
        };
        Inputs::new(query, cache, cache).paged(table).quantisation(quantisation)
    });
    let plan = FusedInferAttention::new(ascend_attention::Layout::Bnsd)
        .scale(1.0)
        .heads(2)
        .actual_seq_lengths_kv([40, 64])
        .plan(inputs[0])
        .unwrap();
    let mut outputs = layers.each_ref().map(|_| plan.output::<f16>().unwrap());
    let allocated = in_steady_state(|| {
        for (inputs, output) in inputs.iter().zip(&mut outputs) {
            plan.launch_into(&stream, inputs, output).unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(allocated, 0, "150 launches allocated {allocated} times");
}
