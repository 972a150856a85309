//! Operators whose result is true or false.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;

pub(crate) fn rows() -> Vec<Row> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let mut rows = vec![
        row("aclnnEqual", [i32([2], [1, 2]).read(), i32([2], [1, 2]).read(), bool([1], [1]).written()]),
        row("aclnnEqual", [f32([1], [nan]).read(), f32([1], [nan]).read(), bool([], [0]).written()]),
        row("aclnnEqual", [i32([2], [1, 2]).read(), i32([1, 2], [1, 2]).read(), bool([], [0]).written()]),
        row(
            "aclnnIsClose",
            [
                f32([4], [1.0, 1.0, nan, inf]).read(),
                f32([4], [1.25, 1.5, nan, inf]).read(),
                Real(0.2),
                Real(0.125),
                Int(1),
                bool([4], [1, 0, 1, 1]).written(),
            ],
        ),
        row("aclnnIsFinite", [f32([4], [0.0, nan, inf, -inf]).read(), bool([4], [1, 0, 0, 0]).written()]),
        row("aclnnIsFinite", [i32([1], [i32::MAX]).read(), bool([1], [1]).written()]),
        row("aclnnIsPosInf", [f32([4], [0.0, nan, inf, -inf]).read(), bool([4], [0, 0, 1, 0]).written()]),
        row("aclnnIsNegInf", [f32([4], [0.0, nan, inf, -inf]).read(), bool([4], [0, 0, 0, 1]).written()]),
        row("aclnnLogicalNot", [f32([3], [0.0, 0.5, nan]).read(), bool([3], [1, 0, 0]).written()]),
        row(
            "aclnnLogicalAnd",
            [f32([4], [0.0, 0.5, 0.0, 2.0]).read(), i32([4], [0, 0, 3, 4]).read(), bool([4], [0, 0, 0, 1]).written()],
        ),
        row(
            "aclnnLogicalOr",
            [f32([4], [0.0, 0.5, 0.0, 2.0]).read(), i32([4], [0, 0, 3, 4]).read(), bool([4], [0, 1, 1, 1]).written()],
        ),
        row(
            "aclnnLogicalXor",
            [f32([4], [0.0, 0.5, 0.0, 2.0]).read(), i32([4], [0, 0, 3, 4]).read(), bool([4], [0, 1, 1, 0]).written()],
        ),
    ];
    // What a relation says of less, equal, greater, and not a number.
    let relations = [
        ("aclnnEqTensor", "aclnnEqScalar", [0, 1, 0, 0]),
        ("aclnnNeTensor", "aclnnNeScalar", [1, 0, 1, 1]),
        ("aclnnLtTensor", "aclnnLtScalar", [1, 0, 0, 0]),
        ("aclnnLeTensor", "aclnnLeScalar", [1, 1, 0, 0]),
        ("aclnnGtTensor", "aclnnGtScalar", [0, 0, 1, 0]),
        ("aclnnGeTensor", "aclnnGeScalar", [0, 1, 1, 0]),
    ];
    // The first two are the same as numbers of the type on the right, to which both are rounded before they are
    // compared.
    let steps = i64([3], [1 << 24, (1 << 24) + 1, (1 << 24) + 4].map(f64::from));
    let half_steps = i32([3], [2048, 2049, 2052]);
    for (with_tensor, with_scalar, [less, equal, greater, unordered]) in relations {
        let numbers = f32([4], [1.0, 2.0, 3.0, nan]).read();
        let truth = bool([4], [less, equal, greater, unordered]).written();
        rows.push(row(with_tensor, [numbers.clone(), f16([1], [2]).read(), truth.clone()]));
        rows.push(row(with_scalar, [numbers, Real(2.0), truth]));
        let integers = i64([3], [-1, 2, 3]).read();
        let truth = bool([3], [less, equal, greater]).written();
        rows.push(row(with_tensor, [integers.clone(), i32([], [2]).read(), truth.clone()]));
        rows.push(row(with_scalar, [integers, Int(2), truth]));
        let rounded = bool([3], [equal, equal, greater]);
        let edge = f64::from(1 << 24);
        rows.push(row(with_tensor, [steps.clone().read(), f32([1], [edge]).read(), rounded.clone().written()]));
        rows.push(row(with_tensor, [half_steps.clone().read(), f16([1], [2048]).read(), rounded.clone().written()]));
        rows.push(row(with_scalar, [steps.clone().read(), Real(edge), rounded.written()]));
        // Two types that both hold the numbers compare them as they are.
        let exact = bool([3], [equal, greater, greater]);
        rows.push(row(with_tensor, [steps.clone().read(), f64([1], [edge]).read(), exact.clone().written()]));
        rows.push(row(with_scalar, [steps.clone().read(), Int(1 << 24), exact.written()]));
        // A scalar is a number of the tensor's type: 0.1 is the nearest half.
        let tenths = bool([2], [equal, greater]).written();
        rows.push(row(with_scalar, [f16([2], [0.1, 0.2]).read(), Real(0.1), tenths]));
    }
    rows
}

#[test]
fn not_a_number_goes_where_pytorch_puts_it() {
    let _bench = Bench::new();
    let inf = f64::INFINITY;
    let x = Tensor::floats(&[4], &[1.0, f64::NAN, inf, -inf]);
    let yes = Tensor::packed(aclDataType::ACL_BOOL, &[4], &[0.0]);
    ok(call!(aclnnIsFinite(x.input(), yes.out())));
    assert_eq!(yes.values(), [1.0, 0.0, 0.0, 0.0]);
    ok(call!(aclnnNeTensor(x.input(), x.input(), yes.out())));
    assert_eq!(yes.values(), [0.0, 1.0, 0.0, 0.0]);
    ok(call!(aclnnIsClose(x.input(), x.input(), 1e-5, 1e-8, Flag(0), yes.out())));
    assert_eq!(yes.values(), [1.0, 0.0, 1.0, 1.0]);
    for largest in [true, false] {
        let (value, place) = (Tensor::floats(&[], &[0.0]), Tensor::ints(&[], &[0]));
        let (out, indices) = (value.out(), place.out());
        ok(match largest {
            true => call!(aclnnMaxDim(x.input(), 0, Flag(0), out, indices)),
            false => call!(aclnnMinDim(x.input(), 0, Flag(0), out, indices)),
        });
        assert!(value.values()[0].is_nan());
        assert_eq!(place.values(), [1.0]);
    }
    let clean = Tensor::floats(&[4], &[0.0]);
    ok(call!(aclnnNanToNum(x.input(), 0.5, 8.0, -8.0, clean.out())));
    assert_eq!(clean.values(), [1.0, 0.5, 8.0, -8.0]);
    let nothing = Tensor::floats(&[2], &[-inf]);
    let sum = Tensor::floats(&[], &[0.0]);
    ok(call!(aclnnLogSumExp(nothing.input(), ints(&[0]), Flag(0), sum.out())));
    assert_eq!(sum.values(), [-inf]);
}
