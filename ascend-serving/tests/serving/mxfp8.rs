//! Caches of MXFP8 on Ascend 950: whatever the schedule, what is stored is near what was written, and attention is
//! that over what is stored, by queries in groups.

use crate::acts::{Act, Schedule, Scheduled, Turn, act, config};
use crate::harness;
use crate::harness::reference::Half;
use crate::quantised_caches::{Layer, accuracies, ascend_950, emulated_as};
use crate::tokens::{DIM, row};
use approx::assert_abs_diff_eq;
use ascend_attention::spec::minifloat::Float8E4M3Fn;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, Tensor, bf16, f16};
use ascend_emu::{Site, inject};
use ascend_serving::kv::{
    Cache, CacheShape, CacheWrite, ChannelScales, PadPolicy, PagedKvCache, QuantisedType, Sequence,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Drafting,
    Error, StatePolicy, rules,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const LAYERS: usize = 2;
const GROUP: usize = 32;
/// Blocks beyond those of requests: the operator counts shared ones for each row of a call.
const SHARED: usize = 12;

/// The query (0), key (1) or value (2) of a token, whose groups differ in magnitude, so that scales do.
fn numbers(name: u64, layer: usize, what: u64, heads: usize) -> Vec<bf16> {
    let row = row(name, layer, what, heads).into_iter().enumerate();
    let scaled = row.map(|(at, number)| {
        let nth = name as usize + what as usize + 3 * (at / DIM) + at % DIM / GROUP;
        let magnitude = [1.0, 0.03125, 0.5, 0.125][nth % 4];
        bf16::from_f32(number.to_f32() * magnitude)
    });
    scaled.collect()
}

fn upload<T: Half>(stream: &Stream, names: &[u64], layer: usize, what: u64, heads: usize) -> Tensor<T> {
    let rows = names.iter().flat_map(|name| numbers(*name, layer, what, heads));
    let rows: Vec<T> = rows.map(|x| T::from_f32(x.to_f32())).collect();
    stream.upload(&rows, [names.len(), heads, DIM]).unwrap()
}

/// Numbers as the nearest FLOAT8_E4M3FN times the smallest power of two with which none of their 32 is cut.
fn in_groups<T: Half>(numbers: Vec<bf16>) -> Vec<f64> {
    let numbers: Vec<f64> = numbers.into_iter().map(|x| T::from_f32(x.to_f32()).to_f64()).collect();
    let group = |group: &[f64]| {
        let most = group.iter().fold(0f64, |most, x| most.max(x.abs()));
        let scale = match most > 0.0 {
            true => (most / 448.0).log2().ceil().exp2(),
            false => 1.0,
        };
        let stored = |x: &f64| Float8E4M3Fn::from_f32((x / scale) as f32).to_f32();
        let stored = group.iter().map(|x| f64::from(stored(x)) * scale);
        stored.collect::<Vec<_>>()
    };
    numbers.chunks(GROUP).flat_map(group).collect()
}

/// What a layer stores, downloaded.
struct Stored {
    /// `[blocks, N, block_size, D]`.
    shape: [usize; 4],
    floats: [Vec<u8>; 2],
    powers: [Vec<u8>; 2],
}

impl Stored {
    fn of<T: Half>(stream: &Stream, cache: &PagedKvCache<T>, layer: usize) -> Self {
        let layer = cache.quantised_layer(layer).unwrap();
        let [key, value] = layer.group_scales().unwrap();
        let bytes = |tensor: &ascend_attention::AnyTensor| tensor.download_bytes(stream).unwrap();
        Self {
            shape: layer.key().shape().try_into().unwrap(),
            floats: [layer.key(), layer.value()].map(bytes),
            powers: [bytes(key), bytes(value)],
        }
    }

    /// The key (1) or value (2) of a slot, `[N, D]`.
    fn token(&self, what: u64, slot: usize) -> Vec<f64> {
        let [_, heads, block_size, dim] = self.shape;
        let (block, place) = (slot / block_size, slot % block_size);
        let of = what as usize - 1;
        let element = |head: usize, x: usize| {
            let head = block * heads + head;
            let power = match what {
                1 => (head * block_size + place) * (dim / GROUP) + x / GROUP,
                _ => {
                    let pair = head * (block_size / 64) + place / 64;
                    (pair * dim + x) * 2 + place % 64 / GROUP
                }
            };
            let float = self.floats[of][(head * block_size + place) * dim + x];
            let power = i32::from(self.powers[of][power]) - 127;
            f64::from(Float8E4M3Fn::from_bits(float).to_f32()) * f64::from(power).exp2()
        };
        let all = (0..heads).flat_map(|head| (0..dim).map(move |x| (head, x)));
        all.map(|(head, x)| element(head, x)).collect()
    }
}

#[derive(Clone, Debug)]
struct Model {
    kv_heads: usize,
    group: usize,
    block_size: usize,
    blocks: usize,
    dump: bool,
    chunked: bool,
    mtp: bool,
}

fn model() -> impl Strategy<Value = Model> {
    let sizes = (1usize..3, 1usize..4, 1usize..3, 3usize..6);
    (sizes, any::<[bool; 3]>()).prop_map(|((kv_heads, group, size, blocks), flags)| Model {
        kv_heads,
        group,
        block_size: size * 512,
        blocks,
        dump: flags[0],
        chunked: flags[1],
        mtp: flags[2],
    })
}

struct Engine<'a, T: Half> {
    stream: &'a Stream,
    settings: BatchSettings,
    attention: Attention<T>,
    shape: AttentionShape,
    schedule: Schedule,
    /// Rows of outputs that were compared.
    checked: usize,
    /// The scales of each layer's values before the step.
    before: Vec<Vec<u8>>,
    /// Scales that a later token has made larger.
    enlarged: usize,
}

