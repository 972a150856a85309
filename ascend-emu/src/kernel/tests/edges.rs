//! Rows without keys, infinities and NaN, empty tensors, threads.

use super::calls::contents::encode;
use super::case::{Case, Mask};
use super::data::{Data, levels};
use crate::kernel::simd::Level;
use crate::kernel::{Buffers, KernelError, run};
use ascend_spec::attention_problem::{AttentionProblem, TensorRole, Work};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Parameter, Version};
use ascend_spec::{Cann, DType, Layout, Soc, SparseMode, Target, TensorDesc};
use rayon::ThreadPoolBuilder;
use std::ptr;

fn each(case: &Case, test: impl Fn(&AttentionProblem<'_>, &mut Data, Level)) {
    for level in levels() {
        case.with(|problem, tensors| test(problem, tensors, level));
    }
}

/// Prefill of two query blocks and three KV tiles, and decode of a few queries.
fn shapes() -> [Case; 2] {
    [Case::plain(DType::Float16, [2, 1, 2, 100, 205, 32]), Case::plain(DType::Float16, [2, 1, 2, 1, 205, 32])]
}

fn is_blank(problem: &AttentionProblem<'_>, tensors: &Data, row: (usize, usize, usize)) -> bool {
    let zero = (0..problem.value_dim).all(|d| tensors.output(&problem.out, row, d) == 0.0);
    zero && tensors.lse(&problem.lse.unwrap(), row) == f64::INFINITY
}

/// Replaces element `d` of a row in the first batch entry.
fn put(case: &Case, bytes: &mut [u8], row: usize, d: usize, value: f32) {
    let value = encode(case.dtype, value);
    let start = (row * case.dim + d) * value.len();
    bytes[start..start + value.len()].copy_from_slice(&value);
}

#[test]
fn rows_that_the_geometry_masks_fully_are_blank() {
    let mut case = Case::plain(DType::Bf16, [1, 1, 2, 130, 40, 16]);
    case.mode = SparseMode::RightDownCausal;
    each(&case, |problem, tensors, level| {
        tensors.run(problem, level);
        for head in 0..2 {
            for row in 0..130 {
                assert_eq!(is_blank(problem, tensors, (0, head, row)), row < 90, "{row}");
            }
        }
    });
}

#[test]
fn rows_and_sequences_past_their_length_are_blank() {
    let mut case = Case::plain(DType::Float16, [3, 1, 2, 100, 205, 32]);
    case.q_lens = Some(vec![7, 100, 0]);
    case.kv_lens = Some(vec![205, 0, 9]);
    each(&case, |problem, tensors, level| {
        // Rows past the lengths are not read.
        let rows = 205 * 32 * 2;
        tensors.bytes_mut(Parameter::Key)[rows..2 * rows].fill(0xff);
        tensors.bytes_mut(Parameter::Value)[rows..2 * rows].fill(0xff);
        tensors.run(problem, level);
        for b in 0..3 {
            for row in 0..100 {
                assert_eq!(is_blank(problem, tensors, (b, 1, row)), b > 0 || row >= 7, "{b} {row}");
            }
        }
    });
}

#[test]
fn rows_that_the_mask_hides_all_keys_of_are_blank_or_the_mean() {
    for mut case in shapes() {
        case.mode = SparseMode::AllMask;
        let keys = case.key_rows[0];
        // The second sequence sees nothing; in the first, every third row sees nothing.
        let bytes = (0..2 * case.rows * keys).map(|at| {
            let (b, row) = (at / keys / case.rows, at / keys % case.rows);
            u8::from(b == 1 || row % 3 == 2)
        });
        let shape = [2, case.rows, keys].map(|n| n as i64).to_vec();
        case.mask = Some(Mask { shape, dtype: DType::Bool, bytes: bytes.collect() });
        for corrects in [false, true] {
            if corrects && case.rows == 1 {
                // The decode path does not take the bit.
                continue;
            }
            case.inner_precise = if corrects { 2 } else { 0 };
            each(&case, |problem, tensors, level| {
                let want = tensors.oracle(problem);
                tensors.run(problem, level);
                tensors.compare(problem, &want).unwrap();
                for row in 0..case.rows {
                    let place = (1, 1, row);
                    assert_eq!(tensors.lse(&problem.lse.unwrap(), place), f64::INFINITY);
                    let zero = tensors.output(&problem.out, place, 5) == 0.0;
                    assert_eq!(zero, corrects, "{row}");
                }
            });
        }
    }
}

#[test]
fn hidden_keys_may_hold_anything() {
    for mut case in shapes() {
        let keys = case.key_rows[0];
        // Keys 30 to 49 are hidden from all, the last one from the first row alone.
        case.mode = SparseMode::AllMask;
        let mut bytes = vec![0; 2 * case.rows * keys];
        for row in bytes.chunks_mut(keys) {
            row[30..50].fill(1);
        }
        bytes[keys - 1] = 7;
        let shape = [2, case.rows, keys].map(|n| n as i64).to_vec();
        case.mask = Some(Mask { shape, dtype: DType::Int8, bytes });
        each(&case, |problem, tensors, level| {
            for key in 30..50 {
                put(&case, tensors.bytes_mut(Parameter::Key), key, 3, f32::NAN);
                put(&case, tensors.bytes_mut(Parameter::Value), key, 4, f32::NAN);
                put(&case, tensors.bytes_mut(Parameter::Value), key, 5, f32::INFINITY);
            }
            put(&case, tensors.bytes_mut(Parameter::Value), keys - 1, 7, f32::INFINITY);
            let want = tensors.oracle(problem);
            tensors.run(problem, level);
            tensors.compare(problem, &want).unwrap();
            assert!(tensors.output(&problem.out, (0, 0, 0), 7).is_finite());
            if case.rows > 1 {
                assert_eq!(tensors.output(&problem.out, (0, 0, 1), 7), f64::INFINITY);
            }
        });
    }
}

#[test]
fn nan_reaches_the_rows_that_see_it() {
    for case in shapes() {
        // A key: every row of the sequence, and none of the other.
        each(&case, |problem, tensors, level| {
            put(&case, tensors.bytes_mut(Parameter::Key), 100, 3, f32::NAN);
            tensors.run(problem, level);
            assert!((0..32).all(|d| tensors.output(&problem.out, (0, 1, 0), d).is_nan()));
            assert!(tensors.lse(&problem.lse.unwrap(), (0, 1, 0)).is_nan());
            assert!((0..32).all(|d| tensors.output(&problem.out, (1, 1, 0), d).is_finite()));
        });
        // A query: its row alone.
        each(&case, |problem, tensors, level| {
            put(&case, tensors.bytes_mut(Parameter::Query), 0, 3, f32::NAN);
            tensors.run(problem, level);
            assert!(tensors.output(&problem.out, (0, 0, 0), 9).is_nan());
            assert!(tensors.output(&problem.out, (0, 1, 0), 9).is_finite());
        });
        // A value: its element alone.
        each(&case, |problem, tensors, level| {
            put(&case, tensors.bytes_mut(Parameter::Value), 100, 3, f32::NAN);
            tensors.run(problem, level);
            assert!(tensors.output(&problem.out, (0, 1, 0), 3).is_nan());
            assert!(tensors.output(&problem.out, (0, 1, 0), 4).is_finite());
        });
    }
}

#[test]
fn infinite_and_large_scores_neither_panic_nor_overflow() {
    for case in shapes() {
        let keys = case.key_rows[0];
        each(&case, |problem, tensors, level| {
            // One score is -inf: its key drops out.
            for d in 0..32 {
                put(&case, tensors.bytes_mut(Parameter::Query), 0, d, 1.0);
            }
            put(&case, tensors.bytes_mut(Parameter::Key), 50, 0, f32::NEG_INFINITY);
            let want = tensors.oracle(problem);
            tensors.run(problem, level);
            assert!(tensors.output(&problem.out, (0, 0, 0), 0).is_finite());
            assert!((tensors.output(&problem.out, (0, 0, 0), 0) - want.attention[0]).abs() < 2e-3);
            // All of them are: there is no answer.
            for key in 0..keys {
                put(&case, tensors.bytes_mut(Parameter::Key), key, 0, f32::NEG_INFINITY);
            }
            tensors.run(problem, level);
            assert!(tensors.output(&problem.out, (0, 0, 0), 0).is_nan());
            // One is +inf: neither.
            put(&case, tensors.bytes_mut(Parameter::Key), 50, 0, f32::INFINITY);
            tensors.run(problem, level);
            assert!(tensors.output(&problem.out, (0, 0, 0), 0).is_nan());
            // The largest finite numbers.
            for d in 0..32 {
                put(&case, tensors.bytes_mut(Parameter::Query), 0, d, 65504.0);
                for key in 0..keys {
                    put(&case, tensors.bytes_mut(Parameter::Key), key, d, if key == 60 { 65504.0 } else { -65504.0 });
                }
            }
            let want = tensors.oracle(problem);
            tensors.run(problem, level);
            assert!((tensors.output(&problem.out, (0, 0, 0), 0) - want.attention[0]).abs() < 2e-3);
        });
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut prefill = Case::plain(DType::Float16, [1, 1, 3, 200, 1300, 32]);
    prefill.mode = SparseMode::RightDownCausal;
    let decode = Case::plain(DType::Bf16, [2, 2, 4, 1, 3000, 64]);
    let list = Case { key_rows: vec![700, 1, 2000], ..Case::plain(DType::Float16, [3, 1, 1, 1, 1, 160]) };
    for case in [prefill, decode, list] {
        let want = case.with(|problem, tensors| tensors.oracle(problem));
        let outputs = [1, 2, 7].map(|threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            case.with(|problem, tensors| {
                pool.install(|| tensors.run(problem, Level::detect()));
                tensors.compare(problem, &want).unwrap();
                (tensors.bytes(Parameter::AttentionOut).to_vec(), tensors.bytes(Parameter::SoftmaxLse).to_vec())
            })
        });
        assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2], "{case:?}");
    }
}

