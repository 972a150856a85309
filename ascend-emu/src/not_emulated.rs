//! The failure of functions that the emulator does not have.

use crate::status::{acl, failure};
use crate::trace::trace;
use crate::trace::value::value;
use std::fmt;

/// Fails as a function that is not emulated: returns `status`, and sets the message of the calling thread.
pub fn not_emulated(function: &'static str, status: i32) -> i32 {
    refused(function, status, format_args!("{function} is not emulated"))
}

/// Fails as a function that is not emulated, with a message of the caller's.
pub fn refused(function: &'static str, status: i32, message: fmt::Arguments<'_>) -> i32 {
    let refuse = || acl(|| Err(failure!(status, "{message}")));
    let Some(trace) = trace() else {
        return refuse();
    };
    // SAFETY: there are no arguments.
    let line = unsafe { trace.begin(function, &[]) };
    let status = refuse();
    // SAFETY: this is what the function returns.
    unsafe { line.end("aclError", value!(status)) };
    status
}
