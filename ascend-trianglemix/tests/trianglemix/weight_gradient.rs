//! The parts of the causal triangle by products on the device, against the host's and against the definition.

use crate::harness;

use ascend_attention::spec::geometry::TriangleMix;
use ascend_attention::{Error, Number, Stream, Tensor, bf16, f16};
use ascend_trianglemix::{LayerSample, PartSums, ProbeMeasure, SampleMeasure, TriangleProbe, WeightGradientSample};
use harness::numbers;
use proptest::prelude::*;

/// The sums by their definition, of `[tokens, heads, dim]` and `[tokens, kv_heads, dim]`.
fn naive(sizes: TriangleMix, [tokens, heads, kv_heads, dim]: [usize; 4], gradient: &[f64], value: &[f64]) -> PartSums {
    let mut sums = PartSums::default();
    for head in 0..heads {
        let kv = head / (heads / kv_heads);
        for i in 0..tokens {
            for j in 0..=i {
                let products =
                    (0..dim).map(|d| gradient[(i * heads + head) * dim + d] * value[(j * kv_heads + kv) * dim + d]);
                let cell = products.sum::<f64>().abs() / heads as f64;
                let near = (i - j) as u64 <= sizes.sliding_window_size;
                if near || (j as u64) < sizes.num_sink_tokens {
                    sums.streaming += cell;
                } else if i as u64 + sizes.num_last_tokens >= tokens as u64 {
                    sums.last += cell;
                } else {
                    sums.middle += cell;
                }
            }
        }
    }
    sums
}

#[track_caller]
fn close(got: PartSums, want: PartSums, within: f64) {
    let pairs = [(got.streaming, want.streaming), (got.last, want.last), (got.middle, want.middle)];
    for (one, other) in pairs {
        assert!((one - other).abs() <= within * (1.0 + other.abs()), "{got:?} is not {want:?}");
    }
}

fn exact<T: Number>(tensor: &Tensor<T>, stream: &Stream) -> Vec<f64> {
    let elements = tensor.download(stream).unwrap();
    elements.into_iter().map(Number::to_f64).collect()
}

/// Compares with the definition and with the host.
fn compare<T: Number>(
    stream: &Stream,
    sizes: TriangleMix,
    shape: [usize; 4],
    of: impl Fn(f32) -> T,
    seed: u64,
    within: f64,
) {
    let [tokens, heads, kv_heads, dim] = shape;
    let upload = |seed, heads: usize| {
        let elements = numbers(seed, tokens * heads * dim);
        let elements: Vec<T> = elements.into_iter().map(&of).collect();
        stream.upload(&elements, [tokens, heads, dim]).unwrap()
    };
    let (gradient, value) = (upload(seed, heads), upload(seed ^ 1, kv_heads));
    let sample = WeightGradientSample::new(&gradient, &value).unwrap();
    let got = sample.parts(stream, sizes).unwrap();
    let (gradient, value) = (exact(&gradient, stream), exact(&value, stream));
    close(got, naive(sizes, shape, &gradient, &value), within);
    let zeros = vec![0.0; tokens * heads.max(kv_heads)];
    let host = LayerSample {
        tokens,
        heads,
        kv_heads,
        dim: 1,
        value_dim: dim,
        scale: 1.0,
        query: &zeros[..tokens * heads],
        key: &zeros[..tokens * kv_heads],
        value: &value,
    };
    let measure = SampleMeasure::WeightGradient(&gradient);
    close(got, host.parts(sizes, measure).unwrap(), within);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn parts_are_those_of_the_host_and_of_the_definition(
        tokens in 1usize..90, kv_heads in 1usize..4, group in 1usize..4, dim in 1usize..24,
        sizes in (0u64..20, 0u64..40, 0u64..40), dtype in 0..3, seed: u64,
    ) {
        let stream = harness::stream();
        let sizes = TriangleMix::new(sizes.0, sizes.1, sizes.2);
        let shape = [tokens, kv_heads * group, kv_heads, dim];
        match dtype {
            0 => compare(&stream, sizes, shape, |value| value, seed, 1e-5),
            1 => compare(&stream, sizes, shape, f16::from_f32, seed, 1e-3),
            _ => compare(&stream, sizes, shape, bf16::from_f32, seed, 8e-3),
        }
    }
}

