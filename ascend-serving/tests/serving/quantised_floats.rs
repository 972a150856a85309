//! Caches of FLOAT8_E4M3FN and HIFLOAT8 on Ascend 950: what is stored, how near attention over it is, and what is
//! refused.

use crate::quantised_caches::{self, Layer, accuracies, ascend_950, emulated_as, served};

use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, CacheWrite, ChannelScales, PadPolicy, PagedKvCache, QuantisedType};
use ascend_serving::{Error, OutputDeviation};

use QuantisedType::{Float8E4M3Fn as E4m3, HiFloat8 as Hif8, Int8};

const DIM: usize = 64;
const PAD: PadPolicy = PadPolicy::SkipNegative;

fn upload(stream: &Stream, data: &[f32], heads: usize) -> Tensor<bf16> {
    quantised_caches::upload(stream, data, heads, DIM)
}

#[test]
fn the_device_cuts_no_float_and_the_host_needs_not() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let shape = CacheShape::new(1, 1, DIM);
    let one = [ChannelScales::uniform(&shape, 1.0, 1.0).unwrap()];
    let mut numbers = [0f32; DIM];
    numbers[..4].copy_from_slice(&[464.0, 500.0, -45_000.0, 30_000.0]);
    let rows = upload(&stream, &numbers, 1);
    let written = |mut cache: PagedKvCache<bf16>| {
        let write = CacheWrite::plan(&cache, &stream, &[0], &rows, &rows).unwrap();
        cache.write(&stream, &write, 0, &rows, &rows).unwrap();
        let layer = cache.quantised_layer(0).unwrap();
        layer.value().download_bytes(&stream).unwrap()[..4].to_vec()
    };
    let channels = |stored| PagedKvCache::quantised(&stream, 1, 128, shape, PAD, stored, &one).unwrap();
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
    let tokens = PagedKvCache::quantised_by_token(device, 1, 128, shape, PAD, E4m3).unwrap();
    let floats = written(tokens);
    assert_eq!(Float8E4M3Fn::from_bits(floats[2]).to_f32(), -448.0);
}

#[test]
fn calibrations_leave_room() {
    let keys = [1.0, 0.0, -2.0, 0.0].map(bf16::from_f32);
    for (stored, becomes) in [(Int8, 127.0), (E4m3, 112.0), (Hif8, 15.0)] {
        let scales = ChannelScales::covering(stored, &keys, &keys, 2, 1).unwrap();
        assert_eq!(scales.key(), [2.0 / becomes, 1.0]);
        assert_eq!(scales.value(), [2.0 / becomes]);
    }
}

#[test]
fn ascend_950_serves_floats_and_others_refuse_them() {
    let all = ["quantised_prefill", "quantised_decode", "quantised_prefill"];
    for soc in [Soc::AtlasA2, Soc::AtlasA3, Soc::AtlasInference, Soc::Ascend950] {
        let Some(stream) = emulated_as(soc, Cann::V9_1) else {
            return;
        };
        for dim in [64, 128] {
            for format in [Cache::BnBsH, Cache::BnNBsD] {
                for (stored, by_token) in [(E4m3, false), (E4m3, true), (Hif8, false)] {
                    let shape = CacheShape::new(1, 2, dim).format(format);
                    let scales = [ChannelScales::uniform(&shape, 0.5, 0.25).unwrap()];
                    let cache = match by_token {
                        true => {
                            let device = stream.device();
                            PagedKvCache::<bf16>::quantised_by_token(device, 8, 128, shape, PAD, stored)
                        }
                        false => PagedKvCache::quantised(&stream, 8, 128, shape, PAD, stored, &scales),
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
                            assert!(why.contains("whose tokens are contiguous"), "{told}");
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
    let Some(stream) = ascend_950() else {
        return;
    };
    let (device, shape) = (stream.device(), CacheShape::new(1, 1, DIM));
    let refused = PagedKvCache::<bf16>::quantised_by_token(device, 1, 128, shape, PAD, Hif8);
    let why = refused.unwrap_err();
    assert!(matches!(why, Error::Violation(_)), "{why:?}");
    assert!(why.to_string().contains("HIFLOAT8"), "{why}");
}

/// How far attention over caches of each type is from that over 16 bits, where the calibration has seen tokens so
/// many times as large, too.
fn of_each_type(stream: &Stream, larger: f32) -> Vec<(QuantisedType, bool, OutputDeviation)> {
    let layer = Layer::random(stream, 1, DIM);
    let seen = |numbers: &[bf16]| -> Vec<bf16> {
        let seen = numbers.iter().map(|x| bf16::from_f32(x.to_f32() * larger));
        seen.collect()
    };
    let [_, key, value] = layer.numbers.each_ref().map(|of| seen(of));
    let layers = [layer];
    let shape = CacheShape::new(1, 2, DIM);
    let mut found = Vec::new();
    for (stored, by_token) in [(Int8, false), (E4m3, false), (Hif8, false), (Int8, true), (E4m3, true)] {
        let scales = ChannelScales::covering(stored, &key, &value, 2 * DIM, 2 * DIM);
        let scales = [scales.unwrap()];
        let cache = match by_token {
            true => {
                let device = stream.device();
                PagedKvCache::quantised_by_token(device, 4, 128, shape, PAD, stored)
            }
            false => PagedKvCache::quantised(stream, 4, 128, shape, PAD, stored, &scales),
        };
        let plain = PagedKvCache::new(stream.device(), 4, 128, shape, PAD).unwrap();
        println!("{stored:?}, by token {by_token}");
        let of = accuracies(stream, [plain, cache.unwrap()], &layers);
        found.push((stored, by_token, of[0]));
    }
    found
}

/// Evenly spread numbers are nearer as integers; numbers far smaller than what their channels may be are nearer as
/// floats.
#[test]
fn the_accuracy_of_each_type() {
    let Some(stream) = ascend_950() else {
        return;
    };
    let even = of_each_type(&stream, 1.0);
    for (stored, by_token, of) in &even {
        let most = if *stored == Int8 { 0.001 } else { 0.01 };
        let share = of.largest_share();
        assert!(share > 0.0 && share < most, "{stored:?}, {by_token}: {of:?}");
    }
    let uneven = of_each_type(&stream, 100.0);
    let mean = |stored, by_token| {
        let of = uneven.iter().find(|of| (of.0, of.1) == (stored, by_token));
        of.unwrap().2.mean()
    };
    for stored in [E4m3, Hif8] {
        assert!(4.0 * mean(stored, false) < mean(Int8, false), "{uneven:?}");
    }
}
