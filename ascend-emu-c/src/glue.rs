//! The small operators around attention.

use ascend_emu::glue::format_cast::calculate;
use ascend_emu::glue::*;
use ascend_sys::bindings::{aclOpExecutor, aclTensor, aclnnStatus, aclrtStream};
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

/// The function of `aclnnNpuFormatCast` beside its two phases; `dstShape` is freed by the caller.
///
/// # Safety
///
/// That of [`ascend_emu::abi`].
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is that of the C function")]
pub unsafe extern "C" fn aclnnNpuFormatCastCalculateSizeAndFormat(
    srcTensor: *const aclTensor,
    dstFormat: i32,
    additionalDtype: i32,
    dstShape: *mut *mut i64,
    dstShapeSize: *mut u64,
    actualFormat: *mut i32,
) -> aclnnStatus {
    // SAFETY: the caller keeps the same contract.
    unsafe { calculate(srcTensor.cast(), dstFormat, additionalDtype, dstShape, dstShapeSize, actualFormat) }
}
