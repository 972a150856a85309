//! Caches of FLOAT8_E4M3FN and HIFLOAT8 on Ascend 950: what is stored, how near attention over it is, and what is refused.

use crate::harness;

use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{
    Cache, CacheShape, ChannelScales, PadPolicy, PagedKvCache, QuantisedType, Sequence,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings,
    CacheAccuracy, Causality, Error, Fused, LayerRows, QuantisedDecode, QuantisedPrefill,
    compare_caches,
};
use proptest::prelude::*;
use proptest::test_runner::Config;

use QuantisedType::{Float8E4M3Fn as E4m3, HiFloat8 as Hif8, Int8};

const DIM: usize = 64;
const PAD: PadPolicy = PadPolicy::SkipNegative;

/// An emulated product with CANN 9.1; none, said so, on an NPU.
fn emulated(soc: Soc) -> Option<Stream> {
    if harness::not_on_npu("products are emulated") {
        return None;
    }
    // The harness looks at what is left behind.
    drop(harness::runtime());
    let runtime = Runtime::emulated_as(&Machine::new(soc, Cann::V9_1)).unwrap();
    Some(runtime.device(0).unwrap().stream().unwrap())
}

fn upload(stream: &Stream, data: &[f32], heads: usize) -> Tensor<bf16> {
    let data: Vec<_> = data.iter().copied().map(bf16::from_f32).collect();
    let tokens = data.len() / (heads * DIM);
    stream.upload(&data, [tokens, heads, DIM]).unwrap()
}

/// The bits of the nearest number of a type, which is not cut.
fn bits(stored: QuantisedType, number: f32) -> u8 {
    match stored {
        Int8 => (number.round_ties_even() as i8) as u8,
        E4m3 => Float8E4M3Fn::from_f32(number).to_bits(),
        Hif8 => HiFloat8::from_f32(number).to_bits(),
    }
}

proptest! {
    #![proptest_config(Config { cases: 24, failure_persistence: None, ..Config::default() })]

    /// Each token's floats are its numbers times the inverse of the rounded scale, in its slot and nowhere else.
    #[test]
    fn floats_go_to_their_slots(
        stored in prop_oneof![Just(E4m3), Just(Hif8)],
        format in prop_oneof![Just(Cache::BnBsH), Just(Cache::BnNBsD)],
        heads in 1usize..4,
        seed in 1u64..1000,
        wanted in prop::collection::btree_set(0usize..640, 1..30),
    ) {
        let Some(stream) = emulated(Soc::Ascend950) else { return Ok(()) };
        let shape = CacheShape::new(1, heads, DIM).format(format);
        let channels = heads * DIM;
        let scale = |what: usize, channel: usize| 0.003 * (1 + 2 * what + channel % 7) as f32;
        let of = |what| (0..channels).map(|c| scale(what, c)).collect();
        let scales = [ChannelScales::new(of(0), of(1)).unwrap()];
        let cache = PagedKvCache::<bf16>::quantised_as(&stream, 5, 128, shape, PAD, stored, &scales);
        let mut cache = cache.unwrap();
        let mut slots: Vec<i32> = wanted.iter().map(|slot| *slot as i32).collect();
        let tokens = slots.len() + 2;
        let keys = harness::numbers(seed, tokens * channels);
        let values = harness::numbers(seed + 1, tokens * channels);
        slots.extend([-1, -1]);
        let (key, value) = (upload(&stream, &keys, heads), upload(&stream, &values, heads));
        let write = cache.plan_write(&stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, 0, &key, &value).unwrap();
        let layer = cache.quantised_layer(0).unwrap();
        prop_assert_eq!(layer.stored(), stored);
        for (what, (tensor, numbers)) in [(layer.key(), &keys), (layer.value(), &values)].into_iter().enumerate() {
            prop_assert_eq!(tensor.dtype(), stored.dtype());
            let mut want = vec![0u8; tensor.len()];
            for (token, slot) in wanted.iter().enumerate() {
                for channel in 0..channels {
                    let number = bf16::from_f32(numbers[token * channels + channel]).to_f32();
                    let scale = bf16::from_f32(scale(what, channel)).to_f32();
                    let (head, x, block, row) = (channel / DIM, channel % DIM, slot / 128, slot % 128);
                    let place = match format {
                        Cache::BnNBsD => ((block * heads + head) * 128 + row) * DIM + x,
                        _ => slot * channels + channel,
                    };
                    want[place] = bits(stored, number * scale.recip());
                }
            }
            prop_assert_eq!(tensor.download_bytes(&stream).unwrap(), want);
        }
    }
}

