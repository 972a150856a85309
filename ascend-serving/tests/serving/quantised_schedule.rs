//! Whatever the schedule: over a quantised cache every token gets the attention that one dense pass gives it over
//! what is stored times its scales.

use crate::harness;
use crate::quantised_caches::ascend_950;
use approx::abs_diff_eq;

use crate::acts::{Act, Schedule, Scheduled, Turn, act, config};
use crate::harness::reference::Half;
use crate::tokens::{DIM, dense_over, packed, row};
use ascend_attention::spec::Cann;
use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::{Stream, Tensor, bf16, f16};
use ascend_serving::kv::{Cache, CacheShape, ChannelScales, PadPolicy, PagedKvCache, QuantisedType};
use ascend_serving::{
    Attention, AttentionGraphs, AttentionShape, AttentionState, Backend, Backends, BatchSettings, Causality, Drafting,
    GraphLimits, StatePolicy,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const LAYERS: usize = 2;
/// Blocks beyond those of requests: the operator counts shared ones for each row of a call.
const SHARED: usize = 30;

#[derive(Clone, Debug)]
struct Model {
    kv_heads: usize,
    group: usize,
    window: Option<usize>,
    per_head: bool,
    block_size: usize,
    blocks: usize,
    dump: bool,
    chunked: bool,
    mtp: bool,
    hybrid: bool,
    /// Whether each token has its own scale.
    by_token: bool,
    stored: QuantisedType,
    /// Whether steps that graphs serve are replayed.
    graphs: bool,
}

fn model() -> impl Strategy<Value = Model> {
    let window = prop_oneof![2 => Just(None), 1 => (1usize..200).prop_map(Some)];
    let sizes = (1usize..3, 1usize..4, window, 1usize..3, 4usize..9);
    (sizes, any::<[bool; 7]>()).prop_map(|((kv_heads, group, window, size, blocks), flags)| Model {
        kv_heads,
        group,
        window,
        per_head: flags[0] && kv_heads == 1,
        block_size: size * 128,
        blocks,
        dump: flags[1],
        chunked: flags[2],
        mtp: flags[3],
        hybrid: flags[4],
        by_token: flags[5],
        stored: QuantisedType::Int8,
        graphs: flags[6],
    })
}

/// The scale of a channel: the numbers are between -1 and 1, so that some channels of INT8 are cut and others have
/// few steps.
fn scale(stored: QuantisedType, layer: usize, what: u64, channel: usize) -> f32 {
    let steps = match stored {
        QuantisedType::Int8 => [1.0 / 160.0, 0.07, 0.2, 0.011],
        QuantisedType::Float8E4M3Fn => [1.0 / 400.0, 0.07, 3.0, 0.011],
        QuantisedType::HiFloat8 => [1.0 / 3000.0, 0.07, 3.0, 0.011],
        other => panic!("{other:?}: which scales does it take?"),
    };
    let scale = steps[(channel + layer + what as usize) % steps.len()];
    bf16::from_f32(scale).to_f32()
}

fn scales(stored: QuantisedType, layer: usize, channels: usize) -> ChannelScales {
    let of = |what| (0..channels).map(|c| scale(stored, layer, what, c)).collect();
    ChannelScales::new(of(1), of(2)).unwrap()
}

/// What the key (1) or value (2) of a token is multiplied by, so that each has a scale of its own.
fn magnitude(name: u64, what: u64) -> f32 {
    [1.0, 0.125, 0.5, 0.25][(name + what) as usize % 4]
}

/// Keys (1) or values (2) of tokens.
fn multiplied<T: Half>(stream: &Stream, names: &[u64], layer: usize, what: u64, heads: usize) -> Tensor<T> {
    let rows = names.iter().flat_map(|name| {
        let row = row(*name, layer, what, heads).into_iter();
        row.map(|x| T::from_f32(bf16::from_f32(x.to_f32() * magnitude(*name, what)).to_f32()))
    });
    let rows: Vec<T> = rows.collect();
    stream.upload(&rows, [names.len(), heads, DIM]).unwrap()
}

/// What a cache gives back for the numbers of a token.
fn stored<T: Half>(model: &Model, layer: usize, what: u64, numbers: Vec<f64>) -> Vec<f64> {
    let nearest = |number: f32| match model.stored {
        QuantisedType::Int8 => number.round_ties_even().clamp(-128.0, 127.0),
        QuantisedType::Float8E4M3Fn => Float8E4M3Fn::from_f32(number).to_f32(),
        QuantisedType::HiFloat8 => HiFloat8::from_f32(number).to_f32(),
        other => panic!("{other:?}: how is it rounded?"),
    };
    if model.by_token {
        let most = numbers.iter().fold(0f64, |most, number| most.max(number.abs()));
        let largest = match model.stored {
            QuantisedType::Int8 => 127.0,
            _ => 448.0,
        };
        let scale = most as f32 / largest;
        let back = |number: f64| f64::from(nearest(number as f32 / scale) * scale);
        return numbers.into_iter().map(back).collect();
    }
    let channels = numbers.into_iter().enumerate();
    let stored = |(channel, number): (usize, f64)| {
        let scale = scale(model.stored, layer, what, channel);
        let scale = match T::DTYPE {
            ascend_attention::DType::Float16 => f16::from_f32(scale).to_f32(),
            _ => scale,
        };
        f64::from(nearest(number as f32 * scale.recip())) * f64::from(scale)
    };
    channels.map(stored).collect()
}

struct Engine<'a, T: Half> {
    stream: &'a Stream,
    model: Model,
    settings: BatchSettings,
    attention: Attention<T>,
    graphs: Option<AttentionGraphs<T>>,
    shape: AttentionShape,
    schedule: Schedule,
    checked: usize,
    /// Rows of mixed steps that read the cache in its blocks.
    in_place: usize,
    served: Vec<&'static str>,
}

