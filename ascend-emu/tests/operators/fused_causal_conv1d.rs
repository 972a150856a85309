//! FusedCausalConv1d and its in-place form through their C functions: numbers, lines, and what leads outside of a pool.

use crate::bench::*;
use crate::flash_family::call::on_machine;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_spec::Cann;
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor};
use half::bf16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const WORKSPACE: u64 = 16 << 20;
const CHANNELS: usize = 64;

/// Rows of equal channels.
fn rows(numbers: &[f32]) -> *mut c_void {
    upload(&numbers.iter().flat_map(|&number| [bf16::from_f32(number); CHANNELS]).collect::<Vec<_>>())
}

/// The first channel of each row, if the others are the same.
fn first(place: *mut c_void, count: usize) -> Vec<f32> {
    let all = download::<bf16>(place, count * CHANNELS);
    let row = |row: &[bf16]| if row.iter().all(|x| *x == row[0]) { row[0].to_f32() } else { f32::NAN };
    all.chunks(CHANNELS).map(row).collect()
}

/// Starts, lines, accepted and computed counts of sequences.
type Numbers<'a> = [&'a [i32]; 4];

/// Convolves rows 1, 2, 3, ... with weights 100, 10 and 1 over lines of three rows, in place or to rows of -1. Returns
/// the statuses and the outputs.
fn convolve(numbers: Numbers<'_>, pool: *mut c_void, pool_lines: i64, in_place: bool) -> ([i32; 3], Vec<f32>) {
    let count = *numbers[0].last().unwrap() as usize;
    let half = |shape: &[i64], data| tensor(aclDataType::ACL_BF16, shape, data);
    let ints = |numbers: &[i32]| match numbers {
        [] => null_mut(),
        _ => tensor(aclDataType::ACL_INT32, &[numbers.len() as i64], upload(numbers)),
    };
    let x = rows(&(0..count).map(|row| row as f32 + 1.0).collect::<Vec<_>>());
    let y = rows(&vec![-1.0; count]);
    let shape = [count as i64, CHANNELS as i64];
    let weight = half(&[3, CHANNELS as i64], rows(&[100.0, 10.0, 1.0]));
    let lines = half(&[pool_lines, 3, CHANNELS as i64], pool);
    let [starts, own_lines, accepted, computed] = numbers.map(ints);
    let none: *const aclTensor = null();
    let most_rows = numbers[0].windows(2).map(|ends| i64::from(ends[1]) - i64::from(ends[0])).max().unwrap().max(1);
    let (stream, workspace) = (stream(), Memory::new(WORKSPACE as usize));
    let (mut bytes, mut executor) = (0, null_mut::<aclOpExecutor>());
    let statuses = unsafe {
        let rows = half(&shape, x);
        let first = match in_place {
            true => aclnnInplaceFusedCausalConv1dGetWorkspaceSize(
                rows,
                weight,
                lines,
                starts,
                own_lines,
                none,
                none,
                accepted,
                computed,
                none,
                none,
                none,
                0,
                -1,
                0,
                most_rows,
                0,
                128,
                0,
                &mut bytes,
                &mut executor,
            ),
            false => aclnnFusedCausalConv1dGetWorkspaceSize(
                rows,
                weight,
                lines,
                starts,
                own_lines,
                none,
                none,
                accepted,
                computed,
                none,
                none,
                none,
                0,
                -1,
                0,
                most_rows,
                0,
                128,
                0,
                half(&shape, y),
                &mut bytes,
                &mut executor,
            ),
        };
        let launch = if in_place { aclnnInplaceFusedCausalConv1d } else { aclnnFusedCausalConv1d };
        [first, launch(workspace.at, WORKSPACE, executor, stream), aclrtSynchronizeStream(stream)]
    };
    (statuses, first(if in_place { x } else { y }, count))
}

/// Work on an emulated Ascend 950.
fn ascend_950() -> Bench {
    on_machine("Ascend950PR_9599", Cann::V9_1)
}

