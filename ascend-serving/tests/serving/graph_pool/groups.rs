//! Layers of several kinds, full and windowed, with sinks or quantised, as one captured step.

use super::layers::{check, tensors};
use crate::grouped_layers::{HEADS, KV_HEADS, POLICY, WINDOW, model, with_full_layers};
use crate::harness;
use crate::tokens::DIM;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, ChannelScales, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, Backend, Backends, BatchRequest, Causality, Error, GraphLimits, LatentForm, LatentTensors, LayerInputs,
    rules,
};
use std::num::NonZeroUsize;

#[test]
fn a_step_that_one_group_refuses_is_padded_in_none() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let limits = GraphLimits::new([4], 300);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 300).unwrap();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let mut metadata = model.metadata(&batch, POLICY).unwrap();
    let before = metadata.clone();
    assert!(!graphs.serves(&metadata));
    let long = graphs.begin(&stream, &mut metadata).map(drop);
    assert!(long.unwrap_err().breaks(&rules::GRAPH_LENGTHS));
    assert_eq!(metadata, before);
    // The metadata of one group is not that of the model.
    let mut one = metadata.group(1).unwrap().clone();
    assert!(!graphs.serves(&one));
    let alone = graphs.begin(&stream, &mut one).map(drop);
    assert!(alone.unwrap_err().breaks(&rules::GROUP_LAYERS));
}

struct Request {
    sequence: Sequence,
    names: Vec<u64>,
}

/// Chunks, decoding, shared prefixes and preemption, eager and by graphs.
#[test]
fn full_and_windowed_layers_are_one_step() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut graphs = model
        .capture_layers(&stream, |layer| model.mask(layer), &GraphLimits::new([2, 5], 2000).tokens_each(3))
        .unwrap();
    let held = |model: &Attention<bf16>, group: usize| model.groups()[group].cache().pool().held_blocks();
    let mut running: Vec<Request> = (0..2).map(|_| Request { sequence: model.sequence(), names: Vec::new() }).collect();
    let mut named = 0;
    let mut replays = 0;
    // What each request adds in each step; a request that is not there shares the first one's tokens.
    let steps: [&[usize]; 18] = [
        &[300, 40],
        &[200, 1],
        &[150, 1],
        &[1, 1],
        &[1, 1],
        &[1, 130, 7],
        &[1, 1, 1],
        &[1, 1, 1],
        &[300, 1, 1],
        &[1, 1, 1, 5],
        &[1, 1, 1, 1],
        &[1, 1, 1, 1],
        &[1, 1, 1, 1],
        &[1, 1],
        &[150, 1],
        &[3, 3],
        &[1, 1],
        &[2, 1],
    ];
    for (step, news) in steps.into_iter().enumerate() {
        running.truncate(news.len());
        while running.len() < news.len() {
            let donor = &running[0];
            let tokens = donor.sequence.len() - 1;
            let sequence = donor.sequence.share_prefix(tokens).unwrap();
            let names = donor.names[..tokens].to_vec();
            running.push(Request { sequence, names });
        }
        if step == 11 {
            // Preempted, and computed again from its tokens.
            let request = &mut running[1];
            request.sequence.truncate(0).unwrap();
            let tokens = request.names.len();
            run(&stream, &mut model, &mut running[1..2], &[tokens], None, &mut 0);
        }
        let few = news.iter().all(|new| *new <= 3);
        let graphs = (few && (step % 2 == 0 || step > 14)).then_some(&mut graphs);
        replays += usize::from(graphs.is_some());
        run(&stream, &mut model, &mut running, news, graphs, &mut named);
        stream.synchronize().unwrap();
        // The window, one step's tokens, and the blocks in which both begin.
        let most = news.iter().map(|new| (WINDOW - 1 + new) / 128 + 2);
        assert!(held(&model, 1) <= most.sum(), "step {step}");
    }
    assert!(replays == 7 && held(&model, 0) > held(&model, 1));
    // What the window shows no more cannot be shared.
    let early = running[0].sequence.share_prefix(200).unwrap_err();
    assert_eq!(early.rule, &rules::SEQUENCE_LENGTH);
    assert_eq!(running[0].sequence.truncate(200).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
    drop(running);
    stream.synchronize().unwrap();
    assert_eq!((held(&model, 0), held(&model, 1)), (0, 0));
}

