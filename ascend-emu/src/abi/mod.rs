//! The functions of the C ABI, one file for each area of the headers.
//!
//! They carry C's names and types and can be called through [`functions`](crate::functions), or one by one. No
//! unmangled symbol comes from here: a process may hold the emulator and CANN's own libraries side by side.
//!
//! # Safety
//!
//! All of them share one contract, that of the C headers. Pointers that a function reads or writes through are null
//! where that is said to be allowed, or valid for what the header says: one value, the number of elements given beside
//! them, or a NUL-terminated text. Handles need no care: they are numbers, and a wrong one is an error. Device
//! addresses need none either, except that host memory named by a copy is valid, and stays so until an asynchronous
//! copy is over.
//!
//! No panic leaves these functions; it becomes the status of an internal error.

#![allow(non_snake_case, reason = "the names are those of the C functions")]
#![allow(
    clippy::missing_safety_doc,
    reason = "one contract for all, in the module's documentation"
)]
#![allow(
    missing_docs,
    reason = "the headers and ascend_sys::bindings document them"
)]

#[macro_use]
mod entry_point;

mod batch;
mod callback;
mod capability;
mod copy;
mod device;
mod event;
mod executor;
mod fia;
mod gather;
mod graph;
mod health;
mod host_memory;
mod limits;
mod machine;
mod memory;
mod meta;
mod notify;
mod peer;
mod runtime;
mod scatter;
mod stream;
mod stream_attribute;
mod timeout;
mod update;
mod virtual_memory;

pub use batch::*;
pub use callback::*;
pub use capability::*;
pub use copy::*;
pub use device::*;
pub use event::*;
pub use executor::*;
pub use fia::*;
pub use gather::*;
pub use graph::*;
pub use health::*;
pub use host_memory::*;
pub use limits::*;
pub(crate) use machine::fill_in;
pub use machine::*;
pub use memory::*;
pub use meta::*;
pub use notify::*;
pub use peer::*;
pub use runtime::*;
pub use scatter::*;
pub use stream::*;
pub use stream_attribute::*;
pub use timeout::*;
pub use update::*;
pub use virtual_memory::*;

use crate::descriptor::Described;
use crate::executor::Executor;
use crate::op::declared::{DeclaredOperator, ParameterOf};
use crate::operator::{Addresses, Operator};
use crate::status::{ACLNN_NULLPTR, Failure, NULL_PARAM, Outcome, PARAM_INVALID, failure};
use ascend_spec::operator::ArgumentList;
use ascend_sys::bindings::aclOpExecutor;
use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Refuses a null pointer.
fn not_null<T>(name: &str, pointer: *const T) -> Outcome {
    not_null_or(NULL_PARAM, name, pointer)
}

fn not_null_or<T>(code: i32, name: &str, pointer: *const T) -> Outcome {
    if pointer.is_null() {
        Err(failure!(code, "{name} is null"))
    } else {
        Ok(())
    }
}

/// Writes a result.
///
/// # Safety
///
/// `to` is null or valid for writing one value.
unsafe fn store<T>(name: &str, to: *mut T, value: T) -> Outcome {
    not_null(name, to)?;
    // SAFETY: not null, so valid for writing. Callers in C may give it any alignment.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// The end of a timeout in milliseconds; -1 is none.
fn deadline(name: &str, milliseconds: i32) -> Outcome<Option<Instant>> {
    match u64::try_from(milliseconds) {
        Ok(ms) => Ok(Instant::now().checked_add(Duration::from_millis(ms))),
        Err(_) if milliseconds == -1 => Ok(None),
        Err(_) => Err(refuse(
            &format!("{name}: timeout"),
            milliseconds,
            "-1 (for ever), or milliseconds from 0 on",
        )),
    }
}

/// A value that is not one of those allowed.
fn refuse(what: &str, given: impl std::fmt::Display, allowed: &str) -> Failure {
    failure!(PARAM_INVALID, "{what}: given {given}, allowed: {allowed}")
}

/// Device workspace of a call that computes something: what operators ask for their system workspace.
const WORKSPACE_BYTES: u64 = 16 << 20;

/// The end of every phase one: an executor of the operator that `make` checks and prepares, with the addresses of its
/// tensors, and the bytes of workspace it needs: none where there is nothing to do.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(crate) unsafe fn phase_one<O: Operator + 'static>(
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
    make: impl FnOnce() -> Outcome<(O, Addresses, bool)>,
) -> Outcome {
    not_null_or(ACLNN_NULLPTR, "workspaceSize", workspace_size)?;
    not_null_or(ACLNN_NULLPTR, "executor", executor)?;
    let (op, addresses, idle) = make()?;
    let bytes = if idle { 0 } else { WORKSPACE_BYTES };
    let id = Executor::create(Arc::new(op), addresses, bytes);
    // SAFETY: not null, so valid for writing.
    unsafe {
        workspace_size.write_unaligned(bytes);
        executor.write_unaligned(id.raw());
    }
    Ok(())
}

/// Phase one of a declared operator: the executor of the call that `new` checks and prepares of its arguments.
///
/// # Safety
///
/// The pointers are null or valid for writing.
unsafe fn executor_of<O, A, E>(
    new: impl FnOnce(&A) -> Result<O, E>,
    read: impl FnOnce() -> Outcome<A>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome
where
    O: DeclaredOperator + 'static,
    A: ArgumentList<Parameter = ParameterOf<O>, Tensor = Described>,
    Failure: From<E>,
{
    // SAFETY: the caller's promise.
    unsafe {
        phase_one(workspace_size, executor, || {
            let arguments = read()?;
            let op = new(&arguments)?;
            let idle = op.is_idle();
            Ok((op, Addresses::of(&arguments), idle))
        })
    }
}

/// A text argument, `None` for null.
///
/// # Safety
///
/// `text` is null or NUL-terminated.
unsafe fn optional_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, so a NUL-terminated text.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}
