//! Lines of elements: sums, extremes, order, norms.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use ascend_sys::bindings::aclTensor;
use proptest::prelude::*;
use std::ptr::null;

pub(crate) fn rows() -> Vec<Row> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let matrix = f32([2, 3], [1, 2, 3, 4, 5, 9]);
    let whole = i32([2, 2], [1, -2, 0, 3]);
    let double = || of_type(aclDataType::ACL_DOUBLE);
    let [odds, other_odds] = [[1.0, 3.0, 4.0].map(|part: f64| part / 8.0), [0.5, 0.25, 0.25]];
    let logs = |odds: [f64; 3]| odds.map(f64::ln);
    vec![
        row("aclnnReduceSum", [matrix.clone().read(), axes([0]), Int(1), double(), f64([1, 3], [5, 7, 12]).written()]),
        row(
            "aclnnReduceSum",
            [whole.clone().read(), axes([]), Int(0), of_type(aclDataType::ACL_INT64), i64([], [2]).written()],
        ),
        row("aclnnMean", [matrix.clone().read(), axes([-1]), Int(0), double(), f64([2], [2, 6]).written()]),
        row("aclnnProd", [matrix.clone().read(), double(), f64([], [1080]).written()]),
        row("aclnnProdDim", [matrix.clone().read(), Int(1), Int(1), double(), f64([2, 1], [6, 180]).written()]),
        row("aclnnMax", [whole.clone().read(), i32([], [3]).written()]),
        row("aclnnMax", [f32([3], [1.0, nan, 2.0]).read(), f32([], [nan]).written()]),
        row("aclnnMin", [whole.clone().read(), i32([], [-2]).written()]),
        row("aclnnAmax", [matrix.clone().read(), axes([1]), Int(0), f32([2], [3, 9]).written()]),
        row("aclnnAmin", [matrix.clone().read(), axes([1]), Int(1), f32([2, 1], [1, 4]).written()]),
        row("aclnnAny", [whole.clone().read(), axes([0]), Int(0), bool([2], [1, 1]).written()]),
        row("aclnnAny", [bool([2, 2], [0, 0, 0, 1]).read(), axes([1]), Int(0), bool([2], [0, 1]).written()]),
        row("aclnnAll", [whole.read(), axes([1]), Int(0), bool([2], [1, 0]).written()]),
        row(
            "aclnnVarCorrection",
            [matrix.clone().read(), axes([1]), Int(0), Int(0), f32([2], [2.0 / 3.0, 14.0 / 3.0]).written()],
        ),
        row("aclnnVarCorrection", [matrix.clone().read(), axes([1]), Int(1), Int(1), f32([2, 1], [1, 7]).written()]),
        row("aclnnStd", [matrix.clone().read(), axes([1]), Int(1), Int(0), f32([2], [1.0, 7f64.sqrt()]).written()]),
        row(
            "aclnnLinalgVectorNorm",
            [f32([2], [3, -4]).read(), Real(2.0), axes([0]), Int(1), double(), f64([1], [5]).written()],
        ),
        row("aclnnLogSumExp", [f64([3], logs(odds)).read(), axes([0]), Int(0), f64([], [0]).written()]),
        row(
            "aclnnLogSumExp",
            [f32([2, 2], [0.0, 0.0, -inf, inf]).read(), axes([1]), Int(0), f32([2], [2f64.ln(), inf]).written()],
        ),
        row("aclnnSoftmax", [f64([1, 3], logs(odds)).read(), Int(1), f64([1, 3], odds).written()]),
        // A line with infinity, or of nothing but -infinity, has no softmax.
        row(
            "aclnnSoftmax",
            [
                f32([3, 2], [0.0, -inf, 0.0, inf, -inf, -inf]).read(),
                Int(1),
                f32([3, 2], [1.0, 0.0, nan, nan, nan, nan]).written(),
            ],
        ),
        row("aclnnLogSoftmax", [f64([3, 1], logs(other_odds)).read(), Int(0), f64([3, 1], logs(other_odds)).written()]),
        row(
            "aclnnLogSoftmax",
            [
                f32([3, 2], [0.0, -inf, 0.0, inf, -inf, -inf]).read(),
                Int(1),
                f32([3, 2], [0.0, -inf, nan, nan, nan, nan]).written(),
            ],
        ),
        row("aclnnCumsum", [matrix.read(), Int(1), double(), f64([2, 3], [1, 3, 6, 4, 9, 18]).written()]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn lines_of_any_axes_are_summed_and_searched(
        view in shape().prop_flat_map(|shape| view_of(shape, true)),
        (axes, keep) in (any::<[bool; 4]>(), any::<bool>()),
        axis in 0..4usize,
        dtype in dtype(),
        values in small(),
    ) {
        let _bench = Bench::new();
        let x = Tensor::new(dtype, view, &values);
        let shape = x.view.shape.clone();
        let rank = shape.len();
        // Negative axes count from the end.
        let dims: Vec<i64> = (0..rank)
            .filter(|&axis| axes[axis])
            .map(|axis| if keep { axis as i64 - rank as i64 } else { axis as i64 })
            .collect();
        let reduced = |axis: usize| dims.is_empty() || axes[axis];
        let left: Vec<i64> = (0..rank)
            .filter(|&axis| keep || !reduced(axis))
            .map(|axis| if reduced(axis) { 1 } else { shape[axis] })
            .collect();
        // Sums over all elements that fall on the same place.
        let mut want = vec![0.0; left.iter().product::<i64>() as usize];
        let kept = View::packed(&left);
        let places = View::packed(&shape);
        let mut lines: Vec<Vec<f64>> = vec![Vec::new(); want.len()];
        for (place, value) in places.places().into_iter().zip(x.values()) {
            let mut to = 0;
            let mut out_axis = 0;
            for (axis, &size) in shape.iter().enumerate() {
                let at = place / places.strides[axis] % size;
                if !reduced(axis) {
                    to += at * kept.strides[out_axis];
                }
                if keep || !reduced(axis) {
                    out_axis += 1;
                }
            }
            want[to as usize] += value;
            lines[to as usize].push(value);
        }
        let sums = Tensor::packed(aclDataType::ACL_DOUBLE, &left, &[0.5]);
        let as_double = Type(aclDataType::ACL_DOUBLE);
        ok(call!(aclnnReduceSum(x.input(), ints(&dims), Flag(u8::from(keep)), as_double, sums.out())));
        prop_assert_eq!(sums.values(), want);
        let any = Tensor::packed(aclDataType::ACL_BOOL, &left, &[0.0]);
        ok(call!(aclnnAny(x.input(), ints(&dims), Flag(u8::from(keep)), any.out())));
        let truth = |line: &Vec<f64>| f64::from(line.iter().any(|&value| value != 0.0));
        prop_assert_eq!(any.values(), lines.iter().map(truth).collect::<Vec<_>>());
        let biggest = Tensor::packed(dtype, &left, &[0.0]);
        let status = call!(aclnnAmax(x.input(), ints(&dims), Flag(u8::from(keep)), biggest.out()));
        if lines.iter().any(Vec::is_empty) {
            fails(status, 161_002, &["aclnnAmax: self: given"]);
        } else {
            ok(status);
            let most = |line: &Vec<f64>| line.iter().copied().fold(f64::MIN, f64::max);
            prop_assert_eq!(biggest.values(), lines.iter().map(most).collect::<Vec<_>>());
        }
        // Along one axis: greatest with its place, running sums, order.
        if rank == 0 || x.view.count() == 0 {
            return Ok(());
        }
        let axis = axis % rank;
        let (size, step) = (shape[axis], places.strides[axis]);
        let shown = x.values();
        let line = |start: i64| -> Vec<f64> {
            (0..size).map(|i| shown[(start + i * step) as usize]).collect()
        };
        let starts: Vec<i64> = (places.places().into_iter())
            .filter(|place| place / step % size == 0)
            .collect();
        let mut kept = shape.clone();
        kept[axis] = 1;
        let (best, at) = (Tensor::packed(dtype, &kept, &[0.0]), Tensor::ints(&kept, &[0]));
        ok(call!(aclnnMaxDim(x.input(), axis as i64, Flag(1), best.out(), at.out())));
        let first = |line: &[f64]| {
            let most = line.iter().copied().fold(f64::MIN, f64::max);
            (most, line.iter().position(|&value| value == most).unwrap() as f64)
        };
        let want: Vec<(f64, f64)> = starts.iter().map(|&start| first(&line(start))).collect();
        prop_assert_eq!(best.values().into_iter().zip(at.values()).collect::<Vec<_>>(), want);
        let running = Tensor::packed(aclDataType::ACL_DOUBLE, &shape, &[0.0]);
        ok(call!(aclnnCumsum(x.input(), axis as i64, as_double, running.out())));
        let (sorted, order) = (Tensor::packed(dtype, &shape, &[0.0]), Tensor::ints(&shape, &[0]));
        ok(call!(aclnnSort(x.input(), Flag(1), axis as i64, Flag(1), sorted.out(), order.out())));
        let soft = Tensor::packed(aclDataType::ACL_DOUBLE, &shape, &[0.0]);
        ok(call!(aclnnSoftmax(x.input(), axis as i64, soft.out())));
        let (running, sorted, order, soft) =
            (running.values(), sorted.values(), order.values(), soft.values());
        for start in starts {
            let line = line(start);
            let of = |values: &[f64]| -> Vec<f64> {
                (0..size).map(|i| values[(start + i * step) as usize]).collect()
            };
            for (i, sum) in of(&running).into_iter().enumerate() {
                prop_assert_eq!(sum, line[..=i].iter().sum::<f64>());
            }
            let mut want: Vec<usize> = (0..line.len()).collect();
            want.sort_by(|&a, &b| line[b].partial_cmp(&line[a]).unwrap());
            prop_assert_eq!(of(&order), want.iter().map(|&i| i as f64).collect::<Vec<_>>());
            prop_assert_eq!(of(&sorted), want.iter().map(|&i| line[i]).collect::<Vec<_>>());
            let total: f64 = line.iter().map(|value| value.exp()).sum();
            for (got, value) in of(&soft).into_iter().zip(&line) {
                prop_assert!((got - value.exp() / total).abs() < 1e-12);
            }
        }
    }
}

#[test]
fn lines_have_norms() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 2], &[3.0, -4.0, 0.0, 2.0]);
    let out = Tensor::floats(&[2], &[0.0]);
    for (p, want) in [
        (2.0, [5.0, 2.0]),
        (1.0, [7.0, 2.0]),
        (0.0, [2.0, 1.0]),
        (f64::INFINITY, [4.0, 2.0]),
        (f64::NEG_INFINITY, [3.0, 0.0]),
    ] {
        ok(call!(aclnnLinalgVectorNorm(
            x.input(),
            real(p),
            ints(&[-1]),
            Flag(0),
            Type(aclDataType::ACL_FLOAT),
            out.out()
        )));
        assert_eq!(out.values(), want, "{p}");
    }
    ok(call!(aclnnVarCorrection(x.input(), ints(&[1]), 1, Flag(0), out.out())));
    assert_eq!(out.values(), [24.5, 2.0]);
    let y = Tensor::floats(&[2, 2], &[0.0]);
    let bounds = [Tensor::floats(&[2], &[-1.0, 0.0]), Tensor::floats(&[2], &[2.0, 1.0])];
    let between = |least: *const aclTensor, most: *const aclTensor| {
        ok(call!(aclnnClampTensor(x.input(), OptionalIn(least), OptionalIn(most), y.out())));
        y.values()
    };
    let [least, most] = bounds.each_ref().map(|bound| bound.handle.cast_const());
    assert_eq!(between(least, most), [2.0, 0.0, 0.0, 1.0]);
    assert_eq!(between(least, null()), [3.0, 0.0, 0.0, 2.0]);
    assert_eq!(between(null(), most), [2.0, -4.0, 0.0, 1.0]);
    let dot = Tensor::floats(&[], &[0.0]);
    ok(call!(aclnnDot(bounds[0].input(), bounds[1].input(), dot.out())));
    assert_eq!(dot.values(), [-2.0]);
}

