//! Captured graphs: a replay is what the calls would compute now, in whatever order it is asked for, and nothing is
//! lost.

use crate::harness;
use ascend_attention::spec::Rule;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::graph::{CapturedCall, Capturing, GraphGroup};
use ascend_attention::merge::{EmptyRows, MergeState, Part};
use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
use ascend_attention::{
    Device, Error, FusedInferAttention, Graph, Layout, Output, Plan, Result, Stream, Tensor, f16, rules,
};
use harness::gate::Gate;
use harness::{halves, still_works};

const BATCH: usize = 3;
const HEADS: usize = 2;
const DIM: usize = 64;
const HIDDEN: usize = HEADS * DIM;
const BLOCKS: usize = 24;
const BLOCK_SIZE: usize = 16;
const COLUMNS: usize = 8;
const LONGEST: usize = COLUMNS * BLOCK_SIZE;
/// Some wait is for ever if it takes longer than this.
const LIMIT: Duration = Duration::from_secs(60);

/// One layer of a decode step.
struct Layer {
    query: Tensor<f16>,
    key: Tensor<f16>,
    value: Tensor<f16>,
    output: Output<f16>,
}

struct Buffers {
    table: BlockTable,
    layers: Vec<Layer>,
}

fn outputs(device: &Device) -> Output<f16> {
    Output {
        attention: Tensor::empty(device, [BATCH, 1, HIDDEN]).unwrap(),
        softmax_lse: Some(Tensor::empty(device, [BATCH, HEADS, 1, 1]).unwrap()),
    }
}

fn rows(seed: usize) -> Vec<Vec<usize>> {
    let row = |b: usize| (0..COLUMNS).map(move |c| (b * COLUMNS + c * 5 + seed) % BLOCKS);
    (0..BATCH).map(|b| row(b).collect()).collect()
}

impl Buffers {
    fn new(stream: &Stream, layers: usize) -> Self {
        let cache = |seed| {
            let data = halves(seed, BLOCKS * BLOCK_SIZE * HIDDEN);
            stream.upload(&data, [BLOCKS, BLOCK_SIZE, HIDDEN]).unwrap()
        };
        let layer = |layer: usize| {
            let seed = 10 * layer as u64;
            let query = halves(seed + 1, BATCH * HIDDEN);
            let output = outputs(stream.device());
            poison(&output, stream);
            Layer {
                query: stream.upload(&query, [BATCH, 1, HIDDEN]).unwrap(),
                key: cache(seed + 2),
                value: cache(seed + 3),
                output,
            }
        };
        Self {
            table: BlockTable::from_rows(stream, &rows(0), BLOCK_SIZE).unwrap(),
            layers: (0..layers).map(layer).collect(),
        }
    }

    fn inputs<'a>(&'a self, layer: &'a Layer) -> Inputs<'a, f16> {
        Inputs::new(&layer.query, &layer.key, &layer.value).paged(&self.table)
    }

    /// Launches the captured step call by call.
    fn eager(&self, stream: &Stream, keys: &[usize]) -> Vec<Vec<f16>> {
        let call = call().actual_seq_lengths_kv(keys);
        let compute = |layer: &Layer| {
            let inputs = self.inputs(layer);
            let plan = call.plan(inputs).unwrap();
            let output = plan.launch(stream, inputs).unwrap();
            output.attention.download(stream).unwrap()
        };
        self.layers.iter().map(compute).collect()
    }
}

fn poison(output: &Output<f16>, stream: &Stream) {
    let nan = vec![f16::NAN; output.attention.len()];
    output.attention.overwrite(stream, &nan).unwrap();
}

fn call() -> FusedInferAttention {
    FusedInferAttention::new(Layout::Bsh).heads(HEADS).scale(0.125).softmax_lse(true)
}

fn keys(keys: &[usize]) -> PerRequest {
    PerRequest::new(keys.to_vec()).unwrap()
}

fn per(kv: &PerRequest) -> CallLengths<'_> {
    CallLengths::Batched { q: None, kv }
}

/// Every layer with the same lengths.
fn record(capture: &Capturing<'_>, buffers: &Buffers) -> Result<CapturedCall> {
    let longest = keys(&[LONGEST; BATCH]);
    let first = buffers.inputs(&buffers.layers[0]);
    let varying = capture.attention(&call(), per(&longest), first)?;
    for layer in &buffers.layers {
        capture.launch_into(varying, buffers.inputs(layer), &mut layer.output.clone())?;
    }
    Ok(varying)
}

