//! Whole parts of a tensor along one axis: selected, replaced, cut out, and in another order.

use super::rows::Argument::Int;
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ptr::null_mut;

pub(crate) fn rows() -> Vec<Row> {
    let matrix = [1, 2, 3, 4, 5, 6];
    vec![
        row(
            "aclnnIndexSelect",
            [bf16([2, 3], matrix).read(), Int(1), i32([2], [2, 0]).read(), bf16([2, 2], [3, 1, 6, 4]).written()],
        ),
        row("aclnnIndexSelect", [i32([], [7]).read(), Int(0), i64([1], [0]).read(), i32([], [7]).written()]),
        row(
            "aclnnGatherV2",
            [
                f16([3, 2], matrix).read(),
                Int(0),
                i32([2, 2], [2, 0, 1, 2]).read(),
                f16([2, 2, 2], [5, 6, 1, 2, 3, 4, 5, 6]).written(),
            ],
        ),
        row("aclnnGatherV2", [i8([2, 3], matrix).read(), Int(-1), i64([], [1]).read(), i8([2], [2, 5]).written()]),
        row(
            "aclnnInplaceIndexCopy",
            [
                i32([3, 2], matrix).becomes([9, 8, 3, 4, 7, 0]),
                Int(0),
                i64([2], [2, 0]).read(),
                i32([2, 2], [7, 0, 9, 8]).read(),
            ],
        ),
        row(
            "aclnnInplaceIndexCopy",
            [f16([2, 3], matrix).becomes([1, 2, 8, 4, 5, 9]), Int(1), i32([], [2]).read(), f16([2, 1], [8, 9]).read()],
        ),
        row(
            "aclnnSlice",
            [f32([2, 3], matrix).read(), Int(1), Int(-3), Int(i64::MAX), Int(2), f32([2, 2], [1, 3, 4, 6]).written()],
        ),
        row(
            "aclnnSlice",
            [i64([3], [7, 8, 9]).read(), Int(0), Int(1), Int(-1), Int(i64::MAX), i64([1], [8]).written()],
        ),
        row(
            "aclnnPermute",
            [bf16([1, 2, 3], matrix).read(), axes([2, 0, -2]), bf16([3, 1, 2], [1, 4, 2, 5, 3, 6]).written()],
        ),
        row(
            "aclnnArgsort",
            [f16([2, 3], [3, 1, 3, 4, 6, 5]).read(), Int(-1), Int(1), i64([2, 3], [0, 2, 1, 1, 2, 0]).written()],
        ),
    ]
}

/// The coordinates of the elements of a shape, the last axis fastest.
fn coordinates(shape: &[i64]) -> Vec<Vec<i64>> {
    let packed = View::packed(shape);
    let coordinate = |place: i64| {
        let axes = packed.strides.iter().zip(shape);
        axes.map(|(step, size)| place / step % size).collect()
    };
    packed.places().into_iter().map(coordinate).collect()
}

/// The element of a tensor at coordinates.
fn at(tensor: &Tensor, buffer: &[f64], coordinate: &[i64]) -> f64 {
    let steps = coordinate.iter().zip(&tensor.view.strides);
    buffer[(tensor.view.offset + steps.map(|(index, stride)| index * stride).sum::<i64>()) as usize]
}

