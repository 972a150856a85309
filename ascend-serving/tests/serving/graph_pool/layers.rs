//! Graphs of single layers, and models with several kinds of layers, against attention by its definition.

use crate::grouped_layers::{HEADS, KV_HEADS, POLICY, attention, attention_over, model, shape};
use crate::harness;
use crate::tokens::{DIM, dense, packed};
use ascend_attention::spec::Rule;
use ascend_attention::{FusedInferAttention, Graph, Layout, Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionGraphs, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings,
    Causality, Error, GraphLimits, rules,
};
use std::num::NonZeroUsize;

/// Query, key and value of tokens in a layer.
pub fn tensors(stream: &Stream, names: &[u64], layer: usize) -> [Tensor<bf16>; 3] {
    [(0, HEADS), (1, KV_HEADS), (2, KV_HEADS)].map(|(what, heads)| packed(stream, names, layer, what, heads))
}

/// Whether a row is the attention of the last of these tokens, which sees `window` keys.
pub(super) fn check(row: &[bf16], names: &[u64], layer: usize, window: Option<usize>, told: &str) {
    let first = window.map_or(0, |window| names.len().saturating_sub(window));
    let want = dense(names, layer, shape(), |place| place >= first);
    for (got, want) in row.iter().zip(&want) {
        let error = (got.to_f64() - want).abs();
        assert!(error <= 1e-2, "layer {layer}, {told}: {got}, expected {want}");
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
    let mut graphs = attention.capture(stream, Causality::Causal, &limits).unwrap();
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
            let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, tokens)], settings).unwrap();
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
        let batch: Vec<_> = running.iter().map(|(s, _)| BatchRequest::of(s, 1)).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        assert!(graphs.serves(&metadata));
        let last: Vec<u64> = running.iter().map(|(_, names)| *names.last().unwrap()).collect();
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
                check(row, names, layer, None, &format!("step {step}, request {request}"));
            }
        }
        let [query, key, value] = tensors(on, &last, 0);
        let again = replayed.forward(0, (&query, &key, &value)).unwrap_err();
        assert!(again.breaks(&rules::STEP_LAYER_REPEATED), "{again}");
        drop(replayed);
        on.synchronize().unwrap();
    }
}

#[test]
fn graphs_refuse_steps_of_other_forms_layers_and_caches() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 8);
    let limits = GraphLimits::new([2], 300).blocks(4);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
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
    assert!(blocks.given.starts_with("5 blocks of 2 requests"), "{blocks}");
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
fn a_layer_that_there_is_not_is_the_same_error_eager_and_by_graphs() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &GraphLimits::new([1], 300)).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let mut metadata = model.metadata(&batch, POLICY).unwrap();
    let [query, key, value] = tensors(&stream, &[1], 0);
    let mut eager = model.begin(&stream, &metadata).unwrap();
    let none = eager.forward(5, (&query, &key, &value)).unwrap_err();
    drop(eager);
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    let said = none.to_string();
    assert!(matches!(&none, Error::Violation(violation) if violation.rule.id == "argument.value"), "{said}");
    assert!(said.contains("below 5"), "{said}");
    let forward = step.forward(5, (&query, &key, &value)).unwrap_err();
    assert_eq!(forward.to_string(), said);
    assert_eq!(step.tensors(5).unwrap_err().to_string(), said);
    // Rows and heads are checked as those of an eager step, padding aside.
    let rule =
        |step: &mut ascend_serving::Step<'_, bf16>, query| match step.forward(0, (query, &key, &value)).unwrap_err() {
            Error::Violation(refused) => refused.rule,
            other => panic!("{other:?}"),
        };
    let two = Tensor::empty(stream.device(), [2, HEADS, DIM]).unwrap();
    let heads = Tensor::empty(stream.device(), [1, HEADS + 1, DIM]).unwrap();
    assert_eq!(rule(&mut step, &two), &rules::STEP_TOKENS);
    assert_eq!(rule(&mut step, &heads), &rules::STEP_HEADS);
    step.forward(0, (&query, &key, &value)).unwrap();
}

