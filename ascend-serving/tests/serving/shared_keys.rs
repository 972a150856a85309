//! Layers that attend without writing, to keys of another layer.

use crate::harness;
use approx::abs_diff_eq;

use crate::tokens::{DIM, dense, packed};
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, Causality, Drafting,
    GraphLimits, LayerInputs, LayerMask, StatePolicy, rules,
};

const LAYERS: usize = 2;

fn shape() -> AttentionShape {
    AttentionShape::new(4, 2, DIM)
}

fn attention(stream: &Stream) -> Attention<bf16> {
    with_backends(stream, Backends::none().with(Backend::Fused))
}

fn with_backends(stream: &Stream, backends: Backends<bf16>) -> Attention<bf16> {
    let of = CacheShape::new(LAYERS, shape().kv_heads, DIM);
    let cache = PagedKvCache::new(stream.device(), 8, 128, of, PadPolicy::SkipNegative).unwrap();
    Attention::new(shape(), cache, backends)
}

/// A window of 3 tokens.
fn window() -> LayerMask {
    Causality::from_flags(true, Some(3)).unwrap().into()
}

/// Overwrites the keys and values of a layer that is queued.
fn spoil(stream: &Stream, tensors: [&Tensor<bf16>; 2]) {
    for tensor in tensors {
        tensor.overwrite(stream, &vec![bf16::NAN; tensor.len()]).unwrap();
    }
}

/// Computes the first tokens of a sequence, which have these names.
fn compute(stream: &Stream, attention: &mut Attention<bf16>, names: &[u64]) -> Sequence {
    let (sequence, metadata) = begun(stream, attention, names.len());
    let mut step = attention.begin(stream, &metadata).unwrap();
    for layer in 0..LAYERS {
        let [query, key, value] = &rows(stream, names, layer);
        step.forward(layer, (query, key, value)).unwrap();
    }
    step.end().unwrap();
    sequence
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
    assert_last(stream, output, names, (layer, usize::MAX));
}

/// Compares the rows of a layer, those of the last tokens, with its definition under a window.
fn assert_last(stream: &Stream, output: &Tensor<bf16>, names: &[u64], (layer, window): (usize, usize)) {
    let width = shape().heads * DIM;
    let got = output.download(stream).unwrap();
    let before = names.len() - got.len() / width;
    for (token, got) in (before..).zip(got.chunks_exact(width)) {
        let want = dense(&names[..=token], layer, shape(), |key| token - key < window);
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
    assert_computed(&stream, step.forward(0, shared).unwrap(), &names, 0);
    let [query, key, value] = &rows(&stream, &names, 1);
    step.forward(1, (query, key, value)).unwrap();
    let mut output = Tensor::empty(stream.device(), [5, shape().heads, DIM]).unwrap();
    step.forward_into(0, shared, &mut output).unwrap();
    assert_computed(&stream, &output, &names, 0);
    let again = LayerInputs::from((query, key, value)).shared_keys();
    assert_computed(&stream, step.forward(1, again).unwrap(), &names, 1);
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
fn shared_keys_come_from_the_cache_behind_backends_that_read_own_keys() {
    let stream = harness::stream();
    let backends = || Backends::none().with(Backend::CascadePrefill);
    let names: Vec<u64> = (1..8).collect();
    let mut attention = with_backends(&stream, backends().with(Backend::Fused));
    let mut sequence = compute(&stream, &mut attention, &names[..3]);
    attention.grow(&stream, &mut sequence, 4).unwrap();
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, 4)], StatePolicy::default()).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    for layer in 0..LAYERS {
        let [query, key, value] = &rows(&stream, &names[3..], layer);
        let inputs = LayerInputs::from((query, key, value));
        assert_last(&stream, step.forward(layer, inputs).unwrap(), &names, (layer, usize::MAX));
        assert_eq!(step.selected(layer).unwrap().name, "cascade_prefill");
        spoil(&stream, [key, value]);
        assert_last(&stream, step.forward(layer, inputs.shared_keys()).unwrap(), &names, (layer, usize::MAX));
        assert_eq!(step.selected(layer).unwrap().name, "cascade_prefill");
    }
    step.end().unwrap();
    // Without a backend behind it the layer is refused, and a layer with keys of its own is not.
    let mut attention = with_backends(&stream, backends().for_steps(&[AttentionState::PrefillNoCache], fused()));
    let mut sequence = compute(&stream, &mut attention, &names[..3]);
    attention.grow(&stream, &mut sequence, 4).unwrap();
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, 4)], StatePolicy::default()).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let [query, key, value] = &rows(&stream, &names[3..], 0);
    let inputs = LayerInputs::from((query, key, value));
    step.forward(0, inputs).unwrap();
    let refused = step.forward(0, inputs.shared_keys()).unwrap_err();
    assert!(refused.breaks(&rules::STEP_SHARED_KEYS) && refused.to_string().contains("Backend::Fused"), "{refused}");
    step.forward(1, inputs).unwrap();
    step.end().unwrap();
}

