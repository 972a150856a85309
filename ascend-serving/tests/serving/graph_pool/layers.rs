//! Graphs of single layers, and models with several kinds of layers, against attention by its definition.

use std::num::NonZeroUsize;

use ascend_attention::{FusedInferAttention, Graph, Layout, Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, ChannelScales, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality,
    Error, Fused, GraphLimits, GroupedAttention, GroupedRequest, GroupedSequence, LatentForm,
    LatentTensors, LayerInputs, QuantisedDecode, QuantisedPrefill, rules,
};

use crate::grouped_layers::{
    HEADS, KV_HEADS, POLICY, WINDOW, attention, attention_over, model, shape, with_full_layers,
};
use crate::harness;
use crate::tokens::{DIM, dense, packed};

/// Query, key and value of tokens in a layer.
fn tensors(stream: &Stream, names: &[u64], layer: usize) -> [Tensor<bf16>; 3] {
    [(0, HEADS), (1, KV_HEADS), (2, KV_HEADS)]
        .map(|(what, heads)| packed(stream, names, layer, what, heads))
}

/// Whether a row is the attention of the last of these tokens, which sees `window` keys.
fn check(row: &[bf16], names: &[u64], layer: usize, window: Option<usize>, told: &str) {
    let first = window.map_or(0, |window| names.len().saturating_sub(window));
    let want = dense(names, layer, shape(), |place| place >= first);
    for (got, want) in row.iter().zip(&want) {
        let error = (got.to_f64() - want).abs();
        assert!(
            error <= 1e-2,
            "layer {layer}, {told}: {got}, expected {want}"
        );
    }
}

#[test]
fn one_object_replays_every_layer_with_other_work_in_between() {
    let stream = harness::stream();
    for (format, pad) in [
        (Cache::BnBsH, PadPolicy::SkipNegative),
        (Cache::BnNBsD, PadPolicy::SkipNegative),
        (Cache::BnNBsD, PadPolicy::DumpSlot(5)),
        (Cache::Nz, PadPolicy::SkipNegative),
    ] {
        replays_every_layer(&stream, attention_over(&stream, 3, 24, format, pad));
    }
}

fn replays_every_layer(stream: &Stream, mut attention: Attention<bf16>) {
    let limits = GraphLimits::new([1, 3, 5], 500);
    let mut graphs = attention
        .capture(stream, Causality::Causal, &limits)
        .unwrap();
    assert_eq!(graphs.sizes().collect::<Vec<_>>(), [1, 3, 5]);
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    let mut running: Vec<(Sequence, Vec<u64>)> = Vec::new();
    let mut named = 0;
    for (step, requests) in [1usize, 2, 5, 4, 3, 1, 5].into_iter().enumerate() {
        running.truncate(requests);
        while running.len() < requests {
            // A prompt, computed without a graph.
            let tokens = 1 + 120 * (running.len() % 4);
            let mut sequence = Sequence::new(attention.cache().pool());
            attention.grow(stream, &mut sequence, tokens).unwrap();
            let names: Vec<u64> = (named..named + tokens as u64).collect();
            named += tokens as u64;
            let metadata =
                AttentionMetadata::new(&[BatchRequest::of(&sequence, tokens)], settings).unwrap();
            let mut prefill = attention.begin(stream, &metadata).unwrap();
            for layer in 0..3 {
                let [query, key, value] = tensors(stream, &names, layer);
                prefill.forward(layer, (&query, &key, &value)).unwrap();
            }
            drop(prefill);
            running.push((sequence, names));
        }
        for (sequence, names) in &mut running {
            attention.grow(stream, sequence, 1).unwrap();
            names.push(named);
            named += 1;
        }
        let batch: Vec<_> = running
            .iter()
            .map(|(s, _)| BatchRequest::of(s, 1))
            .collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        assert!(graphs.serves(&metadata));
        let last: Vec<u64> = running
            .iter()
            .map(|(_, names)| *names.last().unwrap())
            .collect();
        // Now and then on another stream, which the buffers and the workspace have to follow.
        let other = stream.device().stream().unwrap();
        stream.synchronize().unwrap();
        let on = if step % 3 == 1 { &other } else { stream };
        let mut replayed = graphs.begin(on, &mut metadata).unwrap();
        for layer in 0..3 {
            // Other work: tensors are made, the host waits for results.
            let [query, key, value] = tensors(on, &last, layer);
            let output = replayed.forward(layer, (&query, &key, &value)).unwrap();
            let rows = output.download(on).unwrap();
            for (request, (_, names)) in running.iter().enumerate() {
                let row = &rows[request * HEADS * DIM..][..HEADS * DIM];
                check(
                    row,
                    names,
                    layer,
                    None,
                    &format!("step {step}, request {request}"),
                );
            }
        }
        let again = replayed.launch(0).unwrap_err();
        assert!(again.breaks(&rules::GRAPH_LAYER), "{again}");
        drop(replayed);
        on.synchronize().unwrap();
    }
}