/// A part of the padding is neither with it nor without it; what the engine has padded itself is the engine's batch.
#[test]
fn a_part_of_the_padding_is_refused_in_a_replay() {
    let stream = harness::stream();
    let mut model = model(&stream);
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &GraphLimits::new([6], 300)).unwrap();
    let mut sequence = model.sequence();
    model.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = model.metadata(&[BatchRequest::of(&sequence, 1)], POLICY).unwrap();
    metadata.pad_to(3).unwrap();
    // Begun again, the step no longer has the rows of the engine's own padding.
    for (given, said) in [(vec![1, 3, 6], "all or those behind the first 3 rows"), (vec![1, 6], "as a whole")] {
        let mut step = graphs.begin(&stream, &mut metadata).unwrap();
        assert_eq!(step.tokens(), 6);
        for (layer, rows) in given.iter().enumerate() {
            let good = tensors(&stream, &vec![1; *rows], layer);
            for part in (0..8).filter(|part| !given.contains(part)) {
                let wrong = tensors(&stream, &vec![1; part], layer);
                for place in 0..3 {
                    let mut inputs = good.each_ref();
                    inputs[place] = &wrong[place];
                    let refused = step.forward(layer, (inputs[0], inputs[1], inputs[2])).unwrap_err();
                    assert!(refused.breaks(&rules::STEP_TOKENS), "{refused}");
                    let text = refused.to_string();
                    assert!(text.contains("1 rows of the requests and 5 of padding, which may be left out"), "{text}");
                    assert!(text.contains(said) && text.contains("all rows (`tokens` of the step) or none"), "{text}");
                }
            }
            let [query, key, value] = &good;
            let output = step.forward(layer, (query, key, value)).unwrap();
            check(&output.download(&stream).unwrap()[..HEADS * DIM], &[1], layer, None, &format!("{rows} rows"));
        }
    }
}

/// The padding of a replay that was dropped counts for nothing: the step is begun again, with a graph or without one.
#[test]
fn a_step_whose_replay_was_dropped_is_computed_either_way() {
    let stream = harness::stream();
    for pad in [PadPolicy::SkipNegative, PadPolicy::DumpSlot(5)] {
        let mut attention = attention_over(&stream, 2, 24, Cache::BnBsH, pad);
        let mut graphs = attention.capture(&stream, Causality::Causal, &GraphLimits::new([2, 4], 300)).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
        let mut running = [0, 100].map(|first| (Sequence::new(attention.cache().pool()), vec![first, first + 1]));
        for (sequence, names) in &mut running {
            attention.grow(&stream, sequence, 2).unwrap();
            let metadata = AttentionMetadata::new(&[BatchRequest::of(sequence, 2)], settings).unwrap();
            let mut step = attention.begin(&stream, &metadata).unwrap();
            for layer in 0..2 {
                let [query, key, value] = tensors(&stream, names, layer);
                step.forward(layer, (&query, &key, &value)).unwrap();
            }
            step.end().unwrap();
        }
        for (turn, replayed) in [true, false, true, false].into_iter().enumerate() {
            // One request is padded to 2, or both and another begin to 4.
            let batch = &mut running[..1 + turn / 2];
            for (sequence, names) in &mut *batch {
                attention.grow(&stream, sequence, 1).unwrap();
                names.push(200 + 10 * turn as u64 + names[0]);
            }
            let requests: Vec<_> = batch.iter().map(|(sequence, _)| BatchRequest::of(sequence, 1)).collect();
            let mut metadata = AttentionMetadata::new(&requests, settings).unwrap();
            if turn > 1 {
                metadata.pad_to(3).unwrap();
            }
            let mut dropped = graphs.begin(&stream, &mut metadata).unwrap();
            let [query, key, value] = tensors(&stream, &vec![900; batch.len()], 0);
            dropped.forward(0, (&query, &key, &value)).unwrap();
            drop(dropped);
            let padded = [2, 2, 4, 4][turn];
            assert_eq!([metadata.tokens(), metadata.actual_tokens()], [padded, batch.len()]);
            let mut rows: Vec<u64> = batch.iter().map(|(_, names)| *names.last().unwrap()).collect();
            rows.resize(padded, 901);
            let compared = |layer: usize, output: &Tensor<bf16>| {
                let output = output.download(&stream).unwrap();
                for (row, (_, names)) in output.chunks(HEADS * DIM).zip(&*batch) {
                    check(row, names, layer, None, &format!("turn {turn}"));
                }
            };
            if replayed {
                let mut step = graphs.begin(&stream, &mut metadata).unwrap();
                for layer in 0..2 {
                    let [query, key, value] = tensors(&stream, &rows, layer);
                    compared(layer, step.forward(layer, (&query, &key, &value)).unwrap());
                }
                step.end().unwrap();
            } else {
                let mut step = attention.begin(&stream, &metadata).unwrap();
                for layer in 0..2 {
                    let [query, key, value] = tensors(&stream, &rows, layer);
                    compared(layer, step.forward(layer, (&query, &key, &value)).unwrap());
                }
                step.end().unwrap();
            }
        }
    }
}

