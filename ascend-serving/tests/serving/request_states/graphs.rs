//! Steps of the model that are replayed from graphs.

use std::ops::Range;
use std::sync::Arc;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::{Cann, Rule};
use ascend_attention::sys::Api;
use ascend_attention::sys::bindings::{aclError, aclmdlRI, aclrtStream};
use ascend_attention::{Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{
    Attention, AttentionGraphs, AttentionMetadata, BatchRequest, ConvolutionInputs, Error, GraphLimits, LayerTensor,
    RangeCheck, Result, StatePolicy, rules,
};
use proptest::prelude::*;

use super::engine::{Act, Engine, act};
use super::model::*;
use crate::acts::config;
use crate::harness;

/// Graphs of the model, and the weights that they read.
pub(super) struct Graphs {
    pub(super) graphs: AttentionGraphs<bf16>,
    weights: Vec<Tensor<bf16>>,
}

fn all_weights(stream: &Stream) -> Vec<Tensor<bf16>> {
    (0..LAYERS).map(|layer| weight(stream, layer)).collect()
}

/// The weights of the convolutions of the linear layers.
fn linear(weights: &[Tensor<bf16>]) -> [(Tensor<bf16>, Option<Tensor<bf16>>); 2] {
    LINEAR.map(|layer| (weights[layer].clone(), None))
}

/// Graphs of requests of up to so many tokens, of the largest sizes for which the pool has slots.
fn limits(weights: &[Tensor<bf16>], each: usize) -> GraphLimits {
    GraphLimits::new([1, 2, SLOTS / each], 160).tokens_each(each).convolutions(linear(weights))
}

fn capture(attention: &Attention<bf16>, stream: &Stream, limits: &GraphLimits) -> Result<AttentionGraphs<bf16>> {
    attention.capture_layers(stream, |layer| attention.mask(layer), limits)
}

impl Graphs {
    pub(super) fn new(attention: &Attention<bf16>, stream: &Stream, each: usize) -> Self {
        let weights = all_weights(stream);
        Self { graphs: capture(attention, stream, &limits(&weights, each)).unwrap(), weights }
    }

    /// Queues some layers of a step, ends it, and returns their outputs.
    pub(super) fn queue(
        &mut self,
        stream: &Stream,
        metadata: &mut AttentionMetadata,
        names: &[u64],
        layers: Range<usize>,
    ) -> Result<Vec<Vec<bf16>>> {
        let mut step = self.graphs.begin(stream, metadata)?;
        // The graphs read their own weights, and all layers of a kind write one output.
        let weights = &self.weights;
        let outputs = layers.map(|layer| {
            let output = forward_by(&weights[layer], &mut step, stream, (names, 0), layer)?;
            Ok(output.download(stream)?)
        });
        let outputs = outputs.collect::<Result<_>>()?;
        step.end()?;
        Ok(outputs)
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn any_schedule_with_replayed_steps_is_the_recurrence(
        acts in prop::collection::vec(act(), 1..16),
        drafts in 0usize..4,
        // As many tokens as have a slot each, fewer, and more.
        each in 1usize..6,
        cann in prop::sample::select(vec![Cann::V8_5, Cann::V9_1]),
    ) {
        let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
        let stream = stream_of(cann);
        let mut engine = Engine::new(&stream, drafts);
        engine.graphs = Some(Graphs::new(&engine.attention, &stream, each));
        engine.act(&Act::Admit(0))?;
        for act in &acts {
            engine.act(act)?;
            engine.held_elsewhere();
        }
        engine.end();
    }
}

#[test]
fn replayed_decodes_drafts_and_forks_are_the_recurrence() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    for cann in [Cann::V8_5, Cann::V9_1] {
        let stream = stream_of(cann);
        for each in [1, 3] {
            let mut engine = Engine::new(&stream, 2);
            engine.graphs = Some(Graphs::new(&engine.attention, &stream, each));
            for act in [
                Act::Admit(0),
                Act::Admit(0),
                Act::Step(vec![(0, 1, 0), (1, 1, 0)], 0),
                Act::Step(vec![(0, 63, 0)], 0),
                Act::Step(vec![(0, 20, 0), (1, 40, 0)], 0),
                Act::Step(vec![(0, 1, 0), (1, 1, 0)], 0),
                // Drafts that are rejected, twice; alone, and beside a decode.
                Act::Step(vec![(0, 3, 2)], 0),
                Act::Step(vec![(0, 3, 1), (1, 1, 0)], 0),
                Act::Step(vec![(0, 2, 0), (1, 3, 2)], 0),
                // A fork from one token before the end; both go on.
                Act::Share(0, 1),
                Act::Step(vec![(0, 1, 0), (1, 1, 0), (2, 1, 0)], 0),
                Act::Step(vec![(0, 2, 0), (1, 2, 1), (2, 1, 0)], 0),
                // The whole request again, between replayed steps of the others.
                Act::Preempt(0),
                Act::Step(vec![(1, 1, 0), (2, 1, 0)], 0),
                Act::Step(vec![(0, 90, 0)], 0),
                Act::Step(vec![(0, 1, 0), (2, 3, 1)], 0),
                Act::Break(1, 2),
                Act::Step(vec![(0, 1, 0), (2, 1, 0)], 0),
            ] {
                engine.act(&act).unwrap();
            }
            assert_eq!(engine.replayed, if each == 1 { 5 } else { 10 }, "{} of {each}", engine.replayed);
            engine.end();
        }
    }
}

fn is(outcome: Result<()>, rule: &'static Rule) {
    match outcome {
        Err(refused) => assert!(refused.breaks(rule), "{refused}"),
        Ok(()) => panic!("not refused by {rule:?}"),
    }
}

/// The model with a sequence of a prompt that is computed, and graphs of one token.
fn after_a_prompt(stream: &Stream, prompt: &[u64]) -> (Attention<bf16>, Graphs, Sequence) {
    let mut attention = model(stream, 1);
    let graphs = Graphs::new(&attention, stream, 1);
    let mut sequence = attention.sequence();
    attention.grow(stream, &mut sequence, prompt.len()).unwrap();
    let metadata = metadata(&attention, &sequence, prompt.len());
    let mut step = attention.begin(stream, &metadata).unwrap();
    for layer in 0..LAYERS {
        forward(&mut step, stream, prompt, 0, layer).unwrap();
    }
    step.end().unwrap();
    (attention, graphs, sequence)
}

fn metadata(attention: &Attention<bf16>, sequence: &Sequence, new: usize) -> AttentionMetadata {
    attention.metadata(&[BatchRequest::of(sequence, new)], StatePolicy::default()).unwrap()
}

/// Graphs neither serve nor begin a step.
fn refuse(graphs: &mut Graphs, stream: &Stream, mut metadata: AttentionMetadata, rule: &'static Rule) {
    assert!(!graphs.graphs.serves(&metadata), "{rule:?}");
    is(graphs.graphs.begin(stream, &mut metadata).map(drop), rule);
}

/// A replay that is forgotten, done twice, or done after its request was preempted or began anew.
#[test]
fn replays_that_do_not_go_on_from_their_states_are_refused() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let stream = stream_of(Cann::V9_1);
    let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let unpadded = metadata(&attention, &sequence, 1);

    // Forgotten before anything is written: the same metadata is begun again, by the graphs or without them.
    graphs.queue(&stream, &mut unpadded.clone(), &[4], 0..0).unwrap_err();
    graphs.queue(&stream, &mut unpadded.clone(), &[4], FULL..FULL + 1).unwrap_err();
    drop(attention.begin(&stream, &unpadded).unwrap());

    let mut padded = unpadded.clone();
    graphs.queue(&stream, &mut padded, &[4], 0..LAYERS).unwrap();
    assert_eq!(attention.computed_tokens(&sequence).unwrap(), 4);
    // Twice: by the metadata that was padded, and as it was before.
    for again in [padded, unpadded] {
        refuse(&mut graphs, &stream, again, &rules::SEQUENCE_COMPUTED);
    }
    let recomputed = [BatchRequest::of(&sequence, 1).recompute()];
    let recomputed = attention.metadata(&recomputed, StatePolicy::default()).unwrap();
    refuse(&mut graphs, &stream, recomputed, &rules::STATE_TOKENS);

    // On another stream than the pool's, or after the request was preempted, also where it has as many tokens again.
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut next = metadata(&attention, &sequence, 1);
    let elsewhere = stream.device().stream().unwrap();
    is(graphs.graphs.begin(&elsewhere, &mut next).map(drop), &rules::STATE_STREAM);
    sequence.truncate(0).unwrap();
    refuse(&mut graphs, &stream, next.clone(), &rules::BLOCK_GIVEN_BACK);
    attention.grow(&stream, &mut sequence, 5).unwrap();
    assert!(graphs.graphs.begin(&stream, &mut next).is_err());

    // Forgotten behind a layer of linear attention, or behind its convolution alone: the request begins anew.
    for whole_layer in [true, false] {
        let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let mut broken = metadata(&attention, &sequence, 1);
        let ended = match whole_layer {
            true => graphs.queue(&stream, &mut broken, &[4], 0..1).map(drop),
            false => {
                let mut step = graphs.graphs.begin(&stream, &mut broken).unwrap();
                let own = step.linear_tensors(LINEAR[0]).unwrap();
                let x = own.x.as_ref().unwrap();
                step.convolve(LINEAR[0], (x, &graphs.weights[LINEAR[0]])).unwrap();
                step.end()
            }
        };
        let ended = ended.unwrap_err();
        assert!(ended.breaks(&rules::STEP_LAYERS_MISSING) && ended.to_string().contains("truncate"), "{ended}");
        refuse(&mut graphs, &stream, broken.clone(), &rules::STATE_TORN);
        is(attention.begin(&stream, &broken).map(drop), &rules::STATE_TORN);
        is(attention.grow(&stream, &mut sequence, 1), &rules::STATE_TORN);
        sequence.truncate(0).unwrap();
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let mut anew = metadata(&attention, &sequence, 1);
        let outputs = graphs.queue(&stream, &mut anew, &[9], 0..LAYERS).unwrap();
        for (layer, output) in outputs.iter().enumerate() {
            let want = reference(&[9], layer).concat();
            assert!(output.iter().zip(&want).all(|(got, want)| (got.to_f64() - want).abs() < 0.03), "layer {layer}");
        }
    }
}

