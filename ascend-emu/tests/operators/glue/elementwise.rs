//! Operators whose every element comes of the elements at the same position of broadcast inputs.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ptr::{null, null_mut};

pub(crate) fn rows() -> Vec<Row> {
    [sums_and_products(), quotients()].concat()
}

fn sums_and_products() -> Vec<Row> {
    let (a, b) = (f32([2, 2], [1, 2, 3, 4]), f32([2], [10, 100]));
    let whole = i64([3], [1, -2, 3]);
    vec![
        row("aclnnAdd", [a.clone().read(), b.clone().read(), Real(0.5), f32([2, 2], [6, 52, 8, 54]).written()]),
        row(
            "aclnnAdd",
            [i8([2], [100, -100]).read(), i8([2], [100, -100]).read(), Int(1), i8([2], [-56, 56]).written()],
        ),
        row("aclnnAdds", [whole.clone().read(), Int(10), Int(3), i64([3], [31, 28, 33]).written()]),
        row("aclnnAdds", [whole.clone().read(), Real(0.5), Int(3), f32([3], [2.5, -0.5, 4.5]).written()]),
        row("aclnnInplaceAdd", [a.clone().becomes([21, 202, 23, 204]), b.clone().read(), Int(2)]),
        row("aclnnInplaceAdds", [bf16([2], [1, 2]).becomes([1.5, 2.5]), Real(0.25), Int(2)]),
        row("aclnnSub", [b.clone().read(), a.clone().read(), Int(2), f32([2, 2], [8, 96, 4, 92]).written()]),
        row("aclnnSubs", [whole.clone().read(), Int(1), Int(5), i64([3], [-4, -7, -2]).written()]),
        row("aclnnInplaceSub", [a.clone().becomes([-19, -198, -17, -196]), b.clone().read(), Int(2)]),
        row("aclnnInplaceSubs", [f16([2], [1, 2]).becomes([0.5, 1.5]), Real(0.5), Int(1)]),
        row("aclnnRsub", [a.clone().read(), b.clone().read(), Int(2), f32([2, 2], [8, 96, 4, 92]).written()]),
        row("aclnnRsubs", [whole.clone().read(), Int(10), Int(2), i64([3], [8, 14, 4]).written()]),
        row("aclnnMul", [a.clone().read(), b.clone().read(), f32([2, 2], [10, 200, 30, 400]).written()]),
        row("aclnnMuls", [whole.clone().read(), Real(0.5), f16([3], [0.5, -1.0, 1.5]).written()]),
        row("aclnnInplaceMul", [a.becomes([10, 200, 30, 400]), b.read()]),
        row("aclnnInplaceMuls", [whole.clone().becomes([-3, 6, -9]), Int(-3)]),
        row("aclnnPowTensorScalar", [whole.clone().read(), Int(3), i64([3], [1, -8, 27]).written()]),
        row("aclnnPowTensorScalar", [f32([2], [4.0, 0.25]).read(), Real(-0.5), f32([2], [0.5, 2.0]).written()]),
        row("aclnnPowTensorTensor", [f32([1], [2]).read(), whole.clone().read(), f32([3], [2.0, 0.25, 8.0]).written()]),
        row(
            "aclnnPowScalarTensor",
            [Real(100.0), f32([3], [0.5, -1.0, 2.0]).read(), f32([3], [10.0, 0.01, 1e4]).written()],
        ),
        row("aclnnInplacePowTensorScalar", [whole.becomes([1, 4, 9]), Int(2)]),
    ]
}