impl<'a, T: Half> Engine<'a, T> {
    fn new(stream: &'a Stream, model: &Model) -> Self {
        let pad = match model.dump {
            true => PadPolicy::DumpSlot(0),
            false => PadPolicy::SkipNegative,
        };
        let of_cache = CacheShape::new(LAYERS, model.kv_heads, DIM).format(Cache::BnNBsD);
        let (device, blocks) = (stream.device(), SHARED + model.blocks);
        let cache = PagedKvCache::mxfp8(device, blocks, model.block_size, of_cache, pad).unwrap();
        // Backends of other caches are refused, and the next one is asked.
        let backends = Backends::none()
            .with(Backend::Fused)
            .with(Backend::QuantisedDecode)
            .with(Backend::QuantisedPrefill)
            .with(Backend::MxFp8);
        let shape = AttentionShape::new(model.kv_heads * model.group, model.kv_heads, DIM);
        let mut schedule = Schedule::of(4);
        schedule.tokens = 900;
        Self {
            stream,
            settings: BatchSettings::of(&cache, Causality::Causal)
                .policy(StatePolicy::new(model.chunked, model.mtp.then_some(Drafting::Mtp))),
            attention: Attention::new(shape, cache, backends),
            shape,
            schedule,
            checked: 0,
            before: vec![Vec::new(); LAYERS],
            enlarged: 0,
        }
    }

    /// A row of the step's output against attention in double precision over what is stored, and that against what
    /// was written.
    fn check(
        &self,
        layer: usize,
        stored: &Stored,
        result: &[T],
        request: usize,
        token: usize,
        names: &[u64],
    ) -> Result<(), TestCaseError> {
        let block_size = stored.shape[2];
        let sequence = &self.schedule.requests[request].sequence;
        let slot = |place: usize| sequence.row()[place / block_size] * block_size + place % block_size;
        let rows = |what| -> Vec<Vec<f64>> {
            let slots = (0..names.len()).map(slot);
            slots.map(|slot| stored.token(what, slot)).collect()
        };
        let (keys, values) = (rows(1), rows(2));
        let kv_heads = self.shape.kv_heads;
        for (place, name) in names.iter().enumerate() {
            let wanted = in_groups::<T>(numbers(*name, layer, 1, kv_heads));
            prop_assert_eq!(&keys[place], &wanted, "key {}", place);
            let value = numbers(*name, layer, 2, kv_heads);
            for (x, (got, want)) in values[place].iter().zip(value).enumerate() {
                let want = T::from_f32(want.to_f32()).to_f64();
                // Powers of two of numbers up to 1 have floats from 2^-17 on.
                prop_assert!(
                    (got - want).abs() <= want.abs() / 16.0 + 2f64.powi(-17),
                    "value {place}, element {x}: {got}, expected {want}"
                );
            }
        }
        let query = in_groups::<T>(numbers(*names.last().unwrap(), layer, 0, self.shape.heads));
        for head in 0..self.shape.heads {
            let query = &query[head * DIM..][..DIM];
            let at = head / (self.shape.heads / kv_heads) * DIM;
            let scores: Vec<f64> = keys
                .iter()
                .map(|key| {
                    let products = key[at..][..DIM].iter().zip(query).map(|(k, q)| k * q);
                    self.shape.scale * products.sum::<f64>()
                })
                .collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
            for x in 0..DIM {
                let terms = scores.iter().zip(&values);
                let terms = terms.map(|(score, value)| (score - most).exp() / sum * value[at + x]);
                let (want, size) = terms.fold((0.0, 0.0), |(a, b), t| (a + t, b + t.abs()));
                let got = result[(token * self.shape.heads + head) * DIM + x].to_f64();
                // Probabilities become floats of 3 bits behind the first.
                prop_assert!(
                    (got - want).abs() <= size / 16.0 + want.abs() / 128.0 + 1e-6,
                    "layer {layer}, request {request}, {} keys, head {head}, element {x}: {got}, expected {want}",
                    names.len()
                );
            }
        }
        Ok(())
    }
}