#[test]
fn graphs_refuse_steps_of_other_forms_layers_and_caches() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 8);
    let limits = GraphLimits::new([2], 300).blocks(4);
    let mut graphs = attention
        .capture(&stream, Causality::Causal, &limits)
        .unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    let mut sequences = [0; 3].map(|_| Sequence::new(attention.cache().pool()));
    for sequence in &mut sequences {
        attention.grow(&stream, sequence, 200).unwrap();
    }
    let mut refused = |batch: &[BatchRequest<'_>], settings| {
        let mut metadata = AttentionMetadata::new(batch, settings).unwrap();
        let before = metadata.clone();
        assert!(!graphs.serves(&metadata));
        match graphs.begin(&stream, &mut metadata).map(drop) {
            Err(Error::Violation(refused)) => {
                assert_eq!(metadata, before, "{refused}");
                refused
            }
            other => panic!("{other:?}"),
        }
    };
    let of = |at: usize, new| BatchRequest::of(&sequences[at], new);
    assert_eq!(refused(&[of(0, 2)], settings).rule, &rules::GRAPH_SIZE);
    let three = [of(0, 1), of(1, 1), of(2, 1)];
    assert_eq!(refused(&three, settings).rule, &rules::GRAPH_SIZE);
    let window = Causality::Window(NonZeroUsize::new(9).unwrap());
    let windowed = BatchSettings::of(attention.cache(), window).policy(POLICY);
    assert_eq!(refused(&[of(0, 1)], windowed).rule, &rules::STEP_CAUSALITY);
    let other = self::attention(&stream, 1, 9);
    let elsewhere = BatchSettings::of(other.cache(), Causality::Causal).policy(POLICY);
    assert_eq!(refused(&[of(0, 1)], elsewhere).rule, &rules::SETTINGS_CACHE);
    attention.grow(&stream, &mut sequences[0], 100).unwrap();
    let of = |at: usize, new| BatchRequest::of(&sequences[at], new);
    // 3 blocks and 2 of another request; 4 were declared.
    let blocks = refused(&[of(0, 1), of(1, 1)], settings);
    assert_eq!(blocks.rule, &rules::GRAPH_LENGTHS);
    assert!(
        blocks.given.starts_with("5 blocks of 2 requests"),
        "{blocks}"
    );
    assert!(blocks.fix.starts_with("preempt a request"), "{blocks}");
    attention.grow(&stream, &mut sequences[0], 1).unwrap();
    let keys = refused(&[BatchRequest::of(&sequences[0], 1)], settings);
    assert_eq!(keys.rule, &rules::GRAPH_LENGTHS);
    assert_eq!(keys.allowed, "at most 300");
    assert_eq!(attention.cache().pool().steps_in_flight(), 0);
    let one = BatchRequest::of(&sequences[1], 1);
    let mut metadata = AttentionMetadata::new(&[one], settings).unwrap();
    assert!(metadata.renew(&[one, one]).is_err() && !graphs.serves(&metadata));
    let none = graphs.begin(&stream, &mut metadata).map(drop).unwrap_err();
    assert!(none.breaks(&rules::BATCH_EMPTY), "{none}");
}

