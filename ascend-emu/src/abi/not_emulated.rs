//! What stands in for functions that the emulator does not have.

use crate::status::{acl, failure};
use crate::trace::trace;
use crate::trace::value::value;

/// Fails as the function of a name that a client linked and that is not emulated: returns `status` and leaves the calling
/// thread a message.
pub fn not_emulated(function: &'static str, status: i32) -> i32 {
    let refuse = || acl(|| Err(failure!(status, "{function} is not emulated")));
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
