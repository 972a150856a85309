//! Streams, sizes and scales that steps and captures refuse by their own name.

use ascend_attention::{Error as CallError, Graph, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits, LayerMask, NamedMask, StatePolicy, rules,
};

use crate::grouped_layers::{attention, model, shape};
use crate::harness;
use crate::refusals::blamed;

#[test]
fn a_stream_of_another_device_is_what_steps_and_captures_blame() {
    let stream = harness::stream();
    let other = harness::runtime().device(1).unwrap().stream().unwrap();
    let mut attention = attention(&stream, 1, 8);
    let mut sequence = Sequence::new(attention.cache().pool());
    assert_eq!(blamed(attention.grow(&other, &mut sequence, 1)), "stream");
    assert_eq!(sequence.len(), 0);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    assert_eq!(blamed(attention.begin(&other, &metadata)), "stream");
    let limits = GraphLimits::new([2], 300);
    let captured = attention.capture(&other, Causality::Causal, &limits);
    assert_eq!(blamed(captured), "stream");
    let captured = attention.capture(&stream, Causality::Causal, &limits);
    let mut graphs = captured.unwrap();
    assert_eq!(blamed(graphs.begin(&other, &mut metadata)), "stream");
    // The refused step was not padded.
    assert_eq!(metadata.tokens(), 1);
    assert!(graphs.begin(&stream, &mut metadata).is_ok());

    let mut model = model(&stream);
    let mut sequence = model.sequence();
    assert_eq!(blamed(model.grow(&other, &mut sequence, 1)), "stream");
    assert_eq!(sequence.len(), 0);
    model.grow(&stream, &mut sequence, 1).unwrap();
    let request = BatchRequest::of(&sequence, 1);
    let metadata = model.metadata(&[request], StatePolicy::default()).unwrap();
    assert_eq!(blamed(model.begin(&other, &metadata)), "stream");
    assert_eq!(blamed(model.capture_layers(&other, |layer| model.mask(layer), &limits)), "stream");
    assert!(model.begin(&stream, &metadata).is_ok());
}

#[test]
fn a_step_that_cannot_begin_while_the_thread_captures_is_not_padded() {
    let stream = harness::stream();
    let other = stream.device().stream().unwrap();
    let mut attention = attention(&stream, 1, 8);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let before = metadata.clone();
    let limits = GraphLimits::new([2], 300);
    let captured = attention.capture(&stream, Causality::Causal, &limits);
    let mut graphs = captured.unwrap();
    drop(graphs.begin(&stream, &mut metadata.clone()).unwrap());
    for on in [&stream, &other] {
        Graph::capture(stream.device(), (), |_, ()| {
            let begun = graphs.begin(on, &mut metadata).map(drop);
            let capturing = matches!(begun, Err(Error::Attention(CallError::Capturing { .. })));
            assert!(capturing, "{begun:?}");
            Ok(())
        })
        .unwrap();
        assert_eq!(metadata, before);
    }
    graphs.begin(&other, &mut metadata).unwrap();
    assert_eq!(metadata.tokens(), 2);
}

#[test]
fn graphs_of_no_size_or_of_size_0_are_refused() {
    let stream = harness::stream();
    let attention = attention(&stream, 1, 8);
    for sizes in [vec![], vec![0], vec![2, 0], vec![usize::MAX]] {
        let limits = GraphLimits::new(sizes, 300);
        let error = attention.capture(&stream, Causality::Causal, &limits).unwrap_err();
        assert!(error.breaks(&rules::GRAPH_SIZE), "{error}");
    }
}

#[test]
fn graphs_of_requests_without_keys_are_refused() {
    let stream = harness::stream();
    let attention = attention(&stream, 1, 8);
    let all = NamedMask::new("all", |_, _, _| true);
    for mask in [LayerMask::from(Causality::Causal), LayerMask::from(all)] {
        let captured = attention.capture(&stream, mask, &GraphLimits::new([2], 0));
        let why = captured.unwrap_err();
        assert!(why.breaks(&rules::GRAPH_LENGTHS), "{why}");
    }
}

#[test]
fn the_tensors_of_a_graph_do_not_change_places() {
    let stream = harness::stream();
    let cache = PagedKvCache::new(stream.device(), 4, 128, CacheShape::new(1, 2, 64), PadPolicy::SkipNegative);
    let backends = Backends::none().with(Backend::Fused);
    let mut attention = Attention::<bf16>::new(AttentionShape::new(2, 2, 64), cache.unwrap(), backends);
    let captured = attention.capture(&stream, Causality::Causal, &GraphLimits::new([1], 100));
    let mut graphs = captured.unwrap();
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let ones = stream.upload(&[bf16::ONE; 2 * 64], [1, 2, 64]).unwrap();
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    let of = step.tensors(0).unwrap();
    let (query, key, value) = (of.query.clone(), of.key.clone(), of.value.clone());
    assert_eq!(blamed(step.forward(0, (&value, &ones, &query))), "query");
    assert_eq!(blamed(step.forward(0, (&ones, &query, &ones))), "key");
    assert_eq!(blamed(step.forward(0, (&ones, &ones, &key))), "value");
    step.forward(0, (&ones, &ones, &ones)).unwrap();
}

#[test]
fn a_scale_that_scores_nothing_is_refused() {
    let stream = harness::stream();
    for (scale, taken) in [
        (0.0, false),
        (-0.0, false),
        (f64::NAN, false),
        (f64::INFINITY, false),
        (-0.125, false),
        (8.0, false),
        (64.0, false),
        (0.125, true),
        (1.0, true),
    ] {
        let of = CacheShape::new(1, shape().kv_heads, shape().head_dim);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::<bf16>::new(stream.device(), 8, 128, of, pad).unwrap();
        let scaled = shape().scale(scale);
        let mut attention = Attention::new(scaled, cache, Backends::none().with(Backend::Fused));
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
        let limits = GraphLimits::new([1], 300);
        if taken {
            attention.begin(&stream, &metadata).unwrap();
        } else {
            let named = "AttentionShape.scale";
            assert_eq!(blamed(attention.begin(&stream, &metadata)), named);
            let captured = attention.capture(&stream, Causality::Causal, &limits);
            assert_eq!(blamed(captured), named);
        }
    }
}