#[test]
fn a_step_that_one_group_refuses_is_padded_in_none() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let limits = GraphLimits::new([4], 300);
    let mut graphs = model.capture(&stream, &limits).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 300).unwrap();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let batch = [GroupedRequest::of(&sequence, 1)];
    let mut metadata = model.metadata(&batch, POLICY).unwrap();
    let before = metadata.clone();
    assert!(!graphs.serves_grouped(&metadata));
    let long = graphs.begin_grouped(&stream, &mut metadata).map(drop);
    assert!(long.unwrap_err().breaks(&rules::GRAPH_LENGTHS));
    assert_eq!(metadata, before);
    // The metadata of one group is not that of the model.
    let mut one = metadata.group(0).unwrap().clone();
    assert!(!graphs.serves(&one));
    let alone = graphs.begin(&stream, &mut one).map(drop);
    assert!(alone.unwrap_err().breaks(&rules::GROUP_LAYERS));
}

#[test]
fn a_layer_that_there_is_not_is_the_same_error_eager_and_by_graphs() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut graphs = model.capture(&stream, &GraphLimits::new([1], 300)).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let batch = [GroupedRequest::of(&sequence, 1)];
    let mut metadata = model.metadata(&batch, POLICY).unwrap();
    let [query, key, value] = tensors(&stream, &[1], 0);
    let mut eager = model.begin(&stream, &metadata).unwrap();
    let none = eager.forward(5, (&query, &key, &value)).unwrap_err();
    drop(eager);
    let mut step = graphs.begin_grouped(&stream, &mut metadata).unwrap();
    let said = none.to_string();
    assert!(
        matches!(&none, Error::Violation(violation) if violation.rule.id == "argument.value"),
        "{said}"
    );
    assert!(said.contains("below 5"), "{said}");
    let forward = step.forward(5, (&query, &key, &value)).unwrap_err();
    assert_eq!(forward.to_string(), said);
    assert_eq!(step.launch(5).unwrap_err().to_string(), said);
    // Rows and heads are checked as those of an eager step, padding aside.
    let rule = |step: &mut ascend_serving::AttentionGraphStep<'_, bf16>, query| match step
        .forward(0, (query, &key, &value))
        .unwrap_err()
    {
        Error::Violation(refused) => refused.rule,
        other => panic!("{other:?}"),
    };
    let two = Tensor::empty(stream.device(), [2, HEADS, DIM]).unwrap();
    let heads = Tensor::empty(stream.device(), [1, HEADS + 1, DIM]).unwrap();
    assert_eq!(rule(&mut step, &two), &rules::STEP_TOKENS);
    assert_eq!(rule(&mut step, &heads), &rules::STEP_HEADS);
    step.forward(0, (&query, &key, &value)).unwrap();
}

/// 64 requests of up to 32768 keys would have 16384 blocks; together they never have more than the 96 that there are.
#[test]
fn many_requests_that_may_each_be_long_are_captured_over_a_small_cache() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 96);
    let mut graphs = attention
        .capture(&stream, Causality::Causal, &GraphLimits::new([64], 32_768))
        .unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    // One of 3000 keys, whose cached ones are zeros, and 63 of one.
    let mut sequences: Vec<_> = (0..64)
        .map(|_| Sequence::new(attention.cache().pool()))
        .collect();
    for (at, sequence) in sequences.iter_mut().enumerate() {
        let tokens = if at == 5 { 3000 } else { 1 };
        attention.grow(&stream, sequence, tokens).unwrap();
        let cache = attention.cache();
        cache.mark_computed(sequence, tokens - 1).unwrap();
    }
    let batch: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let names: Vec<u64> = (1..=64).collect();
    let [query, key, value] = tensors(&stream, &names, 0);
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    let output = step.forward(0, (&query, &key, &value)).unwrap();
    let rows = output.download(&stream).unwrap();
    drop(step);
    for (request, name) in names
        .iter()
        .enumerate()
        .filter(|(request, _)| *request != 5)
    {
        let row = &rows[request * HEADS * DIM..][..HEADS * DIM];
        check(row, &[*name], 0, None, &format!("request {request}"));
    }
    let eager = attention
        .begin(&stream, &metadata)
        .unwrap()
        .forward(0, (&query, &key, &value))
        .unwrap();
    assert_eq!(eager.download(&stream).unwrap(), rows);
}