impl<T: Half> Scheduled for Engine<'_, T> {
    type Element = T;

    fn parts(&mut self) -> (&mut Schedule, &Stream, &mut PagedKvCache<T>) {
        (&mut self.schedule, self.stream, self.attention.cache_mut())
    }

    fn step(&mut self, turns: &[Turn], pad: usize) -> Result<(), TestCaseError> {
        let metadata = self.schedule.metadata(turns, self.settings, pad);
        let names = self.schedule.names(turns, pad);
        let mut results = Vec::new();
        {
            let mut step = self.attention.begin(self.stream, &metadata).unwrap();
            for layer in 0..LAYERS {
                let rows = |what, heads| upload::<T>(self.stream, &names, layer, what, heads);
                let (query, key) = (rows(0, self.shape.heads), rows(1, self.shape.kv_heads));
                let value = rows(2, self.shape.kv_heads);
                results.push(step.forward(layer, (&query, &key, &value)).unwrap().clone());
            }
            prop_assert_eq!(step.selected(0).unwrap().name, "mxfp8");
        }
        for (layer, result) in results.iter().enumerate() {
            let stored = Stored::of(self.stream, self.attention.cache(), layer);
            let [_, scales] = &stored.powers;
            let larger = self.before[layer].iter().zip(scales);
            self.enlarged += larger.filter(|(old, new)| (1..**new).contains(*old)).count();
            self.before[layer] = scales.clone();
            let result = result.download(self.stream).unwrap();
            for row in self.schedule.rows(turns) {
                self.check(layer, &stored, &result, row.request, row.token, row.names)?;
                self.checked += 1;
            }
        }
        Ok(())
    }
}

fn run<T: Half>(model: &Model, steps: &[(Vec<Act>, usize)]) -> Result<(), TestCaseError> {
    let Some(stream) = ascend_950() else {
        return Ok(());
    };
    let mut engine = Engine::<T>::new(&stream, model);
    engine.run(steps)
}

proptest! {
    #![proptest_config(config(12))]

    #[test]
    fn any_schedule_over_groups_is_attention_over_what_is_stored(model in model(), half in any::<bool>(), steps in prop::collection::vec((prop::collection::vec(act(150, 6), 1..5), 0usize..10), 1..7)) {
        match half {
            true => run::<f16>(&model, &steps)?,
            false => run::<bf16>(&model, &steps)?,
        }
    }
}

/// Two requests whose tokens come one by one and in chunks that end within a group of 32.
#[test]
fn tokens_that_come_one_by_one_enlarge_the_scales_of_those_in_front_of_them() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let model = Model { kv_heads: 2, group: 2, block_size: 512, blocks: 4, dump: true, chunked: true, mtp: false };
    let mut engine = Engine::<bf16>::new(&stream, &model);
    let steps = [
        vec![Act::Chunk(0, 40), Act::Chunk(1, 5)],
        vec![Act::Chunk(0, 1), Act::Chunk(1, 1)],
        vec![Act::Chunk(0, 1), Act::Chunk(1, 40)],
        vec![Act::Chunk(0, 20), Act::Chunk(1, 1)],
        vec![Act::Verify(0, 3, 1), Act::Chunk(1, 1)],
    ];
    for acts in &steps {
        engine.act(acts, 2).unwrap();
    }
    // Of each request and layer the first row of a step, one in the middle and the last.
    assert!(engine.checked >= 30, "{} rows", engine.checked);
    assert!(engine.enlarged >= 100, "{} scales", engine.enlarged);
    engine.end();
}

