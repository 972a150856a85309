//! Products of matrices.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;

pub(crate) fn rows() -> Vec<Row> {
    let (a, b) = (
        f16([2, 3], [1, 2, 3, 4, 5, 6]),
        f16([3, 2], [1, 0, 0, 1, 2, 2]),
    );
    let product = [7, 8, 16, 17];
    let stack = |data: &Data| data.clone().with_axis().read();
    vec![
        row(
            "aclnnMatmul",
            [
                a.clone().read(),
                b.clone().read(),
                f16([2, 2], product).written(),
                Int(0),
            ],
        ),
        row(
            "aclnnMatmul",
            [
                f32([2], [1, 2]).read(),
                f32([2, 2], [1, 2, 3, 4]).read(),
                f32([2], [7, 10]).written(),
                Int(1),
            ],
        ),
        row(
            "aclnnMm",
            [
                a.clone().read(),
                b.clone().read(),
                f32([2, 2], product).written(),
                Int(0),
            ],
        ),
        row(
            "aclnnDot",
            [
                f32([3], [1, 2, 3]).read(),
                f32([3], [4, -5, 6]).read(),
                f32([], [12]).written(),
            ],
        ),
        row(
            "aclnnMv",
            [
                a.clone().read(),
                f16([3], [1, 0, -1]).read(),
                f16([2], [-2, -2]).written(),
                Int(0),
            ],
        ),
        row(
            "aclnnAddmm",
            [
                f16([2], [10, 20]).read(),
                a.clone().read(),
                b.clone().read(),
                Real(0.5),
                Int(2),
                f16([2, 2], [19, 26, 37, 44]).written(),
                Int(0),
            ],
        ),
        row(
            "aclnnBaddbmm",
            [
                f16([1, 1, 1], [f64::NAN]).read(),
                stack(&a),
                stack(&b),
                Int(0),
                Int(-1),
                f16([1, 2, 2], product.map(|value| -value)).written(),
                Int(0),
            ],
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn products_of_any_views_are_matrix_products(
        (m, k, n) in (0..5i64, 0..5i64, 1..5i64),
        stack in prop::collection::vec(1..3i64, 0..3),
        ones in any::<[bool; 2]>(),
        seed in any::<[u8; 2]>(),
        values in small(),
    ) {
        let _bench = Bench::new();
        let of = |ones: bool, last: [i64; 2]| -> Vec<i64> {
            let stack = stack.iter().map(|&size| if ones { 1 } else { size });
            stack.chain(last).collect()
        };
        // One factor is whole, so that the stack is what both broadcast to.
        let (left, right) = (of(ones[0] && !ones[1], [m, k]), of(ones[1], [k, n]));
        let stretched = |shape: &[i64], seed: u8| {
            let mut view = View::packed(shape);
            let step = i64::from(seed % 3) + 1;
            view.strides.iter_mut().for_each(|stride| *stride *= step);
            view.room *= step;
            view
        };
        let a = Tensor::new(aclDataType::ACL_FLOAT16, stretched(&left, seed[0]), &values);
        let b = Tensor::new(aclDataType::ACL_FLOAT, stretched(&right, seed[1]), &values);
        let out = Tensor::floats(&of(false, [m, n]), &[0.5]);
        ok(call!(aclnnMatmul(a.input(), b.input(), out.out(), 1)));
        let whole = |tensor: &Tensor, last: [i64; 2]| tensor.broadcast(&of(false, last));
        let (x, y) = (whole(&a, [m, k]), whole(&b, [k, n]));
        let mut want = Vec::new();
        for matrix in 0..stack.iter().product::<i64>() {
            for i in 0..m {
                for j in 0..n {
                    let at = |r: i64| x[((matrix * m + i) * k + r) as usize] * y[((matrix * k + r) * n + j) as usize];
                    want.push((0..k).map(at).sum::<f64>());
                }
            }
        }
        prop_assert_eq!(out.values(), want);
    }
}
