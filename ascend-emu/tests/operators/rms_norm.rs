//! RmsNorm through its C functions: numbers, and a short rstdOut.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use std::ffi::c_void;
use std::ptr::null_mut;

const WORKSPACE: u64 = 16 << 20;

/// Normalises the rows `[3, -4]` and `[0, 2]` with epsilon 0.5 and an rstdOut of `[scales, 1]`, which begins at
/// `rstd`. Returns the statuses of both phases and of the wait, and the rows.
fn normalise(scales: i64, rstd: *mut c_void) -> ([i32; 3], Vec<f32>) {
    let (x, y) = (upload(&ROWS), upload(&[0f32; 4]));
    let statuses = normalise_into(&[scales, 1], [x, y, rstd]);
    (statuses, download(y, 4))
}

const ROWS: [f32; 4] = [3.0, -4.0, 0.0, 2.0];

/// Normalises two rows of two elements, as [`normalise`] does: x, yOut and an rstdOut of the shape begin at the places.
fn normalise_into(scales: &[i64], [x, y, rstd]: [*mut c_void; 3]) -> [i32; 3] {
    let float = |shape: &[i64], data| tensor(aclDataType::ACL_FLOAT, shape, data);
    let (mut bytes, mut executor) = (0, null_mut::<aclOpExecutor>());
    let (stream, workspace) = (stream(), Memory::new(WORKSPACE as usize));
    unsafe {
        [
            aclnnRmsNormGetWorkspaceSize(
                float(&[2, 2], x),
                float(&[2], upload(&[1.0f32, 10.0])),
                0.5,
                float(&[2, 2], y),
                float(scales, rstd),
                &mut bytes,
                &mut executor,
            ),
            aclnnRmsNorm(workspace.at, WORKSPACE, executor, stream),
            aclrtSynchronizeStream(stream),
        ]
    }
}

#[test]
fn rows_are_divided_by_their_root_mean_square() {
    let _bench = Bench::new();
    let rstd = upload(&[0f32; 2]);
    let (statuses, y) = normalise(2, rstd);
    assert_eq!(statuses, [0; 3], "{}", message());
    let want = [1.0 / 13f32.sqrt(), 1.0 / 2.5f32.sqrt()];
    assert_eq!(download::<f32>(rstd, 2), want);
    assert_eq!(y, [3.0 * want[0], -40.0 * want[0], 0.0, 20.0 * want[1]]);
}

/// As ggml calls it, strictly: rows in place, and a number for each row without an axis of 1.
#[test]
fn rows_are_normalised_in_place() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let (rows, rstd) = (upload(&ROWS), upload(&[0f32; 2]));
    assert_eq!(normalise_into(&[2], [rows, rows, rstd]), [0; 3], "{}", message());
    let want = [1.0 / 13f32.sqrt(), 1.0 / 2.5f32.sqrt()];
    assert_eq!(download::<f32>(rstd, 2), want);
    assert_eq!(download::<f32>(rows, 4), [3.0 * want[0], -40.0 * want[0], 0.0, 20.0 * want[1]]);
}

#[test]
fn rows_that_begin_within_others_are_refused() {
    let _bench = Bench::new();
    let (rows, rstd) = (upload(&[0f32; 5]), upload(&[0f32; 2]));
    let later = rows.wrapping_byte_add(4);
    let statuses = normalise_into(&[2], [rows, later, rstd]);
    assert_ne!(statuses, [0; 3]);
    assert!(message().contains("yOut"), "{}", message());
}

#[test]
fn a_number_is_written_for_each_row_whatever_room_there_is() {
    let _bench = Bench::new();
    let rstd = upload(&[0f32; 4]);
    let (statuses, _) = normalise(1, rstd);
    assert_eq!(statuses, [0; 3], "{}", message());
    let written = download::<f32>(rstd, 4);
    assert!(written[1] > 0.0 && written[2..] == [0.0; 2], "{written:?}");
    // At the end of an allocation, strict checks stop the launch.
    let _strict = check_scope(Check::Strict);
    let end = malloc(4);
    let (statuses, _) = normalise(1, end);
    assert_ne!(statuses[1], 0);
}
