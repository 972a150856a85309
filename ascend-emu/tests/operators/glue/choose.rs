//! Bounds of numbers, and choices between numbers.

use super::rows::Argument::{Absent, Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_sys::bindings::aclDataType;
use std::ptr::null_mut;

pub(crate) fn rows() -> Vec<Row> {
    let nan = f64::NAN;
    let numbers = f32([4], [-2.0, 0.5, 3.0, nan]);
    let whole = i32([3], [-2, 1, 3]);
    let mask = bool([3], [1, 0, 1]);
    vec![
        row("aclnnMaximum", [numbers.clone().read(), f32([1], [1]).read(), f32([4], [1.0, 1.0, 3.0, nan]).written()]),
        row("aclnnMinimum", [numbers.clone().read(), f32([1], [1]).read(), f32([4], [-2.0, 0.5, 1.0, nan]).written()]),
        row("aclnnClamp", [numbers.clone().read(), Real(0.0), Real(1.0), f32([4], [0.0, 0.5, 1.0, nan]).written()]),
        row("aclnnClamp", [whole.clone().read(), Absent, Int(1), i32([3], [-2, 1, 1]).written()]),
        row("aclnnClampMin", [whole.clone().read(), Int(0), i32([3], [0, 1, 3]).written()]),
        row("aclnnClampMax", [whole.clone().read(), Int(2), i32([3], [-2, 1, 2]).written()]),
        row("aclnnInplaceClampMax", [numbers.clone().becomes([-2.0, 0.5, 0.75, nan]), Real(0.75)]),
        row("aclnnClampMinTensor", [whole.clone().read(), i32([3], [0, 5, 2]).read(), i32([3], [0, 5, 3]).written()]),
        row("aclnnClampMaxTensor", [whole.clone().read(), i32([3], [0, 5, 2]).read(), i32([3], [-2, 1, 2]).written()]),
        row(
            "aclnnClampTensor",
            [whole.clone().read(), i32([], [0]).read(), i32([3], [0, 5, 2]).read(), i32([3], [0, 1, 2]).written()],
        ),
        row("aclnnClampTensor", [whole.clone().read(), Absent, i32([], [0]).read(), i32([3], [-2, 0, 0]).written()]),
        row(
            "aclnnNanToNum",
            [
                f32([4], [nan, f64::INFINITY, f64::NEG_INFINITY, 2.0]).read(),
                Real(0.5),
                Real(9.0),
                Real(-9.0),
                f32([4], [0.5, 9.0, -9.0, 2.0]).written(),
            ],
        ),
        row(
            "aclnnSWhere",
            [mask.clone().read(), whole.clone().read(), f32([], [0.5]).read(), f32([3], [-2.0, 0.5, 3.0]).written()],
        ),
        row(
            "aclnnInplaceMaskedFillScalar",
            [f16([2, 3], 1..7).becomes([-1, 2, -1, -1, 5, -1]), mask.clone().read(), Int(-1)],
        ),
        // As in PyTorch: any number but 0 is true, and integers take numbers without their fractions.
        row("aclnnInplaceMaskedFillScalar", [bool([3], [0, 0, 0]).becomes([1, 0, 1]), mask.clone().read(), Real(0.5)]),
        row("aclnnInplaceMaskedFillScalar", [bool([3], [1, 1, 1]).becomes([0, 1, 0]), mask.clone().read(), Real(0.0)]),
        row("aclnnInplaceMaskedFillScalar", [whole.clone().becomes([2, 1, 2]), mask.clone().read(), Real(2.7)]),
        row(
            "aclnnInplaceMaskedFillTensor",
            [whole.clone().becomes([8, 1, 8]), mask.clone().read(), i32([], [8]).read()],
        ),
        row("aclnnInplaceMaskedFillTensor", [whole.becomes([2, 1, 2]), mask.read(), f32([1], [2.7]).read()]),
    ]
}

#[test]
fn integers_beside_a_mask_stay_exact() {
    let _bench = Bench::new();
    let numbers = [(1i64 << 60) + 1, 5];
    let at = upload(&numbers);
    let x = Tensor::over(aclDataType::ACL_INT64, View::packed(&[2]), at);
    let mask = Tensor::packed(aclDataType::ACL_BOOL, &[2], &[0.0, 1.0]);
    let half = Tensor::floats(&[], &[0.5]);
    ok(call!(aclnnInplaceMaskedFillTensor(x.shared(), mask.input(), half.input())));
    sync(null_mut());
    assert_eq!(download::<i64>(at, 2), [numbers[0], 0]);
}
