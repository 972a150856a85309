//! Defines the C functions of an operator from the declaration of its arguments.
//!
//! Their contract is that of [`abi`](crate::abi), which provides them too.

/// The C type of a kind of argument.
macro_rules! c_type {
    (tensor) => { *const ascend_sys::bindings::aclTensor };
    (output) => { *const ascend_sys::bindings::aclTensor };
    (inout) => { *mut ascend_sys::bindings::aclTensor };
    (output_mut) => { *mut ascend_sys::bindings::aclTensor };
    (list) => { *const ascend_sys::bindings::aclTensorList };
    (ints) => { *const ascend_sys::bindings::aclIntArray };
    (int_list) => { *const ascend_sys::bindings::aclIntArray };
    (int) => { i64 };
    (int8) => { i8 };
    (float) => { f64 };
    (flag) => { bool };
    (text) => { *mut std::ffi::c_char };
    (optional_text) => { *mut std::ffi::c_char };
}

/// Reads the value of a C argument.
macro_rules! read_argument {
    (list $argument:ident $name:literal) => {
        $crate::descriptor::optional_list($name, $argument)?.unwrap_or_default()
    };
    (ints $argument:ident $name:literal) => {
        $crate::descriptor::optional_ints($argument)?
    };
    (int_list $argument:ident $name:literal) => {
        $crate::descriptor::optional_ints($argument)?
    };
    (int $argument:ident $name:literal) => {
        $argument
    };
    (int8 $argument:ident $name:literal) => {
        $argument
    };
    (float $argument:ident $name:literal) => {
        $argument
    };
    (flag $argument:ident $name:literal) => {
        $argument
    };
    (text $argument:ident $name:literal) => {{
        $crate::c_pointer::not_null_or($crate::status::ACLNN_NULLPTR, $name, $argument)?;
        // SAFETY: not null, so a NUL-terminated text by the promise of the caller from C.
        unsafe { $crate::c_pointer::optional_text($argument) }.unwrap_or_default()
    }};
    (optional_text $argument:ident $name:literal) => {
        // SAFETY: null or NUL-terminated, by the promise of the caller from C.
        unsafe { $crate::c_pointer::optional_text($argument) }
    };
    ($tensor:ident $argument:ident $name:literal) => {
        $crate::descriptor::optional_tensor($argument)?
    };
}

/// Defines a phase one. It reads its arguments when `prepare(with, read, workspace_size, executor)` calls `read`.
macro_rules! phase_one {
    (
        { $function:ident, $arguments:ident, $prepare:ident($($with:expr),*) }
        $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*
    ) => {
        #[allow(
            non_snake_case, missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments,
            reason = "the C function, which the headers document"
        )]
        pub unsafe extern "C" fn $function(
            $($field: $crate::ops::entry_point::c_type!($kind),)*
            workspace_size: *mut u64,
            executor: *mut *mut ascend_sys::bindings::aclOpExecutor,
        ) -> ascend_sys::bindings::aclnnStatus {
            let read = || {
                #[allow(clippy::needless_update, reason = "the newest version has them all")]
                Ok($arguments { $($field: $crate::ops::entry_point::read_argument!($kind $field $name),)* ..Default::default() })
            };
            // SAFETY: the promise of the caller from C.
            $crate::status::aclnn(|| unsafe { $prepare($($with,)* read, workspace_size, executor) })
        }
    };
}

/// Defines a phase two.
macro_rules! phase_two {
    ($function:ident, $symbol:expr) => {
        #[allow(
            non_snake_case,
            missing_docs,
            clippy::missing_safety_doc,
            reason = "the C function, which the headers document"
        )]
        pub unsafe extern "C" fn $function(
            workspace: *mut std::ffi::c_void,
            workspace_size: u64,
            executor: *mut ascend_sys::bindings::aclOpExecutor,
            stream: ascend_sys::bindings::aclrtStream,
        ) -> ascend_sys::bindings::aclnnStatus {
            $crate::status::aclnn(|| {
                let executor = executor.cast();
                $crate::executor::launch(
                    $symbol,
                    workspace.addr(),
                    workspace_size,
                    executor,
                    stream,
                )
            })
        }
    };
}

pub(crate) use {c_type, phase_one, phase_two, read_argument};
