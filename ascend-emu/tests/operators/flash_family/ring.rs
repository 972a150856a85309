//! RingAttentionUpdate: golden cases, statuses, strided tensors, any numbers against double precision, rows without
//! keys.

use super::call::{OnDevice, run};
use super::case::{cases, numbers};
use crate::bench::*;
use approx::{abs_diff_eq, assert_abs_diff_eq};
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_spec::ops::ring_attention_update;
use ascend_spec::{arguments_of_version, ring_attention_update_arguments};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use half::{bf16, f16};
use proptest::prelude::*;

type Arguments = ring_attention_update::Arguments<OnDevice>;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;

pub(crate) fn prepare(version: u8, arguments: &Arguments) -> (i32, (u64, *mut aclOpExecutor)) {
    match version {
        1 => ring_attention_update_arguments! { arguments_of_version {
            1 phase_one { aclnnRingAttentionUpdateGetWorkspaceSize, arguments }
        } },
        _ => ring_attention_update_arguments! { arguments_of_version {
            2 phase_one { aclnnRingAttentionUpdateV2GetWorkspaceSize, arguments }
        } },
    }
}

/// Merges, and gives the status of the first step that fails.
fn merge(version: u8, arguments: &Arguments) -> i32 {
    let (status, prepared) = prepare(version, arguments);
    if status != 0 {
        return status;
    }
    let two = match version {
        1 => aclnnRingAttentionUpdate,
        _ => aclnnRingAttentionUpdateV2,
    };
    run(two, prepared)
}

#[test]
fn golden_cases_are_merged() {
    let _bench = Bench::new();
    let cases = cases("ring_attention_update", 3);
    for case in &cases {
        let inputs = case.inputs("prev_attn_out");
        let of_output = |name: &str| match name {
            "attn_out" => inputs[0].dtype,
            _ => FLOAT,
        };
        let arguments = arguments!(case, ascend_spec::ops::ring_attention_update, of_output);
        ok(merge(case.version(), &arguments));
        let softmax = ["softmax_atol", "softmax_rtol"];
        case.compare("attn_out", arguments.attn_out.as_ref().unwrap(), ["atol", "rtol"]);
        for (name, of) in [("softmax_max", &arguments.softmax_max), ("softmax_sum", &arguments.softmax_sum)] {
            case.compare(name, of.as_ref().unwrap(), softmax);
        }
    }
}

/// Sizes and numbers of a merge.
#[derive(Clone, Debug)]
struct Merge {
    packed: bool,
    /// Order of packed softmax tensors as the attention lies.
    same: bool,
    dtype: aclDataType,
    /// Rows of each sequence; one number for all where there is a batch axis.
    lengths: Vec<usize>,
    batch: usize,
    heads: usize,
    dim: usize,
    seed: u32,
}

impl Merge {
    fn rows(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Numbers that differ from row to row, from -1 to 1.
    fn numbers(&self, salt: u32, count: usize) -> Vec<f64> {
        let mut state = self.seed.wrapping_add(salt).wrapping_mul(0x9e37_79b9) | 1;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0
        };
        (0..count).map(next).collect()
    }

    fn attention(&self, values: &[f64]) -> OnDevice {
        let bytes: Vec<u8> = match self.dtype {
            aclDataType::ACL_FLOAT16 => values.iter().flat_map(|&v| f16::from_f64(v).to_le_bytes()).collect(),
            aclDataType::ACL_BF16 => values.iter().flat_map(|&v| bf16::from_f64(v).to_le_bytes()).collect(),
            _ => floats(values),
        };
        let [rows, heads, dim] = [self.rows(), self.heads, self.dim].map(|n| n as i64);
        let shape = match self.packed {
            true => [rows, heads, dim],
            false => [rows, self.batch as i64, heads * dim],
        };
        OnDevice::new(self.dtype, &shape, &bytes)
    }

    fn softmax(&self, values: &[f64]) -> OnDevice {
        let copies: Vec<f64> = values.iter().flat_map(|&value| [value; 8]).collect();
        let [rows, heads, batch] = [self.rows(), self.heads, self.batch].map(|n| n as i64);
        match self.packed {
            true => OnDevice::new(FLOAT, &[rows, heads, 8], &floats(&copies)),
            false => OnDevice::new(FLOAT, &[batch, heads, rows, 8], &floats(&copies)),
        }
    }

