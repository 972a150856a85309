//! The functions of an operator, made of the declaration of its arguments.

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
    (float) => { f64 };
    (flag) => { bool };
    (text) => { *mut std::ffi::c_char };
    (optional_text) => { *mut std::ffi::c_char };
}

/// What a C argument stands for.
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
    (float $argument:ident $name:literal) => {
        $argument
    };
    (flag $argument:ident $name:literal) => {
        $argument
    };
    (text $argument:ident $name:literal) => {{
        $crate::abi::not_null_or($crate::status::ACLNN_NULLPTR, $name, $argument)?;
        // SAFETY: not null, so a NUL-terminated text by the promise of the caller from C.
        unsafe { $crate::abi::optional_text($argument) }.unwrap_or_default()
    }};
    (optional_text $argument:ident $name:literal) => {
        // SAFETY: null or NUL-terminated, by the promise of the caller from C.
        unsafe { $crate::abi::optional_text($argument) }
    };
    ($tensor:ident $argument:ident $name:literal) => {
        $crate::descriptor::optional_tensor($argument)?
    };
}

/// Defines a phase one: it reads its arguments when `prepare(with, read, workspace_size, executor)` asks for them.
macro_rules! phase_one {
    (
        { $function:ident, $arguments:ident, $prepare:ident($($with:expr),*) }
        $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*
    ) => {
        #[allow(clippy::too_many_arguments, reason = "the C signature")]
        pub unsafe extern "C" fn $function(
            $($field: c_type!($kind),)*
            workspace_size: *mut u64,
            executor: *mut *mut aclOpExecutor,
        ) -> aclnnStatus {
            let read = || {
                #[allow(clippy::needless_update, reason = "the newest version has them all")]
                Ok($arguments { $($field: read_argument!($kind $field $name),)* ..Default::default() })
            };
            // SAFETY: the promise of the caller from C.
            aclnn(|| unsafe { $prepare($($with,)* read, workspace_size, executor) })
        }
    };
}

/// Defines a phase two.
macro_rules! phase_two {
    ($function:ident, $symbol:expr) => {
        pub unsafe extern "C" fn $function(
            workspace: *mut c_void,
            workspace_size: u64,
            executor: *mut aclOpExecutor,
            stream: aclrtStream,
        ) -> aclnnStatus {
            aclnn(|| {
                let executor = executor.cast();
                launch($symbol, workspace.addr(), workspace_size, executor, stream)
            })
        }
    };
}