#[test]
fn working_memory_is_that_of_tiles_and_threads() {
    let bytes = |threads: usize, rows: usize, keys: usize| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        // Enough blocks for none to be split.
        let case = Case::plain(DType::Float16, [2, 16, 1, rows, keys, 64]);
        case.with(|problem, tensors| {
            pool.install(|| tensors.run(problem, Level::detect()));
            tensors.working_memory
        })
    };
    for rows in [1, 40, 384] {
        let one = bytes(1, rows, 96);
        assert!(0 < one && one < 350_000, "{one}");
        assert_eq!(bytes(1, rows, 700), one);
        assert!(bytes(2, rows, 700) <= 2 * one);
    }
    assert_eq!(bytes(1, 384, 96), bytes(1, 768, 700));
}

#[test]
fn rows_may_lie_backwards_and_outputs_on_each_other() {
    let case = Case::plain(DType::Float16, [1, 2, 1, 200, 300, 128]);
    each(&case, |problem, tensors, level| {
        let mut problem = problem.clone();
        for view in [&mut problem.query.view, &mut problem.out.view] {
            view.offset += 199 * view.row;
            view.row = -view.row;
        }
        let want = tensors.oracle(&problem);
        tensors.run(&problem, level);
        tensors.compare(&problem, &want).unwrap();
        // Every head writes the same place: any may win, none may be torn apart by a race.
        problem.out.view.head = 0;
        tensors.run(&problem, level);
        let got = tensors.output(&problem.out, (0, 0, 0), 0);
        assert!([0, 200 * 128].iter().any(|&at| (got - want.attention[at]).abs() < 2e-3));
    });
}

