//! Layers that attend without writing, to keys of another layer.

use crate::harness;
use approx::abs_diff_eq;

use crate::tokens::{DIM, dense, packed};
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, Causality, FusedAttention, GraphLimits,
    LayerInputs, StatePolicy, rules,
};

const LAYERS: usize = 2;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, DIM)
}

fn attention(stream: &Stream) -> Attention<bf16> {
    let of = CacheShape::new(LAYERS, shape().kv_heads, DIM);
    let cache = PagedKvCache::new(stream.device(), 8, 128, of, PadPolicy::SkipNegative).unwrap();
    Attention::new(shape(), cache, Backends::none().with(FusedAttention))
}

/// A sequence with tokens of these names, none of them computed, and the metadata of a step of them.
fn begun(stream: &Stream, attention: &mut Attention<bf16>, tokens: usize) -> (Sequence, AttentionMetadata) {
    let mut sequence = attention.sequence();
    attention.grow(stream, &mut sequence, tokens).unwrap();
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, tokens)], StatePolicy::default()).unwrap();
    (sequence, metadata)
}

fn rows(stream: &Stream, names: &[u64], layer: usize) -> [Tensor<bf16>; 3] {
    let heads = [shape().heads, shape().kv_heads, shape().kv_heads];
    [0, 1, 2].map(|what| packed(stream, names, layer, what, heads[what as usize]))
}

/// Compares the rows of a causal layer with its definition.
fn assert_computed(stream: &Stream, output: &Tensor<bf16>, names: &[u64], layer: usize) {
    let width = shape().heads * DIM;
    let got = output.download(stream).unwrap();
    for (token, got) in got.chunks_exact(width).enumerate() {
        let want = dense(&names[..=token], layer, shape(), |_| true);
        for (got, want) in got.iter().zip(&want) {
            assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2), "token {token}: {got}, {want}");
        }
    }
}

#[test]
fn keys_are_shared_by_layers_behind_the_one_that_has_them() {
    let stream = harness::stream();
    let mut attention = attention(&stream);
    let (_sequence, metadata) = begun(&stream, &mut attention, 5);
    let names: Vec<u64> = (1..6).collect();
    let [query, key, value] = &rows(&stream, &names, 0);
    let inputs = LayerInputs::from((query, key, value));
    let shared = inputs.shared_keys();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let refused = step.forward(0, shared).unwrap_err();
    assert!(refused.breaks(&rules::STEP_SHARED_KEYS), "{refused}");
    step.forward(0, inputs).unwrap();
    // Keys of other tensors, a layer of another number, and one that there is not.
    let [_, other, _] = &rows(&stream, &names, 1);
    let of_others = LayerInputs::from((query, other, value)).shared_keys();
    for (layer, inputs) in [(0, of_others), (1, shared)] {
        let refused = step.forward(layer, inputs).unwrap_err();
        assert!(refused.breaks(&rules::STEP_SHARED_KEYS), "{refused}");
    }
    assert!(step.forward(LAYERS, shared).is_err());
    assert!(step.forward(0, inputs).unwrap_err().breaks(&rules::STEP_LAYER_REPEATED));
    // In the middle of the step and behind its last layer, with other queries too.
    assert_computed(&stream, &step.forward(0, shared).unwrap(), &names, 0);
    let [query, key, value] = &rows(&stream, &names, 1);
    step.forward(1, (query, key, value)).unwrap();
    let mut output = Tensor::empty(stream.device(), [5, shape().heads, DIM]).unwrap();
    step.forward_into(0, shared, &mut output).unwrap();
    assert_computed(&stream, &output, &names, 0);
    let again = LayerInputs::from((query, key, value)).shared_keys();
    assert_computed(&stream, &step.forward(1, again).unwrap(), &names, 1);
    step.end().unwrap();
}

#[test]
fn a_step_without_its_own_layer_does_not_end() {
    let stream = harness::stream();
    let mut attention = attention(&stream);
    let (_sequence, metadata) = begun(&stream, &mut attention, 5);
    let [query, key, value] = &rows(&stream, &[1, 2, 3, 4, 5], 0);
    let inputs = LayerInputs::from((query, key, value));
    let mut step = attention.begin(&stream, &metadata).unwrap();
    step.forward(0, inputs).unwrap();
    step.forward(0, inputs.shared_keys()).unwrap();
    assert!(step.end().unwrap_err().breaks(&rules::STEP_LAYERS_MISSING));
}

#[test]
fn graphs_write_their_keys() {
    let stream = harness::stream();
    let mut attention = attention(&stream);
    let mut graphs = attention.capture(&stream, Causality::Causal, &GraphLimits::new([1], 300)).unwrap();
    let (_sequence, mut metadata) = begun(&stream, &mut attention, 1);
    let [query, key, value] = &rows(&stream, &[1], 0);
    let inputs = LayerInputs::from((query, key, value));
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    let refused = step.forward(0, inputs.shared_keys()).unwrap_err();
    assert!(refused.breaks(&rules::GRAPH_INPUTS), "{refused}");
    let output = step.forward(0, inputs).unwrap().clone();
    assert_computed(&stream, &output, &[1], 0);
}