#[test]
fn prompts_of_several_tiles_are_summed_up_whole() {
    let stream = harness::stream();
    let sizes = TriangleMix::new(4, 100, 64);
    // More rows than a tile has, and more keys.
    compare(&stream, sizes, [2500, 2, 1, 4], |value| value, 5, 1e-5);
    compare(&stream, sizes, [2500, 2, 2, 4], f16::from_f32, 6, 1e-3);
}

#[test]
fn views_are_samples_too() {
    let stream = harness::stream();
    let [tokens, heads, kv_heads, dim] = [9, 4, 2, 8];
    // Queries' gradients and values side by side, as in a fused projection.
    let joined = numbers(3, tokens * (heads + kv_heads) * dim);
    let joined = stream.upload(&joined, [tokens, heads + kv_heads, dim]).unwrap();
    let gradient = joined.narrow(1, 0..heads).unwrap();
    let value = joined.narrow(1, heads..heads + kv_heads).unwrap();
    let sizes = TriangleMix::new(1, 2, 1);
    let sample = WeightGradientSample::new(&gradient, &value).unwrap();
    let got = sample.parts(&stream, sizes).unwrap();
    let shape = [tokens, heads, kv_heads, dim];
    let want = naive(sizes, shape, &exact(&gradient, &stream), &exact(&value, &stream));
    close(got, want, 1e-5);
}

#[test]
fn samples_are_recorded_by_a_probe_of_gradients() {
    let stream = harness::stream();
    let gradient = stream.upload(&[1.0f32; 6 * 2], [6, 1, 2]).unwrap();
    let sample = WeightGradientSample::new(&gradient, &gradient).unwrap();
    let mut probe = TriangleProbe::new(2, TriangleMix::new(1, 1, 1)).unwrap();
    assert!(sample.record(&stream, &mut probe, 2).is_err());
    assert_eq!(probe.measure(), None);
    sample.record(&stream, &mut probe, 1).unwrap();
    assert_eq!(probe.measure(), Some(ProbeMeasure::WeightGradient));
    // Row 3 leaves out a key, row 4 two, each cell of 2.
    assert_eq!(probe.contributions()[1].middle, 6.0);
    assert_eq!(probe.contributions()[1].samples, 1);

    let mut mass = TriangleProbe::new(1, TriangleMix::new(1, 1, 1)).unwrap();
    let sums = PartSums::default();
    (mass.record_parts(0, ProbeMeasure::AttentionMass, sums)).unwrap();
    let error = sample.record(&stream, &mut mass, 0).unwrap_err();
    assert!(error.to_string().contains("AttentionMass"), "{error}");
}

#[test]
fn samples_that_do_not_fit_are_refused() {
    let stream = harness::stream();
    let of = |shape: &[usize]| {
        let elements = vec![0.5f32; shape.iter().product()];
        stream.upload(&elements, shape).unwrap()
    };
    let refused = |gradient: &[usize], value: &[usize], why: &str| {
        let sample = WeightGradientSample::new(&of(gradient), &of(value));
        let error = sample.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&[3, 8], &[3, 2, 4], "output_gradient");
    refused(&[3, 2, 4], &[3, 4], "value");
    refused(&[3, 2, 4], &[2, 2, 4], "[3, kv_heads, 4]");
    refused(&[3, 2, 4], &[3, 2, 5], "[3, kv_heads, 4]");
    refused(&[3, 3, 4], &[3, 2, 4], "a multiple of kv_heads, 2");
    refused(&[0, 2, 4], &[0, 2, 4], "tokens");
    refused(&[3, 2, 4], &[3, 0, 4], "kv_heads");
    refused(&[3, 2, 0], &[3, 2, 0], "value_dim");
}

#[test]
fn numbers_that_are_none_are_told() {
    let stream = harness::stream();
    let sizes = TriangleMix::new(1, 1, 1);
    let refused = |gradient: f16, value: f16| {
        let of = |number| stream.upload(&[number; 4 * 8], [4, 1, 8]).unwrap();
        let sample = WeightGradientSample::new(&of(gradient), &of(value)).unwrap();
        let error = sample.parts(&stream, sizes).unwrap_err();
        assert!(matches!(&error, Error::Violation(violation) if violation.rule.id == "argument.value"), "{error}");
        assert!(error.to_string().contains("take f32"), "{error}");
    };
    refused(f16::NAN, f16::ONE);
    refused(f16::ONE, f16::INFINITY);
    refused(f16::from_f32(200.0), f16::from_f32(200.0));
    harness::still_works(&stream);
}
