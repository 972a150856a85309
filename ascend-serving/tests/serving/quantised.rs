//! An INT8 cache: what is stored, and what is refused.

use crate::harness;
use approx::abs_diff_eq;

use crate::harness::reference::Half;
use crate::quantised_caches::{self, Layer, accuracies, ascend_950, attention, emulated_as};
use crate::refusals::{blamed, broken, rule};
use ascend_attention::attention::{Antiquantisation, Quantisation};
use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, Tensor, bf16, f16};
use ascend_emu::{Site, inject};
use ascend_serving::kv::{
    Cache, CacheShape, CacheWrite, ChannelScales, PadPolicy, PagedKvCache, QuantisedType, Sequence,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits, LayerInputs, LayerMask, NamedMask, compare_caches, rules,
};
use proptest::prelude::*;
use proptest::test_runner::Config;

const DIM: usize = 32;

fn upload(stream: &Stream, data: &[f32], heads: usize) -> Tensor<bf16> {
    quantised_caches::upload(stream, data, heads, DIM)
}

/// Writes tokens of one head to the first slots, and gives what is stored of their values.
fn stored(numbers: &[f32], scale: f32) -> Vec<i8> {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let scales = [ChannelScales::uniform(&shape, 1.0, scale).unwrap()];
    let pad = PadPolicy::SkipNegative;
    let mut cache = PagedKvCache::<bf16>::quantised(&stream, 2, 128, shape, pad, QuantisedType::Int8, &scales).unwrap();
    assert!(cache.is_quantised());
    assert_eq!(cache.bytes(), 2 * 2 * 128 * DIM);
    let rows = upload(&stream, numbers, 1);
    let slots: Vec<i32> = (0..rows.shape()[0] as i32).collect();
    let write = CacheWrite::plan(&cache, &stream, &slots, &rows, &rows).unwrap();
    cache.write(&stream, &write, 0, &rows, &rows).unwrap();
    let value = &cache.quantised_layer(0).unwrap().cache.value;
    value.download(&stream).unwrap()[..numbers.len()].to_vec()
}

#[test]
fn halves_go_to_the_even_integer_and_what_is_too_large_is_cut() {
    let cases = [
        (0.5, 0),
        (1.5, 2),
        (2.5, 2),
        (-0.5, 0),
        (-1.5, -2),
        (-3.5, -4),
        (126.5, 126),
        (127.5, 127),
        (200.0, 127),
        (3e38, 127),
        (-127.5, -128),
        (-128.5, -128),
        (-1e30, -128),
        (1e-30, 0),
        (0.0, 0),
    ];
    let mut numbers = [0f32; DIM];
    let mut want = [0i8; DIM];
    for (at, (number, integer)) in cases.into_iter().enumerate() {
        (numbers[at], want[at]) = (number, integer);
    }
    assert_eq!(stored(&numbers, 1.0), want);
    // A power of two divides exactly.
    let eighths = numbers.map(|number| number / 8.0);
    assert_eq!(stored(&eighths, 0.125), want);
}