fn quotients() -> Vec<Row> {
    let (a, b) = (i32([4], [7, -7, 7, -7]), i32([4], [2, 2, -2, -2]));
    let exact = [3.5, -3.5, -3.5, 3.5];
    let (towards_zero, down) = ([3, -3, -3, 3], [3, -4, -4, 3]);
    let rest = [1, 1, -1, -1];
    // By 2.
    let (exact_by, towards_zero_by, down_by, rest_by) =
        ([3.5, -3.5, 3.5, -3.5], [3, -3, 3, -3], [3, -4, 3, -4], [1, 1, 1, 1]);
    let real = f32([4], [7, -7, 7, -7]);
    vec![
        row("aclnnDiv", [a.clone().read(), b.clone().read(), f32([4], exact).written()]),
        row(
            "aclnnDiv",
            [f32([2], [1, -1]).read(), f32([1], [0]).read(), f32([2], [f64::INFINITY, f64::NEG_INFINITY]).written()],
        ),
        row("aclnnDivs", [a.clone().read(), Int(2), f16([4], exact_by).written()]),
        row("aclnnInplaceDiv", [real.clone().becomes(exact), b.clone().read()]),
        row("aclnnInplaceDivs", [real.clone().becomes(exact_by), Real(2.0)]),
        row("aclnnDivMod", [a.clone().read(), b.clone().read(), Int(0), f32([4], exact).written()]),
        row("aclnnDivMod", [a.clone().read(), b.clone().read(), Int(1), i32([4], towards_zero).written()]),
        row("aclnnDivMod", [real.clone().read(), b.clone().read(), Int(2), f32([4], down).written()]),
        row("aclnnDivMods", [real.clone().read(), Int(2), Int(1), f32([4], towards_zero_by).written()]),
        row("aclnnDivMods", [a.clone().read(), Int(2), Int(2), i32([4], down_by).written()]),
        row("aclnnFloorDivide", [a.clone().read(), b.clone().read(), i32([4], down).written()]),
        row("aclnnFloorDivides", [real.clone().read(), Real(2.0), f32([4], down_by).written()]),
        row("aclnnInplaceFloorDivide", [a.clone().becomes(down), b.clone().read()]),
        row("aclnnInplaceFloorDivides", [a.clone().becomes(down_by), Int(2)]),
        row("aclnnRemainderTensorTensor", [a.clone().read(), b.clone().read(), i32([4], rest).written()]),
        row("aclnnRemainderTensorScalar", [real.read(), Real(2.0), f32([4], rest_by).written()]),
        row("aclnnInplaceRemainderTensorTensor", [a.clone().becomes(rest), b.read()]),
        row("aclnnInplaceRemainderTensorScalar", [a.becomes(rest_by), Int(2)]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arithmetic_and_comparisons_broadcast_over_any_views(
        (a, b, out) in shape().prop_flat_map(|shape| {
            // One has the whole shape, so that it is what both broadcast to.
            let b = narrower(shape.clone()).prop_flat_map(|shape| view_of(shape, true));
            (view_of(shape.clone(), true), b, view_of(shape, false))
        }),
        types in (dtype(), dtype()),
        values in (small(), small()),
    ) {
        let _bench = Bench::new();
        let a = Tensor::new(types.0, a, &values.0);
        let b = Tensor::new(types.1, b, &values.1);
        let shape = out.shape.clone();
        let double = || Tensor::new(aclDataType::ACL_DOUBLE, out.clone(), &[0.5]);
        let (x, y) = (a.values(), b.broadcast(&shape));
        let each = |f: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
            x.iter().zip(&y).map(|(&x, &y)| f(x, y)).collect()
        };
        let truth = |f: &dyn Fn(f64, f64) -> bool| each(&|x, y| f64::from(f(x, y)));
        let to = double();
        ok(call!(aclnnAdd(a.input(), b.input(), int(3), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| x + 3.0 * y));
        // What is not shown stays as it was.
        let shown = to.view.places();
        for (place, value) in to.buffer().into_iter().enumerate() {
            prop_assert!(shown.contains(&(place as i64)) || value == 0.5);
        }
        ok(call!(aclnnSub(b.input(), a.input(), real(0.5), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| y - 0.5 * x));
        ok(call!(aclnnMul(a.input(), b.input(), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| x * y));
        ok(call!(aclnnMaximum(a.input(), b.input(), to.out())));
        prop_assert_eq!(to.values(), each(&f64::max));
        ok(call!(aclnnMinimum(a.input(), b.input(), to.out())));
        prop_assert_eq!(to.values(), each(&f64::min));
        ok(call!(aclnnRsubs(a.input(), real(1.5), int(2), to.out())));
        prop_assert_eq!(to.values(), each(&|x, _| 1.5 - 2.0 * x));
        ok(call!(aclnnClamp(a.input(), OptionalScalar(int(1).0), OptionalScalar(null()), to.out())));
        prop_assert_eq!(to.values(), each(&|x, _| x.max(1.0)));
        ok(call!(aclnnSWhere(a.input(), b.input(), a.input(), to.out())));
        prop_assert_eq!(to.values(), each(&|x, y| if x != 0.0 { y } else { x }));
        let yes = Tensor::new(aclDataType::ACL_BOOL, out.clone(), &[1.0]);
        ok(call!(aclnnLtTensor(a.input(), b.input(), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, y| x < y));
        ok(call!(aclnnGeTensor(a.input(), b.input(), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, y| x >= y));
        ok(call!(aclnnNeScalar(a.input(), int(2), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, _| x != 2.0));
        ok(call!(aclnnLogicalAnd(a.input(), b.input(), yes.out())));
        prop_assert_eq!(yes.values(), truth(&|x, y| x != 0.0 && y != 0.0));
        let one = Tensor::packed(aclDataType::ACL_BOOL, &[1], &[0.0]);
        ok(call!(aclnnEqual(a.input(), b.input(), one.out())));
        let same = a.view.shape == b.view.shape && a.values() == b.values();
        prop_assert_eq!(one.values(), [f64::from(same)]);
    }
}

#[test]
fn scalars_count_as_they_do_in_pytorch() {
    let _bench = Bench::new();
    // 0.1 as a half equals the half that is nearest to it.
    let half = Tensor::packed(aclDataType::ACL_FLOAT16, &[1], &[0.1]);
    let yes = Tensor::packed(aclDataType::ACL_BOOL, &[1], &[0.0]);
    ok(call!(aclnnEqScalar(half.input(), real(0.1), yes.out())));
    assert_eq!(yes.values(), [1.0]);
    // Integers stay exact beyond 2^53, and divide exactly into real numbers.
    let big = Tensor::ints(&[2], &[(1 << 60) + 1, -7]);
    sync(null_mut());
    let exact = upload(&[(1i64 << 60) + 1, -7]);
    let big = Tensor::over(aclDataType::ACL_INT64, big.view, exact);
    ok(call!(aclnnInplaceAdds(big.in_out(), int(1), int(1))));
    sync(null_mut());
    assert_eq!(download::<i64>(exact, 2), [(1 << 60) + 2, -6]);
    let seven = Tensor::ints(&[2], &[-7, 7]);
    let quotient = Tensor::floats(&[2], &[0.0]);
    ok(call!(aclnnDivs(seven.input(), int(2), quotient.out())));
    assert_eq!(quotient.values(), [-3.5, 3.5]);
    let whole = Tensor::ints(&[2], &[0, 0]);
    ok(call!(aclnnFloorDivides(seven.input(), int(2), whole.out())));
    assert_eq!(whole.values(), [-4.0, 3.0]);
    ok(call!(aclnnDivMods(seven.input(), int(2), 1, whole.out())));
    assert_eq!(whole.values(), [-3.0, 3.0]);
    ok(call!(aclnnRemainderTensorScalar(seven.input(), int(4), whole.out())));
    assert_eq!(whole.values(), [1.0, 3.0]);
    ok(call!(aclnnFloorDivides(seven.input(), int(0), whole.out())));
    assert_eq!(whole.values(), [0.0, 0.0]);
}