/// A state that a fork shares goes to another slot before the replay, which writes there; rows of padding reach no
/// state.
#[test]
fn replays_leave_the_states_of_others_alone() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let stream = stream_of(Cann::V9_1);
    let mut attention = model(&stream, 1);
    for each in [1, 2] {
        let mut graphs = Graphs::new(&attention, &stream, each);
        let mut sequence = attention.sequence();
        // A whole block, so that the growth writes into none that is shared.
        let prompt: Vec<u64> = (0..16).collect();
        attention.grow(&stream, &mut sequence, 16).unwrap();
        let first = metadata(&attention, &sequence, 16);
        let mut step = attention.begin(&stream, &first).unwrap();
        for layer in 0..LAYERS {
            forward(&mut step, &stream, &prompt, 0, layer).unwrap();
        }
        step.end().unwrap();
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let mut next = metadata(&attention, &sequence, 1);
        // Between the growth and the replay.
        let kept = sequence.share_prefix(16).unwrap();
        let pool = |attention: &Attention<bf16>| {
            let states = attention.states().unwrap();
            let read = |tensor: &ascend_attention::AnyTensor| tensor.download_bytes(&stream).unwrap();
            let layers = 0..SHAPE.layers;
            let of = |layer| [read(states.layer(layer).unwrap().tensor()), read(states.windows(layer).unwrap())];
            layers.flat_map(of).collect::<Vec<Vec<u8>>>()
        };
        let before = pool(&attention);
        graphs.queue(&stream, &mut next, &[4], 0..LAYERS).unwrap();
        let after = pool(&attention);
        for (before, after) in before.iter().zip(&after) {
            let slots = before.chunks(before.len() / SLOTS).zip(after.chunks(after.len() / SLOTS));
            let changed: Vec<usize> =
                slots.enumerate().filter(|(_, (old, new))| old != new).map(|(slot, _)| slot).collect();
            assert_eq!(changed.len(), 1, "{changed:?} with {each} tokens a request");
        }
        // What was kept goes on as if nothing had happened.
        let mut fork = kept.fork();
        attention.grow(&stream, &mut fork, 1).unwrap();
        let mut other = metadata(&attention, &fork, 1);
        let outputs = graphs.queue(&stream, &mut other, &[7], 0..LAYERS).unwrap();
        for (layer, output) in outputs.iter().enumerate() {
            let want = reference(&[&prompt[..], &[7]].concat(), layer).pop().unwrap();
            assert!(output.iter().zip(&want).all(|(got, want)| (got.to_f64() - want).abs() < 0.03), "layer {layer}");
        }
    }
    assert_eq!(attention.states().unwrap().free_slots(), SLOTS);
}