/// Layers that see every key are INT8, those with a window of 16 bits: decodes of both are replayed from graphs.
#[test]
fn int8_layers_and_windowed_ones_are_one_captured_step() {
    let stream = harness::stream();
    let shape = CacheShape::new(2, KV_HEADS, DIM);
    // Numbers are between -1 and 1.
    let scales = [0, 1].map(|_| ChannelScales::uniform(&shape, 1.0 / 127.0, 1.0 / 127.0).unwrap());
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::quantised(&stream, 30, 128, shape, pad, QuantisedType::Int8, &scales).unwrap();
    let backends = Backends::none().with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill);
    let mut model = with_full_layers(&stream, cache, backends);
    let limits = GraphLimits::new([2, 4], 1000);
    let several = model.capture_layers(&stream, |layer| model.mask(layer), &limits.clone().tokens_each(2));
    let several = several.unwrap_err();
    for rule in [&rules::BACKEND_DECODE, &rules::GRAPH_BACKEND] {
        assert!(several.breaks(rule), "{several}");
    }
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
    let request = |_| Request { sequence: model.sequence(), names: Vec::new() };
    let mut running: Vec<Request> = (0..3).map(request).collect();
    let mut named = 0;
    for news in [[130, 1, 60], [1, 1, 1], [1, 1, 1], [1, 90, 1], [1, 1, 1], [1, 1, 1]] {
        let graphs = news.iter().all(|new| *new == 1).then_some(&mut graphs);
        run(&stream, &mut model, &mut running, &news, graphs, &mut named);
    }
}

