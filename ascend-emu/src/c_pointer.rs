//! Pointers that callers from C give.

use crate::status::{Outcome, failure};
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
