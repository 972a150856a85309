//! Normalised rows: views, weights of another type, errors.

use crate::harness;

use ascend_attention::norm::RmsNorm;
use ascend_attention::{Number, Stream, Tensor, bf16, f16};
use harness::{filled, numbers, violated};
use proptest::prelude::*;

/// A tensor of this shape; with `turned` its columns are contiguous, not its rows.
fn upload<T: Number>(
    stream: &Stream,
    seed: u64,
    [rows, columns]: [usize; 2],
    turned: bool,
    rounded: fn(f32) -> T,
) -> Tensor<T> {
    let elements = numbers(seed, rows * columns);
    let elements: Vec<T> = elements.into_iter().map(rounded).collect();
    match turned {
        false => stream.upload(&elements, [rows, columns]).unwrap(),
        true => {
            let tensor = stream.upload(&elements, [columns, rows]).unwrap();
            tensor.permute([1, 0]).unwrap()
        }
    }
}

fn exact<T: Number>(stream: &Stream, tensor: &Tensor<T>) -> Vec<f64> {
    let elements = tensor.download(stream).unwrap();
    elements.into_iter().map(Number::to_f64).collect()
}

/// Compares a launch with the definition, in double precision. `rounding` is half a unit in the last place of `T`.
fn compare<T: Number, W: Number>(stream: &Stream, x: &Tensor<T>, gamma: &Tensor<W>, rounding: f64) {
    let epsilon = 1e-3;
    let plan = RmsNorm::new(epsilon).plan((x, gamma)).unwrap();
    let got = plan.launch(stream, (x, gamma)).unwrap();
    let (rows, weights) = (exact(stream, x), exact(stream, gamma));
    let (y, rstd) = (exact(stream, &got.y), exact(stream, &got.rstd));
    assert_eq!(got.rstd.shape(), [x.shape()[0], 1]);
    for (row, elements) in rows.chunks(weights.len()).enumerate() {
        let squares: f64 = elements.iter().map(|value| value * value).sum();
        let scale = 1.0 / (squares / weights.len() as f64 + epsilon).sqrt();
        assert!((rstd[row] - scale).abs() <= 1e-6 * scale);
        for (column, (value, weight)) in elements.iter().zip(&weights).enumerate() {
            let want = value * scale * weight;
            let got = y[row * weights.len() + column];
            assert!((got - want).abs() <= rounding * want.abs() + 1e-7, "{got} is not {want}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn rows_of_views_are_those_of_the_definition(
        shape in (1usize..40, 1usize..70), turned: bool, dtypes in 0..5, seed: u64,
    ) {
        let stream = harness::stream();
        let (rows, columns) = shape;
        macro_rules! check {
            ($x:expr, $gamma:expr, $rounding:expr) => {{
                let x = upload(&stream, seed, [rows, columns], turned, $x);
                let gamma = upload(&stream, seed ^ 1, [1, columns], false, $gamma);
                let gamma = gamma.reshape([columns]).unwrap();
                compare(&stream, &x, &gamma, $rounding);
            }};
        }
        let single: fn(f32) -> f32 = |value| value;
        match dtypes {
            0 => check!(single, single, 1e-7),
            1 => check!(f16::from_f32, f16::from_f32, 4.9e-4),
            2 => check!(bf16::from_f32, bf16::from_f32, 4e-3),
            3 => check!(f16::from_f32, single, 4.9e-4),
            _ => check!(bf16::from_f32, single, 4e-3),
        }
    }
}

#[test]
fn other_tensors_than_planned_and_other_contracts_are_refused() {
    let stream = harness::stream();
    let half = |shape: &[usize]| filled(&stream, f16::ONE, shape);
    let (x, gamma) = (half(&[2, 3, 4]), half(&[4]));
    let plan = RmsNorm::new(1e-6).plan((&x, &gamma)).unwrap();
    assert_eq!(plan.operator(), "aclnnRmsNorm");
    plan.launch(&stream, (&half(&[2, 3, 4]), &gamma)).unwrap();
    let other = plan.launch(&stream, (&half(&[3, 2, 4]), &gamma));
    assert!(other.unwrap_err().breaks(&ascend_attention::rules::PLAN_TENSORS));

    let rms = RmsNorm::new(1e-6);
    assert_eq!(violated(rms.plan((&x, &half(&[3])))), "rms_norm.gamma_shape");
    assert_eq!(violated(RmsNorm::new(-1.0).plan((&x, &gamma))), "rms_norm.epsilon");
    let nan = RmsNorm::new(f64::NAN);
    assert_eq!(violated(nan.plan((&x, &gamma))), "rms_norm.finite_epsilon");
    nan.allow_lint("rms_norm.finite_epsilon").plan((&x, &gamma)).unwrap();
    let none = half(&[0, 4]);
    let plan = rms.plan((&none, &gamma)).unwrap();
    assert_eq!(plan.launch(&stream, (&none, &gamma)).unwrap().y.shape(), [0, 4]);
    let wide: Tensor<f32> = stream.upload(&[1.0; 4], [4]).unwrap();
    rms.plan((&x, &wide)).unwrap();
}