fn fused() -> Backends<bf16> {
    Backends::none().with(Backend::Fused)
}

#[test]
fn shared_keys_of_a_quantised_cache_are_those_that_it_holds() {
    let stream = harness::stream();
    let of = CacheShape::new(LAYERS, shape().kv_heads, DIM);
    let cache =
        PagedKvCache::quantised_by_token(stream.device(), 8, 128, of, PadPolicy::SkipNegative, QuantisedType::Int8)
            .unwrap();
    let mut attention = Attention::new(shape(), cache, Backends::none().with(Backend::QuantisedPrefill));
    let names: Vec<u64> = (1..6).collect();
    let (_sequence, metadata) = begun(&stream, &mut attention, 5);
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let [query, key, value] = &rows(&stream, &names, 0);
    let inputs = LayerInputs::from((query, key, value));
    step.forward(0, inputs).unwrap();
    spoil(&stream, [key, value]);
    let output = step.forward(0, inputs.shared_keys()).unwrap().download(&stream).unwrap();
    for (token, got) in output.chunks_exact(shape().heads * DIM).enumerate() {
        let want = dense(&names[..=token], 0, shape(), |_| true);
        for (got, want) in got.iter().zip(&want) {
            assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 5e-2), "token {token}: {got}, {want}");
        }
    }
}

#[test]
fn a_step_that_verifies_drafts_stays_one_for_layers_that_share_keys() {
    let stream = harness::stream();
    let decode = Backends::none().with(Backend::PagedDecode);
    let mut attention = with_backends(&stream, fused().for_steps(&[AttentionState::DecodeOnly], decode));
    let names: Vec<u64> = (1..7).collect();
    let mut sequence = compute(&stream, &mut attention, &names[..5]);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let policy = StatePolicy::new(true, Some(Drafting::Mtp));
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, 1)], policy).unwrap();
    assert_eq!(metadata.state(), AttentionState::SpecDecoding);
    let mask = window();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let [query, key, value] = &rows(&stream, &names[5..], 0);
    let inputs = LayerInputs::from((query, key, value));
    step.forward(0, inputs).unwrap();
    spoil(&stream, [key, value]);
    let shared = step.forward(0, inputs.shared_keys().mask(&mask)).unwrap();
    assert_last(&stream, shared, &names, (0, 3));
    let [query, key, value] = &rows(&stream, &names[5..], 1);
    let output = step.forward(1, LayerInputs::from((query, key, value)).mask(&mask)).unwrap();
    assert_last(&stream, output, &names, (1, 3));
    assert_eq!([0, 1].map(|layer| step.selected(layer).unwrap().name), ["fused"; 2]);
    step.end().unwrap();
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
    // Behind the layer that is queued as well, since no number of a layer mends it.
    let refused = step.forward(0, inputs.shared_keys()).unwrap_err();
    assert!(refused.breaks(&rules::GRAPH_INPUTS) && refused.to_string().contains("`Attention::begin`"), "{refused}");
}
