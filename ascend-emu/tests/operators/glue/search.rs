//! Elements that are looked for in lines.

use super::rows::Argument::Int;
use super::rows::*;

pub(crate) fn rows() -> Vec<Row> {
    let matrix = f32([2, 3], [3, 1, 3, 4, 6, 5]).read();
    let whole = i64([3], [2, 9, -1]).read();
    vec![
        // Of several equal ones the first; NaN is greater and less than any number.
        row("aclnnMaxDim", [matrix.clone(), Int(1), Int(0), f32([2], [3, 6]).written(), i64([2], [0, 1]).written()]),
        row(
            "aclnnMinDim",
            [matrix.clone(), Int(0), Int(1), f32([1, 3], [3, 1, 3]).written(), i64([1, 3], [0, 0, 0]).written()],
        ),
        row(
            "aclnnMinDim",
            [f32([2], [1.0, f64::NAN]).read(), Int(0), Int(0), f32([], [f64::NAN]).written(), i64([], [1]).written()],
        ),
        row("aclnnArgMax", [matrix.clone(), Int(-1), Int(1), i64([2, 1], [0, 1]).written()]),
        row("aclnnArgMin", [matrix.clone(), Int(-1), Int(0), i32([2], [1, 0]).written()]),
        row(
            "aclnnSort",
            [
                matrix.clone(),
                Int(1),
                Int(1),
                Int(0),
                f32([2, 3], [1, 3, 3, 4, 5, 6]).written(),
                i64([2, 3], [1, 0, 2, 0, 2, 1]).written(),
            ],
        ),
        row(
            "aclnnSort",
            [whole.clone(), Int(0), Int(0), Int(1), i64([3], [9, 2, -1]).written(), i64([3], [1, 0, 2]).written()],
        ),
        row(
            "aclnnTopk",
            [
                matrix,
                Int(2),
                Int(1),
                Int(1),
                Int(1),
                f32([2, 2], [3, 3, 6, 5]).written(),
                i64([2, 2], [0, 2, 1, 2]).written(),
            ],
        ),
        row("aclnnTopk", [whole, Int(1), Int(0), Int(0), Int(1), i64([1], [-1]).written(), i64([1], [2]).written()]),
    ]
}