#[test]
fn the_device_cuts_no_float_and_the_host_needs_not() {
    let Some(stream) = emulated(Soc::Ascend950) else {
        return;
    };
    let shape = CacheShape::new(1, 1, DIM);
    let one = [ChannelScales::uniform(&shape, 1.0, 1.0).unwrap()];
    let mut numbers = [0f32; DIM];
    numbers[..4].copy_from_slice(&[464.0, 500.0, -45_000.0, 30_000.0]);
    let rows = upload(&stream, &numbers, 1);
    let written = |mut cache: PagedKvCache<bf16>| {
        let write = cache.plan_write(&stream, &[0], &rows, &rows).unwrap();
        cache.write(&stream, &write, 0, &rows, &rows).unwrap();
        let layer = cache.quantised_layer(0).unwrap();
        layer.value().download_bytes(&stream).unwrap()[..4].to_vec()
    };
    let channels =
        |stored| PagedKvCache::quantised_as(&stream, 1, 128, shape, PAD, stored, &one).unwrap();
    let e4m3 = written(channels(E4m3));
    let floats = e4m3.iter().map(|x| Float8E4M3Fn::from_bits(*x).to_f32());
    let floats: Vec<f32> = floats.collect();
    assert_eq!(floats[0], 448.0);
    assert!(floats[1..].iter().all(|x| x.is_nan()), "{floats:?}");
    let hif8 = written(channels(Hif8));
    let floats = hif8.iter().map(|x| HiFloat8::from_bits(*x).to_f32());
    let floats: Vec<f32> = floats.collect();
    assert_eq!(floats, [512.0, 512.0, f32::NEG_INFINITY, 32768.0]);
    let device = stream.device();
    let tokens = PagedKvCache::quantised_by_token_as(device, 1, 128, shape, PAD, E4m3).unwrap();
    let floats = written(tokens);
    assert_eq!(Float8E4M3Fn::from_bits(floats[2]).to_f32(), -448.0);
}

#[test]
fn calibrations_leave_room() {
    let keys = [1.0, 0.0, -2.0, 0.0].map(bf16::from_f32);
    for (stored, becomes) in [(Int8, 127.0), (E4m3, 112.0), (Hif8, 15.0)] {
        let scales = ChannelScales::covering_as(stored, &keys, &keys, 2, 1).unwrap();
        assert_eq!(scales.key(), [2.0 / becomes, 1.0]);
        assert_eq!(scales.value(), [2.0 / becomes]);
    }
}

/// Attention of two key heads over a cache.
fn attention(cache: PagedKvCache<bf16>) -> Attention<bf16> {
    let dim = cache.shape().key_dim;
    let backends = match cache.is_quantised() {
        true => Backends::none()
            .with(QuantisedDecode)
            .with(QuantisedPrefill),
        false => Backends::none().with(Fused),
    };
    Attention::new(AttentionShape::new(4, 2, dim), cache, backends)
}

/// What serves a prompt, a decode and a chunk behind them, or why nothing does.
fn served(stream: &Stream, cache: PagedKvCache<bf16>) -> Vec<Result<&'static str, String>> {
    let dim = cache.shape().key_dim;
    let mut attention = attention(cache);
    let mut sequence = Sequence::new(attention.cache().pool());
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let mut outcomes = Vec::new();
    for new in [130, 1, 3] {
        attention.grow(stream, &mut sequence, new).unwrap();
        let batch = [BatchRequest::of(&sequence, new)];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let rows = |heads: usize| {
            let ones = vec![bf16::ONE; new * heads * dim];
            stream.upload(&ones, [new, heads, dim]).unwrap()
        };
        let mut step = attention.begin(stream, &metadata).unwrap();
        let outcome = step.forward(0, &rows(4), &rows(2), &rows(2));
        outcomes.push(match outcome {
            Ok(output) => {
                let output = output.attention.download(stream).unwrap();
                let checked = outcomes.iter().all(Result::is_ok);
                let exact = output.iter().all(|x| (x.to_f64() - 1.0).abs() < 1e-2);
                assert!(exact || !checked);
                Ok(step.selected().unwrap().name)
            }
            Err(why) => Err(why.to_string()),
        });
    }
    outcomes
}