proptest! {
    #![proptest_config(Config { cases: 24, failure_persistence: None, ..Config::default() })]

    /// What is stored of each token is its numbers times the inverse of the rounded scale, in its slot and nowhere
    /// else.
    #[test]
    fn quantised_tokens_go_to_their_slots(
        stored in prop_oneof![2 => Just(QuantisedType::Int8), 1 => Just(QuantisedType::Float8E4M3Fn), 1 => Just(QuantisedType::HiFloat8)],
        format in prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD), Just(Cache::Nz)],
        heads in 1usize..4,
        seed in 1u64..1000,
        wanted in prop::collection::btree_set(0usize..640, 1..30),
        layer in 0usize..2,
    ) {
        let stream = match stored {
            QuantisedType::Int8 => harness::stream(),
            _ => match ascend_950() {
                Some(stream) => stream,
                None => return Ok(()),
            },
        };
        // Floats are read from no NZ cache.
        let format = match (stored, format) {
            (QuantisedType::Int8, format) => format,
            (_, Cache::Nz) => Cache::BnNBsD,
            (_, format) => format,
        };
        let shape = CacheShape::new(2, heads, DIM).format(format);
        let channels = heads * DIM;
        let scale = |layer: usize, what: usize, channel: usize| 0.003 * (1 + layer + 2 * what + channel % 7) as f32;
        let scales = [0, 1].map(|layer| {
            let of = |what| (0..channels).map(|c| scale(layer, what, c)).collect();
            ChannelScales::new(of(0), of(1)).unwrap()
        });
        let pad = PadPolicy::SkipNegative;
        let mut cache = PagedKvCache::<bf16>::quantised(&stream, 5, 128, shape, pad, stored, &scales).unwrap();
        let mut slots: Vec<i32> = wanted.iter().map(|slot| *slot as i32).collect();
        let tokens = slots.len() + 2;
        let keys = harness::numbers(seed, tokens * channels);
        let values = harness::numbers(seed + 1, tokens * channels);
        // The rows of padding hold any values.
        slots.extend([-1, -1]);
        let (key, value) = (upload(&stream, &keys, heads), upload(&stream, &values, heads));
        let write = CacheWrite::plan(&cache, &stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, layer, &key, &value).unwrap();
        for at in 0..2 {
            let of = cache.quantised_layer(at).unwrap();
            prop_assert_eq!(of.stored(), stored);
            for (what, (tensor, numbers)) in [(of.key(), &keys), (of.value(), &values)].into_iter().enumerate() {
                prop_assert_eq!(tensor.dtype(), stored.dtype());
                let mut want = vec![0u8; tensor.len()];
                for (token, slot) in wanted.iter().enumerate().filter(|_| at == layer) {
                    for channel in 0..channels {
                        let number = bf16::from_f32(numbers[token * channels + channel]).to_f32();
                        let scale = bf16::from_f32(scale(layer, what, channel)).to_f32();
                        let (head, x, block, row) = (channel / DIM, channel % DIM, slot / 128, slot % 128);
                        let place = match format {
                            Cache::BnBsH => slot * channels + channel,
                            // 32 elements are 32 bytes: a head is one part.
                            Cache::BnNBsD | Cache::Nz => ((block * heads + head) * 128 + row) * DIM + x,
                        };
                        want[place] = bits(stored, number * scale.recip());
                    }
                }
                prop_assert_eq!(tensor.download_bytes(&stream).unwrap(), want);
            }
        }
    }
}

/// The bits of the nearest number of a type, which is not cut.
fn bits(stored: QuantisedType, number: f32) -> u8 {
    match stored {
        QuantisedType::Int8 => (number.round_ties_even() as i8) as u8,
        QuantisedType::Float8E4M3Fn => Float8E4M3Fn::from_f32(number).to_bits(),
        QuantisedType::HiFloat8 => HiFloat8::from_f32(number).to_bits(),
        other => panic!("{other:?}: how is it rounded?"),
    }
}

#[test]
fn scales_that_divide_nothing_are_refused() {
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let refused = ChannelScales::new(vec![1.0, scale], vec![1.0]).unwrap_err();
        assert_eq!(refused.rule, &rules::QUANTISED_SCALE);
        assert!(refused.given.contains("channel 1 of the key"), "{refused}");
    }
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let with = |scales: &[ChannelScales]| {
        PagedKvCache::<f16>::quantised(&stream, 1, 128, shape, pad, QuantisedType::Int8, scales)
    };
    let uniform = |scale| ChannelScales::uniform(&shape, scale, 1.0).unwrap();
    with(&[uniform(1.0)]).unwrap();
    // No number of FLOAT16, or 0 there.
    for scale in [1e5, 1e-9] {
        assert_eq!(rule(with(&[uniform(scale)])), &rules::QUANTISED_SCALE);
    }
    assert_eq!(rule(with(&[])), &rules::QUANTISED_SCALE);
    let few = ChannelScales::new(vec![1.0; DIM], vec![1.0; DIM - 1]).unwrap();
    assert_eq!(rule(with(&[few])), &rules::QUANTISED_SCALE);
    let floats = PagedKvCache::<f32>::quantised(&stream, 1, 128, shape, pad, QuantisedType::Int8, &[uniform(1.0)]);
    assert_eq!(blamed(floats), "T");
    let huge = CacheShape::new(shape.layers, usize::MAX, shape.key_dim);
    let refused = ChannelScales::uniform(&huge, 1.0, 1.0).unwrap_err();
    assert_eq!(refused.rule, &rules::QUANTISED_SCALE);
}

