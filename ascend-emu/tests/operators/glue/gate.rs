//! Gated linear units and thresholds.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;

pub(crate) fn rows() -> Vec<Row> {
    let (ln_3, nan) = (3f64.ln(), f64::NAN);
    let [exact, tanh] = [0.8413447460685429, 0.8411919906082768];
    let whole = i32([4], [-2, 1, 2, 9]);
    let numbers = f16([4], [-2.0, 0.5, 0.75, nan]);
    vec![
        // The logistic function of ln 3 is 3/4.
        row(
            "aclnnSwiGlu",
            [f64([2, 2], [ln_3, 4.0, -ln_3, 8.0]).read(), Int(-1), f64([2, 1], [3.0 * ln_3, -2.0 * ln_3]).written()],
        ),
        row("aclnnSwiGlu", [f16([2, 3], [0, 1, 2, 5, 0, 0]).read(), Int(0), f16([1, 3], [0, 0, 0]).written()]),
        row(
            "aclnnGeGluV3",
            [
                f64([1, 4], [1, 2, 3, 1]).read(),
                Int(1),
                Int(0),
                Int(0),
                f64([1, 2], [2.99595030590511, 2.0 * exact]).written(),
                f64([1, 2], [2.99595030590511, exact]).written(),
            ],
        ),
        row(
            "aclnnGeGluV3",
            [
                f64([2], [1, 5]).read(),
                Int(0),
                Int(1),
                Int(1),
                f64([1], [5.0 * tanh]).written(),
                f64([1], [tanh]).written(),
            ],
        ),
        row("aclnnThreshold", [whole.clone().read(), Real(1.5), Real(7.9), i32([4], [7, 7, 2, 9]).written()]),
        row("aclnnInplaceThreshold", [numbers.becomes([7.5, 7.5, 0.75, nan]), Real(0.5), Real(7.5)]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn halves_of_any_views_gate_each_other(
        (view, axis, out) in (prop::collection::vec(1..4i64, 1..4), 0..3usize).prop_flat_map(|(half, axis)| {
            let axis = axis % half.len();
            let mut whole = half.clone();
            whole[axis] *= 2;
            (view_of(whole, true), Just(axis), view_of(half, false))
        }),
        dtype in prop::sample::select(vec![
            aclDataType::ACL_FLOAT, aclDataType::ACL_FLOAT16, aclDataType::ACL_BF16, aclDataType::ACL_DOUBLE,
        ]),
        values in prop::collection::vec(-4.0..4.0f64, 1..30),
        left in any::<bool>(),
        threshold in -3.0..3.0f64,
    ) {
        let _bench = Bench::new();
        let x = Tensor::new(dtype, view, &values);
        let (out, gelu) = (Tensor::new(dtype, out.clone(), &[5.0]), Tensor::new(dtype, out, &[5.0]));
        let half = x.view.shape[axis] / 2;
        let first = View { shape: out.view.shape.clone(), ..x.view.clone() };
        let second = View { offset: first.offset + half * first.strides[axis], ..first.clone() };
        let buffer = x.buffer();
        let [first, second] = [first, second]
            .map(|view| view.places().into_iter().map(|place| buffer[place as usize]).collect::<Vec<_>>());
        let step = match dtype {
            aclDataType::ACL_DOUBLE => 1e-12,
            aclDataType::ACL_FLOAT => 1e-6,
            aclDataType::ACL_FLOAT16 => 1e-3,
            _ => 8e-3,
        };
        let near = |got: Vec<f64>, want: Vec<f64>| {
            assert!(got.len() == want.len());
            for (got, want) in got.into_iter().zip(want) {
                assert!((got - want).abs() <= step * (want.abs() + 1e-3), "{got} is not {want}");
            }
        };
        ok(call!(aclnnSwiGlu(x.input(), axis as i64, out.out())));
        near(out.values(), first.iter().zip(&second).map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect());

        ok(call!(aclnnGeGluV3(x.input(), axis as i64, 1, Flag(u8::from(left)), out.out(), gelu.out())));
        let (gated, factor) = if left { (&first, &second) } else { (&second, &first) };
        let of = |x: f64| {
            x / (1.0 + (-2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).exp())
        };
        near(gelu.values(), gated.iter().map(|&value| of(value)).collect());
        near(out.values(), gated.iter().zip(factor).map(|(&value, factor)| of(value) * factor).collect());

        let same = Tensor::packed(dtype, &x.view.shape, &[5.0]);
        ok(call!(aclnnThreshold(x.input(), real(threshold), real(-8.0), same.out())));
        let bound = if dtype == aclDataType::ACL_DOUBLE { threshold } else { f64::from(threshold as f32) };
        let want: Vec<f64> = x.values().into_iter().map(|value| if value > bound { value } else { -8.0 }).collect();
        prop_assert_eq!(same.values(), want);
    }
}

#[test]
fn axes_without_halves_are_refused() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 3], &[1.0]);
    let number = Tensor::floats(&[], &[1.0]);
    let out = Tensor::floats(&[1, 3], &[0.0]);
    fails(
        call!(aclnnSwiGlu(x.input(), 1, out.out())),
        161_002,
        &["aclnnSwiGlu: x: given [2, 3], allowed: an even size of axis 1"],
    );
    fails(
        call!(aclnnSwiGlu(number.input(), 0, out.out())),
        161_002,
        &["aclnnSwiGlu: x: given [], allowed: an even size of axis 0"],
    );
    fails(
        call!(aclnnGeGluV3(x.input(), 0, 2, Flag(0), out.out(), out.out())),
        161_002,
        &["aclnnGeGluV3: approximate: given 2, allowed: 0 (none), 1 (tanh)"],
    );
}