/// A plan whose lengths stay.
fn fixed_plan(buffers: &Buffers) -> Result<Plan> {
    let call = call().actual_seq_lengths_kv([LONGEST; BATCH]);
    call.plan(buffers.inputs(&buffers.layers[0]))
}

fn captured(stream: &Stream, layers: usize) -> (Graph<Buffers>, CapturedCall) {
    Graph::capture(stream.device(), Buffers::new(stream, layers), record).unwrap()
}

#[track_caller]
fn rule(error: Error) -> &'static Rule {
    match error {
        Error::Violation(refused) => refused.rule,
        other => panic!("{other}"),
    }
}

/// Numbers below `bound`, the same for each seed.
fn below(seed: u64, bound: usize) -> usize {
    (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as usize % bound
}

#[test]
fn a_replay_reads_no_block_that_its_cache_does_not_have() {
    let stream = harness::stream();
    let violates = |outcome: Result<()>, id: &str| {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Violation(of) if of.rule.id == id), "{error}");
    };
    // Full, and with lengths that stay: the launches of both read what the table holds then.
    let fixed = |capture: &Capturing<'_>, buffers: &Buffers| {
        let plan = fixed_plan(buffers)?;
        let layer = &buffers.layers[0];
        plan.launch_into(capture, buffers.inputs(layer), &mut layer.output.clone())
    };
    let (mut varying, _) = captured(&stream, 2);
    let (mut same, ()) = Graph::capture(stream.device(), Buffers::new(&stream, 1), fixed).unwrap();
    for graph in [&mut varying, &mut same] {
        let lengths = keys(&[LONGEST; BATCH]);
        let replay = |graph: &mut Graph<Buffers>| {
            let update = match graph.varying() {
                0 => graph.update(),
                _ => graph.update().all(per(&lengths))?,
            };
            graph.launch(&stream, update)
        };
        let mut beyond = rows(0);
        beyond[1][2] = BLOCKS;
        let table = |graph: &Graph<Buffers>, rows: &[Vec<usize>]| graph.buffers().table.overwrite(&stream, rows);
        violates(table(graph, &beyond), "block_table.range");
        let mut short = rows(0);
        short[2].pop();
        table(graph, &short).unwrap();
        violates(replay(graph), "block_table.row_short");
        table(graph, &rows(1)).unwrap();
        replay(graph).unwrap();
        stream.synchronize().unwrap();
    }
    harness::still_works(&stream);
}

#[test]
fn a_replay_is_the_step_with_new_lengths_and_contents() {
    let stream = harness::stream();
    let (mut graph, _) = captured(&stream, 3);
    for layer in &graph.buffers().layers {
        let output = layer.output.attention.download(&stream).unwrap();
        assert!(output.iter().all(|x| x.is_nan()), "a capture runs nothing");
    }
    for step in 0..12u64 {
        let lengths: Vec<usize> = (0..BATCH as u64).map(|b| 1 + below(7 * step + b, LONGEST)).collect();
        // Contents change in place: queries every step, the table every other one.
        for (at, layer) in graph.buffers().layers.iter().enumerate() {
            let query = halves(100 * step + at as u64, BATCH * HIDDEN);
            layer.query.overwrite(&stream, &query).unwrap();
            poison(&layer.output, &stream);
        }
        let table = &graph.buffers().table;
        table.overwrite(&stream, &rows(step as usize / 2)).unwrap();
        let kv = keys(&lengths);
        let update = graph.update().all(per(&kv)).unwrap();
        graph.launch(&stream, update).unwrap();
        let buffers = graph.buffers();
        let want = buffers.eager(&stream, &lengths);
        for (layer, want) in buffers.layers.iter().zip(want) {
            assert_eq!(layer.output.attention.download(&stream).unwrap(), want);
        }
    }
}