#[test]
fn a_calibration_covers_its_numbers() {
    let keys = [1.0, 0.0, -2.0, 0.0].map(bf16::from_f32);
    let scales = ChannelScales::covering(QuantisedType::Int8, &keys, &keys[..2], 2, 1).unwrap();
    assert_eq!(scales.key(), [2.0 / 127.0, 1.0]);
    assert_eq!(scales.value(), [1.0 / 127.0]);
    let none = ChannelScales::covering::<bf16>(QuantisedType::Int8, &[], &[], 2, 1).unwrap();
    assert_eq!((none.key(), none.value()), (&[1.0; 2][..], &[1.0][..]));
    for bad in [f32::NAN, f32::INFINITY] {
        let keys = [0.5, bad].map(bf16::from_f32);
        let refused = ChannelScales::covering(QuantisedType::Int8, &keys, &keys, 1, 1).unwrap_err();
        assert_eq!(refused.rule, &rules::QUANTISED_FINITE);
    }
    for channels in [0, 3] {
        let refused = ChannelScales::covering(QuantisedType::Int8, &keys, &keys, channels, 1).unwrap_err();
        assert_eq!(refused.rule, &rules::QUANTISED_SCALE);
    }
    for channels in [ChannelScales::MAX_CHANNELS + 1, 1 << 40, usize::MAX] {
        let refused = ChannelScales::covering::<bf16>(QuantisedType::Int8, &[], &[], channels, 1).unwrap_err();
        assert_eq!(refused.rule, &rules::QUANTISED_SCALE);
        let shape = CacheShape::new(1, channels, 2);
        let refused = ChannelScales::uniform(&shape, 1.0, 1.0).unwrap_err();
        assert_eq!(refused.rule, &rules::QUANTISED_SCALE);
    }
}

#[test]
fn numbers_of_16_bits_are_not_read_from_integers() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let scales = [ChannelScales::uniform(&shape, 1.0, 1.0).unwrap()];
    let cache = |scales: Option<&[ChannelScales]>| match scales {
        Some(scales) => {
            PagedKvCache::<bf16>::quantised(&stream, 1, 128, shape, pad, QuantisedType::Int8, scales).unwrap()
        }
        None => PagedKvCache::<bf16>::new(stream.device(), 1, 128, shape, pad).unwrap(),
    };
    let (integers, mut plain) = (cache(Some(&scales)), cache(None));
    assert_eq!(rule(integers.layer(0)), &rules::CACHE_QUANTISED);
    assert_eq!(blamed(plain.quantised_layer(0)), "cache");
    assert_eq!(blamed(integers.quantised_layer(1)), "layer");
    let device = stream.device();
    let of_tokens = PagedKvCache::quantised_by_token(device, 1, 128, shape, pad, QuantisedType::Int8).unwrap();
    let graphs = |cache| {
        let backends = Backends::none();
        let backends = backends.with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill);
        Attention::new(AttentionShape::new(1, 1, DIM), cache, backends)
    };
    let (of_tokens, integers) = (graphs(of_tokens), graphs(integers));
    let limits = GraphLimits::new([1], 128);
    let captured = of_tokens.capture(&stream, Causality::Causal, &limits);
    assert_eq!(rule(captured), &rules::CACHE_QUANTISED);
    let sinks = stream.upload(&[bf16::ONE], [1]).unwrap();
    let window = Causality::from_flags(true, Some(3)).unwrap();
    let none = NamedMask::new("all", |_, _, _| true);
    let causal = || LayerMask::from(Causality::Causal);
    let with_sinks = limits.clone().learnable_sinks([sinks]);
    let several = limits.clone().tokens_each(2);
    for (mask, limits, rules) in [
        (causal(), &several, [&rules::BACKEND_DECODE, &rules::GRAPH_BACKEND]),
        (causal(), &with_sinks, [&rules::BACKEND_DECODE, &rules::GRAPH_BACKEND]),
        (window.into(), &limits, [&rules::BACKEND_DECODE, &rules::GRAPH_BACKEND]),
        (none.into(), &limits, [&rules::BACKEND_QUANTISED; 2]),
    ] {
        let refused = integers.capture(&stream, mask, limits).unwrap_err();
        assert!(rules.iter().all(|rule| refused.breaks(rule)), "{refused}");
    }
    let mut integers = cache(Some(&scales));
    let row = upload(&stream, &[1.0; DIM], 1);
    let of_plain = CacheWrite::plan(&plain, &stream, &[3], &row, &row).unwrap();
    let of_integers = CacheWrite::plan(&integers, &stream, &[3], &row, &row).unwrap();
    let outcome = integers.write(&stream, &of_plain, 0, &row, &row);
    assert_eq!(rule(outcome), &rules::CACHE_QUANTISED);
    let outcome = plain.write(&stream, &of_integers, 0, &row, &row);
    assert_eq!(rule(outcome), &rules::CACHE_QUANTISED);
    let wide = stream.upload(&[bf16::ONE; 2 * DIM], [1, 1, 2 * DIM]).unwrap();
    let outcome = integers.write(&stream, &of_integers, 0, &wide, &row);
    assert_eq!(blamed(outcome), "key");
    let planned = CacheWrite::plan(&integers, &stream, &[3], &row, &wide);
    assert_eq!(broken(planned), "step.heads");
    let kept = integers.quantised_layer(0).unwrap().cache.key.download(&stream).unwrap();
    assert!(kept.iter().all(|x| *x == 0));
}