/// 64 requests of up to 32768 keys would have 16384 blocks; together they never have more than the 96 that there are.
#[test]
fn many_requests_that_may_each_be_long_are_captured_over_a_small_cache() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 96);
    let mut graphs = attention.capture(&stream, Causality::Causal, &GraphLimits::new([64], 32_768)).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    // One of 3000 keys, whose cached ones are zeros, and 63 of one.
    let mut sequences: Vec<_> = (0..64).map(|_| Sequence::new(attention.cache().pool())).collect();
    for (at, sequence) in sequences.iter_mut().enumerate() {
        let tokens = if at == 5 { 3000 } else { 1 };
        attention.grow(&stream, sequence, tokens).unwrap();
        let cache = attention.cache();
        cache.mark_computed(sequence, tokens - 1).unwrap();
    }
    let batch = sequences.iter();
    let batch: Vec<_> = batch.map(|s| BatchRequest::of(s, 1).recompute()).collect();
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let names: Vec<u64> = (1..=64).collect();
    let [query, key, value] = tensors(&stream, &names, 0);
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    let output = step.forward(0, (&query, &key, &value)).unwrap();
    let rows = output.download(&stream).unwrap();
    drop(step);
    for (request, name) in names.iter().enumerate().filter(|(request, _)| *request != 5) {
        let row = &rows[request * HEADS * DIM..][..HEADS * DIM];
        check(row, &[*name], 0, None, &format!("request {request}"));
    }
    let eager = attention.begin(&stream, &metadata).unwrap().forward(0, (&query, &key, &value)).unwrap().clone();
    assert_eq!(eager.download(&stream).unwrap(), rows);
}