struct Request {
    sequence: GroupedSequence,
    names: Vec<u64>,
}

/// Chunks, decoding, shared prefixes and preemption, eager and by graphs.
#[test]
fn full_and_windowed_layers_are_one_step() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut graphs = model
        .capture(&stream, &GraphLimits::new([2, 5], 2000).tokens_each(3))
        .unwrap();
    let held = |model: &GroupedAttention<bf16>, group: usize| {
        model.groups()[group]
            .attention()
            .cache()
            .pool()
            .held_blocks()
    };
    let mut running: Vec<Request> = (0..2)
        .map(|_| Request {
            sequence: model.sequence(),
            names: Vec::new(),
        })
        .collect();
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
            run(
                &stream,
                &mut model,
                &mut running[1..2],
                &[tokens],
                None,
                &mut 0,
            );
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
    assert_eq!(
        running[0].sequence.truncate(200).unwrap_err().rule,
        &rules::SEQUENCE_LENGTH
    );
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
    let cache = PagedKvCache::quantised(&stream, 30, 128, shape, pad, &scales).unwrap();
    let backends = Backends::none()
        .with(QuantisedDecode)
        .with(QuantisedPrefill);
    let mut model = with_full_layers(&stream, Attention::new(self::shape(), cache, backends));
    let limits = GraphLimits::new([2, 4], 1000);
    let several = model.capture(&stream, &limits.clone().tokens_each(2));
    let several = several.unwrap_err();
    for rule in [&rules::BACKEND_DECODE, &rules::GRAPH_BACKEND] {
        assert!(several.breaks(rule), "{several}");
    }
    let mut graphs = model.capture(&stream, &limits).unwrap();
    let request = |_| Request {
        sequence: model.sequence(),
        names: Vec::new(),
    };
    let mut running: Vec<Request> = (0..3).map(request).collect();
    let mut named = 0;
    for news in [
        [130, 1, 60],
        [1, 1, 1],
        [1, 1, 1],
        [1, 90, 1],
        [1, 1, 1],
        [1, 1, 1],
    ] {
        let graphs = news.iter().all(|new| *new == 1).then_some(&mut graphs);
        run(&stream, &mut model, &mut running, &news, graphs, &mut named);
    }
}