/// What a cache serves that is made with scales of channels or of tokens, or why it is not made.
fn served<T: Half>(stream: &Stream, format: Cache, dim: usize, by_token: bool) -> Vec<Result<&'static str, String>> {
    let shape = CacheShape::new(1, 2, dim).format(format);
    let scales = [ChannelScales::uniform(&shape, 0.5, 0.25).unwrap()];
    let pad = PadPolicy::SkipNegative;
    let cache = match by_token {
        true => PagedKvCache::<T>::quantised_by_token(stream.device(), 8, 128, shape, pad, QuantisedType::Int8),
        false => PagedKvCache::<T>::quantised(stream, 8, 128, shape, pad, QuantisedType::Int8, &scales),
    };
    match cache {
        Ok(cache) => quantised_caches::served(stream, cache),
        Err(why) => vec![Err(why.to_string()); 3],
    }
}

#[test]
fn releases_serve_what_they_take() {
    let all = ["quantised_prefill", "quantised_decode", "quantised_prefill"];
    for (soc, cann) in [
        (Soc::AtlasA2, Cann::V8_1),
        (Soc::AtlasA2, Cann::V8_5),
        (Soc::AtlasA2, Cann::V9_0),
        (Soc::AtlasA3, Cann::V9_1),
        (Soc::Ascend950, Cann::V9_1),
        (Soc::AtlasInference, Cann::V9_1),
    ] {
        let Some(stream) = emulated_as(soc, cann) else {
            return;
        };
        let check_scales = |format, dim, half: bool, by_token: bool, want: [Result<&str, &str>; 3]| {
            let got = match half {
                true => served::<f16>(&stream, format, dim, by_token),
                false => served::<bf16>(&stream, format, dim, by_token),
            };
            for (step, (got, want)) in got.into_iter().zip(want).enumerate() {
                let right = match (&got, want) {
                    (Ok(got), Ok(want)) => *got == want,
                    (Err(got), Err(want)) => got.contains(want),
                    _ => false,
                };
                let told = format!("{soc:?}, {cann:?}, {format:?}, {dim}, step {step}");
                assert!(right, "{told}: {got:?}, expected {want:?}");
            }
        };
        let check = |format, dim, half, want| {
            check_scales(format, dim, half, false, want);
            if format != Cache::Nz {
                check_scales(format, dim, half, true, want);
            }
        };
        if soc == Soc::AtlasInference {
            check(Cache::BnBsH, 128, true, [Err("call.product"); 3]);
            continue;
        }
        for dim in [64, 128] {
            check(Cache::BnBsH, dim, false, all.map(Ok));
            let apart = [Ok(all[0]), Ok(all[1]), Err("whose tokens are contiguous")];
            check(Cache::BnNBsD, dim, false, apart);
            // Packed calls of FLOAT16 came with 8.5.
            match cann {
                Cann::V8_1 => check(Cache::BnBsH, dim, true, [Err("packed.dtype"), Ok(all[1]), Err("packed.dtype")]),
                _ => check(Cache::BnBsH, dim, true, all.map(Ok)),
            }
        }
        let decode = match (soc, cann) {
            (Soc::Ascend950, _) => Err("cache.unified_shape"),
            (_, Cann::V8_1) => Err("antiquant.nz_heads"),
            _ => Ok(all[1]),
        };
        check(Cache::Nz, 128, false, [Ok(all[0]), decode, Err("whose tokens are contiguous")]);
    }
}