#[test]
fn values_share_their_powers_of_two_with_those_in_front_of_them() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let shape = CacheShape::new(1, 1, DIM).format(Cache::BnNBsD);
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<bf16>::mxfp8(stream.device(), 2, 512, shape, pad).unwrap();
    let (floats, powers) = (2 * 512 * DIM, 2 * (512 * DIM / GROUP + 512 / GROUP * DIM));
    assert_eq!(cache.bytes(), 2 * floats + powers);
    let mut write = |slots: &[i32], numbers: &[f32]| {
        let rows: Vec<bf16> = numbers.iter().flat_map(|number| [bf16::from_f32(*number); DIM]).collect();
        let rows = stream.upload(&rows, [slots.len(), 1, DIM]).unwrap();
        let write = CacheWrite::plan(&cache, &stream, slots, &rows, &rows).unwrap();
        cache.write(&stream, &write, 0, &rows, &rows).unwrap();
        Stored::of(&stream, &cache, 0)
    };
    let value = |stored: &Stored, slot| stored.token(2, slot)[0];
    let stored = write(&[30, 31, 32, -1], &[1.0, 3.0, 0.001, 7.0]);
    assert_eq!((value(&stored, 30), value(&stored, 31)), (1.0, 3.0));
    // Another group: a small number is as near as a large one.
    assert!((value(&stored, 32) / 0.001 - 1.0).abs() < 1.0 / 16.0);
    let stored = write(&[33], &[1000.0]);
    // Steps of 2^-9 times 4, within half a step.
    assert_abs_diff_eq!(value(&stored, 32), 0.001, epsilon = 4.0 / 1024.0);
    assert!((value(&stored, 33) / 1000.0 - 1.0).abs() < 1.0 / 16.0);
    assert_eq!((value(&stored, 30), value(&stored, 31)), (1.0, 3.0));
    let stored = write(&[32, 33], &[0.001, 0.002]);
    assert!((value(&stored, 32) / 0.001 - 1.0).abs() < 1.0 / 16.0);
    assert!((value(&stored, 33) / 0.002 - 1.0).abs() < 1.0 / 16.0);
    // Keys have their own.
    assert_eq!(stored.token(1, 31)[7], 3.0);
}

/// As `quantised_floats` measures the types that have a scale for each channel or token.
#[test]
fn the_accuracy_of_mxfp8() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let layers = [Layer::random(&stream, 1, DIM)];
    let (shape, pad) = (CacheShape::new(1, 2, DIM), PadPolicy::SkipNegative);
    let device = stream.device();
    let plain = PagedKvCache::new(device, 4, 128, shape, pad).unwrap();
    let shape = shape.format(Cache::BnNBsD);
    let groups = PagedKvCache::mxfp8(device, 2, 512, shape, pad).unwrap();
    let of = accuracies(&stream, [plain, groups], &layers);
    let (largest, mean) = (of[0].largest_share(), of[0].mean_share());
    assert!(largest > 0.0 && largest < 0.05 && mean < 0.005, "{of:?}");
}

#[test]
fn what_has_no_mxfp8_is_refused() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let pad = PadPolicy::SkipNegative;
    let made = |stream: &Stream, block_size, shape: CacheShape| {
        PagedKvCache::<bf16>::mxfp8(stream.device(), 4, block_size, shape, pad)
    };
    let shape = |dim| CacheShape::new(1, 2, dim).format(Cache::BnNBsD);
    for (block_size, dim) in [(512, 64), (512, 128), (1024, 64), (1024, 128)] {
        made(&stream, block_size, shape(dim)).unwrap();
    }
    for (block_size, shape, rule) in [
        (128, shape(64), "mxfp8.cache"),
        (0, shape(64), "pool.size"),
        (usize::MAX, shape(64), "pool.size"),
        (512, shape(32), "mxfp8.form"),
        (512, shape(0), "sizes of 1 or more"),
        (512, shape(256), "mxfp8.form"),
        (512, shape(usize::MAX), "whose product can be counted"),
        (512, CacheShape::new(1, 300, 64).format(Cache::BnNBsD), "num_heads.full_quant"),
        (512, CacheShape::new(1, 2, 64), "BnNBsD"),
        (512, CacheShape::new(1, 2, 64).format(Cache::Nz), "BnNBsD"),
    ] {
        let why = made(&stream, block_size, shape).unwrap_err().to_string();
        assert!(why.contains(rule), "{block_size}, {shape:?}: {why}");
    }
    for (soc, cann) in [(Soc::AtlasA2, Cann::V9_1), (Soc::AtlasA3, Cann::V9_1), (Soc::AtlasInference, Cann::V9_1)] {
        let stream = emulated_as(soc, cann).unwrap();
        let why = made(&stream, 512, shape(64)).unwrap_err();
        let why = why.to_string();
        let rules = ["dtype.registered", "call.product"];
        assert!(rules.iter().any(|rule| why.contains(rule)), "{soc}: {why}");
    }
}

