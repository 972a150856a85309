//! Small operators of models that stand beside attention.

use super::rows::Argument::{Absent, Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ptr::{null, null_mut};

pub(crate) fn rows() -> Vec<Row> {
    let numbers = || f32([1, 4], [1, 2, 3, 4]).read();
    let turns = || [f32([4], [1, 2, 3, 4]).read(), f32([4], [10, 20, 30, 40]).read()];
    let ([cos, sin], [other_cos, other_sin], [last_cos, last_sin]) = (turns(), turns(), turns());
    vec![
        row(
            "aclnnLayerNorm",
            [
                f32([2, 2], [1, 3, 2, 6]).read(),
                axes([2]),
                f32([2], [2, 10]).read(),
                f32([2], [0.5, 0.0]).read(),
                Real(0.0),
                f32([2, 2], [-1.5, 10.0, -1.5, 10.0]).written(),
                f32([2, 1], [2, 4]).written(),
                f32([2, 1], [1.0, 0.5]).written(),
            ],
        ),
        row(
            "aclnnLayerNorm",
            [
                f16([1, 2], [1, 3]).read(),
                axes([1, 2]),
                Absent,
                Absent,
                Real(3.0),
                f16([1, 2], [-0.5, 0.5]).written(),
                Absent,
                Absent,
            ],
        ),
        // The sum of both has the mean square 4 in the first row, 9 in the second.
        row(
            "aclnnAddRmsNorm",
            [
                f16([2, 2], [1, -1, 3, 4]).read(),
                f16([2, 2], [1, -1, 0, -1]).read(),
                f16([2], [10, 20]).read(),
                Real(0.0),
                f16([2, 2], [10, -20, 10, 20]).written(),
                f32([2, 1], [1.0 / 2.0, 1.0 / 3.0]).written(),
                f16([2, 2], [2, -2, 3, 3]).written(),
            ],
        ),
        row(
            "aclnnAddRmsNorm",
            [
                f32([1, 2], [1, 0]).read(),
                f32([1, 2], [0, 1]).read(),
                f32([1, 2], [4, 8]).read(),
                Real(3.0),
                f32([1, 2], [2, 4]).written(),
                f32([1, 1], [0.5]).written(),
                f32([1, 2], [1, 1]).written(),
            ],
        ),
        row("aclnnRotaryPositionEmbedding", [numbers(), cos, sin, Int(0), f32([1, 4], [-29, -76, 39, 96]).written()]),
        row(
            "aclnnRotaryPositionEmbedding",
            [numbers(), other_cos, other_sin, Int(1), f32([1, 4], [-19, 24, -111, 136]).written()],
        ),
        row("aclnnInterleaveRope", [numbers(), last_cos, last_sin, f32([1, 4], [-19, -74, 36, 136]).written()]),
        row(
            "aclnnDynamicQuant",
            [
                f32([2, 2], [127.0, -3.5, 0.0, 0.0]).read(),
                Absent,
                i8([2, 2], [127, -4, 0, 0]).written(),
                f32([2], [1, 0]).written(),
            ],
        ),
        row(
            "aclnnDynamicQuant",
            [
                f16([1, 2], [2, 2]).read(),
                f16([2], [1.0, 0.5]).read(),
                i8([1, 2], [127, 64]).written(),
                f32([1], [2.0 / 127.0]).written(),
            ],
        ),
        row(
            "aclnnScatterNdUpdate",
            [
                i32([3, 2], [1, 2, 3, 4, 5, 6]).becomes([9, 8, 3, 4, 7, 0]),
                i64([2, 1], [2, 0]).read(),
                i32([2, 2], [7, 0, 9, 8]).read(),
            ],
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sums_of_any_views_are_normalised(
        (views, first) in (prop::collection::vec(1..5i64, 1..4), 0..3usize).prop_flat_map(|(shape, first)| {
            let first = first % shape.len();
            let mut lines = shape.clone();
            lines[first..].fill(1);
            let input = || view_of(shape.clone(), true);
            let output = || view_of(shape.clone(), false);
            let gamma = view_of(shape[first..].to_vec(), true);
            ((input(), input(), gamma, output(), view_of(lines, false), output()), Just(first))
        }),
        dtype in prop::sample::select(vec![
            aclDataType::ACL_FLOAT, aclDataType::ACL_FLOAT16, aclDataType::ACL_BF16,
        ]),
        (values, epsilon) in (prop::collection::vec(-4.0..4.0f64, 1..30), 0.01..1.0f64),
    ) {
        let _bench = Bench::new();
        let (a, b, gamma, out, scales, sum) = views;
        let [a, b, gamma, out, sum] = [a, b, gamma, out, sum].map(|view| Tensor::new(dtype, view, &values));
        let scales = Tensor::new(aclDataType::ACL_FLOAT, scales, &[5.0]);
        ok(call!(aclnnAddRmsNorm(
            a.input(), b.input(), gamma.input(), epsilon, out.out(), scales.out(), sum.out()
        )));
        let added: Vec<f64> = a.values().iter().zip(b.values())
            .map(|(a, b)| decode(dtype, &encode(dtype, a + b)))
            .collect();
        prop_assert_eq!(&sum.values(), &added);
        let width = a.view.shape[first..].iter().product::<i64>() as usize;
        let (gamma, out, scales) = (gamma.values(), out.values(), scales.values());
        for (line, (sums, got)) in added.chunks(width).zip(out.chunks(width)).enumerate() {
            let root = (sums.iter().map(|value| value * value).sum::<f64>() / width as f64 + epsilon).sqrt();
            prop_assert!((scales[line] * root - 1.0).abs() < 1e-6);
            for (place, &got) in got.iter().enumerate() {
                let want = sums[place] / root * gamma[place];
                prop_assert!((got - want).abs() <= 8e-3 * want.abs() + 1e-6, "{} is not {}", got, want);
            }
        }
    }
}

#[test]
fn rows_of_models_are_rotated_quantised_and_updated() {
    let _bench = Bench::new();
    // Angles of a quarter turn: a pair (a, b) becomes (-b, a).
    let x = Tensor::floats(&[2, 4], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let (cos, sin) = (Tensor::floats(&[1, 4], &[0.0]), Tensor::floats(&[4], &[1.0]));
    let out = Tensor::floats(&[2, 4], &[0.5]);
    let turn = |mode| {
        ok(call!(aclnnRotaryPositionEmbedding(x.input(), cos.input(), sin.input(), mode, out.out())));
        out.values()
    };
    assert_eq!(turn(0), [-3.0, -4.0, 1.0, 2.0, -7.0, -8.0, 5.0, 6.0]);
    assert_eq!(turn(1), [-2.0, 1.0, -4.0, 3.0, -6.0, 5.0, -8.0, 7.0]);
    ok(call!(aclnnInterleaveRope(x.input(), cos.input(), sin.input(), out.out())));
    assert_eq!(out.values(), [-2.0, -4.0, 1.0, 3.0, -6.0, -8.0, 5.0, 7.0]);
    fails(
        call!(aclnnRotaryPositionEmbedding(x.input(), cos.input(), sin.input(), 2, out.out())),
        161_002,
        &["aclnnRotaryPositionEmbedding: mode: given 2, allowed: 0 (halves), 1 (neighbours)"],
    );
    // Each factor belongs to its place in the output.
    let cos = Tensor::floats(&[4], &[1.0, 2.0, 3.0, 4.0]);
    let sin = Tensor::floats(&[4], &[10.0, 20.0, 30.0, 40.0]);
    ok(call!(aclnnInterleaveRope(x.input(), cos.input(), sin.input(), out.out())));
    assert_eq!(out.values()[..4], [-19.0, -74.0, 36.0, 136.0]);

    let rows = Tensor::floats(&[3, 2], &[1.27, -0.5, 0.0, 0.0, -254.0, 3.0]);
    let smooth = Tensor::floats(&[2], &[1.0, 2.0]);
    let (codes, scales) = (Tensor::packed(aclDataType::ACL_INT8, &[3, 2], &[9.0]), Tensor::floats(&[3], &[0.5]));
    ok(call!(aclnnDynamicQuant(rows.input(), OptionalIn(null()), codes.out(), scales.out())));
    // 3 over 2 is rounded to the even number.
    assert_eq!(codes.values(), [127.0, -50.0, 0.0, 0.0, -127.0, 2.0]);
    let near = |want: [f64; 3]| {
        let got = scales.values();
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?}");
    };
    near([0.01, 0.0, 2.0]);
    ok(call!(aclnnDynamicQuant(rows.input(), OptionalIn(smooth.handle), codes.out(), scales.out())));
    assert_eq!(codes.values()[..2], [127.0, -100.0]);
    near([0.01, 0.0, 2.0]);

    let cache = Tensor::floats(&[2, 2, 2], &[0.0]);
    let places = Tensor::ints(&[2, 2], &[1, 0, 0, 1]);
    let parts = Tensor::floats(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    ok(call!(aclnnScatterNdUpdate(cache.in_out(), places.input(), parts.input())));
    assert_eq!(cache.values(), [0.0, 0.0, 3.0, 4.0, 1.0, 2.0, 0.0, 0.0]);
    let nowhere = Tensor::ints(&[2, 2], &[1, 0, 0, 2]);
    ok(call!(aclnnScatterNdUpdate(cache.in_out(), nowhere.input(), parts.input())));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnScatterNdUpdate: indices: index 2 is out of range for axis 1 of size 2"],
    );
}
