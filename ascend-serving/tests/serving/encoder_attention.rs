//! Encoders and vision towers: each token sees all of its own sequence and nothing else, whatever the lengths, the head
//! dimension, the product and the release.

use crate::harness;
use crate::harness::reference::Half;
use approx::abs_diff_eq;

use ascend_attention::attention::PerRequest;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_serving::{AttentionShape, EncoderAttention, Error, rules};
use proptest::prelude::*;

/// Numbers of a tensor `[tokens, heads, dim]`, which all element types hold.
fn numbers(seed: u64, count: usize) -> Vec<bf16> {
    let numbers = harness::numbers(seed, count).into_iter();
    numbers.map(bf16::from_f32).collect()
}

fn upload<T: Half>(stream: &Stream, numbers: &[bf16], shape: [usize; 3]) -> Tensor<T> {
    let numbers: Vec<T> = numbers.iter().map(|number| T::from_f32(number.to_f32())).collect();
    stream.upload(&numbers, shape).unwrap()
}

/// Runs a batch and compares every number with the definition; the route that it went.
fn compare<T: Half>(stream: &Stream, shape: AttentionShape, lengths: &[usize]) -> &'static str {
    let AttentionShape { heads, kv_heads, head_dim: dim, scale, .. } = shape;
    let tokens: usize = lengths.iter().sum();
    let data = [(1, heads), (2, kv_heads), (3, kv_heads)]
        .map(|(seed, heads)| numbers(seed + 10 * tokens as u64, tokens * heads * dim));
    let [query, key, value] = &data;
    let rows = |numbers: &[bf16], heads| upload::<T>(stream, numbers, [tokens, heads, dim]);
    let (q, k, v) = (rows(query, heads), rows(key, kv_heads), rows(value, kv_heads));
    let lengths_of = PerRequest::new(lengths.to_vec()).unwrap();
    let encoder = EncoderAttention::plan(shape, stream, &lengths_of, (&q, &k, &v)).unwrap();
    let got = encoder.launch(stream, (&q, &k, &v)).unwrap();
    let got = got.download(stream).unwrap();
    let mut first = 0;
    for len in lengths {
        for token in first..first + len {
            for head in 0..heads {
                let at = |token: usize, head: usize, heads: usize| (token * heads + head) * dim;
                let own = head / (heads / kv_heads);
                let row = &query[at(token, head, heads)..][..dim];
                let dot = |key_at: usize| -> f64 {
                    let key = &key[at(key_at, own, kv_heads)..][..dim];
                    row.iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum()
                };
                let scores: Vec<f64> = (first..first + len).map(|key| scale * dot(key)).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                for d in 0..dim {
                    let value = |nth: usize| value[at(first + nth, own, kv_heads) + d].to_f64();
                    let weighted = scores.iter().enumerate();
                    let want: f64 = weighted.map(|(nth, score)| (score - max).exp() / sum * value(nth)).sum();
                    let got = got[at(token, head, heads) + d].to_f64();
                    assert!(
                        abs_diff_eq!(got, want, epsilon = 1e-2),
                        "{lengths:?}, token {token}, head {head}, element {d}: {got}, expected {want}"
                    );
                }
            }
        }
        first += len;
    }
    encoder.route()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn each_token_sees_its_sequence(
        lengths in prop::collection::vec(prop_oneof![Just(0usize), Just(9), 1usize..50], 1..7),
        (kv_heads, group) in (1usize..3, 1usize..3),
        dim in prop::sample::select(&[64usize, 72, 80, 96, 128][..]),
        half: bool,
        cann in prop::sample::select(&Cann::ALL[..]),
    ) {
        prop_assume!(lengths.iter().sum::<usize>() > 0);
        let Some(stream) = harness::stream_of(cann) else { return Ok(()) };
        let shape = AttentionShape::new(kv_heads * group, kv_heads, dim);
        match half {
            true => compare::<f16>(&stream, shape, &lengths),
            false => compare::<bf16>(&stream, shape, &lengths),
        };
    }
}

/// Each route is taken where those before it are refused.
#[test]
fn routes_follow_product_and_release() {
    let stream = |soc, cann| {
        if harness::not_on_npu("products are emulated") {
            return None;
        }
        drop(harness::runtime());
        let runtime = Runtime::emulated_as(&Machine::new(soc, cann)).unwrap();
        Some(runtime.device(0).unwrap().stream().unwrap())
    };
    for (soc, cann, dim, route) in [
        (Soc::AtlasA2, Cann::V9_1, 64, "packed"),
        (Soc::AtlasA2, Cann::V9_1, 80, "packed"),
        (Soc::AtlasA2, Cann::V8_1, 64, "batched"),
        (Soc::AtlasA2, Cann::V8_1, 80, "batched"),
        (Soc::Ascend950, Cann::V9_1, 64, "packed"),
        (Soc::AtlasInference, Cann::V9_1, 64, "prompt"),
    ] {
        let Some(stream) = stream(soc, cann) else {
            return;
        };
        let shape = AttentionShape::new(2, 2, dim);
        // Windows of one length, and what is left over.
        let taken = compare::<f16>(&stream, shape, &[16, 16, 16, 0, 5]);
        assert_eq!(taken, route, "{soc} {cann} {dim}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_queued() {
    let stream = harness::stream();
    let shape = AttentionShape::new(2, 1, 64);
    let rows = |tokens: usize, heads: usize, dim: usize| {
        let zeros = vec![bf16::ZERO; tokens * heads * dim];
        stream.upload(&zeros, [tokens, heads, dim]).unwrap()
    };
    let (query, key) = (rows(8, 2, 64), rows(8, 1, 64));
    let rule = |outcome: Result<(), Error>| match outcome {
        Err(Error::Violation(refused)) => refused.rule,
        other => panic!("{other:?}"),
    };
    let plan = |lengths: &[usize], query: &Tensor<bf16>, key: &Tensor<bf16>| {
        let lengths = PerRequest::new(lengths.to_vec()).unwrap();
        EncoderAttention::plan(shape, &stream, &lengths, (query, key, key))
    };
    assert_eq!(rule(plan(&[0, 0], &query, &key).map(drop)), &rules::BATCH_EMPTY);
    assert_eq!(rule(plan(&[5, 4], &query, &key).map(drop)), &rules::STEP_TOKENS);
    assert_eq!(rule(plan(&[5, 3], &key, &key).map(drop)), &rules::STEP_HEADS);
    let planned = plan(&[5, 3], &query, &key).unwrap();
    let run = |query: &Tensor<bf16>| planned.launch(&stream, (query, &key, &key)).map(drop);
    assert_eq!(rule(run(&rows(9, 2, 64))), &rules::STEP_TOKENS);
    assert_eq!(rule(run(&rows(8, 2, 32))), &rules::STEP_HEADS);
    let mut other = rows(8, 1, 64);
    assert!(planned.launch_into(&stream, (&query, &key, &key), &mut other).is_err());
    run(&query).unwrap();
    let endless = PerRequest::new(vec![i64::MAX as usize, 8]).unwrap();
    assert!(EncoderAttention::plan(shape, &stream, &endless, (&query, &key, &key)).is_err());
    let all = PerRequest::new(vec![8]).unwrap();
    let scaled = |scale| EncoderAttention::plan(shape.scale(scale), &stream, &all, (&query, &key, &key));
    assert!(scaled(f64::NAN).is_err());
    // The root of 64 in the place of one over it.
    let inverse = scaled(8.0).unwrap_err();
    assert!(inverse.to_string().contains("usually 0.125"), "{inverse}");
}
