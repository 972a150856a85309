//! One loop of layers serves steps with graphs and steps without.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{
    BatchRequest, Causality, GraphLimits, LatentForm, LatentRows, LatentTensors, LayerInputs, Result, Step,
    UpProjected, rules,
};
use proptest::prelude::*;

use super::layers::{check, tensors};
use crate::acts::config;
use crate::grouped_layers::{HEADS, POLICY, WINDOW, attention, model};
use crate::harness;
use crate::refusals::{blamed, rule};
use crate::tokens::DIM;

/// Queues every layer of a step of these tokens, in turn into a tensor of the step and of the caller, and returns the
/// rows of each.
fn queue_layers(mut step: Step<'_, bf16>, stream: &Stream, names: &[u64], layers: usize) -> Vec<Vec<bf16>> {
    let mut names = names.to_vec();
    names.resize(step.tokens(), 0);
    let rows = (0..layers).map(|layer| {
        let [query, key, value] = tensors(stream, &names, layer);
        let inputs = (&query, &key, &value);
        if layer % 2 == 0 {
            return step.forward(layer, inputs).unwrap().download(stream).unwrap();
        }
        let mut output = Tensor::empty(stream.device(), [step.tokens(), HEADS, DIM]).unwrap();
        step.forward_into(layer, inputs, &mut output).unwrap();
        output.download(stream).unwrap()
    });
    let rows = rows.collect();
    step.end().unwrap();
    rows
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn one_loop_of_layers_computes_every_step(lengths in prop::collection::vec(1usize..300, 1..4)) {
        let stream = harness::stream();
        let mut model = model(&stream);
        let limits = GraphLimits::new([2, 3], 500);
        let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
        let mut requests: Vec<(Sequence, Vec<u64>)> = Vec::new();
        for (at, length) in lengths.iter().enumerate() {
            let names = (0..=*length).map(|token| (1000 * at + token) as u64).collect();
            requests.push((model.sequence(), names));
        }
        // The prompts, their next tokens, and these once more by graphs.
        for (step, replayed) in [false, false, true].into_iter().enumerate() {
            let mut new_names = Vec::new();
            for ((sequence, names), length) in requests.iter_mut().zip(&lengths) {
                let known = length + step.min(1);
                new_names.extend_from_slice(&names[sequence.len().min(known - 1)..known]);
                model.grow(&stream, sequence, known - sequence.len()).unwrap();
            }
            let batch = requests.iter().zip(&lengths).map(|((sequence, _), length)| {
                let new = if step == 0 { *length } else { 1 };
                BatchRequest::of(sequence, new).recompute()
            });
            let mut metadata = model.metadata(&batch.collect::<Vec<_>>(), POLICY).unwrap();
            let begun = match replayed {
                true => graphs.begin(&stream, &mut metadata).unwrap(),
                false => model.begin(&stream, &metadata).unwrap(),
            };
            for (layer, rows) in queue_layers(begun, &stream, &new_names, 5).iter().enumerate() {
                let mut end = 0;
                for ((sequence, names), length) in requests.iter().zip(&lengths) {
                    end += if step == 0 { *length } else { 1 };
                    let window = (![1, 4].contains(&layer)).then_some(WINDOW);
                    let row = &rows[(end - 1) * HEADS * DIM..][..HEADS * DIM];
                    check(row, &names[..sequence.len()], layer, window, if replayed { "replayed" } else { "planned" });
                }
            }
        }
    }
}

#[test]
fn a_step_without_graphs_has_nothing_to_fill_in_place() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 8);
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 3).unwrap();
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, 3)], POLICY).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    assert_eq!(rule(step.linear_tensors(0).map(drop)), &rules::STEP_IN_PLACE);
    let refused = step.tensors(0).map(drop).unwrap_err();
    assert!(refused.breaks(&rules::STEP_IN_PLACE), "{refused}");
    assert!(refused.to_string().contains("tensors of layer 0, in a step without graphs"), "{refused}");
    // What the refusal advises.
    check(&queue_layers(step, &stream, &[5, 6, 7], 1)[0][2 * HEADS * DIM..], &[5, 6, 7], 0, None, "advised");
}

