//! Products with quantised weights.

use super::rows::Argument::{Absent, Int};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use half::f16;
use proptest::prelude::*;
use std::ptr::null;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;

pub(crate) fn rows() -> Vec<Row> {
    let x = || f16([2, 2], [1, 2, 3, 4]).read();
    let codes = || i8([2, 3], [1, -2, 3, 4, 5, -6]).read();
    vec![
        row(
            "aclnnWeightQuantBatchMatmulV2",
            [
                x(),
                codes(),
                f16([3], [1.0, 0.5, 2.0]).read(),
                Absent,
                Absent,
                Absent,
                Absent,
                Int(0),
                f16([2, 3], [9, 4, -18, 19, 7, -30]).written(),
            ],
        ),
        row(
            "aclnnWeightQuantBatchMatmulV2",
            [
                x(),
                codes(),
                f16([1], [2]).read(),
                f16([1], [1]).read(),
                Absent,
                Absent,
                f16([1, 3], [100, 0, -100]).read(),
                Int(0),
                f16([2, 3], [124, 22, -112, 152, 42, -116]).written(),
            ],
        ),
    ]
}

/// A weight whose columns lie one after the other if `turned`.
fn weight(bits: usize, [rows, columns]: [i64; 2], turned: bool, codes: &[i64]) -> Tensor {
    let mut view = View::packed(&[rows, columns]);
    if turned {
        view.strides = vec![1, rows];
    }
    let mut stored = vec![0_i64; view.room as usize];
    for (&place, &code) in view.places().iter().zip(codes) {
        stored[place as usize] = code;
    }
    let (dtype, bytes): (_, Vec<u8>) = match bits {
        8 => (aclDataType::ACL_INT8, stored.iter().map(|&code| code as u8).collect()),
        _ => {
            let pair = |pair: &[i64]| {
                let [low, high] = [pair[0], pair.get(1).copied().unwrap_or(0)];
                (low & 15 | (high & 15) << 4) as u8
            };
            (aclDataType::ACL_INT4, stored.chunks(2).map(pair).collect())
        }
    };
    Tensor::over(dtype, view, upload(&bytes))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn codes_of_any_granularity_are_multiplied(
        (rows, columns, last) in (1..4i64, 1..6i64, 1..40i64),
        group in prop::sample::select(vec![0, 32, 64]),
        (bits, turned) in (prop::sample::select(vec![4, 8]), any::<bool>()),
        (of_tensor, with_offset, with_bias) in any::<(bool, bool, bool)>(),
        codes in prop::collection::vec(-8..8i64, 20..60),
        values in prop::collection::vec(-2.0..2.0f64, 3..40),
    ) {
        let _bench = Bench::new();
        // The last group has fewer rows than the others.
        let inner = i64::from(group) + last;
        let count = (inner * columns) as usize;
        let codes: Vec<i64> = codes.iter().copied().cycle().take(count).collect();
        let weight = weight(bits, [inner, columns], turned, &codes);
        let x = Tensor::packed(HALF, &[rows, inner], &values);
        let size = i64::from(group);
        let shape = match group {
            0 if of_tensor => vec![1],
            0 => vec![columns],
            _ => vec![(inner + size - 1) / size, columns],
        };
        let scales = Tensor::packed(HALF, &shape, &[0.25, 0.5, 1.5]);
        let offsets = Tensor::packed(HALF, &shape, &[1.0, -2.0, 0.0, 3.0]);
        let bias = Tensor::packed(aclDataType::ACL_FLOAT, &[columns], &[10.0, -20.0]);
        let out = Tensor::packed(HALF, &[rows, columns], &[0.25]);
        let none = OptionalIn(null());
        let given = |given: bool, tensor: &Tensor| if given { OptionalIn(tensor.handle) } else { none };
        ok(call!(aclnnWeightQuantBatchMatmulV2(
            x.input(), InPacked(weight.handle), scales.input(), given(with_offset, &offsets), none, none,
            given(with_bias, &bias), group, out.out(),
        )));
        let (x, scales, offsets, bias) = (x.values(), scales.values(), offsets.values(), bias.values());
        let got = out.values();
        for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let mut want = if with_bias { bias[j as usize] } else { 0.0 };
            let mut most = want.abs();
            for k in 0..inner {
                let number = match group {
                    0 if of_tensor => 0,
                    0 => j,
                    _ => k / size * columns + j,
                } as usize;
                let offset = if with_offset { offsets[number] } else { 0.0 };
                let factor = (codes[(k * columns + j) as usize] as f64 + offset) * scales[number];
                let part = x[(i * inner + k) as usize] * f16::from_f64(factor).to_f64();
                (want, most) = (want + part, most + part.abs());
            }
            let got = got[(i * columns + j) as usize];
            prop_assert!((got - want).abs() <= 1e-3 * want.abs() + 1e-9 * most, "{} is not {}", got, want);
        }
    }
}

#[test]
fn weights_of_other_kinds_are_refused_by_name() {
    let _bench = Bench::new();
    let x = Tensor::packed(HALF, &[2, 64], &[1.0]);
    let weight = Tensor::packed(aclDataType::ACL_INT8, &[64, 3], &[1.0]);
    let scales = Tensor::packed(HALF, &[3], &[1.0]);
    let out = Tensor::packed(HALF, &[2, 3], &[1.0]);
    let none = OptionalIn(null());
    let run = |weight: &Tensor, quant: OptionalIn, group| {
        call!(aclnnWeightQuantBatchMatmulV2(
            x.input(),
            InPacked(weight.handle),
            scales.input(),
            none,
            quant,
            none,
            none,
            group,
            out.out()
        ))
    };
    ok(run(&weight, none, 0));
    let words = Tensor::packed(aclDataType::ACL_INT32, &[64, 3], &[1.0]);
    for (weight, quant, group, message) in [
        (&words, none, 0, "weight: given INT32, allowed: INT8, INT4"),
        (&weight, OptionalIn(scales.handle), 0, "quantScaleOptional: given FLOAT16"),
        (&weight, none, 64, "antiquantGroupSize: given 64, allowed: 0, or a multiple of 32 that is less than 64"),
        (&weight, none, 32, "antiquantScale: given [3], allowed: [2, 3]"),
        (&out, none, 0, "weight: given FLOAT16, allowed: INT8, INT4"),
    ] {
        fails(run(weight, quant, group), 161_002, &[message]);
    }
    // Nowhere else may elements share bytes.
    let nibbles = Tensor::over(aclDataType::ACL_INT4, View::packed(&[4]), malloc(4));
    fails(
        call!(aclnnNeg(nibbles.input(), out.out())),
        161_002,
        &["aclnnNeg: self: given INT4, allowed: FLOAT, FLOAT16"],
    );
}