    /// The place of each row of a head among those of the attention and of the softmax tensors, worked out by counting.
    fn places(&self) -> Vec<(usize, usize)> {
        let mut places = Vec::new();
        let (mut softmax, mut first) = (0, 0);
        let batch = if self.packed { 1 } else { self.batch };
        for b in 0..batch {
            for &length in &self.lengths {
                for head in 0..self.heads {
                    for row in 0..length {
                        let attention = match self.packed {
                            true => (first + row) * self.heads + head,
                            false => (row * batch + b) * self.heads + head,
                        };
                        let of_softmax = if self.same { attention } else { softmax };
                        places.push((attention, of_softmax));
                        softmax += 1;
                    }
                }
                first += length;
            }
        }
        places
    }

    fn arguments(&self, parts: &[Part; 2]) -> Arguments {
        let ends = std::iter::once(0).chain(self.lengths.iter().scan(0i64, |end, &length| {
            *end += length as i64;
            Some(*end)
        }));
        let ends: Vec<i64> = ends.collect();
        let bytes: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        let int64 = aclDataType::ACL_INT64;
        let nothing = vec![f64::NAN; self.places().len()];
        let [prev, cur] = parts;
        Arguments {
            prev_attn_out: Some(self.attention(&prev.attention)),
            prev_softmax_max: Some(self.softmax(&prev.max)),
            prev_softmax_sum: Some(self.softmax(&prev.sum)),
            cur_attn_out: Some(self.attention(&cur.attention)),
            cur_softmax_max: Some(self.softmax(&cur.max)),
            cur_softmax_sum: Some(self.softmax(&cur.sum)),
            actual_seq_qlen: (self.packed).then(|| OnDevice::new(int64, &[ends.len() as i64], &bytes)),
            input_layout: Some(if self.packed { "TND" } else { "SBH" }.into()),
            input_softmax_layout: self.same.then(|| "TND".into()),
            attn_out: Some(self.attention(&vec![f64::NAN; nothing.len() * self.dim])),
            softmax_max: Some(self.softmax(&nothing)),
            softmax_sum: Some(self.softmax(&nothing)),
        }
    }

    fn part(&self, salt: u32) -> Part {
        let rows = self.rows() * self.heads * if self.packed { 1 } else { self.batch };
        let around = |salt, by: f64, least: f64| {
            let numbers = self.numbers(salt, rows).into_iter();
            numbers.map(|n| f64::from((n * by + least) as f32)).collect()
        };
        Part {
            attention: self.numbers(salt, rows * self.dim),
            max: around(salt + 1, 12.0, 0.0),
            sum: around(salt + 2, 20.0, 21.0),
        }
    }
}

/// The numbers of a part, in the order of its tensors.
struct Part {
    attention: Vec<f64>,
    max: Vec<f64>,
    sum: Vec<f64>,
}

fn floats(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|&v| (v as f32).to_le_bytes()).collect()
}

fn read(of: &Option<OnDevice>) -> Vec<f64> {
    let of = of.as_ref().unwrap();
    let elements = of.shape.iter().product::<i64>() as usize;
    let size = if of.dtype == FLOAT { 4 } else { 2 };
    numbers(of.dtype, &download::<u8>(of.at(), elements * size))
}