/// Layers of linear attention and their convolutions take all of the padding, what the engine has padded, or none.
#[test]
fn a_part_of_the_padding_is_refused_in_a_replay() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let stream = stream_of(Cann::V9_1);
    let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = metadata(&attention, &sequence, 1);
    metadata.pad_to(3).unwrap();
    let weights = graphs.weights.clone();
    let mut step = graphs.graphs.begin(&stream, &mut metadata).unwrap();
    assert_eq!(step.tokens(), SLOTS);
    for (layer, given) in LINEAR.into_iter().zip([1, 3]) {
        let rows_of = |count: usize| Rows::new(&stream, &[4], count - 1, layer);
        let value_of = |count: usize| {
            let shape = [count, SHAPE.value_heads, SHAPE.value_dim];
            upload(&stream, std::iter::repeat_n(0.0, shape.iter().product()), &shape)
        };
        let parts = [2, 4, SLOTS - 1, SLOTS + 1];
        for part in parts {
            is(step.convolve(layer, (&rows_of(part).mixed, &weights[layer])).map(drop), &rules::STEP_TOKENS);
        }
        step.convolve(layer, (&rows_of(given).mixed, &weights[layer])).unwrap();
        let (rows, value) = (rows_of(given), value_of(given));
        for part in parts {
            is(step.forward(layer, rows_of(part).tensors(&value)).map(drop), &rules::STEP_TOKENS);
            is(step.forward(layer, rows.tensors(&value_of(part))).map(drop), &rules::STEP_TOKENS);
        }
        step.forward(layer, rows_of(SLOTS).tensors(&value)).unwrap();
    }
}