/// A shape of at least one axis with elements along each.
fn axes_with_elements() -> impl Strategy<Value = Vec<i64>> {
    prop::collection::vec(1..5i64, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn parts_of_any_views_are_selected_and_replaced(
        (own, index) in (axes_with_elements(), prop::collection::vec(0..4i64, 0..3)).prop_flat_map(|(own, index)| {
            (view_of(own, true), view_of(index, true))
        }),
        axis in 0..3usize,
        dtype in dtype(),
        values in small(),
        positions in prop::collection::vec(-4..4i32, 1..12),
        (strided, dim_from_the_end) in any::<(bool, bool)>(),
    ) {
        let _bench = Bench::new();
        let x = Tensor::new(dtype, own, &values);
        let shape = x.view.shape.clone();
        let axis = axis % shape.len();
        let dim = if dim_from_the_end { axis as i64 - shape.len() as i64 } else { axis as i64 };
        let size = shape[axis];
        let positions: Vec<f64> = positions.iter().map(|&at| f64::from(at).rem_euclid(size as f64)).collect();
        let index = Tensor::new(aclDataType::ACL_INT32, index, &positions);
        let (indices, buffer) = (index.buffer(), x.buffer());
        let spread = |shape: &[i64]| {
            let mut view = View::packed(shape);
            if strided {
                view.strides.iter_mut().for_each(|stride| *stride *= 3);
                view.room *= 3;
            }
            view
        };

        // All axes of the index stand in the place of the axis.
        let rank = index.view.shape.len();
        let mut selected = shape.clone();
        selected.splice(axis..=axis, index.view.shape.iter().copied());
        let out = Tensor::new(dtype, spread(&selected), &[1.0]);
        ok(call!(aclnnGatherV2(x.input(), dim, index.input(), out.out())));
        let want: Vec<f64> = coordinates(&selected).iter().map(|place| {
            let mut from = place.clone();
            from.splice(axis..axis + rank, [at(&index, &indices, &place[axis..axis + rank]) as i64]);
            at(&x, &buffer, &from)
        }).collect();
        prop_assert_eq!(out.values(), want);

        // One position replaces one part; the last of several stays.
        let flat = index.values();
        let list = Tensor::ints(&[flat.len() as i64], &flat.iter().map(|&at| at as i64).collect::<Vec<_>>()
            .into_iter().chain([0]).collect::<Vec<_>>());
        let mut source = shape.clone();
        source[axis] = flat.len() as i64;
        let source = Tensor::new(dtype, spread(&source), &[0.0, 1.0, 0.0]);
        let target = Tensor::new(dtype, spread(&shape), &values);
        let (mut want, parts) = (target.buffer(), source.buffer());
        for place in coordinates(&source.view.shape) {
            let mut to = place.clone();
            to[axis] = flat[place[axis] as usize] as i64;
            let to = to.iter().zip(&target.view.strides).map(|(index, stride)| index * stride).sum::<i64>();
            want[to as usize] = at(&source, &parts, &place);
        }
        ok(call!(aclnnInplaceIndexCopy(target.in_out(), dim, list.input(), source.input())));
        prop_assert_eq!(target.buffer(), want);
    }

    #[test]
    fn any_views_are_cut_permuted_and_ordered(
        (view, order) in axes_with_elements().prop_flat_map(|shape| {
            let order: Vec<i64> = (0..shape.len() as i64).collect();
            (view_of(shape, true), Just(order).prop_shuffle())
        }),
        axis in 0..3usize,
        (start, end, step) in (-7..7i64, -7..7i64, 1..4i64),
        dtype in dtype(),
        values in small(),
        descending in any::<bool>(),
    ) {
        let _bench = Bench::new();
        let x = Tensor::new(dtype, view, &values);
        let (shape, buffer) = (x.view.shape.clone(), x.buffer());
        let axis = axis % shape.len();
        let size = shape[axis];

        let bound = |bound: i64| if bound < 0 { bound + size } else { bound }.clamp(0, size);
        let chosen: Vec<i64> = (bound(start)..bound(end)).step_by(step as usize).collect();
        let mut cut = shape.clone();
        cut[axis] = chosen.len() as i64;
        let out = Tensor::packed(dtype, &cut, &[1.0]);
        ok(call!(aclnnSlice(x.input(), axis as i64, start, end, step, out.out())));
        let want: Vec<f64> = coordinates(&cut).into_iter().map(|mut place| {
            place[axis] = chosen[place[axis] as usize];
            at(&x, &buffer, &place)
        }).collect();
        prop_assert_eq!(out.values(), want);

        let turned: Vec<i64> = order.iter().map(|&axis| shape[axis as usize]).collect();
        let out = Tensor::packed(dtype, &turned, &[1.0]);
        ok(call!(aclnnPermute(x.input(), ints(&order), out.out())));
        let want: Vec<f64> = coordinates(&turned).into_iter().map(|place| {
            let mut from = place.clone();
            order.iter().zip(&place).for_each(|(&axis, &index)| from[axis as usize] = index);
            at(&x, &buffer, &from)
        }).collect();
        prop_assert_eq!(out.values(), want);

        let places = Tensor::ints(&shape, &[0]);
        ok(call!(aclnnArgsort(x.input(), axis as i64, Flag(u8::from(descending)), places.out())));
        let got = places.buffer();
        for place in coordinates(&shape).into_iter().filter(|place| place[axis] == 0) {
            let value = |index: i64| {
                let mut place = place.clone();
                place[axis] = index;
                at(&x, &buffer, &place)
            };
            let mut want: Vec<i64> = (0..size).collect();
            want.sort_by(|&a, &b| {
                let order = value(a).partial_cmp(&value(b)).unwrap();
                if descending { order.reverse() } else { order }
            });
            for (count, want) in want.into_iter().enumerate() {
                let mut place = place.clone();
                place[axis] = count as i64;
                prop_assert_eq!(at(&places, &got, &place), want as f64);
            }
        }
    }
}

#[test]
fn parts_that_are_none_are_refused_by_name() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 3], &[1.0]);
    let out = Tensor::floats(&[2, 3], &[0.0]);
    fails(
        call!(aclnnSlice(x.input(), 1, 0, 3, 0, out.out())),
        161_002,
        &["aclnnSlice: step: given 0, allowed: 1 or more"],
    );
    fails(
        call!(aclnnSlice(x.input(), 1, 3, 1, 1, out.out())),
        161_002,
        &["aclnnSlice: out: given [2, 3], allowed: [2, 0]"],
    );
    fails(
        call!(aclnnPermute(x.input(), ints(&[0, 0]), out.out())),
        161_002,
        &["aclnnPermute: dims: given [0, 0], allowed: each of 2 axes once"],
    );
    fails(
        call!(aclnnPermute(x.input(), ints(&[1]), out.out())),
        161_002,
        &["aclnnPermute: dims: given [1], allowed: each of 2 axes once"],
    );
    fails(
        call!(aclnnArgsort(x.input(), 0, Flag(0), out.out())),
        161_002,
        &["aclnnArgsort: out: given FLOAT, allowed: INT64"],
    );
    let places = Tensor::ints(&[1], &[2]);
    let part = Tensor::floats(&[1, 3], &[0.0]);
    fails(
        call!(aclnnInplaceIndexCopy(x.in_out(), 0, places.input(), out.input())),
        161_002,
        &["aclnnInplaceIndexCopy: source: given [2, 3], allowed: [1, 3]"],
    );
    ok(call!(aclnnInplaceIndexCopy(x.in_out(), 0, places.input(), part.input())));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnInplaceIndexCopy: index: index 2 is out of range for axis 0 of size 2"],
    );
}