#[test]
fn the_accuracy_is_that_of_the_scales() {
    let stream = harness::stream();
    let layers = [1, 4].map(|seed| Layer::random(&stream, seed, 64));
    let (shape, pad) = (CacheShape::new(2, 2, 64), PadPolicy::SkipNegative);
    let device = stream.device();
    let plain = || PagedKvCache::<bf16>::new(device, 4, 128, shape, pad).unwrap();
    let compare = |scales: &[ChannelScales]| {
        let cache = PagedKvCache::quantised(&stream, 4, 128, shape, pad, QuantisedType::Int8, scales).unwrap();
        accuracies(&stream, [plain(), cache], &layers)
    };
    let fine = layers.each_ref().map(|of| {
        let [_, key, value] = &of.numbers;
        ChannelScales::covering(QuantisedType::Int8, key, value, 128, 128).unwrap()
    });
    // The second layer has an eighth of the steps.
    let larger = |scales: &[f32]| scales.iter().map(|scale| scale * 8.0).collect();
    let second = ChannelScales::new(larger(fine[1].key()), larger(fine[1].value())).unwrap();
    let coarse = [fine[0].clone(), second];
    let (fine, coarse) = (compare(&fine), compare(&coarse));
    assert_eq!(fine[0], coarse[0]);
    let by_token = PagedKvCache::quantised_by_token(device, 4, 128, shape, pad, QuantisedType::Int8).unwrap();
    let by_token = accuracies(&stream, [plain(), by_token], &layers);
    for of in fine.iter().chain(&by_token) {
        assert!(of.largest > 0.0 && of.largest_share() < 0.02, "{of:?}");
        assert!(of.mean_share() < 0.002 && of.mean() < of.largest, "{of:?}");
    }
    assert!(coarse[1].mean() > 4.0 * fine[1].mean(), "{coarse:?}");
    // The same cache twice is no difference.
    for of in accuracies(&stream, [plain(), plain()], &layers) {
        let none = of.largest == 0.0 && of.mean() == 0.0;
        assert!(none && of.range() > 1.0, "{of:?}");
    }
    let (mut one, mut other) = (attention(plain()), attention(plain()));
    let rows = layers.each_ref().map(Layer::rows);
    for (steps, layers) in
        [(&[1, 1, 20, 1, 1, 26][..], &rows[..]), (&[], &[]), (&[150], &rows[..1]), (&[usize::MAX, 151], &rows)]
    {
        let refused = compare_caches(&stream, &mut one, &mut other, steps, layers);
        assert!(matches!(refused, Err(Error::Violation(_))), "{refused:?}");
    }
    // Rows that no step has.
    let longer = Tensor::empty(stream.device(), [151, rows[1].key.shape()[1], rows[1].key.shape()[2]]).unwrap();
    let odd = rows.each_ref().map(|layer| LayerInputs::from((layer.query, &longer, layer.value)));
    let refused = compare_caches(&stream, &mut one, &mut other, &[150], &odd);
    assert!(matches!(refused, Err(Error::Violation(_))), "{refused:?}");
}

