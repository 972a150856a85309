//! The small operators around attention.

use ascend_emu::glue::*;
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

macro_rules! export_glue {
    ($( $(#[$doc:meta])* fn $name:ident ( $( $argument:ident : $kind:ident ),* ) = $compute:expr ; )*) => {
        $(
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            mod $name {
                use super::*;

                // SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
                #[unsafe(export_name = concat!(stringify!($name), "GetWorkspaceSize"))]
                #[allow(clippy::too_many_arguments, reason = "the C signature")]
                unsafe extern "C" fn prepare(
                    $( $argument: $kind, )*
                    workspaceSize: *mut u64,
                    executor: *mut *mut aclOpExecutor,
                ) -> aclnnStatus {
                    // SAFETY: the caller keeps the same contract.
                    unsafe { ascend_emu::glue::$name::prepare($( $argument, )* workspaceSize, executor) }
                }

                // SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
                #[unsafe(export_name = stringify!($name))]
                unsafe extern "C" fn launch(
                    workspace: *mut c_void,
                    workspaceSize: u64,
                    executor: *mut aclOpExecutor,
                    stream: aclrtStream,
                ) -> aclnnStatus {
                    // SAFETY: the caller keeps the same contract.
                    unsafe { ascend_emu::glue::$name::launch(workspace, workspaceSize, executor, stream) }
                }
            }
        )*
    };
}

ascend_emu::for_each_glue_function! { export_glue }