/// As in CANN, two shapes of one element are equal.
#[test]
fn one_number_is_written_to_any_shape_of_one_element() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[4], &[3.0, 5.0, -1.0, 2.0]);
    let shapes: [&[i64]; 3] = [&[], &[1], &[1, 1]];
    for (shape, keep) in shapes.into_iter().flat_map(|shape| [(shape, 0), (shape, 1)]) {
        let out = Tensor::floats(shape, &[0.5]);
        let gives = |status: i32, want: f64| {
            ok(status);
            assert_eq!(out.values(), [want], "{shape:?}");
        };
        let (float, all, keep) = (Type(aclDataType::ACL_FLOAT), || ints(&[0]), Flag(keep));
        let result = || out.out();
        let x = || x.input();
        gives(call!(aclnnReduceSum(x(), all(), keep, float, result())), 9.0);
        gives(call!(aclnnMean(x(), all(), keep, float, result())), 2.25);
        gives(call!(aclnnProd(x(), float, result())), -30.0);
        gives(call!(aclnnProdDim(x(), 0, keep, float, result())), -30.0);
        gives(call!(aclnnMax(x(), result())), 5.0);
        gives(call!(aclnnMin(x(), result())), -1.0);
        gives(call!(aclnnAmax(x(), all(), keep, result())), 5.0);
        gives(call!(aclnnAmin(x(), all(), keep, result())), -1.0);
        gives(call!(aclnnVarCorrection(x(), all(), 0, keep, result())), 4.6875);
        gives(call!(aclnnLinalgVectorNorm(x(), real(1.0), all(), keep, float, result())), 11.0);
        gives(call!(aclnnDot(x(), x(), result())), 39.0);
        let truth = Tensor::packed(aclDataType::ACL_BOOL, shape, &[0.0]);
        ok(call!(aclnnAny(x(), all(), keep, truth.out())));
        assert_eq!(truth.values(), [1.0]);
        let place = Tensor::ints(shape, &[9]);
        ok(call!(aclnnArgMax(x(), 0, keep, place.out())));
        assert_eq!(place.values(), [1.0]);
        ok(call!(aclnnMinDim(x(), 0, keep, result(), place.out())));
        assert_eq!((out.values(), place.values()), (vec![-1.0], vec![2.0]));
    }
    // Shapes of more elements, or of none, are those of the result alone.
    for shape in [&[2][..], &[0]] {
        let out = Tensor::floats(shape, &[0.5]);
        fails(call!(aclnnMax(x.input(), out.out())), 161_002, &["aclnnMax: out: given"]);
    }
    let rows = Tensor::floats(&[2, 2], &[1.0]);
    let out = Tensor::floats(&[1, 2], &[0.5]);
    fails(
        call!(aclnnAmax(rows.input(), ints(&[0]), Flag(0), out.out())),
        161_002,
        &["aclnnAmax: out: given [1, 2], allowed: [2]"],
    );
}
