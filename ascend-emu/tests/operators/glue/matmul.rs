//! Products of matrices.

use super::rows::Argument::{Absent, Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use crate::flash_family::call::on_chip;
use ascend_emu::glue::OptionalIn;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ptr::null;

pub(crate) fn rows() -> Vec<Row> {
    let (a, b) = (f16([2, 3], [1, 2, 3, 4, 5, 6]), f16([3, 2], [1, 0, 0, 1, 2, 2]));
    let product = [7, 8, 16, 17];
    let stack = |data: &Data| data.clone().with_axis().read();
    vec![
        row("aclnnMatmul", [a.clone().read(), b.clone().read(), f16([2, 2], product).written(), Int(0)]),
        row(
            "aclnnMatmul",
            [f32([2], [1, 2]).read(), f32([2, 2], [1, 2, 3, 4]).read(), f32([2], [7, 10]).written(), Int(1)],
        ),
        row("aclnnMm", [a.clone().read(), b.clone().read(), f32([2, 2], product).written(), Int(0)]),
        row("aclnnDot", [f32([3], [1, 2, 3]).read(), f32([3], [4, -5, 6]).read(), f32([], [12]).written()]),
        row("aclnnMv", [a.clone().read(), f16([3], [1, 0, -1]).read(), f16([2], [-2, -2]).written(), Int(0)]),
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
            "aclnnTransposeBatchMatMul",
            [
                f16([1, 2, 128], vec![1; 256]).read(),
                f16([2, 128, 128], [vec![1; 128 * 128], vec![-1; 128 * 128]].concat()).read(),
                Absent,
                Absent,
                axes([1, 0, 2]),
                axes([0, 1, 2]),
                axes([1, 0, 2]),
                Int(0),
                Int(1),
                f16([1, 2, 128], [vec![128; 128], vec![-128; 128]].concat()).written(),
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

    #[test]
    fn stacks_in_any_order_are_multiplied(
        (m, k, n, each, groups) in (1..4i64, 1..4i64, 1..4i64, 1..3i64, 1..4i64),
        (inside, turned, strided) in any::<(bool, bool, bool)>(),
        values in small(),
    ) {
        let _bench = on_chip("Ascend950PR_9599");
        let stack = each * groups;
        let stretched = |shape: &[i64]| {
            let mut view = View::packed(shape);
            let step = if strided { 2 } else { 1 };
            view.strides.iter_mut().for_each(|stride| *stride *= step);
            view.room *= step;
            view
        };
        let (left, order_a) = if inside { ([m, stack, k], [1, 0, 2]) } else { ([stack, m, k], [0, 1, 2]) };
        let (right, order_b) = if turned { ([stack, n, k], [0, 2, 1]) } else { ([stack, k, n], [0, 1, 2]) };
        let a = Tensor::new(aclDataType::ACL_FLOAT16, stretched(&left), &values);
        let b = Tensor::new(aclDataType::ACL_FLOAT16, stretched(&right), &values);
        let shape = if groups == 1 { [m, stack, n] } else { [groups, m, each * n] };
        let out = Tensor::new(aclDataType::ACL_FLOAT, stretched(&shape), &[0.5]);
        let none = OptionalIn(null());
        ok(call!(aclnnTransposeBatchMatMul(
            a.input(), b.input(), none, none, ints(&order_a), ints(&order_b), ints(&[1, 0, 2]), 0, groups as i32,
            out.out(),
        )));
        let (x, y) = (a.values(), b.values());
        let place = |sizes: [i64; 3], [i, j, k]: [i64; 3]| ((i * sizes[1] + j) * sizes[2] + k) as usize;
        let got = out.values();
        for (s, i, j) in (0..stack).flat_map(|s| (0..m).flat_map(move |i| (0..n).map(move |j| (s, i, j)))) {
            let of_a = |r| x[place(left, if inside { [i, s, r] } else { [s, i, r] })];
            let of_b = |r| y[place(right, if turned { [s, j, r] } else { [s, r, j] })];
            let want: f64 = (0..k).map(|r| of_a(r) * of_b(r)).sum();
            let to = if groups == 1 { [i, s, j] } else { [s / each, i, s % each * n + j] };
            prop_assert_eq!(got[place(shape, to)], want);
        }
    }
}

/// As engines multiply by weights, which lie transposed: more columns than are read at once.
#[test]
fn wide_transposed_factors_are_multiplied() {
    let _bench = Bench::new();
    let values: Vec<f64> = (0..17).map(f64::from).collect();
    for columns in [31, 32, 70] {
        let turned = View { strides: vec![1, 3], ..View::packed(&[3, columns]) };
        let a = Tensor::packed(aclDataType::ACL_FLOAT, &[2, 3], &values);
        let b = Tensor::new(aclDataType::ACL_FLOAT16, turned, &values);
        let out = Tensor::floats(&[2, columns], &[0.5]);
        ok(call!(aclnnMm(a.input(), b.input(), out.out(), 2)));
        let want = (0..2 * columns).map(|place| {
            let (row, column) = (place / columns, place % columns);
            let term = |k: i64| values[(row * 3 + k) as usize] * values[((column * 3 + k) % 17) as usize];
            (0..3).map(term).sum::<f64>()
        });
        assert_eq!(out.values(), want.collect::<Vec<_>>(), "{columns}");
    }
}

#[test]
fn stacks_that_a_product_lacks_are_refused_by_name() {
    let _bench = Bench::new();
    let of = |shape: &[i64]| Tensor::packed(aclDataType::ACL_FLOAT16, shape, &[1.0]);
    let (a, b, out) = (of(&[2, 3, 128]), of(&[2, 128, 128]), of(&[3, 2, 128]));
    let narrow = of(&[2, 128, 64]);
    let scale = Tensor::ints(&[256], &[1]);
    let none = OptionalIn(null());
    let run = |b: &Tensor, scale: OptionalIn, orders: [[i64; 3]; 3], groups| {
        let [x1, x2, y] = orders.map(|order| ints(&order));
        call!(aclnnTransposeBatchMatMul(a.input(), b.input(), none, scale, x1, x2, y, 0, groups, out.out()))
    };
    let (same, usual) = ([0, 1, 2], [1, 0, 2]);
    ok(run(&b, none, [same, same, usual], 1));
    for (b, scale, orders, groups, message) in [
        (
            &narrow,
            none,
            [same, same, usual],
            1,
            "x2: given [2, 128, 64], allowed: rows and columns that are multiples of 128",
        ),
        (&b, OptionalIn(scale.handle), [same, same, usual], 1, "scale: given INT64"),
        (&b, none, [[0, 2, 1], same, usual], 1, "permX1: given [0, 2, 1], allowed: [[0, 1, 2], [1, 0, 2]]"),
        (&b, none, [same, [0, 2, 1], usual], 1, "permX2: given [0, 2, 1], allowed: [[0, 1, 2]]"),
        (&b, none, [same, same, same], 1, "permY: given [0, 1, 2], allowed: [[1, 0, 2]]"),
        (&b, none, [same, same, usual], 3, "batchSplitFactor: given 3, allowed: a divisor of 2"),
        (
            &b,
            none,
            [usual, same, usual],
            1,
            "x2: given [2, 128, 128], allowed: 3 factors for [2, 3, 128] with 128 rows each",
        ),
    ] {
        fails(run(b, scale, orders, groups), 161_002, &[message]);
    }
}
