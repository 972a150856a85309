//! Functions of the bits of integers.

use super::rows::Argument::Int;
use super::rows::*;

pub(crate) fn rows() -> Vec<Row> {
    let (a, b) = (i32([4], [0b1100, 0b1010, -1, 0]), i32([4], [0b1010, 0b0110, 5, 3]));
    let [and, or, xor] = [[8, 2, 5, 0], [14, 14, -1, 3], [6, 12, -6, 3]];
    // Beside 6.
    let [and_six, or_six, xor_six] = [[4, 2, 6, 0], [14, 14, -1, 6], [10, 12, -7, 6]];
    vec![
        row("aclnnBitwiseNot", [i8([3], [0, 5, -128]).read(), i8([3], [-1, -6, 127]).written()]),
        row("aclnnBitwiseNot", [bool([2], [0, 1]).read(), bool([2], [1, 0]).written()]),
        row("aclnnBitwiseAndTensor", [a.clone().read(), b.clone().read(), i32([4], and).written()]),
        row("aclnnBitwiseOrTensor", [a.clone().read(), b.clone().read(), i32([4], or).written()]),
        row("aclnnBitwiseXorTensor", [a.clone().read(), b.clone().read(), i32([4], xor).written()]),
        row("aclnnInplaceBitwiseAndTensor", [a.clone().becomes(and), b.clone().read()]),
        row("aclnnBitwiseAndScalar", [a.clone().read(), Int(6), i32([4], and_six).written()]),
        row("aclnnBitwiseOrScalar", [a.clone().read(), Int(6), i32([4], or_six).written()]),
        row("aclnnBitwiseXorScalar", [a.clone().read(), Int(6), i32([4], xor_six).written()]),
        row("aclnnInplaceBitwiseAndScalar", [a.becomes(and_six), Int(6)]),
    ]
}
