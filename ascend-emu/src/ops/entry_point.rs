//! The C functions of an operator: phase one, from the arguments of a call to its executor, and phase two. Both are
//! made of the declaration of its arguments, and their contract is that of [`abi`](crate::abi), which provides them
//! too.

use super::declared::{DeclaredOperator, ParameterOf};
use crate::c_pointer::not_null_or;
use crate::descriptor::DescribedTensor;
use crate::executor::{EXECUTORS, Executor, refused};
use crate::operator::{Addresses, Operator};
use crate::status::{ACLNN_NULLPTR, Failure, Outcome};
use ascend_spec::operator::ArgumentList;
use ascend_spec::{TensorDesc, Violation};
use ascend_sys::bindings::aclOpExecutor;
use std::sync::Arc;

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
    (float32) => { f32 };
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
    (float32 $argument:ident $name:literal) => {
        f64::from($argument)
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
        { $function:ident, $arguments:ident, $($prepare:ident)::+($($with:expr),*) }
        $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*
    ) => {
        #[allow(
            non_snake_case, missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments,
            reason = "the C function, which the headers document"
        )]
        pub unsafe extern "C" fn $function(
            $($field: c_type!($kind),)*
            workspace_size: *mut u64,
            executor: *mut *mut ascend_sys::bindings::aclOpExecutor,
        ) -> ascend_sys::bindings::aclnnStatus {
            let read = || {
                #[allow(clippy::needless_update, reason = "the newest version has them all")]
                Ok($arguments {
                    $($field: read_argument!($kind $field $name),)*
                    ..Default::default()
                })
            };
            // SAFETY: the promise of the caller from C.
            $crate::status::aclnn(|| unsafe { $($prepare)::+($($with,)* read, workspace_size, executor) })
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
                $crate::executor::launch($symbol, workspace.addr(), workspace_size, executor, stream)
            })
        }
    };
}

/// Defines both functions of an operator: a line a version, with its number in the declaration of the arguments, and
/// what checks and prepares a call, as [`executor_of`] takes it; or the operator of all of them, which is made of a
/// call and its version.
macro_rules! c_functions {
    ($table:ident of $operator:ident; $($number:tt $version:ident: $one:ident, $two:ident;)*) => {
        c_functions! {
            $table;
            $($number $version: $one, $two => |arguments| $operator::new(arguments, Version::$version);)*
        }
    };
    ($table:ident; $($number:tt $version:ident: $one:ident, $two:ident => $new:expr;)*) => {
        $(
            $table! { ascend_spec::arguments_of_version {
                $number phase_one { $one, Arguments, $crate::ops::entry_point::executor_of($new) }
            } }
            phase_two!($two, Version::$version.symbol());
        )*
    };
}

/// Device workspace of a call that computes something: the amount that operators use as system workspace.
const WORKSPACE_BYTES: u64 = 16 << 20;

/// An executor of a prepared operator: one with nothing to compute needs no workspace.
pub(crate) fn executor_with(op: impl Operator + 'static, addresses: Addresses, idle: bool) -> Executor {
    let bytes = if idle { 0 } else { WORKSPACE_BYTES };
    Executor::new(Arc::new(op), addresses, bytes)
}

/// The end of every phase one. Writes an executor of the operator that `make` checks and prepares, with the addresses
/// of its tensors, and the bytes of workspace that it needs: none if there is nothing to compute.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(crate) unsafe fn write_executor<O: Operator + 'static>(
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
    make: impl FnOnce() -> Outcome<(O, Addresses, bool)>,
) -> Outcome {
    not_null_or(ACLNN_NULLPTR, "workspaceSize", workspace_size)?;
    not_null_or(ACLNN_NULLPTR, "executor", executor)?;
    let (op, addresses, idle) = make().inspect_err(refused)?;
    let made = executor_with(op, addresses, idle);
    let bytes = made.workspace_bytes();
    let id = EXECUTORS.insert(made);
    // SAFETY: not null, so valid for writing.
    unsafe {
        workspace_size.write_unaligned(bytes);
        executor.write_unaligned(id.raw());
    }
    Ok(())
}

/// The call that `new` checks and prepares from arguments, with the addresses of its tensors, and whether it has
/// nothing to compute.
pub(crate) fn prepared<O, A, E>(new: impl FnOnce(&A) -> Result<O, E>, arguments: &A) -> Outcome<(O, Addresses, bool)>
where
    O: DeclaredOperator + 'static,
    A: ArgumentList<Parameter = ParameterOf<O>, Tensor = DescribedTensor>,
    Failure: From<E>,
{
    let op = new(arguments)?;
    refuse_beyond_tensors(&op)?;
    let idle = op.is_idle();
    Ok((op, Addresses::of(arguments), idle))
}

/// Phase one of a declared operator. Writes the executor of the call that `new` checks and prepares from the
/// arguments that `read` returns.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(crate) unsafe fn executor_of<O, A, E>(
    new: impl FnOnce(&A) -> Result<O, E>,
    read: impl FnOnce() -> Outcome<A>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome
where
    O: DeclaredOperator + 'static,
    A: ArgumentList<Parameter = ParameterOf<O>, Tensor = DescribedTensor>,
    Failure: From<E>,
{
    // SAFETY: the caller's promise.
    unsafe { write_executor(workspace_size, executor, || prepared(new, &read()?)) }
}

/// Refuses a call whose launch would touch bytes outside of its tensors, unless a lint reports that it does. The
/// operators take some calls without work, or with sizes that they do not compare, whose arguments claim more than
/// the tensors have.
fn refuse_beyond_tensors<O: DeclaredOperator>(op: &O) -> Result<(), Violation> {
    let mut inside = true;
    op.touches(&mut |argument, touched| {
        let desc = op.arguments().tensor(argument);
        let all = desc.and_then(TensorDesc::byte_range);
        inside &= touched.is_empty() || all.is_some_and(|all| all.start <= touched.start && touched.end <= all.end);
    });
    match inside || op.overruns() {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "arguments that say more rows, heads or elements than the tensors have, which the operator does not \
             compare",
        )),
    }
}