#[test]
fn empty_keys_fill_and_empty_queries_do_nothing() {
    let desc = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape).unwrap();
    for layout in [Layout::Bnsd, Layout::Bsh] {
        let half = |rows| match layout {
            Layout::Bnsd => desc(DType::Float16, &[2, 4, rows, 16]),
            _ => desc(DType::Float16, &[2, rows, 64]),
        };
        for (rows, work) in [(5, Work::Fill), (0, Work::Nothing)] {
            let keys = [half(0)];
            let mut call = FiaCall::new(layout.as_str());
            call.num_heads = 4;
            call.query = Some(half(rows));
            (call.key, call.value) = (&keys, &keys);
            call.attention_out = Some(half(rows));
            call.softmax_lse = Some(desc(DType::Float, &[2, 4, rows, 1]));
            call.softmax_lse_flag = true;
            let checked = call.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
            let problem = checked.problem;
            assert_eq!(problem.work, work);
            let mut out = vec![0xff; 2 * 4 * 5 * 16 * 2];
            let mut lse = vec![0xff; 2 * 4 * 5 * 4];
            let outputs = [out.as_mut_ptr(), lse.as_mut_ptr()];
            let base = |role| match role {
                TensorRole::Output => outputs[0],
                TensorRole::LogSumExp => outputs[1],
                _ => ptr::null_mut(),
            };
            let buffers = Buffers(&base);
            // SAFETY: both outputs have the size of their descriptors, and no input is touched.
            unsafe { run(&problem, &buffers) }.unwrap();
            if work == Work::Fill {
                assert!(out.iter().all(|&byte| byte == 0));
                assert!(lse.as_chunks().0.iter().all(|&l| f32::from_le_bytes(l) == f32::INFINITY));
            } else {
                assert!(out.iter().chain(&lse).all(|&byte| byte == 0xff));
            }
        }
    }
}