impl<'a, T: Half> Engine<'a, T> {
    fn new(stream: &'a Stream, model: Model) -> Self {
        let shape = AttentionShape::new(model.kv_heads * model.group, model.kv_heads, DIM);
        let pad = match model.dump {
            true => PadPolicy::DumpSlot(0),
            false => PadPolicy::SkipNegative,
        };
        let format = if model.per_head { Cache::BnNBsD } else { Cache::BnBsH };
        let scales = [0, 1].map(|layer| scales(model.stored, layer, model.kv_heads * DIM));
        let cache_shape = CacheShape::new(LAYERS, model.kv_heads, DIM).format(format);
        let (blocks, size) = (SHARED + model.blocks, model.block_size);
        let (device, stored) = (stream.device(), model.stored);
        let cache = match model.by_token {
            true => PagedKvCache::quantised_by_token(device, blocks, size, cache_shape, pad, stored),
            false => PagedKvCache::quantised(stream, blocks, size, cache_shape, pad, stored, &scales),
        }
        .unwrap();
        // Backends of other caches are refused, and the next one is asked.
        let all = Backends::none()
            .with(Backend::PagedDecode)
            .with(Backend::Fused)
            .with(Backend::QuantisedDecode)
            .with(Backend::QuantisedPrefill);
        let backends = match model.hybrid && model.window.is_none() {
            true => {
                // Graphs record calls alone, so that their layers all decode in the blocks.
                let decodes = match model.graphs {
                    true => "quantised_decode",
                    false => "quantised_prefill",
                };
                let all = all.prefer(0..LAYERS, &AttentionState::ALL, "quantised_prefill").unwrap();
                let all = all.prefer([1], &[AttentionState::DecodeOnly], decodes).unwrap();
                all.prefer([0], &[AttentionState::DecodeOnly], "quantised_decode").unwrap()
            }
            false => all,
        };
        let causality = Causality::from_flags(true, model.window).unwrap();
        let mut schedule = Schedule::of(6);
        schedule.begin = 4;
        schedule.tokens = 400;
        schedule.window = model.window;
        let settings = BatchSettings::of(&cache, causality);
        let attention = Attention::new(shape, cache, backends);
        // What has no graphs is refused when it is captured.
        let can = model.window.is_none() && !model.by_token;
        let limits = GraphLimits::new([1, 2, 5], 500);
        let graphs = match model.graphs {
            false => None,
            true => match attention.capture(stream, causality, &limits) {
                Ok(graphs) => {
                    assert!(can);
                    Some(graphs)
                }
                Err(refused) => {
                    assert!(!can, "{refused}");
                    None
                }
            },
        };
        Self {
            stream,
            settings: settings.policy(StatePolicy::new(model.chunked, model.mtp.then_some(Drafting::Mtp))),
            model,
            attention,
            graphs,
            shape,
            schedule,
            checked: 0,
            in_place: 0,
            served: Vec::new(),
        }
    }
}