/// One step, every layer's last row of each request against the definition.
fn run(
    stream: &Stream,
    model: &mut GroupedAttention<bf16>,
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
    let batch: Vec<_> = running
        .iter()
        .zip(news)
        .map(|(request, new)| GroupedRequest::of(&request.sequence, *new))
        .collect();
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
            let mut step = graphs.begin_grouped(stream, &mut metadata).unwrap();
            for layer in 0..5 {
                let [query, key, value] = tensors(stream, &tokens, layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap();
                check(layer, &output.download(stream).unwrap());
            }
        }
        None => {
            metadata
                .pad_to(metadata.tokens().next_multiple_of(4))
                .unwrap();
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
fn graphs_serve_a_step_if_its_padding_fits_too() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 8);
    let limits = GraphLimits::new([1, 4], 300);
    let mut graphs = attention
        .capture(&stream, Causality::Causal, &limits)
        .unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    let mut sequences = [0; 3].map(|_| Sequence::new(attention.cache().pool()));
    for (sequence, tokens) in sequences.iter_mut().zip([300, 300, 200]) {
        attention.grow(&stream, sequence, tokens).unwrap();
        attention.cache().mark_computed(sequence, tokens).unwrap();
    }
    let metadata = |count: usize, new: usize| {
        let batch = sequences.iter().take(count);
        let batch: Vec<_> = batch.map(|s| BatchRequest::of(s, new)).collect();
        AttentionMetadata::new(&batch, settings).unwrap()
    };
    // 3, 3 and 2 blocks; a request of padding takes one more.
    for (count, new, served) in [(1, 1, true), (2, 1, true), (3, 1, false), (1, 2, false)] {
        let mut step = metadata(count, new);
        assert_eq!(graphs.serves(&step), served, "{count} requests of {new}");
        assert_eq!(graphs.begin(&stream, &mut step).is_ok(), served);
    }
    attention.grow(&stream, &mut sequences[0], 1).unwrap();
    let long = BatchRequest::of(&sequences[0], 1);
    let long = AttentionMetadata::new(&[long], settings).unwrap();
    assert!(!graphs.serves(&long), "301 keys of at most 300");
}

/// How a step ends that the next one, on another stream, has to wait for.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// The replay is refused: the thread captures.
    Refused,
    /// Its output is copied on its stream behind the replay.
    Read,
    /// Its tensors are filled, and nothing is replayed.
    Filled,
}

#[test]
fn a_step_on_another_stream_waits_for_all_that_the_one_before_has_queued() {
    for ending in [Ending::Refused, Ending::Read, Ending::Filled] {
        let first = harness::stream();
        let second = first.device().stream().unwrap();
        let of = CacheShape::new(2, 1, DIM);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(first.device(), 8, 128, of, pad).unwrap();
        let shape = AttentionShape::new(1, 1, DIM);
        let mut attention = Attention::<bf16>::new(shape, cache, Backends::none().with(Fused));
        let limits = GraphLimits::new([1], 256);
        let mut graphs = attention
            .capture(&first, Causality::Causal, &limits)
            .unwrap();
        let mut sequences = [0; 2].map(|_| Sequence::new(attention.cache().pool()));
        for sequence in &mut sequences {
            attention.grow(&first, sequence, 1).unwrap();
        }
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let [mut one, mut two] = sequences.each_ref().map(|sequence| {
            AttentionMetadata::new(&[BatchRequest::of(sequence, 1)], settings).unwrap()
        });
        let rows = |stream: &Stream, value: f32| {
            stream
                .upload(&[bf16::from_f32(value); DIM], [1, 1, DIM])
                .unwrap()
        };
        let (ones, twos) = (rows(&first, 1.0), rows(&second, 2.0));
        let mine = rows(&first, 0.0);
        let large = vec![bf16::ONE; 1024 * 8 * 128];
        let large = first.upload(&large, [1, 8, 1024, 128]).unwrap();
        let slow = FusedInferAttention::new(Layout::Bnsd).heads(8).scale(0.1);
        let slow = slow.plan((&large, &large, &large)).unwrap();
        let mut slow_output = slow.output().unwrap();
        let mut keep_busy = || {
            for _ in 0..3 {
                slow.launch_into(&first, (&large, &large, &large), &mut slow_output)
                    .unwrap();
            }
        };
        first.synchronize().unwrap();
        second.synchronize().unwrap();

        let mut step = graphs.begin(&first, &mut one).unwrap();
        match ending {
            Ending::Refused => {
                keep_busy();
                keep_busy();
                step.forward(0, (&ones, &ones, &ones)).unwrap();
                Graph::capture(first.device(), (), |_, ()| {
                    assert!(step.launch(1).is_err());
                    Ok(())
                })
                .unwrap();
            }
            Ending::Read => {
                let output = step.forward(0, (&ones, &ones, &ones)).unwrap();
                keep_busy();
                mine.copy_from(&first, output).unwrap();
            }
            Ending::Filled => {
                keep_busy();
                let tensors = step.tensors(0).unwrap();
                for to in [&tensors.query, &tensors.key, &tensors.value] {
                    to.copy_from(&first, &ones).unwrap();
                }
            }
        }
        let queued = first.record_event().unwrap();
        drop(step);
        let mut step = graphs.begin(&second, &mut two).unwrap();
        assert!(queued.is_complete().unwrap(), "{ending:?}");
        let output = step.forward(0, (&twos, &twos, &twos)).unwrap();
        let output = output.download(&second).unwrap();
        assert_eq!(output, [bf16::from_f32(2.0); DIM], "{ending:?}");
        drop(step);
        if let Ending::Read = ending {
            assert_eq!(mine.download(&first).unwrap(), [bf16::ONE; DIM]);
        }
        let keys = attention.cache().layer(0).unwrap().key.clone();
        let keys = keys.download(&first).unwrap();
        let key = |sequence: &Sequence| keys[sequence.slot(0).unwrap() * DIM];
        let [_, of_second] = &sequences;
        assert_eq!(key(of_second), bf16::from_f32(2.0), "{ending:?}");
    }
}