/// 4233, 4649, 16798, 9727, xLLM-AI/xllm 1466: replays that hang, or that read the lengths of another step. Steps are
/// queued one behind the other without the host waiting, on streams in turn; each reads its own lengths.
#[test]
fn replays_in_a_row_read_their_own_lengths() {
    let streams = [harness::stream(), harness::stream()];
    let [first, second] = &streams;
    let (mut graph, _) = captured(first, 4);
    let kept = |_| -> Vec<Tensor<f16>> {
        let empty = |_: &Layer| Tensor::empty(first.device(), [BATCH, 1, HIDDEN]).unwrap();
        graph.buffers().layers.iter().map(empty).collect()
    };
    let steps: Vec<_> = (0..40).map(kept).collect();
    let lengths = |step: usize| {
        let len = |b| 1 + below((step * BATCH + b) as u64, LONGEST);
        (0..BATCH).map(len).collect::<Vec<usize>>()
    };
    second.wait_event(&first.record_event().unwrap()).unwrap();
    for (step, kept) in steps.iter().enumerate() {
        let stream = &streams[step % 2];
        let kv = keys(&lengths(step));
        let update = graph.update().all(per(&kv)).unwrap();
        graph.launch(stream, update).unwrap();
        for (layer, kept) in graph.buffers().layers.iter().zip(kept) {
            kept.copy_from(stream, &layer.output.attention).unwrap();
        }
        // The next replay, on the other stream, overwrites what was just copied.
        let copied = stream.record_event().unwrap();
        streams[(step + 1) % 2].wait_event(&copied).unwrap();
    }
    for stream in &streams {
        stream.synchronize_timeout(LIMIT).unwrap();
    }
    for (step, kept) in steps.iter().enumerate() {
        let want = graph.buffers().eager(first, &lengths(step));
        for (kept, want) in kept.iter().zip(want) {
            assert_eq!(kept.download(first).unwrap(), want, "step {step}");
        }
    }
}

/// Graphs refuse as streams do: what would be out of order is refused by name before anything is launched.
#[test]
fn wrong_orders_are_refused_by_name() {
    let stream = harness::stream();
    let (mut graph, varying) = captured(&stream, 2);
    let (mut other, foreign) = captured(&stream, 1);
    let kv = keys(&[5, 6, 7]);
    // Forgotten.
    let error = graph.launch(&stream, graph.update()).unwrap_err();
    assert!(error.to_string().contains("no lengths for call 0"), "{error}");
    assert_eq!(rule(error), &rules::GRAPH_UPDATE);
    // Twice.
    let twice = graph.update().lengths(varying, per(&kv)).unwrap();
    assert_eq!(rule(twice.lengths(varying, per(&kv)).unwrap_err()), &rules::GRAPH_UPDATE);
    // Of another graph.
    let error = graph.update().lengths(foreign, per(&kv)).unwrap_err();
    assert_eq!(rule(error), &rules::GRAPH_UPDATE);
    let update = other.update().all(per(&kv)).unwrap();
    assert_eq!(rule(graph.launch(&stream, update).unwrap_err()), &rules::GRAPH_UPDATE);
    let error = Graph::capture(stream.device(), Buffers::new(&stream, 1), |capture, b| {
        let layer = &b.layers[0];
        capture.launch_into(varying, b.inputs(layer), &mut layer.output.clone())
    })
    .unwrap_err();
    assert_eq!(rule(error), &rules::GRAPH_UPDATE);
    // Nothing was launched, and the graph works.
    stream.synchronize_timeout(LIMIT).unwrap();
    let output = &graph.buffers().layers[1].output;
    let output = output.attention.download(&stream).unwrap();
    assert!(output.iter().all(|x| x.is_nan()));
    // A borrowed update is there after a refusal, for one replay.
    let update = graph.update().lengths(varying, per(&kv)).unwrap();
    assert_eq!(rule(other.launch(&stream, &update).unwrap_err()), &rules::GRAPH_UPDATE);
    graph.launch(&stream, &update).unwrap();
    assert_eq!(rule(graph.launch(&stream, &update).unwrap_err()), &rules::GRAPH_UPDATE);
    stream.synchronize_timeout(LIMIT).unwrap();
    let output = &graph.buffers().layers[1].output;
    assert!(output.attention.download(&stream).unwrap().iter().all(|x| x.is_finite()));
}

