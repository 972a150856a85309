//! CausalConv1d through its C functions: numbers, lines, and what leads outside of a pool.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use half::bf16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const WORKSPACE: u64 = 16 << 20;
const CHANNELS: usize = 16;

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

/// Convolves rows 1, 2, 3, ... with weights 2 and 1 over lines of one row, without an activation. Returns the statuses
/// and the outputs, -1 where nothing is written.
fn convolve(
    starts: &[i32],
    lines: &[i32],
    history: &[i32],
    pool: *mut c_void,
    pool_lines: i64,
) -> ([i32; 3], Vec<f32>) {
    let count = *starts.last().unwrap() as usize;
    let half = |shape: &[i64], data| tensor(aclDataType::ACL_BF16, shape, data);
    let ints = |numbers: &[i32]| tensor(aclDataType::ACL_INT32, &[numbers.len() as i64], upload(numbers));
    let x = rows(&(0..count).map(|row| row as f32 + 1.0).collect::<Vec<_>>());
    let y = rows(&vec![-1.0; count]);
    let shape = [count as i64, CHANNELS as i64];
    let (stream, workspace) = (stream(), Memory::new(WORKSPACE as usize));
    let (mut bytes, mut executor) = (0, null_mut::<aclOpExecutor>());
    let statuses = unsafe {
        [
            aclnnCausalConv1dGetWorkspaceSize(
                half(&shape, x),
                half(&[2, CHANNELS as i64], rows(&[2.0, 1.0])),
                null(),
                half(&[pool_lines, 1, CHANNELS as i64], pool),
                ints(starts),
                ints(lines),
                ints(history),
                null(),
                0,
                -1,
                0,
                half(&shape, y),
                &mut bytes,
                &mut executor,
            ),
            aclnnCausalConv1d(workspace.at, WORKSPACE, executor, stream),
            aclrtSynchronizeStream(stream),
        ]
    };
    (statuses, first(y, count))
}

#[test]
fn windows_begin_in_the_line_or_with_zeros_and_lines_keep_the_last_rows() {
    let _bench = Bench::new();
    let pool = rows(&[10.0, 20.0, 30.0]);
    let (statuses, out) = convolve(&[0, 2, 3, 4], &[2, -1, 0], &[1, 1, 0], pool, 3);
    assert_eq!(statuses, [0; 3], "{}", message());
    // The sequence without a line is left out, and the last one does not see the 10 of its line.
    assert_eq!(out, [61.0, 4.0, -1.0, 4.0]);
    assert_eq!(first(pool, 3), [4.0, 20.0, 2.0]);
}

#[test]
fn numbers_that_lead_elsewhere_are_named_and_write_nothing() {
    let _bench = Bench::new();
    let cases: [([i32; 3], [i32; 2], FindingKind, &str); 4] = [
        ([0, 1, 2], [0, 3], FindingKind::SlotOutOfRange, "line 3 of sequence 1, allowed: 0 to 2"),
        ([0, 1, 2], [0, -2], FindingKind::SlotOutOfRange, "line -2 of sequence 1"),
        ([0, 3, 2], [0, 1], FindingKind::SequenceLength, "rows 0 to 3 of sequence 0"),
        ([0, 1, 2], [1, 1], FindingKind::DuplicateSlot, "line 1 of sequences 0 and 1"),
    ];
    for (starts, lines, kind, text) in cases {
        let pool = rows(&[10.0, 20.0, 30.0]);
        let seen = findings().len();
        let (statuses, out) = convolve(&starts, &lines, &[1, 1], pool, 3);
        assert_eq!(statuses, [0; 3], "{}", message());
        let found = &findings()[seen..];
        let named = found.iter().find(|finding| finding.kind == kind && finding.message.contains(text));
        assert!(named.is_some(), "{text}: {found:?}");
        if kind == FindingKind::SlotOutOfRange {
            assert_eq!((out, first(pool, 3)), (vec![21.0, -1.0], vec![1.0, 20.0, 30.0]));
        }
        let _strict = check_scope(Check::Strict);
        let (statuses, _) = convolve(&starts, &lines, &[1, 1], rows(&[10.0, 20.0, 30.0]), 3);
        assert_ne!(statuses[2], 0, "{text}");
        assert!(message().contains(text), "{}", message());
    }
    // The last sequence has rows of the first one, and is left out with the one in between.
    let (pool, seen) = (rows(&[10.0, 20.0, 30.0]), findings().len());
    let (statuses, out) = convolve(&[0, 5, 2, 8], &[0, 1, 2], &[1; 3], pool, 3);
    assert_eq!(statuses, [0; 3], "{}", message());
    assert_eq!(out, [21.0, 4.0, 7.0, 10.0, 13.0, -1.0, -1.0, -1.0]);
    assert_eq!(first(pool, 3), [5.0, 20.0, 30.0]);
    for text in ["rows 5 to 2 of sequence 1", "rows 2 to 8 of sequence 2"] {
        let found = &findings()[seen..];
        assert!(found.iter().any(|finding| finding.message.contains(text)), "{text}: {found:?}");
    }
}

#[test]
fn lines_that_nothing_has_written_are_found() {
    let _bench = Bench::new();
    let bytes = CHANNELS * 2;
    let pool = malloc(3 * bytes);
    let written = rows(&[7.0]);
    ok(unsafe { aclrtMemcpy(pool.wrapping_byte_add(bytes), bytes, written, bytes, D2D) });
    let check = check_scope(Check::Strict);
    // Line 0 is not read where the sequence does not go on from it; after that it has been written.
    for history in [0, 1] {
        let (statuses, _) = convolve(&[0, 1, 2], &[1, 0], &[1, history], pool, 3);
        assert_eq!(statuses, [0; 3], "{}", message());
    }
    let (statuses, _) = convolve(&[0, 1], &[2], &[1], pool, 3);
    assert_ne!(statuses[2], 0);
    assert!(message().contains("convStates"), "{}", message());
    drop(check);
}