#[test]
fn windows_begin_in_the_line_or_with_zeros_and_lines_end_with_the_last_rows() {
    let _bench = ascend_950();
    for in_place in [false, true] {
        let pool = rows(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        // One sequence goes on behind rows 2 and 3, one behind 7 and 8, one begins, and one is left out.
        let numbers: Numbers<'_> = [&[0, 2, 3, 4, 5], &[0, 2, 1, -1], &[2, 1, 0, 1], &[9, 9, 0, 9]];
        let (statuses, out) = convolve(numbers, pool, 3, in_place);
        assert_eq!(statuses, [0; 3], "{}", message());
        let left_out = if in_place { 5.0 } else { -1.0 };
        // The third window is 700, 80 and 3, and the nearest number in BF16.
        assert_eq!(out, [231.0, 312.0, 784.0, 4.0, left_out]);
        assert_eq!(first(pool, 9), [3.0, 1.0, 2.0, 0.0, 0.0, 4.0, 7.0, 8.0, 3.0]);
    }
}

#[test]
fn numbers_that_lead_elsewhere_are_named_and_write_nothing() {
    let _bench = ascend_950();
    let cases: [(Numbers<'_>, FindingKind, &str); 6] = [
        ([&[0, 1, 2], &[0, 3], &[], &[]], FindingKind::SlotOutOfRange, "line 3 of sequence 1, allowed: 0 to 2"),
        ([&[0, 1, 2], &[0, -2], &[], &[]], FindingKind::SlotOutOfRange, "line -2 of sequence 1"),
        ([&[0, 3, 2], &[0, 1], &[], &[]], FindingKind::SequenceLength, "rows 0 to 3 of sequence 0"),
        ([&[0, 1, 2], &[0, 1], &[1, 3], &[]], FindingKind::SequenceLength, "3 accepted rows of sequence 1"),
        ([&[0, 1, 2], &[0, 1], &[], &[1, -1]], FindingKind::SequenceLength, "-1 computed tokens of sequence 1"),
        ([&[0, 1, 2], &[1, 1], &[], &[]], FindingKind::DuplicateSlot, "line 1 of sequences 0 and 1"),
    ];
    for (numbers, kind, text) in cases {
        let pool = rows(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        let seen = findings().len();
        let (statuses, out) = convolve(numbers, pool, 3, false);
        assert_eq!(statuses, [0; 3], "{}", message());
        let found = &findings()[seen..];
        let named = found.iter().find(|finding| finding.kind == kind && finding.message.contains(text));
        assert!(named.is_some(), "{text}: {found:?}");
        if kind == FindingKind::SlotOutOfRange {
            assert_eq!((out, first(pool, 6)), (vec![231.0, -1.0], vec![2.0, 3.0, 1.0, 4.0, 5.0, 6.0]));
        }
        let _strict = check_scope(Check::Strict);
        let (statuses, _) = convolve(numbers, pool, 3, false);
        assert_ne!(statuses[2], 0, "{text}");
        assert!(message().contains(text), "{}", message());
    }
}

#[test]
fn rows_of_lines_that_nothing_has_written_are_found_where_windows_read_them() {
    let _bench = ascend_950();
    let bytes = CHANNELS * 2;
    let pool = malloc(6 * bytes);
    let check = check_scope(Check::Strict);
    // A sequence begins with one row, which leaves the first row of its line unwritten, and goes on.
    for computed in [0, 1, 2] {
        let (statuses, _) = convolve([&[0, 1], &[1], &[], &[computed]], pool, 2, false);
        assert_eq!(statuses, [0; 3], "{}", message());
    }
    let (statuses, _) = convolve([&[0, 1], &[0], &[], &[1]], pool, 2, false);
    assert_ne!(statuses[2], 0);
    assert!(message().contains("convStates"), "{}", message());
    drop(check);
}
