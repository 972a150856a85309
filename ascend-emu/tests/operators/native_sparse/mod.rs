//! Native sparse attention through its C functions: random calls against the definitions in double precision, and
//! numbers that lead outside of tensors.

mod attention;
mod compression;

use crate::bench::*;
use ascend_emu::{Finding, FindingKind, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor, aclrtStream};
use half::{bf16, f16};
use std::ffi::c_void;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const INT32: aclDataType = aclDataType::ACL_INT32;
const WORKSPACE: u64 = 16 << 20;

/// What outputs hold before.
const POISON: f32 = 999.0;

/// An element type of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    bf16: bool,
}

impl Kind {
    fn dtype(self) -> aclDataType {
        if self.bf16 { aclDataType::ACL_BF16 } else { HALF }
    }

    fn upload(self, numbers: &[f32]) -> *mut c_void {
        match self.bf16 {
            true => upload(&numbers.iter().copied().map(bf16::from_f32).collect::<Vec<_>>()),
            false => upload(&numbers.iter().copied().map(f16::from_f32).collect::<Vec<_>>()),
        }
    }

    fn download(self, at: *const c_void, count: usize) -> Vec<f32> {
        match self.bf16 {
            true => download::<bf16>(at, count).into_iter().map(bf16::to_f32).collect(),
            false => download::<f16>(at, count).into_iter().map(f16::to_f32).collect(),
        }
    }

    fn tensor(self, sizes: &[usize], numbers: &[f32]) -> *mut aclTensor {
        tensor(self.dtype(), &shape(sizes), self.upload(numbers))
    }

    /// Checks numbers with the rounding of the type.
    #[track_caller]
    fn compare(self, got: f32, want: f64, scale: f64) {
        let unit = if self.bf16 { 1.0 / 128.0 } else { 1.0 / 1024.0 };
        assert!((f64::from(got) - want).abs() <= unit * (want.abs() + scale), "{got} is not {want}");
    }
}

fn shape(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|&size| size as i64).collect()
}

/// Sixteenths between -1 and 1, which both types hold.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) % 33) as f32 / 16.0 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Launches what phase one has prepared, and waits for it.
fn launch(
    phase_two: unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, aclrtStream) -> i32,
    (bytes, executor): (u64, *mut aclOpExecutor),
) -> i32 {
    let stream = stream();
    let workspace = malloc(WORKSPACE as usize);
    assert!(bytes <= WORKSPACE);
    ok(unsafe { phase_two(workspace, bytes, executor, stream) });
    let status = unsafe { ascend_emu::abi::aclrtSynchronizeStream(stream) };
    destroy(stream);
    free(workspace);
    status
}

/// A table whose entries for `rows` sequences of `columns` blocks are all different, with the number of blocks.
fn table(seed: u64, rows: usize, columns: usize) -> (Vec<i32>, usize) {
    let count = rows * columns;
    // A step that shares no factor with a power of two walks over all blocks.
    let blocks = (count + 1).next_power_of_two();
    let step = (seed as usize % blocks) | 1;
    ((0..count).map(|at| ((at * step + seed as usize) % blocks) as i32).collect(), blocks)
}

#[track_caller]
fn found(since: usize, kind: FindingKind, text: &str) {
    let all = findings();
    let found = |finding: &Finding| finding.kind == kind && finding.message.contains(text);
    assert!(all[since..].iter().any(found), "{text}: {:?}", &all[since..]);
}