#[test]
fn a_token_with_a_number_that_is_none_is_refused_before_its_layer_is_written() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let device = stream.device();
    let mut cache = PagedKvCache::<bf16>::quantised_by_token(device, 1, 128, shape, pad, QuantisedType::Int8).unwrap();
    // A factor of 4 bytes for each token's key and value.
    assert_eq!(cache.bytes(), 2 * 128 * (DIM + 4));
    let good = upload(&stream, &[2.0; 2 * DIM], 1);
    let mut numbers = [1.0; 2 * DIM];
    numbers[DIM + 3] = f32::NAN;
    let bad = upload(&stream, &numbers, 1);
    let write = CacheWrite::plan(&cache, &stream, &[3, 5], &good, &good).unwrap();
    for (key, value) in [(&bad, &good), (&good, &bad)] {
        let refused = cache.write(&stream, &write, 0, key, value);
        assert_eq!(rule(refused), &rules::QUANTISED_FINITE);
    }
    let one = upload(&stream, &[1.0; DIM], 1);
    assert_eq!(rule(cache.write(&stream, &write, 0, &one, &good)), &rules::SLOT_COUNT);
    let key = |cache: &PagedKvCache<bf16>| {
        let key = &cache.quantised_layer(0).unwrap().cache.key;
        key.download(&stream).unwrap()
    };
    assert!(key(&cache).iter().all(|x| *x == 0));
    cache.write(&stream, &write, 0, &good, &good).unwrap();
    let key = key(&cache);
    assert_eq!(key.iter().filter(|x| **x == 127).count(), 2 * DIM);
    assert_eq!(key[5 * DIM..6 * DIM], [127; DIM]);
    // Padding may be anything, wherever it stands.
    let write = CacheWrite::plan(&cache, &stream, &[4, -1], &good, &good).unwrap();
    cache.write(&stream, &write, 0, &bad, &bad).unwrap();
    let bad_first = upload(&stream, &[&numbers[DIM..], &[1.0; DIM]].concat(), 1);
    let write = CacheWrite::plan(&cache, &stream, &[-1, 4], &good, &good).unwrap();
    cache.write(&stream, &write, 0, &bad_first, &bad_first).unwrap();
    let refused = cache.write(&stream, &write, 0, &good, &bad);
    assert_eq!(rule(refused), &rules::QUANTISED_FINITE);

    let other = ChannelScales::uniform(&shape, 1.0, 1.0).unwrap();
    let mut channels =
        PagedKvCache::<bf16>::quantised(&stream, 1, 128, shape, pad, QuantisedType::Int8, &[other]).unwrap();
    assert_eq!(blamed(channels.write(&stream, &write, 0, &good, &good)), "write");
    let nz = shape.format(Cache::Nz);
    let made = PagedKvCache::<bf16>::quantised_by_token(device, 1, 128, nz, pad, QuantisedType::Int8);
    assert_eq!(blamed(made), "shape.format");
    let made = PagedKvCache::<f32>::quantised_by_token(device, 1, 128, shape, pad, QuantisedType::Int8);
    assert_eq!(blamed(made), "T");
}

/// What costs nothing is checked first: no memory of the device is taken for what cannot be.
#[test]
fn caches_that_cannot_be_are_refused_before_memory_is_taken() {
    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let stream = ascend_950().unwrap();
    let (device, pad) = (stream.device(), PadPolicy::SkipNegative);
    let many = CacheShape::MAX_LAYERS + 1;
    let huge = CacheShape::new(usize::MAX, 1, 64);
    let of_many = CacheShape::new(many, 1, 64);
    let scales = vec![ChannelScales::uniform(&of_many, 1.0, 1.0).unwrap(); many];
    let groups = huge.format(Cache::BnNBsD);
    let _no_memory = inject(Site::Malloc, 1, 207_018);
    for made in [
        PagedKvCache::<bf16>::new(device, 1, 512, huge, pad),
        PagedKvCache::quantised(&stream, 1, 512, of_many, pad, QuantisedType::Int8, &scales),
        PagedKvCache::quantised_by_token(device, 1, 512, huge, pad, QuantisedType::Int8),
        PagedKvCache::mxfp8(device, 1, 512, groups, pad),
    ] {
        let why = made.unwrap_err();
        let invalid = matches!(&why, Error::Violation(violation) if violation.rule.id == "argument.value");
        assert!(invalid && why.to_string().contains("at most 4096"), "{why}");
    }
    // Scales are uploaded when all else is right.
    let one = CacheShape::new(1, 1, 64);
    let no_blocks = PagedKvCache::<bf16>::quantised(&stream, 0, 512, one, pad, QuantisedType::Int8, &scales[..1]);
    assert_eq!(rule(no_blocks), &rules::POOL_SIZE);
}

