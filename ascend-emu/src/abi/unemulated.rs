//! Functions that the headers declare and the emulator does not compute: each refuses the call by name.

use crate::status::{ACLNN_RUNTIME, aclnn, failure};

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
