//! Elements at positions: indices and masks.

use super::rows::Argument::{Int, Real};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use std::ptr::null_mut;

pub(crate) fn rows() -> Vec<Row> {
    let matrix = [1, 2, 3, 4, 5, 6];
    vec![
        row(
            "aclnnIndex",
            [
                f32([2, 3], matrix).read(),
                tensor_list([i64([2], [1, 0]), i64([2], [-1, 1])]),
                f32([2], [6, 2]).written(),
            ],
        ),
        row(
            "aclnnIndexPutImpl",
            [
                f32([3], [1, 2, 3]).becomes([1, 2, 33]),
                tensor_list([i64([2], [2, 2])]),
                f32([2], [10, 20]).read(),
                Int(1),
                Int(0),
            ],
        ),
        row(
            "aclnnIndexPutImpl",
            [
                i32([3], [1, 2, 3]).becomes([9, 2, 9]),
                tensor_list([i64([2], [0, -1])]),
                i32([1], [9]).read(),
                Int(0),
                Int(0),
            ],
        ),
        row(
            "aclnnGather",
            [i32([2, 3], matrix).read(), Int(0), i64([1, 3], [1, 0, 1]).read(), i32([1, 3], [4, 2, 6]).written()],
        ),
        row(
            "aclnnEmbedding",
            [f32([3, 2], matrix).read(), i64([2], [2, 0]).read(), f32([2, 2], [5, 6, 1, 2]).written()],
        ),
        row(
            "aclnnScatter",
            [
                f32([2, 3], matrix).read(),
                Int(1),
                i64([2, 1], [2, 0]).read(),
                f32([2, 1], [10, 20]).read(),
                Int(0),
                f32([2, 3], [1, 2, 10, 20, 5, 6]).written(),
            ],
        ),
        row(
            "aclnnInplaceScatter",
            [
                i32([3], [1, 2, 3]).becomes([20, 2, 30]),
                Int(0),
                i64([2], [0, 2]).read(),
                i32([2], [20, 10]).read(),
                Int(2),
            ],
        ),
        row(
            "aclnnScatterValue",
            [
                f32([3], [1, 2, 3]).read(),
                Int(0),
                i64([1], [1]).read(),
                Real(0.5),
                Int(1),
                f32([3], [1.0, 2.5, 3.0]).written(),
            ],
        ),
        row(
            "aclnnInplaceScatterValue",
            [i64([2, 2], [1, 2, 3, 4]).becomes([1, 7, 7, 4]), Int(-1), i64([2, 1], [1, 0]).read(), Int(7), Int(0)],
        ),
        row(
            "aclnnScatterAdd",
            [
                i32([3], [1, 2, 3]).read(),
                Int(0),
                i64([3], [1, 1, 0]).read(),
                i32([3], [10, 20, 30]).read(),
                i32([3], [31, 32, 3]).written(),
            ],
        ),
        row(
            "aclnnMaskedSelect",
            [i32([2, 2], [1, 2, 3, 4]).read(), bool([2], [0, 1]).read(), i32([2], [2, 4]).found_in([4])],
        ),
        row("aclnnNonzero", [f32([2, 2], [0.0, 0.5, -1.0, 0.0]).read(), i64([2, 2], [0, 1, 1, 0]).found_in([4, 2])]),
        row("aclnnNonzeroV2", [bool([1, 3], [1, 0, 1]).read(), i64([2, 2], [0, 0, 0, 2]).found_in([2, 3])]),
    ]
}

