//! Functions of one number.

use super::rows::*;
use std::f64::consts::{E, LN_2, PI, SQRT_2};

/// An operator, the one that overwrites its input, numbers, and what becomes of them.
type Function<'a> = (&'static str, Option<&'static str>, &'a [f64], &'a [f64]);

pub(crate) fn rows() -> Vec<Row> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let functions: &[Function<'_>] = &[
        ("aclnnExp", Some("aclnnInplaceExp"), &[0.0, 1.0, LN_2, -inf], &[1.0, E, 2.0, 0.0]),
        ("aclnnLog", Some("aclnnInplaceLog"), &[1.0, 2.0, 0.0, -1.0], &[0.0, LN_2, -inf, nan]),
        ("aclnnSqrt", Some("aclnnInplaceSqrt"), &[0.25, 2.0, -1.0], &[0.5, SQRT_2, nan]),
        ("aclnnRsqrt", Some("aclnnInplaceRsqrt"), &[0.25, 4.0, 0.0], &[2.0, 0.5, inf]),
        ("aclnnReciprocal", Some("aclnnInplaceReciprocal"), &[0.25, -4.0, 0.0], &[4.0, -0.25, inf]),
        ("aclnnSin", None, &[0.0, PI / 6.0, PI / 2.0], &[0.0, 0.5, 1.0]),
        ("aclnnCos", None, &[0.0, PI / 3.0, PI], &[1.0, 0.5, -1.0]),
        ("aclnnSigmoid", Some("aclnnInplaceSigmoid"), &[0.0, 3f64.ln(), -inf], &[0.5, 0.75, 0.0]),
        ("aclnnSilu", None, &[0.0, 3f64.ln(), -(3f64.ln())], &[0.0, 0.823959216501082, -0.27465307216702745]),
        ("aclnnTanh", None, &[0.0, LN_2, -inf], &[0.0, 0.6, -1.0]),
        ("aclnnRelu", Some("aclnnInplaceRelu"), &[-1.5, 1.5, -inf, nan], &[0.0, 1.5, 0.0, nan]),
        ("aclnnGelu", None, &[0.0, 1.0, -1.0], &[0.0, 0.8411919906082768, -0.15880800939172324]),
        ("aclnnNeg", None, &[1.5, -inf, nan], &[-1.5, inf, nan]),
        ("aclnnAbs", None, &[1.5, -inf, nan], &[1.5, inf, nan]),
        ("aclnnSign", None, &[1.5, -inf, 0.0], &[1.0, -1.0, 0.0]),
        ("aclnnFloor", Some("aclnnInplaceFloor"), &[1.5, -1.5, 2.0], &[1.0, -2.0, 2.0]),
        ("aclnnCeil", Some("aclnnInplaceCeil"), &[1.5, -1.5, 2.0], &[2.0, -1.0, 2.0]),
        ("aclnnRound", None, &[0.5, 1.5, -2.5, 2.6], &[0.0, 2.0, -2.0, 3.0]),
        ("aclnnTrunc", None, &[1.5, -1.5, 2.0], &[1.0, -1.0, 2.0]),
    ];
    let mut rows = Vec::new();
    for &(operator, in_place, given, wanted) in functions {
        let given = floats(given);
        rows.push(row(operator, [given.clone().read(), floats(wanted).written()]));
        rows.extend(in_place.map(|operator| row(operator, [given.becomes(wanted.to_vec())])));
    }
    rows.extend([
        // Exact, and approximated with a hyperbolic tangent.
        row(
            "aclnnGeluV2",
            [
                f64([3], [1, -1, 2]).read(),
                Argument::Int(0),
                f64([3], [0.8413447460685429, -0.15865525393145707, 1.9544997361036416]).written(),
            ],
        ),
        row(
            "aclnnGeluV2",
            [
                f64([2], [1, -1]).read(),
                Argument::Int(1),
                f64([2], [0.8411919906082768, -0.15880800939172324]).written(),
            ],
        ),
        row("aclnnExp", [i64([2], [0, 1]).read(), f32([2], [1.0, E]).written()]),
        row("aclnnRelu", [i8([2], [-3, 3]).read(), i8([2], [0, 3]).written()]),
        row("aclnnNeg", [i8([2], [-128, 3]).read(), i8([2], [-128, -3]).written()]),
        row("aclnnAbs", [i32([2], [-3, 3]).read(), i32([2], [3, 3]).written()]),
        row("aclnnSign", [i32([3], [-3, 0, 3]).read(), i32([3], [-1, 0, 1]).written()]),
    ]);
    rows
}