impl<T: Half> Scheduled for Engine<'_, T> {
    type Element = T;

    fn parts(&mut self) -> (&mut Schedule, &Stream, &mut PagedKvCache<T>) {
        (&mut self.schedule, self.stream, self.attention.cache_mut())
    }

    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError> {
        let mut metadata = self.schedule.metadata(turns, self.settings, pad);
        let names = self.schedule.names(turns, pad);
        let tensors = |layer: usize| {
            let key = multiplied(self.stream, &names, layer, 1, self.shape.kv_heads);
            let value = multiplied(self.stream, &names, layer, 2, self.shape.kv_heads);
            let query = packed(self.stream, &names, layer, 0, self.shape.heads);
            (query, key, value)
        };
        let mut results: Vec<Vec<T>> = Vec::new();
        // What computes each layer.
        let mut chosen: Vec<&str> = Vec::new();
        let graphs = self.graphs.as_mut();
        if let Some(graphs) = graphs.filter(|graphs| graphs.serves(&metadata)) {
            let mut step = graphs.begin(self.stream, &mut metadata).unwrap();
            for layer in 0..LAYERS {
                let (query, key, value) = tensors(layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap();
                results.push(output.download(self.stream).unwrap());
            }
            chosen.resize(LAYERS, "graphs");
            self.served.push("graphs");
        } else {
            let mut step = self.attention.begin(self.stream, &metadata).unwrap();
            for layer in 0..LAYERS {
                let (query, key, value) = tensors(layer);
                let output = step.forward(layer, (&query, &key, &value)).unwrap();
                results.push(output.download(self.stream).unwrap());
            }
            chosen.extend((0..LAYERS).map(|layer| step.selected(layer).unwrap().name));
            self.served.push(chosen[0]);
        }
        // Requests in front that add one token to others are read in their blocks.
        let adds_one = |turn: &&Turn| turn.new == 1 && self.schedule.requests[turn.request].sequence.len() > 1;
        let mut in_front = turns.iter().take_while(adds_one).count();
        if self.model.window.is_some() || !metadata.state().reads_cache() || in_front == metadata.table().requests() {
            in_front = 0;
        }
        let in_place = self.schedule.rows(turns)[..3 * in_front].iter().map(|row| row.request).collect::<Vec<_>>();
        self.in_place += in_place.len();
        for (layer, result) in results.iter().enumerate() {
            let served = chosen[layer];
            let by_decode = ["quantised_decode", "graphs"].contains(&served);
            let width = self.shape.heads * DIM;
            let mut news = turns.iter().flat_map(|turn| [turn.new; 3]).zip([0, 1, 2].iter().cycle());
            for row in self.schedule.rows(turns) {
                let (new, nth) = news.next().unwrap();
                let position = row.names.len() - 1;
                let before = position - [0, new / 2, new - 1][*nth];
                let window = self.model.window.unwrap_or(usize::MAX);
                let from = (position + 1).saturating_sub(window);
                let cached = |place: usize, numbers: Vec<f64>, what| {
                    let magnitude = f64::from(magnitude(row.names[place], what));
                    let numbers = numbers.into_iter().map(|x| x * magnitude).collect();
                    match place < before || by_decode || in_place.contains(&row.request) {
                        true => stored::<T>(&self.model, layer, what, numbers),
                        false => numbers,
                    }
                };
                let want = dense_over(row.names, layer, self.shape, |key| key >= from, cached);
                let got = &result[row.token * width..][..width];
                for (x, (got, want)) in got.iter().zip(&want).enumerate() {
                    let got = got.to_f64();
                    prop_assert!(
                        abs_diff_eq!(got, want, epsilon = 1e-2),
                        "{served}, layer {layer}, request {}, position {position}, element {x}: {got}, expected \
                         {want}; {:?}",
                        row.request,
                        metadata.state()
                    );
                }
                self.checked += 1;
            }
        }
        Ok(())
    }
}

fn run<T: Half>(stream: &Stream, model: Model, steps: &[(Vec<Act>, usize)]) -> Result<(), TestCaseError> {
    let mut engine = Engine::<T>::new(stream, model);
    engine.run(steps)
}