#[test]
fn layers_and_caches_without_a_call_are_refused_by_name() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let pad = PadPolicy::SkipNegative;
    let shape = CacheShape::new(1, 2, DIM).format(Cache::BnNBsD);
    let attention = |cache| {
        let backends = Backends::none().with(Backend::MxFp8);
        Attention::new(AttentionShape::new(4, 2, DIM), cache, backends)
    };
    let mut groups = attention(PagedKvCache::mxfp8(stream.device(), 4, 512, shape, pad).unwrap());
    let scales = [ChannelScales::uniform(&shape, 1.0, 1.0).unwrap()];
    let channels = PagedKvCache::quantised(&stream, 4, 512, shape, pad, QuantisedType::Int8, &scales).unwrap();
    let mut channels = attention(channels);
    let one = |heads| stream.upload(&[bf16::ONE; 4 * DIM][..heads * DIM], [1, heads, DIM]);
    let (query, key) = (one(4).unwrap(), one(2).unwrap());
    let refused = |attention: &mut Attention<bf16>, causality| {
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let settings = BatchSettings::of(attention.cache(), causality);
        let batch = [BatchRequest::of(&sequence, 1)];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        step.forward(0, (&query, &key, &key)).map(drop)
    };
    refused(&mut groups, Causality::Causal).unwrap();
    let window = Causality::from_flags(true, Some(3)).unwrap();
    for (attention, causality, rule) in
        [(&mut groups, window, &rules::BACKEND_MX_FP8), (&mut channels, Causality::Causal, &rules::BACKEND_QUANTISED)]
    {
        let why = refused(attention, causality).unwrap_err();
        assert!(why.breaks(rule), "{why}");
    }
    let mut sequence = Sequence::new(groups.cache().pool());
    groups.grow(&stream, &mut sequence, 5).unwrap();
    match groups.cache_mut().move_tokens(&stream, &sequence, [(3, 1)]) {
        Err(Error::Violation(refused)) => assert_eq!(refused.rule, &rules::CACHE_QUANTISED),
        other => panic!("{other:?}"),
    }
    // Padding may be anything, wherever it stands.
    let first_is = |number: f32| {
        let rows = [[bf16::from_f32(number); 2 * DIM], [bf16::ONE; 2 * DIM]].concat();
        stream.upload(&rows, [2, 2, DIM]).unwrap()
    };
    let (good, bad) = (first_is(1.0), first_is(f32::NAN));
    let cache = groups.cache_mut();
    let write = CacheWrite::plan(cache, &stream, &[-1, 4], &good, &good).unwrap();
    cache.write(&stream, &write, 0, &good, &good).unwrap();
    let of_good = Stored::of(&stream, cache, 0);
    cache.write(&stream, &write, 0, &bad, &bad).unwrap();
    let of_bad = Stored::of(&stream, cache, 0);
    assert_eq!((of_good.floats, of_good.powers), (of_bad.floats, of_bad.powers));
    for bad in [f32::NAN, f32::INFINITY] {
        let rows = stream.upload(&[bf16::from_f32(bad); 2 * DIM], [1, 2, DIM]).unwrap();
        let cache = groups.cache_mut();
        let write = CacheWrite::plan(cache, &stream, &[7], &key, &key).unwrap();
        let before = Stored::of(&stream, cache, 0);
        match cache.write(&stream, &write, 0, &key, &rows) {
            Err(Error::Violation(refused)) => assert_eq!(refused.rule, &rules::QUANTISED_FINITE),
            other => panic!("{other:?}"),
        }
        let after = Stored::of(&stream, groups.cache(), 0);
        assert_eq!((before.floats, before.powers), (after.floats, after.powers));
    }
}

