//! Pointers that callers from C give.

use crate::status::{ACLNN_INNER, ACLNN_NULLPTR, Outcome, failure};
use std::ffi::{CStr, c_char};

/// Refuses a null pointer with a status.
pub(crate) fn not_null_or<T>(code: i32, name: &str, pointer: *const T) -> Outcome {
    if pointer.is_null() { Err(failure!(code, "{name} is null")) } else { Ok(()) }
}

/// A text argument, `None` for null.
///
/// # Safety
///
/// `text` is null or NUL-terminated.
pub(crate) unsafe fn optional_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so a NUL-terminated text.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Copies numbers to an array that the caller frees, with C++'s `delete[]`: for integers that is `free`. Pointers to
/// results stand with their names.
///
/// # Safety
///
/// Both pointers are null or valid for writing.
pub(crate) unsafe fn hand_out(
    values: &[i64],
    (to_name, to): (&str, *mut *mut i64),
    (count_name, count): (&str, *mut u64),
) -> Outcome {
    not_null_or(ACLNN_NULLPTR, to_name, to)?;
    not_null_or(ACLNN_NULLPTR, count_name, count)?;
    // SAFETY: `malloc` has no precondition. At least one byte, so that null means failure.
    let array = unsafe { libc::malloc(size_of_val(values).max(1)) }.cast::<i64>();
    if array.is_null() {
        return Err(failure!(ACLNN_INNER, "no host memory for an array"));
    }
    // SAFETY: the array was made for this many numbers just now, aligned for any type; the results are not null, so
    // valid for writing, and C may give them any alignment.
    unsafe {
        array.copy_from_nonoverlapping(values.as_ptr(), values.len());
        to.write_unaligned(array);
        count.write_unaligned(values.len() as u64);
    }
    Ok(())
}