#[test]
fn sinks_of_one_group_are_captured_without_those_of_another() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let sink = stream.upload(&[bf16::from_f32(2.0); HEADS], [HEADS]);
    let sink = sink.unwrap();
    // Layers 1 and 4 are of one group.
    let of = |layer: usize| [1, 4].contains(&layer).then(|| sink.clone());
    let limits = GraphLimits::new([2], 500).learnable_sinks((0..5).map(of));
    let mut graphs = model.capture(&stream, &limits).unwrap();
    let mut sequence = model.sequence();
    let names: Vec<u64> = (1..=42).collect();
    for new in [41, 1] {
        model.grow(&stream, &mut sequence, new).unwrap();
        let known = &names[..sequence.len()];
        let tokens = &known[known.len() - new..];
        let request = GroupedRequest::of(&sequence, new);
        let mut metadata = model.metadata(&[request], POLICY).unwrap();
        let mut step = model.begin(&stream, &metadata).unwrap();
        let mut eager = Vec::new();
        for layer in 0..5 {
            let [query, key, value] = tensors(&stream, tokens, layer);
            let own = of(layer);
            let mut inputs = LayerInputs::from((&query, &key, &value));
            inputs.learnable_sink = own.as_deref();
            let output = step.forward(layer, inputs);
            eager.push(output.unwrap().download(&stream).unwrap());
        }
        drop(step);
        if new > 1 {
            continue;
        }
        let mut step = graphs.begin_grouped(&stream, &mut metadata).unwrap();
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
            let tensors = LatentTensors {
                query_rope: &query,
                form: LatentForm::Absorbed,
            };
            let latent = LayerInputs::latent(&query, &key, &value, tensors);
            let why = step.forward(layer, latent).map(drop).unwrap_err();
            assert!(why.breaks(&rules::GRAPH_INPUTS), "{why}");
            let (own, causal) = (of(layer), Causality::Causal.into());
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
        model.capture(&stream, &limits).map(drop).unwrap_err()
    };
    let half = refused(
        (0..5)
            .map(|layer| (layer == 4).then(|| sink.clone()))
            .collect(),
    );
    assert!(half.breaks(&rules::STEP_LAYERS), "{half}");
    // Memory of another device is refused before anything is captured.
    let other = harness::runtime().device(1).unwrap();
    let far: Tensor<bf16> = Tensor::empty(&other, [HEADS]).unwrap();
    let far = refused(
        (0..5)
            .map(|layer| (layer % 3 == 1).then(|| far.clone()))
            .collect(),
    );
    match far {
        Error::Violation(violation) => {
            assert!(
                violation.given.starts_with("learnable_sinks: "),
                "{violation}"
            )
        }
        other => panic!("{other}"),
    }
}