/// Their values would be stored with larger steps than those that are behind them.
#[test]
fn tokens_are_not_computed_once_more_in_front_of_others() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let shape = CacheShape::new(1, 1, DIM).format(Cache::BnNBsD);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::mxfp8(stream.device(), 2, 512, shape, pad).unwrap();
    let backends = Backends::standard(stream.device());
    let mut attention = Attention::new(AttentionShape::new(1, 1, DIM), cache, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 21).unwrap();
    attention.cache().mark_computed(&sequence, 21).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut of = |cached, new| {
        let mut request = BatchRequest::of(&sequence, 21).recompute();
        (request.cached, request.new) = (cached, new);
        let metadata = AttentionMetadata::new(&[request], settings).unwrap();
        attention.begin(&stream, &metadata).map(drop)
    };
    let refused = of(0, 4).unwrap_err();
    assert!(refused.breaks(&rules::CACHE_QUANTISED), "{refused}");
    of(0, 21).unwrap();
}

/// Values share powers of two with those in front of them. A write that fails between the two has changed what was
/// accepted, and that does not count any more.
#[test]
fn a_write_that_fails_half_way_loses_the_values_in_front() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let stream = &ascend_950().unwrap();
    let (shape, pad) = (CacheShape::new(1, 1, DIM).format(Cache::BnNBsD), PadPolicy::SkipNegative);
    let rows = |names: &[u64], what: u64, factor: f32| {
        let rows = names.iter().flat_map(|name| numbers(*name, 0, what, 1));
        let rows: Vec<_> = rows.map(|x| bf16::from_f32(x.to_f32() * factor)).collect();
        stream.upload(&rows, [names.len(), 1, DIM]).unwrap()
    };
    let all: Vec<u64> = (0..45).collect();
    let new = || {
        let cache = PagedKvCache::<bf16>::mxfp8(stream.device(), 2, 512, shape, pad).unwrap();
        let backends = Backends::standard(stream.device());
        Attention::new(AttentionShape::new(1, 1, DIM), cache, backends)
    };
    // A step of tokens, as many times as large, with the device failing at the `nth` copy of its layer.
    let step = |attention: &mut Attention<bf16>, sequence: &mut Sequence, names: &[u64], factor, nth: Option<u64>| {
        attention.grow(stream, sequence, names.len()).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let batch = [BatchRequest::of(sequence, names.len())];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let tensors = [0, 1, 2].map(|what| rows(names, what, factor));
        let [query, key, value] = &tensors;
        let mut step = attention.begin(stream, &metadata).unwrap();
        let fault = nth.map(|nth| inject(Site::Memcpy, nth, 207_001));
        let output = step.forward(0, (query, key, value));
        drop(fault);
        match output {
            Ok(output) => Ok(output.download(stream).unwrap()),
            Err(_) => {
                let again = step.forward(0, (query, key, value)).map(drop);
                let end = step.end();
                if again.is_err() {
                    let why = end.unwrap_err().to_string();
                    assert!(why.contains("cut its sequences"), "{why}");
                }
                Err(again)
            }
        }
    };
    let mut attention = new();
    let mut sequence = Sequence::new(attention.cache().pool());
    let want = step(&mut attention, &mut sequence, &all, 1.0, None).unwrap();
    let want = &want[want.len() - DIM..];
    let (mut lost, mut kept) = (0, 0);
    for nth in 1.. {
        let mut attention = new();
        let mut sequence = Sequence::new(attention.cache().pool());
        step(&mut attention, &mut sequence, &all[..40], 1.0, None).unwrap();
        let Err(again) = step(&mut attention, &mut sequence, &[90, 91, 92], 40.0, Some(nth)) else {
            break;
        };
        let computed = match again {
            Err(why) => {
                assert!(why.breaks(&rules::SEQUENCE_GAP), "{why}");
                lost += 1;
                32
            }
            Ok(()) => {
                kept += 1;
                43
            }
        };
        assert_eq!(attention.cache().computed_tokens(&sequence), Ok(computed));
        let computed = computed.min(40);
        sequence.truncate(computed).unwrap();
        let got = step(&mut attention, &mut sequence, &all[computed..], 1.0, None).unwrap();
        for (got, want) in got[got.len() - DIM..].iter().zip(want) {
            // Drafts that were large have left the 32 with coarser values.
            let epsilon = if computed == 32 { 0.02 } else { 0.3 };
            assert_abs_diff_eq!(got.to_f32(), want.to_f32(), epsilon = epsilon);
        }
    }
    assert!(lost > 0 && kept > 0, "{lost} {kept}");
}