proptest! {
    #![proptest_config(config(32))]

    #[test]
    fn any_schedule_over_integers_is_one_dense_pass(model in model(), half in any::<bool>(), steps in prop::collection::vec((prop::collection::vec(act(150, 6), 1..6), 0usize..20), 1..8)) {
        match half {
            // Packed calls of FLOAT16 came with 8.5.
            true if harness::device().target().unwrap().cann >= Cann::V8_5 => run::<f16>(&harness::stream(), model, &steps)?,
            _ => run::<bf16>(&harness::stream(), model, &steps)?,
        }
    }
}

fn stored_type() -> impl Strategy<Value = QuantisedType> {
    use QuantisedType::{Float8E4M3Fn, HiFloat8, Int8};
    prop_oneof![Just(Int8), Just(Float8E4M3Fn), Just(HiFloat8)]
}

proptest! {
    #![proptest_config(config(24))]

    /// Of the types and block sizes that Ascend 950 reads.
    #[test]
    fn any_schedule_on_ascend_950_is_one_dense_pass(model in model(), half in any::<bool>(), stored in stored_type(), size in 1usize..=16, steps in prop::collection::vec((prop::collection::vec(act(150, 6), 1..6), 0usize..20), 1..8)) {
        let Some(stream) = ascend_950() else {
            return Ok(());
        };
        let tokens = model.block_size * (SHARED + model.blocks);
        let model = Model {
            block_size: size * 32,
            blocks: tokens.div_ceil(size * 32),
            by_token: model.by_token && stored != QuantisedType::HiFloat8,
            stored,
            ..model
        };
        match half {
            true => run::<f16>(&stream, model, &steps)?,
            false => run::<bf16>(&stream, model, &steps)?,
        }
    }
}

#[test]
fn the_schedules_reach_both_backends() {
    for by_token in [false, true] {
        reach_both_backends(&harness::stream(), QuantisedType::Int8, by_token);
    }
    if harness::not_on_npu("Ascend 950 is emulated") {
        return;
    }
    for (stored, by_token) in
        [(QuantisedType::Float8E4M3Fn, false), (QuantisedType::Float8E4M3Fn, true), (QuantisedType::HiFloat8, false)]
    {
        reach_both_backends(&ascend_950().unwrap(), stored, by_token);
    }
}

/// A step that is padded past the captured sizes: both layers prefer to decode in the blocks, without a graph.
#[test]
fn layers_that_graphs_could_record_decode_in_blocks_without_them() {
    let model = Model {
        kv_heads: 1,
        group: 1,
        window: None,
        per_head: false,
        block_size: 128,
        blocks: 4,
        dump: false,
        chunked: false,
        mtp: false,
        hybrid: true,
        by_token: false,
        stored: QuantisedType::Int8,
        graphs: true,
    };
    let first = (vec![Act::Chunk(0, 1)], 0);
    let padded = vec![Act::Chunk(1986001782267073812, 1), Act::Chunk(3680820876020673326, 1)];
    run::<bf16>(&harness::stream(), model, &[first, (padded, 4)]).unwrap();
}

fn reach_both_backends(stream: &Stream, stored: QuantisedType, by_token: bool) {
    let model = Model {
        kv_heads: 2,
        group: 2,
        window: None,
        per_head: false,
        block_size: 128,
        blocks: 8,
        dump: true,
        chunked: true,
        mtp: false,
        hybrid: false,
        by_token,
        stored,
        graphs: !by_token,
    };
    let mut engine = Engine::<bf16>::new(stream, model);
    let steps = [
        vec![Act::Chunk(0, 140), Act::Chunk(3, 20)],
        vec![Act::Share(0, 130), Act::Chunk(1, 1)],
        vec![Act::Chunk(0, 7), Act::Verify(1, 3, 2), Act::Chunk(2, 7)],
        vec![Act::Chunk(0, 1), Act::Chunk(1, 1), Act::Chunk(2, 1)],
        vec![Act::Chunk(1, 1), Act::Chunk(0, 5), Act::Chunk(2, 1)],
    ];
    for (nth, acts) in steps.iter().enumerate() {
        engine.act(acts, if nth == 3 { 0 } else { 3 }).unwrap();
    }
    assert!(engine.checked >= 40, "{} rows", engine.checked);
    assert!(engine.in_place > 0);
    let decode = if by_token { "quantised_decode" } else { "graphs" };
    for name in [decode, "quantised_prefill"] {
        assert!(engine.served.contains(&name), "{:?}", engine.served);
    }
    engine.end();
}
