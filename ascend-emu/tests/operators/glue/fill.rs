//! Copies, and numbers that no tensor is needed for.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use approx::abs_diff_eq;
use ascend_emu::glue::Type;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ptr::null_mut;

pub(crate) fn rows() -> Vec<Row> {
    let matrix = [1, 2, 3, 4, 5, 6];
    vec![
        row("aclnnInplaceCopy", [i32([2, 2], [9, 9, 9, 9]).becomes([1, 2, 1, 2]), f32([1, 2], [1.9, 2.0]).read()]),
        row(
            "aclnnCast",
            [f32([3], [1.5, -2.5, 0.0]).read(), of_type(aclDataType::ACL_INT8), i8([3], [1, -2, 0]).written()],
        ),
        row(
            "aclnnCast",
            [f32([3], [0.5, -2.5, 0.0]).read(), of_type(aclDataType::ACL_BOOL), bool([3], [1, 1, 0]).written()],
        ),
        row("aclnnRepeat", [i64([2], [1, 2]).read(), axes([2, 2]), i64([2, 4], [1, 2, 1, 2, 1, 2, 1, 2]).written()]),
        row("aclnnFlip", [i32([2, 3], matrix).read(), axes([1]), i32([2, 3], [3, 2, 1, 6, 5, 4]).written()]),
        row(
            "aclnnConstantPadNd",
            [f16([2], [1, 2]).read(), axes([2, -1]), Real(-0.5), f16([3], [-0.5, -0.5, 1.0]).written()],
        ),
        row("aclnnInplaceFillScalar", [bf16([2], [1, 2]).becomes([-1.5, -1.5]), Real(-1.5)]),
        row("aclnnInplaceFillScalar", [bool([2], [0, 0]).becomes([1, 1]), Real(0.5)]),
        row("aclnnInplaceFillTensor", [u8([2], [1, 2]).becomes([200, 200]), i64([1], [200]).read()]),
        row("aclnnInplaceZero", [f64([2], [1, 2]).becomes([0, 0])]),
        row("aclnnInplaceOne", [f16([2], [0, 2]).becomes([1, 1])]),
        row("aclnnArange", [Int(5), Int(-4), Int(-3), i32([3], [5, 2, -1]).written()]),
        row("aclnnArange", [Real(0.5), Real(2.0), Real(0.75), f32([2], [0.5, 1.25]).written()]),
        // Integers: the bounds lose their fractions first, as in PyTorch.
        row("aclnnArange", [Real(-1.5), Real(2.5), Int(1), i32([4], [-1, 0, 1, 2]).written()]),
        row("aclnnArange", [Int(1), Real(7.9), Real(2.5), i64([3], [1, 3, 5]).written()]),
        row("aclnnArange", [Real(0.5), Int(3), Real(1.5), i64([2], [0, 1]).written()]),
        // Any shape with this number of elements.
        row("aclnnArange", [Int(0), Int(6), Int(1), f32([1, 2, 1, 3], [0, 1, 2, 3, 4, 5]).written()]),
        row("aclnnEye", [Int(3), Int(2), f32([3, 2], [1, 0, 0, 1, 0, 0]).written()]),
        row("aclnnTriu", [i32([2, 3], matrix).read(), Int(1), i32([2, 3], [0, 2, 3, 0, 0, 6]).written()]),
        row("aclnnTril", [i32([2, 3], matrix).read(), Int(1), i32([2, 3], [1, 2, 0, 4, 5, 6]).written()]),
        row("aclnnInplaceTriu", [f32([2, 3], matrix).becomes([1, 2, 3, 0, 5, 6]), Int(0)]),
        row("aclnnInplaceTril", [f32([2, 3], matrix).becomes([0, 0, 0, 4, 0, 0]), Int(-1)]),
        // Distributions of a single number; other tests look at what is drawn from wider ones.
        row("aclnnInplaceNormal", [f32([3], [0, 0, 0]).becomes([1.5, 1.5, 1.5]), Real(1.5), Real(0.0), Int(7), Int(9)]),
        row("aclnnInplaceUniform", [f32([3], [0, 0, 0]).becomes([-2, -2, -2]), Real(-2.0), Real(-2.0), Int(7), Int(9)]),
        row("aclnnInplaceRandom", [i32([3], [0, 0, 0]).becomes([5, 5, 5]), Int(5), Int(6), Int(7), Int(9)]),
        row(
            "aclnnDropoutGenMaskV2",
            [
                axes([3, 43]),
                Real(0.0),
                Int(7),
                Int(9),
                of_type(aclDataType::ACL_FLOAT16),
                u8([2, 16], [255; 32]).written(),
            ],
        ),
        row(
            "aclnnDropoutGenMaskV2",
            [axes([128]), Real(1.0), Int(7), Int(9), of_type(aclDataType::ACL_FLOAT), u8([16], [0; 16]).written()],
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn numbers_apart_are_written_to_any_view(
        view in shape().prop_flat_map(|shape| view_of(shape, false)),
        dtype in dtype(),
    ) {
        let _bench = Bench::new();
        let out = Tensor::new(dtype, view, &[5.0]);
        let (mut want, places) = (out.buffer(), out.view.places());
        for (&place, number) in places.iter().zip(0..) {
            want[place as usize] = decode(dtype, &encode(dtype, f64::from(number)));
        }
        ok(call!(aclnnArange(int(0), int(places.len() as i64), int(1), out.out())));
        prop_assert_eq!(out.buffer(), want);
    }

    #[test]
    fn copies_of_any_views_convert_each_element(
        (from, to) in shape().prop_flat_map(|to| {
            let from = narrower(to.clone()).prop_flat_map(|shape| view_of(shape, true));
            (from, view_of(to, false))
        }),
        types in (dtype(), dtype()),
        values in prop::collection::vec(prop_oneof![-300.0..300.0f64, -1e30..1e30f64, Just(f64::NAN)], 1..30),
    ) {
        let _bench = Bench::new();
        let src = Tensor::new(types.0, from, &values);
        let dst = Tensor::new(types.1, to, &[5.0]);
        let mut want = dst.buffer();
        let signed = [
            aclDataType::ACL_INT8,
            aclDataType::ACL_INT16,
            aclDataType::ACL_INT32,
            aclDataType::ACL_INT64,
        ];
        let signed = signed.contains(&types.0);
        for (&place, value) in dst.view.places().iter().zip(src.broadcast(&dst.view.shape)) {
            let value = match (types.0, value) {
                // Integers wrap around.
                (aclDataType::ACL_INT64 | aclDataType::ACL_INT32 | aclDataType::ACL_INT16, value)
                    if types.1 == aclDataType::ACL_INT8 => f64::from(value as i64 as i8),
                (aclDataType::ACL_INT64 | aclDataType::ACL_INT32, value)
                    if types.1 == aclDataType::ACL_INT16 => f64::from(value as i64 as i16),
                (aclDataType::ACL_INT64, value)
                    if types.1 == aclDataType::ACL_INT32 => f64::from(value as i64 as i32),
                (_, value) if signed && types.1 == aclDataType::ACL_UINT8 => {
                    f64::from(value as i64 as u8)
                }
                (aclDataType::ACL_UINT8, value)
                    if types.1 == aclDataType::ACL_INT8 => f64::from(value as u8 as i8),
                (_, value) => value,
            };
            want[place as usize] = decode(types.1, &encode(types.1, value));
        }
        // What is not shown stays as it was.
        ok(call!(aclnnInplaceCopy(dst.in_out(), src.input())));
        let got = dst.buffer();
        // Halves of the largest integers may be rounded once or twice.
        prop_assert!(
            got.iter().zip(&want).all(|(a, b)| a == b || a.is_nan() && b.is_nan()),
            "{got:?} is not {want:?}"
        );
    }
}

#[test]
fn numbers_are_made_of_nothing() {
    let _bench = Bench::new();
    let out = Tensor::packed(aclDataType::ACL_INT32, &[4], &[0.0]);
    ok(call!(aclnnArange(int(-1), int(7), int(2), out.out())));
    assert_eq!(out.values(), [-1.0, 1.0, 3.0, 5.0]);
    let out = Tensor::floats(&[3], &[0.0]);
    ok(call!(aclnnArange(real(0.0), real(1.5), real(0.5), out.out())));
    assert_eq!(out.values(), [0.0, 0.5, 1.0]);
    ok(call!(aclnnInplaceFillScalar(out.shared(), scalar(aclDataType::ACL_BOOL, true))));
    assert_eq!(out.values(), [1.0; 3]);
    ok(call!(aclnnInplaceZero(out.shared())));
    assert_eq!(out.values(), [0.0; 3]);
    let square = Tensor::packed(aclDataType::ACL_INT8, &[2, 3], &[7.0]);
    ok(call!(aclnnEye(2, 3, square.out())));
    assert_eq!(square.values(), [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    // Types that are not computed with are zeroed and copied all the same.
    let pair = aclDataType::ACL_COMPLEX64;
    let words = upload(&[1.0f32, 2.0, 3.0, 4.0]);
    let complex = |at| Tensor { handle: tensor(pair, &[2], at), ..Tensor::floats(&[1], &[0.0]) };
    let copied = upload(&[9.0f32; 4]);
    ok(call!(aclnnInplaceCopy(complex(copied).in_out(), complex(words).input())));
    ok(call!(aclnnInplaceZero(complex(words).shared())));
    sync(null_mut());
    assert_eq!(download::<f32>(copied, 4), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(download::<f32>(words, 4), [0.0; 4]);
}

#[test]
fn random_numbers_depend_on_seed_offset_and_place_alone() {
    let _bench = Bench::new();
    let count = 20_000;
    let draw = |seed, offset| {
        let out = Tensor::floats(&[count], &[0.0]);
        ok(call!(aclnnInplaceNormal(out.in_out(), 1.0, 2.0, seed, offset)));
        out.values()
    };
    let numbers = draw(7, 0);
    assert_eq!(numbers, draw(7, 0));
    assert!(draw(7, 1).iter().zip(&numbers).all(|(a, b)| a != b));
    assert!(draw(8, 0).iter().zip(&numbers).all(|(a, b)| a != b));
    let mean = numbers.iter().sum::<f64>() / count as f64;
    let variance = numbers.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count as f64;
    assert!((mean - 1.0).abs() < 0.1 && (variance - 4.0).abs() < 0.2, "{mean} {variance}");
    let halves = Tensor::packed(aclDataType::ACL_FLOAT16, &[count], &[0.0]);
    ok(call!(aclnnInplaceUniform(halves.in_out(), -1.0, 1.0, 3, 4)));
    let values = halves.values();
    assert!(values.iter().all(|&value| (-1.0..1.0).contains(&value)));
    assert!((values.iter().sum::<f64>() / count as f64).abs() < 0.05);
    let dice = Tensor::ints(&[count], &[0]);
    ok(call!(aclnnInplaceRandom(dice.in_out(), 1, 7, 3, 4)));
    let values = dice.values();
    for side in 1..7 {
        let hits = values.iter().filter(|&&value| value == f64::from(side)).count();
        assert!((2800..3900).contains(&hits), "{side}: {hits}");
    }
    assert!(values.iter().all(|value| (1.0..7.0).contains(value)));
}

#[test]
fn dropout_masks_keep_as_many_bits_as_their_probability_says() {
    let _bench = Bench::new();
    let (bits, bytes) = (40_001, 5_008);
    let draw = |probability, seed, offset, dtype| {
        let mask = Tensor::packed(aclDataType::ACL_UINT8, &[bytes], &[0.0]);
        ok(call!(aclnnDropoutGenMaskV2(ints(&[bits]), probability, seed, offset, Type(dtype), mask.out())));
        mask.values()
    };
    let float = aclDataType::ACL_FLOAT;
    let mask = draw(0.25, 7, 0, float);
    assert_eq!(mask, draw(0.25, 7, 0, float));
    assert_ne!(mask, draw(0.25, 7, 1, float));
    assert_ne!(mask, draw(0.25, 8, 0, float));
    for bit in 0..8 {
        let kept = mask.iter().filter(|&&byte| byte as u8 >> bit & 1 == 1);
        let share = kept.count() as f64 / bytes as f64;
        assert!(abs_diff_eq!(share, 0.75, epsilon = 0.03), "bit {bit}: {share}");
    }
    // A probability that BF16 does not have is the next one that it has.
    assert_eq!(draw(0.2501, 7, 0, aclDataType::ACL_BF16), mask);
    assert_ne!(draw(0.2501, 7, 0, float), mask);
}

#[test]
fn dropout_masks_that_do_not_fit_are_refused_by_name() {
    let _bench = Bench::new();
    let mask = Tensor::packed(aclDataType::ACL_UINT8, &[16], &[0.0]);
    let (half, float) = (aclDataType::ACL_FLOAT16, aclDataType::ACL_FLOAT);
    let gen_mask = |shape: &[i64], probability, dtype, mask: &Tensor| {
        call!(aclnnDropoutGenMaskV2(ints(shape), probability, 7, 9, Type(dtype), mask.out()))
    };
    fails(
        gen_mask(&[129], 0.5, half, &mask),
        161_002,
        &["aclnnDropoutGenMaskV2: out: given [16], allowed: 32 elements"],
    );
    fails(gen_mask(&[3, -1], 0.5, half, &mask), 161_002, &["aclnnDropoutGenMaskV2: shape: given [3, -1]"]);
    for probability in [-0.1, 1.5, f64::NAN] {
        fails(gen_mask(&[128], probability, half, &mask), 161_002, &["aclnnDropoutGenMaskV2: prob: given", "0 to 1"]);
    }
    fails(
        gen_mask(&[128], 0.5, aclDataType::ACL_INT8, &mask),
        161_002,
        &["aclnnDropoutGenMaskV2: probDataType: given INT8"],
    );
    let floats = Tensor::floats(&[16], &[0.0]);
    fails(gen_mask(&[128], 0.5, float, &floats), 161_002, &["aclnnDropoutGenMaskV2: out: given FLOAT, allowed: UINT8"]);
}

#[test]
fn inputs_are_read_before_outputs_that_share_their_memory() {
    let _bench = Bench::new();
    let numbers: Vec<f64> = (0..8).map(f64::from).collect();
    let x = Tensor::floats(&[8], &numbers);
    let part = |offset| {
        let view = View { shape: vec![7], strides: vec![1], offset, room: 8 };
        Tensor::over(aclDataType::ACL_FLOAT, view, x.at)
    };
    ok(call!(aclnnInplaceCopy(part(1).in_out(), part(0).input())));
    assert_eq!(x.buffer(), [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    ok(call!(aclnnFlip(x.input(), ints(&[0]), x.out())));
    assert_eq!(x.buffer(), [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0]);
    ok(call!(aclnnInplaceAdd(part(1).in_out(), part(0).input(), int(1))));
    assert_eq!(x.buffer(), [6.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0, 0.0]);
    let matrix = Tensor::over(aclDataType::ACL_FLOAT, View::packed(&[2, 2]), x.at);
    ok(call!(aclnnMm(matrix.input(), matrix.input(), matrix.out(), 0)));
    assert_eq!(matrix.values(), [135.0, 143.0, 117.0, 148.0]);
}