/// 15486: workspace taken for shorter keys than those that come later. Longer ones than declared are refused.
#[test]
fn keys_longer_than_declared() {
    let stream = harness::stream();
    let buffers = Buffers::new(&stream, 1);
    let (mut graph, ()) = Graph::capture(stream.device(), buffers, |capture, buffers| {
        let longest = keys(&[60, 30, 60]);
        let inputs = buffers.inputs(&buffers.layers[0]);
        let varying = capture.attention(&call(), per(&longest), inputs)?;
        capture.launch_into(varying, inputs, &mut buffers.layers[0].output.clone())
    })
    .unwrap();
    let long = keys(&[60, 31, 1]);
    let error = graph.update().all(per(&long)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("31 keys of request 1") && text.contains("at most 30"), "{text}");
    assert_eq!(rule(error), &rules::GRAPH_LENGTHS);
    // Another form or number, and what the contract refuses.
    let ends = Cumulative::new(vec![1, 2, 3]).unwrap();
    let short = keys(&[1, 1]);
    let packed = CallLengths::PackedDense { q: &ends, kv: &ends };
    for (lengths, want) in [(packed, &rules::GRAPH_LENGTHS), (per(&short), &rules::LENGTHS_BATCH)] {
        assert_eq!(rule(graph.update().all(lengths).unwrap_err()), want);
    }
    let table = keys(&[LONGEST + 1; BATCH]);
    let too_long = Graph::capture(stream.device(), Buffers::new(&stream, 1), |capture, buffers| {
        let inputs = buffers.inputs(&buffers.layers[0]);
        capture.attention(&call(), per(&table), inputs)
    });
    assert!(matches!(too_long, Err(Error::Violation(_))));
    let most = keys(&[60, 30, 60]);
    let update = graph.update().all(per(&most)).unwrap();
    graph.launch(&stream, update).unwrap();
    let want = graph.buffers().eager(&stream, &[60, 30, 60]);
    let output = &graph.buffers().layers[0].output.attention;
    assert_eq!(output.download(&stream).unwrap(), want[0]);
}

#[test]
fn calls_of_one_graph_take_lengths_of_their_own() {
    let stream = harness::stream();
    let buffers = Buffers::new(&stream, 3);
    let record = |capture: &Capturing<'_>, buffers: &Buffers| {
        let longest = keys(&[LONGEST; BATCH]);
        let [a, b, fixed] = &buffers.layers[..] else {
            panic!("three layers");
        };
        let first = capture.attention(&call(), per(&longest), buffers.inputs(a))?;
        let second = capture.attention(&call(), per(&longest), buffers.inputs(b))?;
        capture.launch_into(second, buffers.inputs(b), &mut b.output.clone())?;
        capture.launch_into(first, buffers.inputs(a), &mut a.output.clone())?;
        // The plan may go once it is captured.
        let lengths = call().actual_seq_lengths_kv([9; BATCH]);
        let plan = lengths.plan(buffers.inputs(fixed))?;
        plan.launch_into(capture, buffers.inputs(fixed), &mut fixed.output.clone())?;
        Ok([first, second])
    };
    let (mut graph, [first, second]) = Graph::capture(stream.device(), buffers, record).unwrap();
    let (a, b) = (keys(&[3, 40, 100]), keys(&[77, 2, 51]));
    let update = graph.update().lengths(second, per(&b)).unwrap();
    let update = update.lengths(first, per(&a)).unwrap();
    graph.launch(&stream, update).unwrap();
    let buffers = graph.into_buffers();
    for (layer, lengths) in [a.lengths(), b.lengths(), &[9; BATCH]].iter().enumerate() {
        let want = buffers.eager(&stream, lengths).swap_remove(layer);
        let got = buffers.layers[layer].output.attention.download(&stream);
        assert_eq!(got.unwrap(), want, "layer {layer}");
    }
}