/// Values are read as they are: by elements of their own number.
#[test]
fn values_that_no_call_reads_make_no_cache() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    for (key_dim, value_dim) in [(1024, DIM), (DIM, 1024)] {
        let shape = CacheShape::new(1, 1, key_dim).value_dim(value_dim);
        let scales = [ChannelScales::uniform(&shape, 1.0, 1.0).unwrap()];
        for made in [
            PagedKvCache::<bf16>::quantised(&stream, 1, 128, shape, pad, QuantisedType::Int8, &scales),
            PagedKvCache::quantised_by_token(stream.device(), 1, 128, shape, pad, QuantisedType::Int8),
        ] {
            assert_eq!(broken(made), "head_dim.max", "{key_dim}, {value_dim}");
        }
    }
}

/// The scales of keys and of values that a call over the cache has.
fn scales_of(stream: &Stream, cache: &PagedKvCache<bf16>) -> [Vec<f32>; 2] {
    let layer = cache.quantised_layer(0).unwrap();
    match layer.quantisation() {
        Some(Quantisation::KeyValue { antiquantisation: Antiquantisation::Split { key, value, .. }, .. }) => {
            [key, value].map(|of| {
                let of = of.scale.clone().typed::<f32>().unwrap();
                of.download(stream).unwrap()
            })
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_scale_of_a_token_goes_to_its_slot_and_with_its_block() {
    let stream = harness::stream();
    for format in [Cache::BnBsH, Cache::BnNBsD] {
        let shape = CacheShape::new(1, 2, DIM).format(format);
        let pad = PadPolicy::DumpSlot(0);
        let mut cache =
            PagedKvCache::<bf16>::quantised_by_token(stream.device(), 4, 16, shape, pad, QuantisedType::Int8).unwrap();
        let mut sequence = Sequence::new(cache.pool());
        let slots = cache.grow(&stream, &mut sequence, 20).unwrap();
        // The largest number of token n is n + 1 in its key, and twice that in its value, in the second head.
        let rows = |factor: f32| {
            let token = |n: usize| {
                let mut row = vec![0.25; 2 * DIM];
                row[DIM + n] = -factor * (n + 1) as f32;
                row
            };
            upload(&stream, &(0..20).flat_map(token).collect::<Vec<_>>(), 2)
        };
        let (key, value) = (rows(1.0), rows(2.0));
        let write = CacheWrite::plan(&cache, &stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, 0, &key, &value).unwrap();
        let mut fork = sequence.fork();
        // The second block becomes one of its own.
        cache.grow(&stream, &mut fork, 1).unwrap();
        assert_ne!(fork.row()[1], sequence.row()[1]);
        let [keys, values] = scales_of(&stream, &cache);
        for n in 0..20 {
            for of in [&sequence, &fork] {
                let slot = of.slot(n).unwrap();
                let want = (n + 1) as f32 / 127.0;
                assert_eq!((keys[slot], values[slot]), (want, 2.0 * (n + 1) as f32 / 127.0), "{format:?}, token {n}");
            }
        }
        let held: Vec<usize> = [sequence.row(), fork.row()].concat();
        let elsewhere = keys.iter().enumerate().filter(|(slot, _)| !held.contains(&(slot / 16)));
        assert!(elsewhere.into_iter().all(|(_, scale)| *scale == 0.0));
    }
}

/// More cached tokens than a call has sequences: they are dequantised by several calls.
#[test]
fn long_contexts_are_dequantised_in_parts() {
    const TOKENS: usize = 66_000;
    let stream = harness::stream();
    let shape = CacheShape::new(1, 1, 64);
    let pad = PadPolicy::SkipNegative;
    let scales = [ChannelScales::uniform(&shape, 1.0, 0.25).unwrap()];
    let cache = PagedKvCache::<bf16>::quantised(&stream, 520, 128, shape, pad, QuantisedType::Int8, &scales).unwrap();
    let backends = Backends::none().with(Backend::QuantisedPrefill);
    let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    let rows = |value: f32, tokens: usize| {
        let rows = vec![bf16::from_f32(value); tokens * 64];
        stream.upload(&rows, [tokens, 1, 64]).unwrap()
    };
    // Every key weighs the same; the last quarter of the cached values is 1.
    for (value, tokens) in [(0.0, TOKENS / 2), (0.0, TOKENS / 4), (1.0, TOKENS / 4)] {
        let cache = attention.cache_mut();
        let slots = cache.grow(&stream, &mut sequence, tokens).unwrap();
        let (key, value) = (rows(0.0, tokens), rows(value, tokens));
        let write = CacheWrite::plan(cache, &stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, 0, &key, &value).unwrap();
    }
    let written = sequence.len();
    attention.cache().mark_computed(&sequence, written).unwrap();
    attention.grow(&stream, &mut sequence, 2).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 2)], settings).unwrap();
    let new = rows(0.0, 2);
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let output = step.forward(0, (&new, &new, &new)).unwrap();
    for x in output.download(&stream).unwrap() {
        assert!(abs_diff_eq!(x.to_f64(), 0.25, epsilon = 1e-3), "{x}");
    }
}

