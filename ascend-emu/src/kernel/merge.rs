//! Combining attention over parts of the keys, as the operator AttentionUpdate does.
//!
//! The kernel computes in single precision and rounds once at the end. A log-sum-exp of +inf counts as -inf where the
//! operator's kernel replaces it; elsewhere it makes the row NaN. A row whose log-sum-exp is -inf in every part is
//! always NaN.

use ascend_spec::DType;
use ascend_spec::ops::attention_update::{UpdateCall, UpdateProblem, visible, weigh};
use half::{bf16, f16};
use rayon::prelude::*;

/// Addresses of the tensors of one call.
#[derive(Debug)]
pub(crate) struct Buffers<'a> {
    pub lse: &'a [*mut u8],
    pub local_out: &'a [*mut u8],
    pub out: *mut u8,
    pub lse_out: Option<*mut u8>,
}

// SAFETY: the contract of `run` covers the memory of the pointers, and threads write different rows through them.
unsafe impl Sync for Buffers<'_> {}

/// Reads the log-sum-exps of a row into `row_of`, as the operator uses them.
///
/// # Safety
///
/// As for [`run`]; the row is one of the call's.
unsafe fn read_lse<'a>(
    problem: &UpdateProblem,
    buffers: &Buffers<'_>,
    row: usize,
    row_of: &'a mut [f32; UpdateCall::MAX_PARTS],
) -> &'a mut [f32] {
    let mut count = 0;
    for (to, from) in row_of.iter_mut().zip(buffers.lse) {
        // SAFETY: the part has a log-sum-exp for each row; alignment is not required.
        *to = unsafe { from.cast::<f32>().add(row).read_unaligned() };
        if problem.infinity_is_empty {
            *to = visible(*to);
        }
        count += 1;
    }
    &mut row_of[..count]
}

/// Says which row is the first whose only possible result is NaN although none of its log-sum-exps is NaN.
///
/// # Safety
///
/// As for [`run`].
pub(crate) unsafe fn empty_row(problem: &UpdateProblem, buffers: &Buffers<'_>) -> Option<String> {
    let mut all = [0.0; UpdateCall::MAX_PARTS];
    (0..problem.rows).find_map(|row| {
        // SAFETY: the caller keeps this contract.
        let lse = unsafe { read_lse(problem, buffers, row, &mut all) };
        if lse.iter().any(|lse| lse.is_nan()) {
            return None;
        }
        if let Some(part) = lse.iter().position(|&lse| lse == f32::INFINITY) {
            return Some(format!(
                "lse[{part}] of row {row} is +inf, with which attention marks a row without visible keys; replace it \
                 by -inf before the merge, or the row becomes NaN"
            ));
        }
        let empty = lse.iter().all(|&lse| lse == f32::NEG_INFINITY);
        empty.then(|| format!("every lse of row {row} is infinite: no part has a key for it, and the row becomes NaN"))
    })
}

/// Merges the parts. Runs on the current rayon pool.
///
/// # Safety
///
/// Each address in `buffers` is valid for all elements of its tensor, for the duration of the call: the list inputs
/// of each kind have `problem.parts` elements, valid for reads; the outputs are valid for writes and overlap nothing
/// else. Alignment is not required.
pub(crate) unsafe fn run(problem: &UpdateProblem, buffers: &Buffers<'_>) {
    // SAFETY: the caller keeps this contract; the contract takes no other dtypes.
    unsafe {
        match problem.dtype {
            DType::Float16 => typed::<f16>(problem, buffers),
            DType::Bf16 => typed::<bf16>(problem, buffers),
            _ => typed::<f32>(problem, buffers),
        }
    }
}

/// Elements of attention.
pub(super) trait Number: Copy + 'static {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

impl Number for f32 {
    fn widen(self) -> f32 {
        self
    }

    fn narrow(value: f32) -> Self {
        value
    }
}

impl Number for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Number for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

/// Number of rows that a thread takes at a time.
const ROWS: usize = 64;

/// # Safety
///
/// As for [`run`]; attention has elements `T`.
unsafe fn typed<T: Number>(problem: &UpdateProblem, buffers: &Buffers<'_>) {
    (0..problem.rows.div_ceil(ROWS)).into_par_iter().for_each(|chunk| {
        let mut sum = vec![0.0; problem.dim];
        let first = chunk * ROWS;
        for row in first..(first + ROWS).min(problem.rows) {
            // SAFETY: the caller keeps this contract; no other thread has this row.
            unsafe { one::<T>(problem, buffers, row, &mut sum) };
        }
    });
}

/// Merges one row; `sum` is working memory for it.
///
/// # Safety
///
/// As for [`run`]; attention has elements `T`, and nothing else writes the row.
unsafe fn one<T: Number>(problem: &UpdateProblem, buffers: &Buffers<'_>, row: usize, sum: &mut [f32]) {
    let mut all = [0.0; UpdateCall::MAX_PARTS];
    // SAFETY: the caller keeps this contract.
    let lse = unsafe { read_lse(problem, buffers, row, &mut all) };
    let merged = weigh(lse);
    sum.fill(0.0);
    let first = row * problem.dim;
    for (&weight, part) in lse.iter().zip(buffers.local_out) {
        for (d, sum) in sum.iter_mut().enumerate() {
            // SAFETY: the part has this row, of as many elements as `sum`.
            let element = unsafe { part.cast::<T>().add(first + d).read_unaligned() };
            *sum += weight * element.widen();
        }
    }
    for (d, &sum) in sum.iter().enumerate() {
        // SAFETY: the output has this row, too.
        unsafe { buffers.out.cast::<T>().add(first + d).write_unaligned(T::narrow(sum)) };
    }
    if let Some(lse_out) = buffers.lse_out {
        // SAFETY: the output of log-sum-exps has an element for each row.
        unsafe { lse_out.cast::<f32>().add(row).write_unaligned(merged) };
    }
}