#[test]
fn writing_attending_merging_and_copying_are_captured_in_order() {
    let stream = harness::stream();
    let device = stream.device();
    let slots = SlotMapping::new(&stream, &[17, 3], BLOCKS * BLOCK_SIZE).unwrap();
    let new = |seed| {
        let data = halves(seed, 2 * HIDDEN);
        stream.upload(&data, [2, HEADS, DIM]).unwrap()
    };
    let (key, value) = (new(90), new(91));
    // Two layers with one query: attention over different keys, to be merged.
    let mut buffers = Buffers::new(&stream, 2);
    buffers.layers[1].query = buffers.layers[0].query.clone();
    let copy: Tensor<f16> = Tensor::empty(device, [BATCH, 1, HIDDEN]).unwrap();
    let lengths = [40, 17, 90];
    let part_outputs: Vec<_> = buffers.layers.iter().map(|l| l.output.clone()).collect();
    let part = |output| Part::of(output).unwrap();
    let pair = [part(&part_outputs[0]), part(&part_outputs[1])];
    let merge = MergeState::new(Layout::Bsh).plan(&pair).unwrap();
    let mut eager_merged = merge.output::<f16>().unwrap();
    let mut graph_merged = merge.output::<f16>().unwrap();
    let scatter =
        ScatterPaKvCache::new().plan((&key, &value, &slots, &buffers.layers[0].key, &buffers.layers[0].value)).unwrap();
    let (mut graph, _) = Graph::capture(device, buffers, |capture, buffers| {
        let layer = &buffers.layers[0];
        scatter.launch(capture, (&key, &value, &slots, &layer.key, &layer.value))?;
        let varying = record(capture, buffers)?;
        merge.launch_into(capture, &pair, &mut graph_merged)?;
        copy.copy_from(capture, &graph_merged.attention)?;
        Ok(varying)
    })
    .unwrap();
    for mapping in [[17, 3], [40, 41], [100, 19]] {
        slots.overwrite(&stream, &mapping).unwrap();
        let fresh = halves(mapping[0] as u64, 2 * HIDDEN);
        key.overwrite(&stream, &fresh).unwrap();
        let kv = keys(&lengths);
        let update = graph.update().all(per(&kv)).unwrap();
        graph.launch(&stream, update).unwrap();
        let got = copy.download(&stream).unwrap();
        let buffers = graph.buffers();
        let cache = buffers.layers[0].key.download(&stream).unwrap();
        for (row, slot) in mapping.iter().enumerate() {
            let at = *slot as usize * HIDDEN;
            let written = &cache[at..at + HIDDEN];
            assert_eq!(written, &fresh[row * HIDDEN..][..HIDDEN]);
        }
        let want = buffers.eager(&stream, &lengths);
        for (layer, want) in buffers.layers.iter().zip(&want) {
            assert_eq!(&layer.output.attention.download(&stream).unwrap(), want);
        }
        merge.launch_into(&stream, &pair, &mut eager_merged).unwrap();
        assert_eq!(eager_merged.attention.download(&stream).unwrap(), got);
    }
}

#[test]
fn what_was_captured_outlives_its_owners() {
    let stream = harness::stream();
    let want;
    let (mut graph, output) = {
        let buffers = Buffers::new(&stream, 2);
        want = buffers.eager(&stream, &[9, 8, 7]);
        let (graph, _) = Graph::capture(stream.device(), (), |capture, ()| record(capture, &buffers)).unwrap();
        (graph, buffers.layers[1].output.attention.clone())
    };
    let kv = keys(&[9, 8, 7]);
    for _ in 0..3 {
        let update = graph.update().all(per(&kv)).unwrap();
        graph.launch(&stream, update).unwrap();
        assert_eq!(output.download(&stream).unwrap(), want[1]);
    }
    // Dropped while a replay is queued: it is done all the same.
    let nan = vec![f16::NAN; output.len()];
    output.overwrite(&stream, &nan).unwrap();
    let update = graph.update().all(per(&kv)).unwrap();
    graph.launch(&stream, update).unwrap();
    drop(graph);
    assert_eq!(output.download(&stream).unwrap(), want[1]);
}

#[test]
fn buffers_can_be_borrowed() {
    let stream = harness::stream();
    let buffers = Buffers::new(&stream, 1);
    let (mut graph, _) = Graph::capture(stream.device(), &buffers, |capture, b| record(capture, b)).unwrap();
    let kv = keys(&[3; BATCH]);
    let update = graph.update().all(per(&kv)).unwrap();
    graph.launch(&stream, update).unwrap();
    drop(graph);
    let want = buffers.eager(&stream, &[3; BATCH]);
    let output = &buffers.layers[0].output.attention;
    assert_eq!(output.download(&stream).unwrap(), want[0]);
}

#[test]
fn a_failed_capture_changes_nothing() {
    let stream = harness::stream();
    let device = stream.device();
    // An error of the closure's.
    let own = Graph::capture(device, Buffers::new(&stream, 2), |capture, buffers| {
        record(capture, buffers)?;
        Err::<(), _>(Error::NoEmulation)
    });
    assert_eq!(own.unwrap_err(), Error::NoEmulation);
    // An error that is ignored.
    let mut wrong = outputs(device);
    wrong.attention = Tensor::empty(device, [BATCH, 1, HIDDEN + 1]).unwrap();
    let ignored = Graph::capture(device, Buffers::new(&stream, 2), |capture, buffers| {
        let varying = record(capture, buffers)?;
        let inputs = buffers.inputs(&buffers.layers[0]);
        let _ = capture.launch_into(varying, inputs, &mut wrong);
        Ok(())
    });
    assert!(ignored.as_ref().is_err_and(|error| error.breaks(&rules::PLAN_TENSORS)));
    // A panic.
    let panic = catch_unwind(AssertUnwindSafe(|| {
        Graph::capture(device, Buffers::new(&stream, 2), |capture, buffers| {
            record(capture, buffers)?;
            std::panic::resume_unwind(Box::new("a bug of the model's"));
            #[allow(unreachable_code, reason = "for its type")]
            Ok(())
        })
    }));
    assert!(panic.is_err());
    still_works(&stream);
    let (mut graph, _) = captured(&stream, 1);
    let kv = keys(&[3; BATCH]);
    let update = graph.update().all(per(&kv)).unwrap();
    graph.launch(&stream, update).unwrap();
    stream.synchronize_timeout(LIMIT).unwrap();
}

