//! Functions that the headers declare and the emulator does not compute: each refuses the call by name.

use crate::status::{ACLNN_RUNTIME, acl, aclnn, failure};
use crate::trace::trace;
use crate::trace::value::value;
use std::fmt;

macro_rules! refuse {
    ({ $name:ident ( $($argument:ident : $type:ty),* ) }) => {
        #[allow(clippy::too_many_arguments, reason = "the C signature")]
        pub unsafe extern "C" fn $name($(_: $type),*) -> ascend_sys::bindings::aclnnStatus {
            let name = stringify!($name);
            aclnn(|| Err(failure!(ACLNN_RUNTIME, "{name} is not emulated")))
        }
    };
}

/// The functions, a line each. Emulated functions are in the other files of this folder, operators in `ops`.
#[rustfmt::skip]
macro_rules! refuse_listed {
    (aclnnFlashAttentionVarLenScoreV5GetMaxWorkspaceSize $function:tt) => { refuse! { $function } };
    (aclnnQuantFlashAttentionScoreGetWorkspaceSize $function:tt) => { refuse! { $function } };
    (aclnnQuantFlashAttentionScore $function:tt) => { refuse! { $function } };
    ($other:ident $function:tt) => {};
}

macro_rules! of_table {
    ($( [$library:ident] fn $name:ident $arguments:tt -> $result:ty ; )*) => {
        $( refuse_listed! { $name { $name $arguments } } )*
    };
}

ascend_sys::for_each_function! { of_table }

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