/// Tensors that a graph does not have are refused before anything is written, and the right ones follow.
#[test]
fn captured_layers_of_linear_attention_bring_what_was_captured() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let stream = stream_of(Cann::V9_1);
    let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = metadata(&attention, &sequence, 1);
    let weights = graphs.weights.clone();
    assert_eq!((graphs.graphs.backend(LINEAR[0]), graphs.graphs.backend(FULL)), (None, Some("fused")));
    let mut step = graphs.graphs.begin(&stream, &mut metadata).unwrap();
    let [layer, other] = LINEAR;
    let (rows, longer) = (Rows::new(&stream, &[4], 0, layer), Rows::new(&stream, &[4, 5], 0, layer));
    let zeros = |shape: &[usize]| upload(&stream, std::iter::repeat_n(0.0, shape.iter().product()), shape);
    let value = zeros(&[1, SHAPE.value_heads, SHAPE.value_dim]);
    let wide = zeros(&[1, HEADS, DIM]);

    is(step.forward(layer, rows.tensors(&value)).map(drop), &rules::STEP_CONVOLUTION);
    let own = step.linear_tensors(layer).unwrap();
    is(step.forward(layer, own.inputs()).map(drop), &rules::STEP_CONVOLUTION);
    is(step.linear_tensors(other).map(drop), &rules::STEP_IN_PLACE);
    is(step.convolve(other, (&rows.mixed, &weights[other])).map(drop), &rules::STEP_IN_PLACE);
    is(step.convolve(layer, (&rows.mixed, &weights[other])).map(drop), &rules::GRAPH_INPUTS);
    let bias = zeros(&[CONVOLUTION.channels]);
    let biased = ConvolutionInputs::from((&rows.mixed, &weights[layer])).bias(&bias);
    is(step.convolve(layer, biased).map(drop), &rules::GRAPH_INPUTS);
    is(step.convolve(layer, (&longer.mixed, &weights[layer])).map(drop), &rules::STEP_TOKENS);
    is(step.convolve(FULL, (&rows.mixed, &weights[layer])).map(drop), &rules::STEP_KIND);
    is(step.linear_tensors(LAYERS).map(drop), &rules::ARGUMENT_VALUE);
    is(step.tensors(layer).map(drop), &rules::STEP_KIND);
    step.convolve(layer, (&rows.mixed, &weights[layer])).unwrap();
    is(step.convolve(layer, (&rows.mixed, &weights[layer])).map(drop), &rules::STEP_CONVOLUTION);
    is(step.linear_tensors(FULL).map(drop), &rules::STEP_KIND);

    let tensors = rows.tensors(&value);
    let without = DeltaTensors::new((tensors.query, tensors.key, tensors.value), tensors.beta);
    is(step.forward(layer, without).map(drop), &rules::STEP_LAYERS);
    let columns = stream.upload(&[0.0f32; SHAPE.value_heads * SHAPE.key_dim], [1, SHAPE.value_heads, SHAPE.key_dim]);
    is(step.forward(layer, tensors.gk(&columns.unwrap())).map(drop), &rules::STEP_LAYERS);
    is(step.forward(layer, rows.tensors(&wide)).map(drop), &rules::STEP_HEADS);
    is(step.forward(layer, longer.tensors(&value)).map(drop), &rules::STEP_TOKENS);
    is(step.forward(layer, (&wide, &wide, &wide)).map(drop), &rules::STEP_KIND);
    is(step.forward(FULL, rows.tensors(&value)).map(drop), &rules::STEP_KIND);
    is(step.forward(LAYERS, rows.tensors(&value)).map(drop), &rules::ARGUMENT_VALUE);
    let mut narrow = zeros(&[1, SHAPE.value_heads, SHAPE.value_dim - 1]);
    is(step.forward_into(layer, rows.tensors(&value), &mut narrow), &rules::PLAN_TENSORS);
    let shape = [step.tokens(), SHAPE.value_heads, SHAPE.value_dim];
    // The windows of the other layer.
    let windows = attention.states().unwrap().windows(1).unwrap();
    let of_states = windows.reshape([windows.len()]).unwrap().narrow(0, 0..shape.iter().product()).unwrap();
    let mut of_states = of_states.reshape(shape).unwrap().typed().unwrap();
    is(step.forward_into(layer, rows.tensors(&value), &mut of_states), &rules::ARGUMENT_MEMORY);
    let mut of_graph = step.forward(layer, rows.tensors(&value)).unwrap().clone();
    is(step.forward(layer, rows.tensors(&value)).map(drop), &rules::STEP_LAYER_REPEATED);
    is(step.convolve(layer, (&rows.mixed, &weights[layer])).map(drop), &rules::STEP_LAYER_REPEATED);
    // The tensors of the graph, filled in place.
    let tensors = step.linear_tensors(other).unwrap();
    let x = tensors.x.as_ref().unwrap();
    let own = tensors.value.clone();
    let rows = Rows::new(&stream, &[4], 0, other);
    x.narrow(0, 0..1).unwrap().copy_from(&stream, &rows.mixed).unwrap();
    let y = step.convolve(other, (x, &weights[other])).unwrap();
    let values = y.narrow(1, 0..VALUES).unwrap().contiguous(&stream).unwrap();
    own.copy_from(&stream, &values.reshape(own.shape()).unwrap()).unwrap();
    let own = own.narrow(0, 0..1).unwrap();
    is(step.forward_into(other, rows.tensors(&own), &mut of_graph), &rules::ARGUMENT_MEMORY);
    let mut output = Tensor::empty(stream.device(), shape).unwrap();
    step.forward_into(other, rows.tensors(&own), &mut output).unwrap();
    let got = output.download(&stream).unwrap();
    let want = reference(&[1, 2, 3, 4], other).pop().unwrap();
    assert!(got.iter().zip(&want).all(|(got, want)| (got.to_f64() - want).abs() < 0.03));
}