#[test]
fn ascend_950_serves_floats_and_others_refuse_them() {
    let all = ["quantised_prefill", "quantised_decode", "quantised_prefill"];
    for soc in [
        Soc::AtlasA2,
        Soc::AtlasA3,
        Soc::AtlasInference,
        Soc::Ascend950,
    ] {
        let Some(stream) = emulated(soc) else { return };
        for dim in [64, 128] {
            for format in [Cache::BnBsH, Cache::BnNBsD] {
                for (stored, by_token) in [(E4m3, false), (E4m3, true), (Hif8, false)] {
                    let shape = CacheShape::new(1, 2, dim).format(format);
                    let scales = [ChannelScales::uniform(&shape, 0.5, 0.25).unwrap()];
                    let cache = match by_token {
                        true => {
                            let device = stream.device();
                            PagedKvCache::quantised_by_token_as(device, 8, 128, shape, PAD, stored)
                        }
                        false => {
                            PagedKvCache::quantised_as(&stream, 8, 128, shape, PAD, stored, &scales)
                        }
                    };
                    let told = format!("{soc:?}, {dim}, {format:?}, {stored:?}, {by_token}");
                    if soc != Soc::Ascend950 {
                        let why = cache.unwrap_err().to_string();
                        let rules = ["dtype.registered", "call.product"];
                        assert!(rules.iter().any(|rule| why.contains(rule)), "{told}: {why}");
                        continue;
                    }
                    let got = served(&stream, cache.unwrap());
                    let told = format!("{told}: {got:?}");
                    assert_eq!(got[..2], [Ok(all[0]), Ok(all[1])], "{told}");
                    match (&got[2], format) {
                        (Ok(name), Cache::BnBsH) => assert_eq!(*name, all[2], "{told}"),
                        (Err(why), Cache::BnNBsD) => {
                            assert!(why.contains("whose tokens lie whole"), "{told}");
                        }
                        _ => panic!("{told}"),
                    }
                }
            }
        }
    }
}

#[test]
fn tokens_have_no_scale_of_hifloat8() {
    let Some(stream) = emulated(Soc::Ascend950) else {
        return;
    };
    let (device, shape) = (stream.device(), CacheShape::new(1, 1, DIM));
    let refused = PagedKvCache::<bf16>::quantised_by_token_as(device, 1, 128, shape, PAD, Hif8);
    let why = refused.unwrap_err();
    assert!(matches!(why, Error::Attention(_)), "{why:?}");
    assert!(why.to_string().contains("HIFLOAT8"), "{why}");
}

/// How far attention over caches of each type is from that over 16 bits, where the calibration has seen tokens so many times
/// as large, too.
fn accuracies(stream: &Stream, larger: f32) -> Vec<(QuantisedType, bool, CacheAccuracy)> {
    const TOKENS: usize = 150;
    let rows = |seed, heads: usize| {
        let numbers = harness::numbers(seed, TOKENS * heads * DIM);
        let numbers: Vec<_> = numbers.into_iter().map(bf16::from_f32).collect();
        let tensor = stream.upload(&numbers, [TOKENS, heads, DIM]).unwrap();
        let large = numbers.iter().map(|x| bf16::from_f32(x.to_f32() * larger));
        (large.collect::<Vec<_>>(), tensor)
    };
    let [query, key, value] = [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| rows(seed, heads));
    let layers = [LayerRows {
        query: &query.1,
        key: &key.1,
        value: &value.1,
    }];
    let shape = CacheShape::new(1, 2, DIM);
    let mut found = Vec::new();
    for (stored, by_token) in [
        (Int8, false),
        (E4m3, false),
        (Hif8, false),
        (Int8, true),
        (E4m3, true),
    ] {
        let scales = ChannelScales::covering_as(stored, &key.0, &value.0, 2 * DIM, 2 * DIM);
        let scales = [scales.unwrap()];
        let cache = match by_token {
            true => {
                let device = stream.device();
                PagedKvCache::quantised_by_token_as(device, 4, 128, shape, PAD, stored)
            }
            false => PagedKvCache::quantised_as(stream, 4, 128, shape, PAD, stored, &scales),
        };
        let mut quantised = attention(cache.unwrap());
        let plain = PagedKvCache::new(stream.device(), 4, 128, shape, PAD).unwrap();
        let mut exact = attention(plain);
        let steps = [100, 1, 1, 20, 1, 1, 26];
        let of = compare_caches(stream, &mut exact, &mut quantised, &steps, &layers).unwrap();
        println!(
            "{stored:?}, by token {by_token}: largest {:.5}, mean {:.6} of {:.2}",
            of[0].largest_share(),
            of[0].mean_share(),
            of[0].range
        );
        found.push((stored, by_token, of[0]));
    }
    found
}

/// Evenly spread numbers are nearer as integers; numbers far smaller than what their channels may be are nearer as floats.
#[test]
fn the_accuracy_of_each_type() {
    let Some(stream) = emulated(Soc::Ascend950) else {
        return;
    };
    let even = accuracies(&stream, 1.0);
    for (stored, by_token, of) in &even {
        let most = if *stored == Int8 { 0.001 } else { 0.01 };
        let share = of.largest_share();
        assert!(
            share > 0.0 && share < most,
            "{stored:?}, {by_token}: {of:?}"
        );
    }
    let uneven = accuracies(&stream, 100.0);
    let mean = |stored, by_token| {
        let of = uneven.iter().find(|of| (of.0, of.1) == (stored, by_token));
        of.unwrap().2.mean
    };
    for stored in [E4m3, Hif8] {
        assert!(4.0 * mean(stored, false) < mean(Int8, false), "{uneven:?}");
    }
}
