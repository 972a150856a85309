//! What stands in for functions that the emulator does not have.

use crate::status::{acl, failure};

/// Fails as the function of a name that a client linked and that is not emulated: returns `status` and leaves the calling
/// thread a message.
pub fn not_emulated(function: &'static str, status: i32) -> i32 {
    acl(|| Err(failure!(status, "{function} is not emulated")))
}