#[test]
fn what_cannot_be_captured_is_refused_by_name() {
    let stream = harness::stream();
    let device = stream.device();
    let buffers = Buffers::new(&stream, 1);
    let event = stream.record_event().unwrap();
    let plan = call().actual_seq_lengths_kv([4; BATCH]).plan(buffers.inputs(&buffers.layers[0])).unwrap();
    let mut output = outputs(device);
    let mut through_host = {
        let part = Part::of(&buffers.layers[0].output).unwrap();
        let pair = [part, part];
        let merge = MergeState::new(Layout::Bsh).empty_rows(EmptyRows::ThroughHost);
        (merge.plan(&pair).unwrap(), outputs(device))
    };
    let (graph, ()) = Graph::capture(device, &buffers, |capture, buffers| {
        let layer = &buffers.layers[0];
        let inputs = buffers.inputs(layer);
        let refused = [
            stream.synchronize(),
            stream.synchronize_timeout(LIMIT),
            stream.is_idle().map(drop),
            stream.record_event().map(drop),
            stream.wait_event(&event),
            event.synchronize(),
            layer.query.download(&stream).map(drop),
            layer.query.overwrite(&stream, &vec![f16::ZERO; BATCH * HIDDEN]),
            stream.upload(&[1i32], [1]).map(drop),
            device.alloc::<u8>(64).map(drop),
            device.host_buffer::<u8>(64).map(drop),
            device.synchronize(),
            layer.key.copy_from(&stream, &layer.value),
            plan.launch_into(&stream, inputs, &mut output),
            Graph::capture(device, (), |_, ()| Ok(())).map(drop),
        ];
        for (at, outcome) in refused.into_iter().enumerate() {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::Capturing { .. }), "{at}: {error}");
        }
        // Another thread may.
        std::thread::scope(|scope| {
            let other = scope.spawn(|| device.alloc::<u8>(64).map(drop));
            other.join().unwrap()
        })?;
        // None of it has spoiled the capture.
        record(capture, buffers).map(drop)
    })
    .unwrap();
    drop(graph);
    let merging = Graph::capture(device, (), |capture, ()| {
        let part = Part::of(&buffers.layers[0].output)?;
        let (merge, into) = &mut through_host;
        merge.launch_into(capture, &[part, part], into)
    });
    let error = merging.unwrap_err();
    assert!(error.to_string().contains("EmptyRows::None"), "{error}");
    still_works(&stream);
}

#[test]
fn a_graph_of_nothing_is_replayed() {
    let stream = harness::stream();
    let (mut graph, ()) = Graph::capture(stream.device(), (), |_, ()| Ok(())).unwrap();
    graph.launch(&stream, graph.update()).unwrap();
    stream.synchronize_timeout(LIMIT).unwrap();
}

/// They have one workspace.
#[test]
fn replays_of_a_group_follow_each_other_on_whatever_streams() {
    let (first, second) = (harness::stream(), harness::stream());
    let mut group = GraphGroup::new(first.device()).unwrap();
    let mut graphs = [2, 1].map(|layers| {
        let buffers = Buffers::new(&first, layers);
        group.capture(buffers, record).unwrap().0
    });
    let lengths = [20, 7, 64];
    let want = graphs.each_ref().map(|graph| graph.buffers().eager(&first, &lengths));
    let gate = Gate::new(first.device());
    gate.hold(&first);
    for (graph, stream) in graphs.iter_mut().zip([&first, &second]) {
        let update = graph.update().all(per(&keys(&lengths))).unwrap();
        graph.launch(stream, update).unwrap();
    }
    assert!(!second.is_idle().unwrap(), "it waits for the first stream");
    gate.open();
    second.synchronize_timeout(LIMIT).unwrap();
    first.synchronize_timeout(LIMIT).unwrap();
    for (graph, want) in graphs.iter().zip(want) {
        let layers = graph.buffers().layers.iter();
        let got = layers.map(|layer| layer.output.attention.download(&first).unwrap());
        assert_eq!(got.collect::<Vec<_>>(), want);
    }
}