/// The layers of a group have the same tensors: filled ahead for the next layer, they would be what the one before it
/// computes.
#[test]
fn tensors_are_filled_for_one_layer_after_another() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let limits = GraphLimits::new([1], 300);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = model.metadata(&[BatchRequest::of(&sequence, 1)], POLICY).unwrap();
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    // Layers 1 and 4 are one group, the others another.
    for (layer, ahead, other) in [(1, 4, 0), (0, 2, 3)] {
        let given = tensors(&stream, &[7], layer);
        let own = step.tensors(layer).unwrap();
        for (own, given) in [&own.query, &own.key, &own.value].into_iter().zip(&given) {
            own.copy_from(&stream, given).unwrap();
        }
        let refused = step.tensors(ahead).map(drop).unwrap_err();
        assert!(refused.breaks(&rules::STEP_IN_PLACE), "{refused}");
        assert!(refused.to_string().contains(&format!("queue layer {layer} first")), "{refused}");
        assert_eq!(rule(step.forward(ahead, own.inputs()).map(drop)), &rules::STEP_IN_PLACE);
        let [query, key, value] = &given;
        assert_eq!(rule(step.forward(ahead, (query, key, value)).map(drop)), &rules::STEP_IN_PLACE);
        if layer == 1 {
            step.tensors(other).unwrap();
        }
        let output = step.forward(layer, own.inputs()).unwrap().download(&stream).unwrap();
        check(&output, &[7], layer, None, "filled");
        step.tensors(layer).unwrap();
        // Not taken for the layer ahead.
        assert_eq!(rule(step.forward(ahead, own.inputs()).map(drop)), &rules::STEP_IN_PLACE);
        let given = tensors(&stream, &[7], ahead);
        let [query, key, value] = &given;
        let output = step.forward(ahead, (query, key, value)).unwrap().download(&stream).unwrap();
        check(&output, &[7], ahead, None, "behind it");
    }
}

/// Outputs that no copy of a graph's fits are refused before anything is queued.
#[test]
fn outputs_of_callers_are_beside_what_a_replay_reads_and_writes() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 2, 8);
    // Sinks that change nothing, which the layers do not bring and the graphs read.
    let around_sink = stream.upload(&[bf16::NEG_INFINITY; 2 * HEADS * DIM], [2, HEADS, DIM]).unwrap();
    let sink = around_sink.reshape([2 * HEADS * DIM]).unwrap().narrow(0, 0..HEADS).unwrap();
    let limits = GraphLimits::new([2], 300).learnable_sinks([sink.clone(), sink]);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = attention.metadata(&[BatchRequest::of(&sequence, 1)], POLICY).unwrap();
    let [first, second] = [0, 1].map(|layer| attention.cache().layer(layer).unwrap().key.clone());
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    assert!(step.selected(0).is_none());
    let [query, key, value] = tensors(&stream, &[7, 0], 0);
    let inputs = (&query, &key, &value);
    // The output of the other layer, which is the memory of this one's.
    let own_output = step.forward(1, inputs).unwrap().clone();
    let own_query = step.tensors(0).unwrap().query.clone();
    let before = [&first, &second].map(|keys| keys.download(&stream).unwrap());
    let shape = [2, HEADS, DIM];
    for (name, mut output) in [
        ("query", query.clone()),
        ("that of the graph", own_query),
        ("that of the graph", own_output),
        ("the cache", cached(&first)),
        // The layer neither reads nor writes it.
        ("the cache", cached(&second)),
        ("learnable_sink", around_sink),
    ] {
        let refused = step.forward_into(0, inputs, &mut output).unwrap_err();
        assert!(refused.breaks(&rules::ARGUMENT_MEMORY) && refused.to_string().contains(name), "{refused}");
    }
    let mut narrow = Tensor::empty(stream.device(), [1, HEADS, DIM]).unwrap();
    assert_eq!(rule(step.forward_into(0, inputs, &mut narrow)), &rules::PLAN_TENSORS);
    let other = harness::runtime().device(1).unwrap();
    assert_eq!(blamed(step.forward_into(0, inputs, &mut Tensor::empty(&other, shape).unwrap())), "output");
    assert_eq!([first, second].map(|keys| keys.download(&stream).unwrap()), before);
    let mut output = Tensor::empty(stream.device(), shape).unwrap();
    step.forward_into(0, inputs, &mut output).unwrap();
    check(&output.download(&stream).unwrap()[..HEADS * DIM], &[7], 0, None, "of the caller");
}

