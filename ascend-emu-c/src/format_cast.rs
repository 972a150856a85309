//! The function of `aclnnNpuFormatCast` beside its two phases.

use ascend_emu::glue::format_cast::calculate;
use ascend_sys::bindings::{aclTensor, aclnnStatus};

/// `aclnnNpuFormatCastCalculateSizeAndFormat`; `dstShape` is freed by the caller.
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