/// One step, every layer's last row of each request against the definition.
fn run(
    stream: &Stream,
    model: &mut Attention<bf16>,
    running: &mut [Request],
    news: &[usize],
    graphs: Option<&mut ascend_serving::AttentionGraphs<bf16>>,
    named: &mut u64,
) {
    for (request, new) in running.iter_mut().zip(news) {
        model.grow(stream, &mut request.sequence, *new).unwrap();
        while request.names.len() < request.sequence.len() {
            *named += 1;
            request.names.push(*named);
        }
    }
    let batch: Vec<_> =
        running.iter().zip(news).map(|(request, new)| BatchRequest::of(&request.sequence, *new)).collect();
    let mut metadata = model.metadata(&batch, POLICY).unwrap();
    let mut tokens = Vec::new();
    for (request, new) in running.iter().zip(news) {
        tokens.extend_from_slice(&request.names[request.names.len() - *new..]);
    }
    let windows: Vec<Option<usize>> = (0..5)
        .map(|layer| {
            let group = model.groups().iter().find(|g| g.layers().contains(&layer));
            group.unwrap().causality().window().map(NonZeroUsize::get)
        })
        .collect();
    let check = |layer: usize, rows: &[bf16]| {
        let mut end = 0;
        for (request, new) in running.iter().zip(news) {
            end += *new;
            let row = &rows[(end - 1) * HEADS * DIM..][..HEADS * DIM];
            let told = format!("{} tokens", request.names.len());
            check(row, &request.names, layer, windows[layer], &told);
        }
    };
    match graphs {
        Some(graphs) => {
            let mut step = graphs.begin(stream, &mut metadata).unwrap();
            for layer in 0..5 {
                let [query, key, value] = tensors(stream, &tokens, layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap();
                check(layer, &output.download(stream).unwrap());
            }
        }
        None => {
            metadata.pad_to(metadata.tokens().next_multiple_of(4)).unwrap();
            tokens.resize(metadata.tokens(), 0);
            let mut step = model.begin(stream, &metadata).unwrap();
            for layer in 0..5 {
                let [query, key, value] = tensors(stream, &tokens, layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap();
                check(layer, &output.download(stream).unwrap());
            }
        }
    }
}

#[test]
fn sinks_of_one_group_are_captured_without_those_of_another() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let sink = stream.upload(&[bf16::from_f32(2.0); HEADS], [HEADS]);
    let sink = sink.unwrap();
    // Layers 1 and 4 are of one group.
    let sink_of = |layer: usize| [1, 4].contains(&layer).then(|| sink.clone());
    let limits = GraphLimits::new([2], 500).learnable_sinks((0..5).map(sink_of));
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &limits).unwrap();
    let mut sequence = model.sequence();
    let names: Vec<u64> = (1..=42).collect();
    for new in [41, 1] {
        model.grow(&stream, &mut sequence, new).unwrap();
        let known = &names[..sequence.len()];
        let tokens = &known[known.len() - new..];
        let request = BatchRequest::of(&sequence, new).recompute();
        let mut metadata = model.metadata(&[request], POLICY).unwrap();
        let mut step = model.begin(&stream, &metadata).unwrap();
        let mut eager = Vec::new();
        for layer in 0..5 {
            let [query, key, value] = tensors(&stream, tokens, layer);
            let own = sink_of(layer);
            let mut inputs = LayerInputs::from((&query, &key, &value));
            inputs.learnable_sink = own.as_deref();
            let output = step.forward(layer, inputs);
            eager.push(output.unwrap().download(&stream).unwrap());
        }
        drop(step);
        if new > 1 {
            continue;
        }
        let mut step = graphs.begin(&stream, &mut metadata).unwrap();
        for (layer, eager) in eager.iter().enumerate() {
            let [query, key, value] = tensors(&stream, tokens, layer);
            let inputs = LayerInputs::from((&query, &key, &value));
            // What belongs to the capture is refused if it is another, and may be given again.
            let other = stream.upload(&[bf16::ONE; HEADS], [HEADS]).unwrap();
            let why = step.forward(layer, inputs.learnable_sink(&other));
            let why = why.map(drop).unwrap_err();
            assert!(why.breaks(&rules::GRAPH_INPUTS), "{why}");
            let bidirectional = Causality::Bidirectional.into();
            let why = step.forward(layer, inputs.mask(&bidirectional));
            let why = why.map(drop).unwrap_err();
            assert!(why.breaks(&rules::STEP_CAUSALITY), "{why}");
            let tensors = LatentTensors { query_rope: &query, form: LatentForm::Absorbed };
            let latent = LayerInputs::latent(&query, &key, &value, tensors);
            let why = step.forward(layer, latent).map(drop).unwrap_err();
            assert!(why.breaks(&rules::GRAPH_INPUTS), "{why}");
            let (own, causal) = (sink_of(layer), Causality::Causal.into());
            let inputs = match &own {
                Some(sink) => inputs.mask(&causal).learnable_sink(sink),
                None => inputs,
            };
            let output = step.forward(layer, inputs).unwrap();
            let rows = output.download(&stream).unwrap();
            assert_eq!(rows[..eager.len()], eager[..], "layer {layer}");
        }
    }
    let refused = |sinks: Vec<Option<Tensor<bf16>>>| {
        let limits = GraphLimits::new([2], 500).learnable_sinks(sinks);
        model.capture_layers(&stream, |layer| model.mask(layer), &limits).map(drop).unwrap_err()
    };
    let half = refused((0..5).map(|layer| (layer == 4).then(|| sink.clone())).collect());
    assert!(half.breaks(&rules::STEP_LAYERS), "{half}");
    let short = refused(vec![Some(sink.clone()); 4]);
    assert!(short.to_string().contains("one entry for each layer"), "{short}");
    // Memory of another device is refused before anything is captured.
    let other = harness::runtime().device(1).unwrap();
    let far: Tensor<bf16> = Tensor::empty(&other, [HEADS]).unwrap();
    let far = refused((0..5).map(|layer| (layer % 3 == 1).then(|| far.clone())).collect());
    match far {
        Error::Violation(violation) => {
            assert!(violation.given.starts_with("learnable_sinks: "), "{violation}")
        }
        other => panic!("{other}"),
    }
}