/// A row of a convolution that is contiguous already is the graph's memory, which the next layer's convolution
/// overwrites.
#[test]
fn rows_that_another_convolution_has_overwritten_are_refused() {
    let stream = stream_of(Cann::V9_1);
    let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = metadata(&attention, &sequence, 1);
    let weights = graphs.weights.clone();
    let mut step = graphs.graphs.begin(&stream, &mut metadata).unwrap();
    let values = SHAPE.value_heads * SHAPE.value_dim;
    let [first, second] = LINEAR.map(|layer| {
        let rows = Rows::new(&stream, &[4], 0, layer);
        let convolved = step.convolve(layer, (&rows.mixed, &weights[layer])).unwrap();
        let value = convolved.narrow(0, 0..1).unwrap().narrow(1, 0..values).unwrap().contiguous(&stream).unwrap();
        (rows, value.reshape([1, SHAPE.value_heads, SHAPE.value_dim]).unwrap())
    });
    is(step.forward(LINEAR[0], first.0.tensors(&first.1)).map(drop), &rules::ARGUMENT_MEMORY);
    step.forward(LINEAR[1], second.0.tensors(&second.1)).unwrap();
}

/// Limits of which nothing can be captured.
#[test]
fn graphs_that_cannot_be_captured_are_refused_by_name() {
    let stream = stream_of(Cann::V9_1);
    let attention = model(&stream, 0);
    let weights = all_weights(&stream);
    let refused = |limits: &GraphLimits, rule| is(capture(&attention, &stream, limits).map(drop), rule);
    let plain = || GraphLimits::new([1], 64);
    // No weights; tokens, weights and sinks that they do not have.
    refused(&plain(), &rules::GRAPH_INPUTS);
    refused(&limits(&weights, 9), &rules::GRAPH_SIZE);
    refused(&plain().convolutions([(weights[0].clone(), None)]), &rules::GRAPH_INPUTS);
    let sinks = (0..LAYERS).map(|layer| (layer != FULL).then(|| stream.upload(&[1.0f32; HEADS], [HEADS]).unwrap()));
    refused(&limits(&weights, 1).learnable_sinks(sinks), &rules::ARGUMENT_VALUE);
    // What the operators refuse: shapes of weights, and from 9.1 on more rows than slots.
    let id = |outcome: Result<AttentionGraphs<bf16>>| match outcome.map(drop).unwrap_err() {
        Error::Violation(violation) => violation.rule.id,
        other => panic!("{other}"),
    };
    let with_weights = |weights: [(Tensor<bf16>, Option<Tensor<bf16>>); 2]| plain().convolutions(weights);
    let narrow = (weights[0].narrow(0, 0..3).unwrap(), None);
    refused(&with_weights([(weights[2].clone(), None), narrow]), &rules::GRAPH_INPUTS);
    let transposed = weights[0].reshape([CONVOLUTION.channels, CONVOLUTION.width]).unwrap();
    refused(&with_weights([(weights[2].clone(), None), (transposed, None)]), &rules::GRAPH_INPUTS);
    let bias = stream.upload(&[bf16::ONE; CONVOLUTION.channels], [CONVOLUTION.channels]).unwrap();
    let one_bias = with_weights([(weights[2].clone(), Some(bias)), (weights[0].clone(), None)]);
    refused(&one_bias, &rules::GRAPH_INPUTS);
    refused(&limits(&weights, 1).tokens_each(0), &rules::GRAPH_SIZE);
    let large = GraphLimits::new([SLOTS + 1], 64).convolutions(linear(&weights));
    let large = capture(&attention, &stream, &large);
    let advice = large.as_ref().map(drop).unwrap_err().to_string();
    assert!(advice.contains(&format!("at least {} slots", SLOTS + 1)), "{advice}");
    assert_eq!(id(large), "recurrent_delta.pool");
    // A model without such layers takes no limits of them.
    let full = Attention::of_groups(1, [group(&stream, 0)]).unwrap();
    is(capture(&full, &stream, &plain().convolutions(linear(&weights))).map(drop), &rules::GRAPH_INPUTS);
    capture(&full, &stream, &plain()).unwrap();
}