#[test]
fn refusals_name_the_type() {
    let refusal = KernelError::UnsupportedType(DType::Int8);
    assert_eq!(refusal.to_string(), "the attention kernel does not compute with INT8");
}

/// Packed calls whose query heads are no multiple of the key heads: the heads of whole groups are computed, the
/// others stay as they were.
#[test]
fn heads_that_the_key_heads_leave_over_are_not_written() {
    for (heads, kv_heads) in [(5, 2), (4, 3), (3, 2), (7, 1), (2, 4), (1, 2)] {
        let packed = |rows: i64, heads: i64| TensorDesc::contiguous(DType::Bf16, &[rows, heads, 80]).unwrap();
        let key = [packed(217, kv_heads)];
        let call = FiaCall {
            query: Some(packed(109, heads)),
            key: &key,
            value: &key,
            num_heads: heads,
            num_key_value_heads: kv_heads,
            actual_seq_lengths: Some(&[4, 109]),
            actual_seq_lengths_kv: Some(&[5, 217]),
            attention_out: Some(packed(109, heads)),
            softmax_lse_flag: true,
            softmax_lse: TensorDesc::contiguous(DType::Float, &[109, heads, 1]),
            ..FiaCall::new("TND")
        };
        let target = Target::new(Soc::AtlasA2, Cann::V9_1);
        let checked = call.check(Version::V3, target).unwrap();
        let problem = &checked.problem;
        for level in levels() {
            let mut data = Data::new(&checked, DType::Bf16, 7);
            let before = data.bytes(Parameter::AttentionOut).to_vec();
            let want = data.oracle(problem);
            data.run(problem, level);
            let after = data.bytes(Parameter::AttentionOut);
            let computed = kv_heads * (heads / kv_heads);
            let head_bytes = 80 * 2;
            for (at, (before, after)) in before.chunks(head_bytes).zip(after.chunks(head_bytes)).enumerate() {
                let head = at as i64 % heads;
                assert_eq!(before != after, head < computed, "{heads}/{kv_heads} {at}");
            }
            // What the oracle does not compute is NaN there, which compares with anything.
            data.compare(problem, &want).unwrap();
        }
    }
}