/// Over every format, a replayed step is the eager one, bit for bit, and so is what it stores.
#[test]
fn a_replayed_step_is_that_of_quantised_decode() {
    const DIM: usize = 128;
    let stream = harness::stream();
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        let shape = CacheShape::new(1, 2, DIM).format(format);
        let scales = [ChannelScales::uniform(&shape, 0.01, 0.007).unwrap()];
        let computed = |by_graph: bool| {
            let pad = PadPolicy::SkipNegative;
            let cache =
                PagedKvCache::<bf16>::quantised(&stream, 6, 128, shape, pad, QuantisedType::Int8, &scales).unwrap();
            let backends = Backends::none().with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill);
            let mut attention = Attention::new(AttentionShape::new(4, 2, DIM), cache, backends);
            let limits = GraphLimits::new([1, 3], 300);
            let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
            let settings = BatchSettings::of(attention.cache(), Causality::Causal);
            let mut sequences = [0, 1].map(|_| Sequence::new(attention.cache().pool()));
            let mut last = Vec::new();
            // 5 tokens a request, one behind the other.
            for step in 0..5 {
                for sequence in &mut sequences {
                    attention.grow(&stream, sequence, 1).unwrap();
                }
                let batch = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
                let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
                let rows = |what: u64, heads: usize| {
                    let numbers = harness::numbers(10 * what + step + 1, 2 * heads * DIM);
                    let numbers: Vec<_> = numbers.into_iter().map(bf16::from_f32).collect();
                    stream.upload(&numbers, [2, heads, DIM]).unwrap()
                };
                let (query, key, value) = (rows(0, 4), rows(1, 2), rows(2, 2));
                last = match by_graph {
                    // The first token is a prompt without a graph: it sees itself in 16 bits.
                    true => {
                        let mut step = graphs.begin(&stream, &mut metadata).unwrap();
                        let output = step.forward(0, (&query, &key, &value)).unwrap();
                        output.download(&stream).unwrap()[..2 * 4 * DIM].to_vec()
                    }
                    false => {
                        let mut step = attention.begin(&stream, &metadata).unwrap();
                        let output = step.forward(0, (&query, &key, &value)).unwrap();
                        output.download(&stream).unwrap()
                    }
                };
            }
            let layer = attention.cache().quantised_layer(0).unwrap();
            let stored = [layer.key(), layer.value()];
            (last, stored.map(|of| of.download_bytes(&stream).unwrap()))
        };
        let (eager, replayed) = (computed(false), computed(true));
        assert!(eager.1[0].iter().any(|x| *x != 0));
        assert_eq!(eager, replayed, "{format:?}");
    }
}
