//! Rotary positions.

use super::rows::Argument::{Int, Ints as Sizes, Text as Name};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use crate::flash_family::call::on_chip;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ptr::null_mut;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;

pub(crate) fn rows() -> Vec<Row> {
    let numbers = || -> Vec<i32> { (0..64).collect() };
    // A quarter turn: (a, b) becomes (-b, a).
    let turned = |pairs: bool| -> Vec<i32> {
        (0..64)
            .map(|i: i32| match (pairs, i) {
                (true, i) => {
                    if i % 2 == 0 {
                        -(i + 1)
                    } else {
                        i - 1
                    }
                }
                (false, 0..32) => -(i + 32),
                (false, i) => i - 32,
            })
            .collect()
    };
    let factor = |value: i32| f16([1, 1, 1, 64], vec![value; 64]).read();
    let whole = || f16([1, 1, 1, 64], numbers());
    let table = || {
        // The second row is a quarter turn.
        let rows = [vec![1; 16], vec![0; 16], vec![0; 16], vec![1; 16]];
        f32([2, 32], rows.concat()).read()
    };
    let line = |values: Vec<i32>| f32([1, 64], values);
    let half: Vec<i32> = (0..64)
        .map(|i: i32| match i {
            0..16 => -(i + 16),
            16..32 => i - 16,
            _ => i,
        })
        .collect();
    vec![
        row(
            "aclnnApplyRotaryPosEmb",
            [whole().becomes(turned(false)), whole().becomes(turned(false)), factor(0), factor(1), Int(1)],
        ),
        row(
            "aclnnApplyRotaryPosEmbV2",
            [
                whole().becomes(turned(false)),
                whole().becomes(turned(false)),
                factor(0),
                factor(1),
                Int(1),
                Name("half"),
            ],
        ),
        // Elements after the rotated ones stay.
        row(
            "aclnnRopeWithSinCosCache",
            [
                i64([1], [1]).read(),
                line(numbers()).read(),
                line(numbers()).read(),
                table(),
                Sizes(vec![]),
                Int(64),
                Int(1),
                line(half.clone()).written(),
                line(half).written(),
            ],
        ),
        row(
            "aclnnRopeWithSinCosCache",
            [
                i64([3, 1], [1, 1, 1]).read(),
                line(numbers()).read(),
                line(numbers()).read(),
                table(),
                Sizes(vec![4, 6, 6]),
                Int(32),
                Int(0),
                line(turned(true)).written(),
                line(turned(true)).written(),
            ],
        ),
    ]
}

/// The places of the pairs of a line of elements.
fn pairs(mode: &str, width: usize) -> Vec<[usize; 2]> {
    match mode {
        "half" => (0..width / 2).map(|i| [i, i + width / 2]).collect(),
        "interleave" => (0..width / 2).map(|i| [2 * i, 2 * i + 1]).collect(),
        _ => {
            let quarter = width / 4;
            let first = (0..quarter).map(|i| [i, i + quarter]);
            first.clone().chain(first.map(|[a, b]| [a + 2 * quarter, b + 2 * quarter])).collect()
        }
    }
}