#[test]
fn elements_are_found_at_positions() {
    let _bench = Bench::new();
    let numbers: Vec<f64> = (0..24).map(f64::from).collect();
    let x = Tensor::floats(&[2, 3, 4], &numbers);
    let rows = Tensor::ints(&[2], &[-1, 0]);
    let picked = Tensor::floats(&[2, 2, 4], &[0.0]);
    ok(call!(aclnnIndexSelect(x.input(), 1, rows.input(), picked.out())));
    let want: Vec<f64> = [8, 0, 20, 12].iter().flat_map(|&start| (start..start + 4).map(f64::from)).collect();
    assert_eq!(picked.values(), want);
    // Neighbouring axes with positions: theirs stand in their place.
    let all = Tensor::packed(aclDataType::ACL_FLOAT, &[0], &[0.0]);
    let columns = Tensor::packed(aclDataType::ACL_INT32, &[3, 1], &[0.0, 1.0, 3.0]);
    let out = Tensor::floats(&[2, 3, 2], &[0.5]);
    ok(call!(aclnnIndex(x.input(), tensors(&[&all, &rows, &columns]), out.out())));
    assert_eq!(out.values(), [8.0, 0.0, 9.0, 1.0, 11.0, 3.0, 20.0, 12.0, 21.0, 13.0, 23.0, 15.0]);
    // Others stand in front.
    let out = Tensor::floats(&[2, 3], &[0.5]);
    let two = Tensor::ints(&[2], &[1, 0]);
    ok(call!(aclnnIndex(x.input(), tensors(&[&two, &all, &rows]), out.out())));
    assert_eq!(out.values(), [15.0, 19.0, 23.0, 0.0, 4.0, 8.0]);
    let rows = Tensor::ints(&[3], &[1, 1, 0]);
    let more = Tensor::floats(&[1, 4], &[100.0]);
    ok(call!(aclnnIndexPutImpl(
        Tensor::over(aclDataType::ACL_FLOAT, View::packed(&[6, 4]), x.at).shared(),
        tensors(&[&rows]),
        more.input(),
        Flag(1),
        Flag(0),
    )));
    let mut want = numbers.clone();
    want[..4].iter_mut().for_each(|value| *value += 100.0);
    want[4..8].iter_mut().for_each(|value| *value += 200.0);
    assert_eq!(x.values(), want);
    let places = Tensor::ints(&[2, 1, 2], &[3, 0, 1, -1]);
    let out = Tensor::floats(&[2, 1, 2], &[0.0]);
    ok(call!(aclnnGather(x.input(), -1, places.input(), out.out())));
    assert_eq!(out.values(), [103.0, 100.0, 13.0, 15.0]);
    ok(call!(aclnnInplaceScatterValue(x.in_out(), 2, places.input(), real(-7.0), 0)));
    ok(call!(aclnnGather(x.input(), 2, places.input(), out.out())));
    assert_eq!(out.values(), [-7.0; 4]);
    let added = Tensor::floats(&[2, 3, 4], &[0.0]);
    ok(call!(aclnnScatterAdd(x.input(), 2, places.input(), out.input(), added.out())));
    assert_eq!(added.values()[..4], [-14.0, 101.0, 102.0, -14.0]);
    let table = Tensor::packed(aclDataType::ACL_BF16, &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let words = Tensor::ints(&[1, 2], &[2, 0]);
    let out = Tensor::packed(aclDataType::ACL_BF16, &[1, 2, 2], &[0.0]);
    ok(call!(aclnnEmbedding(table.input(), words.input(), out.out())));
    assert_eq!(out.values(), [5.0, 6.0, 1.0, 2.0]);
}

#[test]
fn outputs_get_the_shape_that_the_data_decide() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 3], &[1.0, 0.0, 3.0, 0.0, f64::NAN, -6.0]);
    let mask = Tensor::packed(aclDataType::ACL_BOOL, &[3], &[0.0, 1.0, 1.0]);
    let out = Tensor::floats(&[6], &[0.5]);
    ok(call!(aclnnMaskedSelect(x.input(), mask.input(), out.out())));
    assert_eq!(out.shape_now(), [4]);
    let values = out.buffer();
    assert!(values[2].is_nan());
    assert_eq!((values[..2].to_vec(), &values[3..]), (vec![0.0, 3.0], &[-6.0, 0.5, 0.5][..]));
    let places = Tensor::ints(&[6, 2], &[-1]);
    ok(call!(aclnnNonzero(x.input(), places.out())));
    assert_eq!(places.shape_now(), [4, 2]);
    assert_eq!(places.buffer()[..8], [0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 2.0]);
    let places = Tensor::ints(&[2, 6], &[-1]);
    ok(call!(aclnnNonzeroV2(x.input(), places.out())));
    assert_eq!(places.shape_now(), [2, 4]);
    assert_eq!(places.buffer()[..8], [0.0, 0.0, 1.0, 1.0, 0.0, 2.0, 1.0, 2.0]);
    let nothing = Tensor::ints(&[2], &[0]);
    let places = Tensor::ints(&[2, 1], &[-1]);
    ok(call!(aclnnNonzero(nothing.input(), places.out())));
    assert_eq!(places.shape_now(), [0, 1]);
    let counts = Tensor::ints(&[3], &[2, 0, 1]);
    let out = Tensor::ints(&[3], &[9]);
    ok(call!(aclnnRepeatInterleaveTensor(counts.input(), 3, out.out())));
    assert_eq!(out.values(), [0.0, 0.0, 2.0]);
    let short = Tensor::ints(&[2], &[9]);
    ok(call!(aclnnRepeatInterleaveTensor(counts.input(), 2, short.out())));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnRepeatInterleaveTensor: repeats: 3 in sum, but the output has 2"],
    );
}