fn merges() -> impl Strategy<Value = Merge> {
    let lengths = proptest::collection::vec(0usize..40, 1..5);
    let sizes = (1usize..4, 1usize..6, 1usize..4);
    (
        any::<(bool, bool, u32)>(),
        prop::sample::select(vec![FLOAT, aclDataType::ACL_FLOAT16, aclDataType::ACL_BF16]),
        lengths,
        sizes,
    )
        .prop_map(|((packed, same, seed), dtype, mut lengths, (batch, heads, dim))| {
            lengths[0] += 1;
            lengths.truncate(if packed { 5 } else { 1 });
            Merge {
                packed,
                same: packed && same,
                dtype,
                lengths,
                batch,
                heads,
                dim: if packed { 64 * dim } else { 5 * dim },
                seed,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn merges_of_any_sizes_are_those_of_double_precision(of in merges()) {
        let _bench = Bench::new();
        let parts = [of.part(3), of.part(70)];
        let arguments = of.arguments(&parts);
        ok(merge(if of.same { 2 } else { 1 }, &arguments));
        let (attention, max, sum) =
            (read(&arguments.attn_out), read(&arguments.softmax_max), read(&arguments.softmax_sum));
        let given = [&arguments.prev_attn_out, &arguments.cur_attn_out].map(read);
        let rounding = match of.dtype {
            FLOAT => 2e-6,
            aclDataType::ACL_FLOAT16 => 6e-4,
            _ => 5e-3,
        };
        for (row, softmax) in of.places() {
            let [prev, cur] = [&parts[0], &parts[1]].map(|part| (part.max[softmax], part.sum[softmax]));
            let most = prev.0.max(cur.0);
            let weights = [prev, cur].map(|(max, sum)| sum * (max - most).exp());
            let all = weights[0] + weights[1];
            for copy in softmax * 8..softmax * 8 + 8 {
                prop_assert_eq!(max[copy], most);
                prop_assert!(abs_diff_eq!(sum[copy], all, epsilon = 1e-5 * all));
            }
            for d in row * of.dim..(row + 1) * of.dim {
                let want = (given[0][d] * weights[0] + given[1][d] * weights[1]) / all;
                prop_assert!(abs_diff_eq!(attention[d], want, epsilon = rounding), "{} is not {want}", attention[d]);
            }
        }
    }
}

fn small() -> Merge {
    Merge { packed: false, same: false, dtype: FLOAT, lengths: vec![3], batch: 1, heads: 2, dim: 4, seed: 7 }
}

#[test]
fn strided_tensors_are_merged_as_contiguous_ones() {
    let _bench = Bench::new();
    let of = small();
    let parts = [of.part(1), of.part(9)];
    let plain = of.arguments(&parts);
    ok(merge(1, &plain));
    let want = read(&plain.attn_out);

    // Each number of the tensor at every second place of a memory twice as long.
    let spread = |values: &[f64], shape: &[i64]| {
        let wide: Vec<f64> = values.iter().flat_map(|&value| [value, f64::NAN]).collect();
        let mut strides = vec![2; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        OnDevice::strided(FLOAT, shape, &strides, &floats(&wide))
    };
    let shape = [3, 1, 8];
    let mut strided = of.arguments(&parts);
    strided.cur_attn_out = Some(spread(&parts[1].attention, &shape));
    let copies: Vec<f64> = parts[1].max.iter().flat_map(|&max| [max; 8]).collect();
    strided.cur_softmax_max = Some(spread(&copies, &[1, 2, 3, 8]));
    strided.attn_out = Some(spread(&[0.0; 24], &shape));
    ok(merge(1, &strided));
    let out = strided.attn_out.as_ref().unwrap();
    let wide = numbers(FLOAT, &download::<u8>(out.at(), 24 * 2 * 4));
    for (got, want) in wide.chunks(2).zip(want) {
        assert_eq!(got[0], want);
        assert!(got[1].is_nan(), "what lies between is not written");
    }
}

#[test]
fn rows_without_keys_in_both_parts_are_found() {
    let _bench = Bench::new();
    let of = small();
    let (least, most) = (f64::from(f32::MIN), f64::from(f32::MAX));
    for (masked, out, sum) in [((least, most), 0.0, f64::INFINITY), ((0.0, 0.0), f64::NAN, 0.0)] {
        let mut parts = [of.part(1), of.part(9)];
        for part in &mut parts {
            (part.max[4], part.sum[4]) = masked;
        }
        let arguments = of.arguments(&parts);
        let before = findings().len();
        ok(merge(1, &arguments));
        let found = &findings()[before..];
        let found = found.iter().find(|finding| finding.kind == FindingKind::EmptyRow);
        let message = &found.unwrap().message;
        // Softmax numbers lie by heads: the fifth is the second row of head 1.
        assert!(message.contains("row 1 of head 1 of sequence 0"), "{message}");
        assert!(message.contains("ring.both_"), "{message}");
        let first = (2 + 1) * 4;
        let got = read(&arguments.attn_out)[first];
        assert!(got == out || got.is_nan() && out.is_nan(), "{got}");
        assert_eq!(read(&arguments.softmax_sum)[4 * 8], sum);

        let _strict = check_scope(Check::Strict);
        let arguments = of.arguments(&parts);
        assert_ne!(merge(1, &arguments), 0);
        assert!(read(&arguments.softmax_max)[0].is_nan(), "nothing is written");
    }
}

#[test]
fn a_part_without_keys_leaves_the_other_as_it_is() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let of = small();
    for masked in [(f64::from(f32::MIN), f64::from(f32::MAX)), (0.0, 0.0)] {
        let mut parts = [of.part(1), of.part(9)];
        (parts[1].max[0], parts[1].sum[0]) = masked;
        (parts[0].max[0], parts[0].sum[0]) = (-3.0, 2.0);
        let arguments = of.arguments(&parts);
        ok(merge(1, &arguments));
        let attention = read(&arguments.attn_out);
        let given = read(&arguments.prev_attn_out);
        for (got, want) in attention[..4].iter().zip(given) {
            assert_abs_diff_eq!(*got, want, epsilon = 1e-6);
        }
        let max = read(&arguments.softmax_max)[0];
        let sum = read(&arguments.softmax_sum)[0];
        assert_eq!(max, if masked.1 == 0.0 { 0.0 } else { -3.0 });
        assert!((sum * max.exp() - 2.0 * (-3f64).exp()).abs() < 1e-6);
    }
}

#[test]
fn lengths_that_are_no_running_sums_are_found() {
    let _bench = Bench::new();
    let of = Merge { packed: true, lengths: vec![2, 3], dim: 64, ..small() };
    let parts = [of.part(1), of.part(9)];
    for ends in [[0, 2, 9], [1, 2, 5], [0, 4, 1], [0, i64::MIN, i64::MAX]] {
        let mut arguments = of.arguments(&parts);
        let bytes: Vec<u8> = ends.iter().flat_map(|end: &i64| end.to_le_bytes()).collect();
        let wrong = OnDevice::new(aclDataType::ACL_INT64, &[3], &bytes);
        arguments.actual_seq_qlen = Some(wrong);
        let before = findings().len();
        ok(merge(1, &arguments));
        let found = findings();
        let found = found[before..].iter().any(|finding| finding.message.contains("ring.lengths"));
        assert!(found, "{ends:?}");
        let _strict = check_scope(Check::Strict);
        assert_ne!(merge(1, &arguments), 0, "{ends:?}");
    }
}

#[test]
fn statistics_read_in_another_order_than_written_are_found() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let blocks = Merge { packed: true, lengths: vec![2, 3], dim: 64, ..small() };
    let alike = Merge { same: true, ..blocks.clone() };
    let parts = [blocks.part(1), blocks.part(9)];
    let first = blocks.arguments(&parts);
    ok(merge(1, &first));
    let next = |of: &Merge| Arguments {
        prev_attn_out: first.attn_out.clone(),
        prev_softmax_max: first.softmax_max.clone(),
        prev_softmax_sum: first.softmax_sum.clone(),
        ..of.arguments(&parts)
    };
    ok(merge(1, &next(&blocks)));
    let said = [
        "softmax statistics in another order",
        "prevSoftmaxMax",
        "is read as [T, N, 8], and was written as a block [N, Sq, 8] for each sequence",
        "inputSoftmaxLayout",
    ];
    fails(merge(2, &next(&alike)), 507_015, &said);
    // Numbers that the host has put in order are in order.
    let max = first.softmax_max.as_ref().unwrap().at();
    let sum = first.softmax_sum.as_ref().unwrap().at();
    for at in [max, sum] {
        let numbers = vec![1f32; 5 * 2 * 8];
        let bytes = size_of_val(numbers.as_slice());
        ok(unsafe { aclrtMemcpy(at, bytes, numbers.as_ptr().cast(), bytes, H2D) });
    }
    ok(merge(2, &next(&alike)));
}

#[test]
fn what_the_rules_refuse_has_their_status() {
    let _bench = Bench::new();
    let of = small();
    let parts = [of.part(1), of.part(9)];
    let status = |version, change: fn(&mut Arguments)| {
        let mut arguments = of.arguments(&parts);
        change(&mut arguments);
        prepare(version, &arguments).0
    };
    assert_eq!(status(1, |_| {}), 0);
    assert_eq!(status(1, |of| of.cur_softmax_sum = None), 161_001);
    assert_eq!(status(1, |of| of.input_layout = None), 161_002);
    assert_eq!(status(2, |of| of.input_layout = Some("BSH".into())), 161_002);
    assert_eq!(status(1, |of| of.attn_out = of.softmax_max.clone()), 161_001);
    let short = |of: &mut Arguments| {
        of.cur_attn_out = Some(OnDevice::new(FLOAT, &[2, 1, 8], &[0; 64]));
    };
    fails(status(1, short), 561_002, &["ring.shapes"]);
}