#[test]
fn graphs_serve_a_step_if_its_padding_fits_too() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 8);
    let limits = GraphLimits::new([1, 4], 300);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    let mut sequences = [0; 3].map(|_| Sequence::new(attention.cache().pool()));
    for (sequence, tokens) in sequences.iter_mut().zip([300, 300, 200]) {
        attention.grow(&stream, sequence, tokens).unwrap();
        attention.cache().mark_computed(sequence, tokens).unwrap();
    }
    let metadata = |count: usize, new: usize| {
        let batch = sequences.iter().take(count);
        let batch: Vec<_> = batch.map(|s| BatchRequest::of(s, new).recompute()).collect();
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

/// Graphs serve no step that they would not begin, whatever became of its sequence, and the next right one.
#[test]
fn steps_that_graphs_serve_begin() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1, 8);
    let mut graphs = attention.capture(&stream, Causality::Causal, &GraphLimits::new([1], 300)).unwrap();
    let refuse = |graphs: &mut AttentionGraphs<bf16>, metadata: &AttentionMetadata, rule: &'static Rule| {
        assert!(!graphs.serves(metadata), "{rule:?}");
        let refused = graphs.begin(&stream, &mut metadata.clone()).unwrap_err();
        assert!(refused.breaks(rule), "{refused}");
    };
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 9).unwrap();
    attention.cache().mark_computed(&sequence, 9).unwrap();
    // Tokens have moved, and the sequence is not cut.
    attention.cache_mut().move_tokens(&stream, &sequence, [(8, 7)]).unwrap();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let metadata = |attention: &Attention<bf16>, sequence: &Sequence| {
        attention.metadata(&[BatchRequest::of(sequence, 1)], POLICY).unwrap()
    };
    refuse(&mut graphs, &metadata(&attention, &sequence), &rules::SEQUENCE_MOVED);
    // Tokens in front of the step are not computed.
    sequence.truncate(8).unwrap();
    attention.grow(&stream, &mut sequence, 2).unwrap();
    refuse(&mut graphs, &metadata(&attention, &sequence), &rules::SEQUENCE_GAP);
    sequence.truncate(9).unwrap();
    let mut own = metadata(&attention, &sequence);
    // Another step of the sequence is in progress.
    let step = attention.begin(&stream, &own).unwrap();
    refuse(&mut graphs, &own, &rules::SEQUENCE_IN_PROGRESS);
    drop(step);
    let old = own.clone();
    assert!(graphs.serves(&own));
    let mut step = graphs.begin(&stream, &mut own).unwrap();
    let [query, key, value] = tensors(&stream, &[8], 0);
    step.forward(0, (&query, &key, &value)).unwrap();
    step.end().unwrap();
    refuse(&mut graphs, &old, &rules::SEQUENCE_COMPUTED);
    attention.grow(&stream, &mut sequence, 1).unwrap();
    refuse(&mut graphs, &old, &rules::SEQUENCE_CHANGED);
    let next = metadata(&attention, &sequence);
    drop(sequence);
    refuse(&mut graphs, &next, &rules::BLOCK_GIVEN_BACK);
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
        let mut attention = Attention::<bf16>::new(shape, cache, Backends::none().with(Backend::Fused));
        let limits = GraphLimits::new([1], 256);
        let mut graphs = attention.capture(&first, Causality::Causal, &limits).unwrap();
        let mut sequences = [0; 2].map(|_| Sequence::new(attention.cache().pool()));
        for sequence in &mut sequences {
            attention.grow(&first, sequence, 1).unwrap();
        }
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let [mut one, mut two] = sequences
            .each_ref()
            .map(|sequence| AttentionMetadata::new(&[BatchRequest::of(sequence, 1)], settings).unwrap());
        let rows = |stream: &Stream, value: f32| stream.upload(&[bf16::from_f32(value); DIM], [1, 1, DIM]).unwrap();
        let (ones, twos) = (rows(&first, 1.0), rows(&second, 2.0));
        let mine = rows(&first, 0.0);
        let large = vec![bf16::ONE; 1024 * 8 * 128];
        let large = first.upload(&large, [1, 8, 1024, 128]).unwrap();
        let slow = FusedInferAttention::new(Layout::Bnsd).heads(8).scale(0.1);
        let slow = slow.plan((&large, &large, &large)).unwrap();
        let mut slow_output = slow.output().unwrap();
        let mut keep_busy = || {
            for _ in 0..3 {
                slow.launch_into(&first, (&large, &large, &large), &mut slow_output).unwrap();
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
                let own = step.tensors(1).unwrap();
                Graph::capture(first.device(), (), |_, ()| {
                    assert!(step.forward(1, own.inputs()).is_err());
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

/// Inputs in their own places of the graph are not copied; those in other places are refused before any is.
#[test]
fn inputs_may_be_in_their_places_of_the_graph() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 3, 8);
    let limits = GraphLimits::new([2], 300);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(POLICY);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let mut step = graphs.begin(&stream, &mut metadata).unwrap();
    for layer in 0..3 {
        let own = step.tensors(layer).unwrap();
        let own = [&own.query, &own.key, &own.value];
        let given = tensors(&stream, &[7], layer);
        let first = own.each_ref().map(|own| own.narrow(0, 0..1).unwrap());
        let second = own.each_ref().map(|own| own.narrow(0, 1..2).unwrap());
        let key_as_query = own[1].reshape([1, HEADS, DIM]).unwrap();
        let from_second_head = own[1].reshape([4, 1, DIM]).unwrap().narrow(0, 1..3).unwrap();
        let from_second_head = from_second_head.reshape([1, KV_HEADS, DIM]).unwrap();
        for (inputs, places) in [
            ([&key_as_query, &given[1], &given[2]], ["query", "key"]),
            ([&given[0], &first[2], &given[2]], ["key", "value"]),
            ([&given[0], &from_second_head, &given[2]], ["key", "key"]),
        ] {
            let [query, key, value] = inputs;
            let refused = step.forward(layer, (query, key, value)).map(drop).unwrap_err();
            let [name, other] = places;
            let says =
                format!("given {name}: memory that is shared with the first rows of the graph's tensor `{other}`");
            assert!(refused.breaks(&rules::ARGUMENT_MEMORY) && refused.to_string().contains(&says), "{refused}");
        }
        // The row behind the first holds nothing that a copy to the first could overwrite.
        for (place, given) in second.iter().zip(&given) {
            place.copy_from(&stream, given).unwrap();
        }
        let [query, key, value] = &second;
        // What the refusals advise: the place itself, as a whole or its first rows, beside memory of the caller.
        let inputs = match layer {
            0 => (query, key, value),
            1 => {
                own[0].narrow(0, 0..1).unwrap().copy_from(&stream, &given[0]).unwrap();
                first[2].copy_from(&stream, &given[2]).unwrap();
                (own[0], &given[1], &first[2])
            }
            _ => {
                for (place, given) in first.iter().zip(&given) {
                    place.copy_from(&stream, given).unwrap();
                }
                (&first[0], &first[1], own[2])
            }
        };
        let rows = step.forward(layer, inputs).unwrap().download(&stream).unwrap();
        check(&rows[..HEADS * DIM], &[7], layer, None, "in place");
    }
    step.end().unwrap();
}