/// The first elements of a cache, as the output of a step of two tokens.
fn cached(keys: &Tensor<bf16>) -> Tensor<bf16> {
    let rows = keys.reshape([keys.len()]).unwrap().narrow(0, 0..2 * HEADS * DIM).unwrap();
    rows.reshape([2, HEADS, DIM]).unwrap()
}

/// Outputs over a cache of another layer or group are refused, without graphs and with them.
#[test]
fn outputs_of_callers_are_beside_every_cache_of_the_model() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let limits = GraphLimits::new([2], 300);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
    let mut sequences = [model.sequence(), model.sequence()];
    for sequence in &mut sequences {
        model.grow(&stream, sequence, 1).unwrap();
    }
    let mut metadata = model.metadata(&sequences.each_ref().map(|own| BatchRequest::of(own, 1)), POLICY).unwrap();
    let caches = model.groups().iter().map(|group| group.cache());
    let layers = caches.flat_map(|cache| (0..cache.shape().layers).map(|layer| cache.layer(layer).unwrap()));
    let caches: Vec<_> = layers.flat_map(|layer| [layer.key.clone(), layer.value.clone()]).collect();
    assert_eq!(caches.len(), 2 * 5);
    let inputs = |layer| tensors(&stream, &[7, 8], layer);
    let project = |_: &Stream, _: usize, _: LatentRows<'_, bf16>, _: &UpProjected<bf16>| -> Result<()> { Ok(()) };
    let refuse = |mut step: Step<'_, bf16>| {
        for layer in 0..5 {
            let [query, key, value] = inputs(layer);
            for keys in &caches {
                let refused = step.forward_into(layer, (&query, &key, &value), &mut cached(keys)).unwrap_err();
                assert!(refused.breaks(&rules::ARGUMENT_MEMORY), "{refused}");
                // The second output of a layer of latents whose step is mixed.
                let form = LatentForm::Mixed { absorbed: &query, decoded: &cached(keys), projection: &project };
                let mixed = LayerInputs::latent(&query, &key, &value, LatentTensors { query_rope: &query, form });
                let refused = step.forward(layer, mixed).map(drop).unwrap_err().to_string();
                assert!(refused.contains("decoded: memory that is shared with the cache"), "{refused}");
            }
        }
    };
    refuse(model.begin(&stream, &metadata).unwrap());
    refuse(graphs.begin(&stream, &mut metadata).unwrap());
    for keys in &caches {
        assert!(keys.download(&stream).unwrap().iter().all(|element| *element == bf16::ZERO));
    }
}

/// Outputs that no layer fills are refused before its keys are written.
#[test]
fn outputs_of_callers_fit_before_a_step_without_graphs_writes() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 2, 8);
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 2).unwrap();
    let metadata = attention.metadata(&[BatchRequest::of(&sequence, 2)], POLICY).unwrap();
    let keys = attention.cache().layer(0).unwrap().key.clone();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let [query, key, value] = tensors(&stream, &[7, 8], 0);
    let inputs = (&query, &key, &value);
    let empty = |shape: [usize; 3]| Tensor::empty(stream.device(), shape).unwrap();
    let gaps = empty([2, HEADS, 2 * DIM]).narrow(2, 0..DIM).unwrap();
    for mut wrong in [empty([1, HEADS, DIM]), empty([2, HEADS, DIM / 2]), empty([HEADS, 2, DIM / 4]), gaps] {
        assert_eq!(rule(step.forward_into(0, inputs, &mut wrong)), &rules::PLAN_TENSORS);
    }
    let other = harness::runtime().device(1).unwrap();
    let mut far = Tensor::empty(&other, [2, HEADS, DIM]).unwrap();
    assert_eq!(blamed(step.forward_into(0, inputs, &mut far)), "output");
    assert!(keys.download(&stream).unwrap().iter().all(|element| *element == bf16::ZERO));
    drop(step);
    // Nothing is missing from the cache, and the tokens are computed after all.
    let step = attention.begin(&stream, &metadata).unwrap();
    check(&queue_layers(step, &stream, &[7, 8], 2)[0][HEADS * DIM..], &[7, 8], 0, None, "begun again");
}