fn near(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got} is not {want}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn queries_and_keys_turn_in_place_in_every_layout(
        layout in 1..5i64,
        mode in prop::sample::select(vec!["half", "interleave", "quarter"]),
        (batch, tokens, heads, kv_heads, width) in (1..3i64, 1..4i64, 1..4i64, 1..3i64, 1..4i64),
        seed in any::<u64>(),
        values in prop::collection::vec(-2.0..2.0f64, 3..40),
    ) {
        let _bench = on_chip("Ascend950PR_9599");
        let width = 4 * width;
        let shape = |heads: i64| match layout {
            1 => vec![batch, tokens, heads, width],
            2 => vec![tokens, batch, heads, width],
            3 => vec![batch, heads, tokens, width],
            _ => vec![tokens, heads, width],
        };
        let of = |heads: i64, gap: i64| {
            let mut view = View::packed(&shape(heads));
            view.strides.iter_mut().for_each(|stride| *stride *= gap);
            view.room *= gap;
            Tensor::new(FLOAT, view, &values)
        };
        let gap = 1 + (seed % 2) as i64;
        let (query, key, cos, sin) = (of(heads, gap), of(kv_heads, 1), of(1, 1), of(1, 2));
        let before = [query.values(), key.values()];
        let name = std::ffi::CString::new(mode).unwrap();
        ok(call!(aclnnApplyRotaryPosEmbV2(
            query.in_out(), key.in_out(), cos.input(), sin.input(), layout, Text(name.as_ptr())
        )));
        for (tensor, before) in [&query, &key].into_iter().zip(before) {
            let after = tensor.values();
            let (cos, sin) = (cos.broadcast(&tensor.view.shape), sin.broadcast(&tensor.view.shape));
            for start in (0..after.len()).step_by(width as usize) {
                for [a, b] in pairs(mode, width as usize) {
                    let [a, b] = [start + a, start + b];
                    near(after[a], before[a] * cos[a] - before[b] * sin[a]);
                    near(after[b], before[b] * cos[b] + before[a] * sin[b]);
                }
            }
        }
    }

    #[test]
    fn heads_turn_by_the_rows_of_a_table(
        tokens in 1..5usize,
        (heads, kv_heads, units, rotated) in (1..4usize, 1..3usize, 1..4usize, 1..4usize),
        (sections, neox, strided) in any::<(bool, bool, bool)>(),
        cut in 0..100usize,
        positions in prop::collection::vec(0..7i64, 15),
        values in prop::collection::vec(-2.0..2.0f64, 3..40),
    ) {
        let _bench = Bench::new();
        let (head, rotated) = (16 * units, 16 * rotated.min(units));
        let half = rotated / 2;
        let first = 1 + cut % half;
        let sizes = [first, (half - first) / 2, half - first - (half - first) / 2];
        let view = |shape: &[usize]| {
            let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
            let mut view = View::packed(&shape);
            if strided {
                view.strides.iter_mut().for_each(|stride| *stride *= 2);
                view.room *= 2;
            }
            view
        };
        let of = |heads: usize| Tensor::new(FLOAT, view(&[tokens, heads * head]), &values);
        let (query, key, table) = (of(heads), of(kv_heads), Tensor::new(FLOAT, view(&[7, rotated]), &values));
        let out = [of(heads), of(kv_heads)];
        let (shape, count) = match sections {
            true => (vec![3, tokens as i64], 3 * tokens),
            false => (vec![tokens as i64], tokens),
        };
        let places = Tensor::ints(&shape, &positions[..count]);
        let sizes_given: Vec<i64> = match sections {
            true => sizes.iter().map(|&size| size as i64).collect(),
            false => vec![0, 0, 0],
        };
        ok(call!(aclnnRopeWithSinCosCache(
            places.input(), query.input(), key.input(), table.input(), ints(&sizes_given), head as i64,
            Flag(neox.into()), out[0].out(), out[1].out(),
        )));
        let table = table.values();
        for (input, out) in [&query, &key].into_iter().zip(&out) {
            let (before, mut want) = (input.values(), input.values());
            let width = input.view.shape[1] as usize;
            for start in (0..before.len()).step_by(head) {
                let token = start / width;
                let mode = if neox { "half" } else { "interleave" };
                for (pair, [a, b]) in pairs(mode, rotated).into_iter().enumerate() {
                    let source = match sections {
                        true if pair < sizes[0] => 0,
                        true if pair < sizes[0] + sizes[1] => 1,
                        true => 2,
                        false => 0,
                    };
                    let row = positions[source * tokens + token] as usize * rotated;
                    let (cos, sin) = (table[row + pair], table[row + half + pair]);
                    let [a, b] = [start + a, start + b];
                    want[a] = before[a] * cos - before[b] * sin;
                    want[b] = before[b] * cos + before[a] * sin;
                }
            }
            out.values().into_iter().zip(want).for_each(|(got, want)| near(got, want));
        }
    }
}

#[test]
fn rotations_that_a_product_lacks_are_refused_by_name() {
    let _bench = Bench::new();
    let heads = || Tensor::floats(&[1, 2, 1, 64], &[1.0]);
    let (query, key, cos, sin) = (heads(), heads(), heads(), heads());
    let run = |layout, mode: &std::ffi::CStr| {
        call!(aclnnApplyRotaryPosEmbV2(
            query.in_out(),
            key.in_out(),
            cos.input(),
            sin.input(),
            layout,
            Text(mode.as_ptr())
        ))
    };
    ok(run(1, c"half"));
    fails(run(3, c"half"), 161_002, &["aclnnApplyRotaryPosEmbV2: layout: given 3, allowed: 1 (BSND), 4 (TND)"]);
    fails(run(1, c"interleave"), 161_002, &["aclnnApplyRotaryPosEmbV2: rotaryMode: given interleave, allowed: half"]);
    fails(run(4, c"half"), 161_002, &["queryRef: given [1, 2, 1, 64], allowed: 3 dimensions"]);
    let short = Tensor::floats(&[1, 2, 1, 32], &[1.0]);
    fails(
        call!(aclnnApplyRotaryPosEmb(short.in_out(), key.in_out(), cos.input(), sin.input(), 1)),
        161_002,
        &["queryRef: given [1, 2, 1, 32], allowed: a last dimension of 64 or 128"],
    );
    let (line, table) = (Tensor::floats(&[2, 32], &[1.0]), Tensor::floats(&[4, 16], &[1.0]));
    let by_table = |positions: &[i64], sections: &[i64], head| {
        let places = Tensor::ints(&[positions.len() as i64], positions);
        call!(aclnnRopeWithSinCosCache(
            places.input(),
            line.input(),
            line.input(),
            table.input(),
            ints(sections),
            head,
            Flag(1),
            line.out(),
            line.out()
        ))
    };
    fails(
        by_table(&[0, 1], &[], 8),
        161_002,
        &["aclnnRopeWithSinCosCache: headSize: given 8, allowed: a multiple of 16"],
    );
    fails(
        by_table(&[0, 1], &[4, 4, 4], 16),
        161_002,
        &["aclnnRopeWithSinCosCache: mropeSection: given [4, 4, 4], allowed: three sizes, 8 in sum"],
    );
    fails(by_table(&[0, 1], &[i64::MAX, i64::MAX, i64::MAX], 16), 161_002, &["allowed: three sizes, 8 in sum"]);
    fails(by_table(&[0], &[], 16), 161_002, &["positions: given [1], allowed: [2]"]);
    ok(by_table(&[0, 4], &[], 16));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnRopeWithSinCosCache: positions: index 4 is out of range for axis 0 of size 4"],
    );
}
