//! One tensor of several, or of one several times over.

use super::rows::Argument::Int;
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_sys::bindings::aclDataType;

pub(crate) fn rows() -> Vec<Row> {
    let matrix = [1, 2, 3, 4];
    vec![
        row(
            "aclnnCat",
            [tensor_list([i32([1, 2], [1, 2]), i32([2, 2], [3, 4, 5, 6])]), Int(0), i32([3, 2], 1..7).written()],
        ),
        row("aclnnCat", [tensor_list([i32([1], [3]), f32([1], [0.5])]), Int(-1), f32([2], [3.0, 0.5]).written()]),
        row(
            "aclnnStack",
            [tensor_list([f16([2], [1, 2]), f16([2], [3, 4])]), Int(-1), f16([2, 2], [1, 3, 2, 4]).written()],
        ),
        row(
            "aclnnRepeatInterleave",
            [i32([2, 2], matrix).read(), i64([4], [2, 0, 1, 1]).read(), Int(4), i32([4], [1, 1, 3, 4]).written()],
        ),
        row(
            "aclnnRepeatInterleaveWithDim",
            [
                i32([2, 2], matrix).read(),
                i64([2], [1, 2]).read(),
                Int(1),
                Int(3),
                i32([2, 3], [1, 2, 2, 3, 4, 4]).written(),
            ],
        ),
        row("aclnnRepeatInterleaveInt", [i64([2], [7, 8]).read(), Int(2), Int(4), i64([4], [7, 7, 8, 8]).written()]),
        row(
            "aclnnRepeatInterleaveIntWithDim",
            [i32([2, 2], matrix).read(), Int(2), Int(0), Int(4), i32([4, 2], [1, 2, 1, 2, 3, 4, 3, 4]).written()],
        ),
        row("aclnnRepeatInterleaveTensor", [i32([3], [1, 0, 2]).read(), Int(3), i32([3], [0, 2, 2]).written()]),
    ]
}

#[test]
fn tensors_are_joined_repeated_and_turned() {
    let _bench = Bench::new();
    let half = aclDataType::ACL_FLOAT16;
    let a = Tensor::packed(half, &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b = Tensor::packed(half, &[2, 1], &[5.0, 6.0]);
    let nothing = Tensor::packed(half, &[0], &[0.0]);
    let out = Tensor::packed(half, &[2, 3], &[0.0]);
    ok(call!(aclnnCat(tensors(&[&nothing, &a, &b]), -1, out.out())));
    assert_eq!(out.values(), [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
    let out = Tensor::packed(half, &[2, 2, 2], &[0.0]);
    ok(call!(aclnnStack(tensors(&[&a, &a]), 2, out.out())));
    assert_eq!(out.values(), [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    let out = Tensor::packed(half, &[2, 4, 1], &[0.0]);
    ok(call!(aclnnRepeat(b.input(), ints(&[2, 2, 1]), out.out())));
    assert_eq!(out.values(), [5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0, 6.0]);
    let out = Tensor::packed(half, &[2, 2], &[0.0]);
    ok(call!(aclnnFlip(a.input(), ints(&[0, -1]), out.out())));
    assert_eq!(out.values(), [4.0, 3.0, 2.0, 1.0]);
    let out = Tensor::packed(half, &[1, 4], &[0.0]);
    ok(call!(aclnnConstantPadNd(a.input(), ints(&[1, 1, -1, 0]), int(9), out.out())));
    assert_eq!(out.values(), [9.0, 3.0, 4.0, 9.0]);
    let counts = Tensor::ints(&[2], &[2, 1]);
    let out = Tensor::packed(half, &[3, 2], &[0.0]);
    ok(call!(aclnnRepeatInterleaveWithDim(a.input(), counts.input(), 0, 3, out.out())));
    assert_eq!(out.values(), [1.0, 2.0, 1.0, 2.0, 3.0, 4.0]);
    let out = Tensor::packed(half, &[8], &[0.0]);
    ok(call!(aclnnRepeatInterleaveInt(a.input(), 2, 8, out.out())));
    assert_eq!(out.values(), [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    let out = Tensor::packed(half, &[2, 2], &[0.0]);
    ok(call!(aclnnTriu(a.input(), 0, out.out())));
    assert_eq!(out.values(), [1.0, 2.0, 0.0, 4.0]);
    ok(call!(aclnnInplaceTril(out.in_out(), -1)));
    assert_eq!(out.values(), [0.0; 4]);
}
