//! What stands in for functions that the emulator does not have.

use crate::status::{acl, failure};
use crate::trace::trace;
use crate::trace::value::value;
use std::fmt;

/// Fails as the function of a name that a client linked and that is not emulated: returns `status` and leaves the calling
/// thread a message.
pub fn not_emulated(function: &'static str, status: i32) -> i32 {
    refused(function, status, format_args!("{function} is not emulated"))
}

/// As [`not_emulated`], with a message that says more.
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