/// Two steps of a sequence at a time: the second is refused for that, by graphs and without them.
#[test]
fn a_sequence_that_another_step_writes_is_refused_as_that() {
    let stream = stream_of(Cann::V9_1);
    let (mut attention, mut first, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    let mut second = Graphs::new(&attention, &stream, 1);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut both = [(); 2].map(|()| metadata(&attention, &sequence, 1));
    let [one, other] = &mut both;
    let step = first.graphs.begin(&stream, one).unwrap();
    is(second.graphs.begin(&stream, other).map(drop), &rules::SEQUENCE_IN_PROGRESS);
    is(attention.begin(&stream, other).map(drop), &rules::SEQUENCE_IN_PROGRESS);
    // Given up before it has written anything, the step is the other's.
    drop(step);
    second.queue(&stream, other, &[4], 0..LAYERS).unwrap();
    assert_eq!(attention.computed_tokens(&sequence).unwrap(), 4);
}

/// A replay that fails as no replay may.
extern "C" fn no_replay(_: aclmdlRI, _: aclrtStream) -> aclError {
    507_899
}

/// A replay that may have run in part is not repeated, and nothing goes on from its states.
#[test]
fn a_replay_that_fails_is_refused_afterwards() {
    let Some(mut functions) = harness::functions_of(Cann::V9_1) else { return };
    functions.aclmdlRIExecuteAsync = Some(no_replay);
    let api = Arc::new(Api::from_functions(functions, "emulation whose replays fail"));
    // SAFETY: the functions do what CANN's do, or fail as they may.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut next = metadata(&attention, &sequence, 1);
    let mut step = graphs.graphs.begin(&stream, &mut next).unwrap();
    let failed = |outcome: Result<()>| {
        let failed = outcome.unwrap_err();
        assert!(matches!(failed, Error::Attention(_)), "{failed}");
    };
    let own = step.tensors(FULL).unwrap();
    failed(step.forward(FULL, own.inputs()).map(drop));
    is(step.forward(FULL, own.inputs()).map(drop), &rules::STEP_LAYER_REPEATED);
    let own = step.linear_tensors(LINEAR[0]).unwrap();
    let x = own.x.as_ref().unwrap();
    failed(step.convolve(LINEAR[0], (x, &graphs.weights[LINEAR[0]])).map(drop));
    is(step.convolve(LINEAR[0], (x, &graphs.weights[LINEAR[0]])).map(drop), &rules::STATE_TORN);
    is(step.forward(LINEAR[0], own.inputs()).map(drop), &rules::STATE_TORN);
    drop(step);
    is(attention.begin(&stream, &next).map(drop), &rules::STATE_TORN);
    is(graphs.graphs.begin(&stream, &mut next).map(drop), &rules::STATE_TORN);
    sequence.truncate(0).unwrap();
    attention.grow(&stream, &mut sequence, 2).unwrap();
    drop(attention.begin(&stream, &metadata(&attention, &sequence, 2)).unwrap());
}

/// The range check looks at the inputs and outputs of replayed layers of linear attention, and not at their padding.
#[test]
fn replayed_layers_of_linear_attention_are_checked() {
    let stream = stream_of(Cann::V9_1);
    let (mut attention, mut graphs, mut sequence) = after_a_prompt(&stream, &[1, 2, 3]);
    let mut other = sequence.fork();
    for sequence in [&mut sequence, &mut other] {
        attention.grow(&stream, sequence, 1).unwrap();
    }
    let batch = [&sequence, &other].map(|sequence| BatchRequest::of(sequence, 1));
    let mut next = attention.metadata(&batch, StatePolicy::default()).unwrap();
    attention.set_range_check(RangeCheck::always()).unwrap();
    let weights = graphs.weights.clone();
    let mut step = graphs.graphs.begin(&stream, &mut next).unwrap();
    for layer in LINEAR {
        let rows = Rows::new(&stream, &[4, 5], 0, layer);
        step.convolve(layer, (&rows.mixed, &weights[layer])).unwrap();
        let elements = SHAPE.value_heads * SHAPE.value_dim;
        let mut numbers = vec![0.5; 2 * elements];
        if layer == LINEAR[1] {
            numbers[elements + SHAPE.value_dim + 2] = f64::NAN;
        }
        let value = upload(&stream, numbers.into_iter(), &[2, SHAPE.value_heads, SHAPE.value_dim]);
        step.forward(layer, rows.tensors(&value)).unwrap();
    }
    drop(step);
    let findings = attention.await_range_findings().unwrap();
    let places: Vec<_> =
        findings.iter().map(|found| (found.layer, found.tensor, found.request, found.token, found.head)).collect();
    assert!(places.contains(&(LINEAR[1], LayerTensor::Value, 1, 0, 1)), "{places:?}");
    assert!(places.contains(&(LINEAR[1], LayerTensor::Output, 1, 0, 1)), "{places:?}");
    assert_eq!(places.len(), 2, "{places:?}");
    assert_eq!(findings[0].element, 2);
}
