//! Layers with scales of their own: every one is attention by its definition, with and without graphs.

use ascend_attention::{Stream, bf16};
use ascend_serving::{Attention, BatchRequest, Causality, GraphLimits, LayerMask, rules};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::acts::config;
use crate::graph_pool::layers::tensors;
use crate::grouped_layers::{HEADS, POLICY, WINDOW, attention, model, shape};
use crate::harness;
use crate::tokens::{DIM, dense};

const LAYERS: usize = 5;

/// Refuses a row that is not the attention of the last of these tokens.
fn check(model: &Attention<bf16>, row: &[bf16], names: &[u64], layer: usize, scale: f64) -> Result<(), TestCaseError> {
    let is_full = model.mask(layer) == LayerMask::from(Causality::Causal);
    let first = if is_full { 0 } else { names.len().saturating_sub(WINDOW) };
    let want = dense(names, layer, shape().scale(scale), |place| place >= first);
    for (got, want) in row.iter().zip(&want) {
        let apart = (got.to_f64() - want).abs();
        prop_assert!(apart <= 1e-2, "layer {layer}, scale {scale}, {} keys: {got}, expected {want}", names.len());
    }
    Ok(())
}

/// A prompt without a graph, then decodes with one and without.
fn run(stream: &Stream, model: Attention<bf16>, scales: &[f64], prompt: usize) -> Result<(), TestCaseError> {
    let mut model = model.layer_scales(|layer| scales[layer]).unwrap();
    let mut graphs = model.capture_layers(stream, |layer| model.mask(layer), &GraphLimits::new([1], 400)).unwrap();
    let mut sequence = model.sequence();
    let mut names = Vec::new();
    for new in [prompt, 1, 1] {
        model.grow(stream, &mut sequence, new).unwrap();
        let first = names.len() as u64;
        let own: Vec<u64> = (first..first + new as u64).collect();
        names.extend_from_slice(&own);
        let mut metadata = model.metadata(&[BatchRequest::of(&sequence, new).recompute()], POLICY).unwrap();
        if new == 1 {
            let mut step = graphs.begin(stream, &mut metadata).unwrap();
            for (layer, scale) in scales.iter().enumerate() {
                let [query, key, value] = tensors(stream, &own, layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap().download(stream).unwrap();
                check(&model, &output, &names, layer, *scale)?;
            }
            step.end().unwrap();
        }
        let mut outputs = Vec::new();
        let mut step = model.begin(stream, &metadata).unwrap();
        for layer in 0..scales.len() {
            let [query, key, value] = tensors(stream, &own, layer);
            outputs.push(step.forward(layer, (&query, &key, &value)).unwrap().download(stream).unwrap());
        }
        step.end().unwrap();
        for ((layer, output), scale) in outputs.iter().enumerate().zip(scales) {
            check(&model, &output[(new - 1) * HEADS * DIM..], &names, layer, *scale)?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(8))]

    #[test]
    fn layers_have_scales_of_their_own(
        scales in prop::collection::vec(prop_oneof![0.01f64..0.1, Just(0.3)], LAYERS),
        prompt in 2usize..200,
    ) {
        let stream = harness::stream();
        run(&stream, model(&stream), &scales, prompt)?;
        run(&stream, attention(&stream, 3, 8), &scales[..3], prompt)?;
    }
}

/// The comparison tells one scale from another.
#[test]
fn the_attention_of_another_scale_is_refused() {
    let stream = harness::stream();
    let scales = [0.02, 0.3];
    let mut model = attention(&stream, 2, 8).layer_scales(|layer| scales[layer]).unwrap();
    let mut sequence = model.sequence();
    let names: Vec<u64> = (0..20).collect();
    model.grow(&stream, &mut sequence, 20).unwrap();
    let metadata = model.metadata(&[BatchRequest::of(&sequence, 20)], POLICY).unwrap();
    let mut step = model.begin(&stream, &metadata).unwrap();
    let outputs = [0, 1].map(|layer| {
        let [query, key, value] = tensors(&stream, &names, layer);
        step.forward(layer, (&query, &key, &value)).unwrap().download(&stream).unwrap()
    });
    step.end().unwrap();
    for (layer, output) in outputs.iter().enumerate() {
        let row = &output[19 * HEADS * DIM..];
        check(&model, row, &names, layer, scales[layer]).unwrap();
        check(&model, row, &names, layer, scales[1 - layer]).unwrap_err();
    }
}

#[test]
fn a_scale_that_weighs_nothing_is_refused_with_its_layer() {
    let stream = harness::stream();
    for wrong in [0.0, f64::NAN, f64::INFINITY, -0.1, 1e-60, DIM as f64] {
        let refused = model(&stream).layer_scales(|layer| if layer == 4 { wrong } else { 0.1 }).unwrap_err();
        assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
        assert!(refused.to_string().contains("in layer 4"), "{refused}");
    }
}

/// Scales that are set behind a capture are not those of its graphs, which replay again once they are.
#[test]
fn graphs_refuse_steps_of_other_scales_than_their_capture() {
    let stream = harness::stream();
    let model = model(&stream);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &GraphLimits::new([1], 400)).unwrap();
    let own = model.shape().scale;
    let mut model = model.layer_scales(|layer| if layer == 3 { 0.3 } else { own }).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = model.metadata(&[BatchRequest::of(&sequence, 1)], POLICY).unwrap();
    assert!(!graphs.serves(&metadata));
    let refused = graphs.begin(&stream, &mut metadata).unwrap_err();
    assert!(refused.breaks(&rules::GRAPH_INPUTS), "{refused}");
    assert!(refused.to_string().contains("the scale 0.3 of layer 3") && metadata.tokens() == 1, "{refused}");
    let model = model.layer_scales(|_| own).unwrap();
    assert!(graphs.serves(&metadata));
    // Scales that are refused are not set, in no group.
    model.layer_scales(|layer| if layer == 4 { 0.0 } else { 0.3 }).unwrap_err();
    assert!(graphs.serves(&metadata));
}
