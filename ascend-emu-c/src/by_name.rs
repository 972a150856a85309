//! Operators that are run by their names: descriptions of tensors, buffers, and the call. What clients do when a
//! toolkit has no function for an operator.

use ascend_emu::glue::by_name as emulated;
use ascend_emu::refused;
use ascend_sys::bindings::ACL_ERROR_INVALID_PARAM;
use std::ffi::{CStr, c_char, c_void};

/// Exports C functions under their names.
macro_rules! exported {
    ($( fn $name:ident ( $( $argument:ident : $type:ty ),* ) $(-> $result:ty)? = $body:expr; )*) => {$(
        /// The C function of this name.
        ///
        /// # Safety
        ///
        /// That of [`ascend_emu::abi`].
        // SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the names are those of the C functions")]
        pub unsafe extern "C" fn $name($( $argument: $type ),*) $(-> $result)? {
            $body
        }
    )*};
}

exported! {
    fn aclCreateTensorDesc(dtype: i32, rank: i32, sizes: *const i64, format: i32) -> *mut c_void =
        // SAFETY: the caller keeps the same contract.
        unsafe { emulated::create_description(dtype, rank, sizes, format) };
    fn aclDestroyTensorDesc(description: *const c_void) = emulated::destroy_description(description);
    fn aclSetTensorFormat(description: *const c_void, format: i32) -> i32 = emulated::set_format(description, format);
    fn aclSetTensorShape(description: *const c_void, rank: i32, sizes: *const i64) -> i32 =
        // SAFETY: the caller keeps the same contract.
        unsafe { emulated::set_storage(description, rank, sizes) };
    fn aclSetTensorPlaceMent(description: *const c_void, memory: i32) -> i32 =
        emulated::set_placement(description, memory);
    fn aclGetTensorDescType(description: *const c_void) -> i32 =
        emulated::described(description, 0).map_or(UNKNOWN, |(dtype, ..)| dtype);
    fn aclGetTensorDescFormat(description: *const c_void) -> i32 =
        emulated::described(description, 0).map_or(UNKNOWN, |(_, format, ..)| format);
    fn aclGetTensorDescNumDims(description: *const c_void) -> usize =
        emulated::described(description, 0).map_or(0, |(_, _, rank, _)| rank);
    fn aclGetTensorDescDimV2(description: *const c_void, index: usize, size: *mut i64) -> i32 = {
        let found = emulated::described(description, index).and_then(|(.., size)| size);
        let Some(found) = found.filter(|_| !size.is_null()) else {
            let message =
                format_args!("aclGetTensorDescDimV2: axis {index} of no description, or no place for its size");
            return refused("aclGetTensorDescDimV2", ACL_ERROR_INVALID_PARAM, message);
        };
        // SAFETY: not null, so valid for writing by the caller's promise; C may give it any alignment.
        unsafe { size.write_unaligned(found) };
        0
    };
    fn aclCreateDataBuffer(data: *const c_void, size: usize) -> *mut c_void = emulated::create_buffer(data, size);
    fn aclDestroyDataBuffer(buffer: *const c_void) -> i32 = emulated::destroy_buffer(buffer);
    fn aclopCompileAndExecute(
        name: *const c_char, inputs: i32, input: *const *const c_void, read: *const *const c_void,
        outputs: i32, output: *const *const c_void, written: *const *const c_void, _attributes: *const c_void,
        _engine: i32, _compile: i32, _path: *const c_char, stream: *const c_void
    ) -> i32 = {
        if name.is_null() {
            let message = format_args!("aclopCompileAndExecute: opType is null");
            return refused("aclopCompileAndExecute", ACL_ERROR_INVALID_PARAM, message);
        }
        // SAFETY: the caller's promise: a text that ends with a zero, and lists of the numbers given beside them.
        let (name, inputs, outputs) = unsafe {
            (CStr::from_ptr(name).to_string_lossy(), pairs(inputs, input, read), pairs(outputs, output, written))
        };
        emulated::execute(&name, &inputs, &outputs, stream)
    };
}

/// What stands for a type or a format that no description has.
const UNKNOWN: i32 = -1;

/// The elements of two lists side by side; none where a list is null.
///
/// # Safety
///
/// Each list is null or valid for reading `count` elements.
unsafe fn pairs(
    count: i32,
    one: *const *const c_void,
    other: *const *const c_void,
) -> Vec<(*const c_void, *const c_void)> {
    if one.is_null() || other.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise; C may give the lists any alignment.
    (0..usize::try_from(count).unwrap_or(0))
        .map(|at| unsafe { (one.add(at).read_unaligned(), other.add(at).read_unaligned()) })
        .collect()
}
