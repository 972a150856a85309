//! The functions of the C ABI, one file for each area of the headers. The functions of operators are in `ops`.
//!
//! They carry C's names and types and can be called through [`functions`](crate::functions), or one by one. No
//! unmangled symbol comes from here: a process may hold the emulator and CANN's own libraries side by side.
//!
//! # Safety
//!
//! All of them share one contract, that of the C headers. Pointers that a function reads or writes through are null
//! where the header allows it, or valid for what the header documents: one value, the number of elements given beside
//! them, or a NUL-terminated text. Handles need no care: they are numbers, and a wrong one is an error. Device
//! addresses need none either, except that host memory named by a copy is valid, and stays so until an asynchronous
//! copy is over.
//!
//! No panic leaves these functions; it becomes the status of an internal error.

#![allow(non_snake_case, reason = "the names are those of the C functions")]
#![allow(clippy::missing_safety_doc, reason = "one contract for all, in the module's documentation")]
#![allow(missing_docs, reason = "the headers and ascend_sys::bindings document them")]

mod batch;
mod callback;
mod capability;
mod collective;
mod communicator;
mod copy;
mod device;
mod event;
mod executor;
mod graph;
mod host_memory;
mod limits;
mod machine;
mod memory;
mod message;
mod meta;
mod notify;
mod rank_call;
mod runtime;
mod stream;
mod unemulated;
mod virtual_memory;

pub use batch::*;
pub use callback::*;
pub use capability::*;
pub use collective::*;
pub use communicator::*;
pub use copy::*;
pub use device::*;
pub use event::*;
pub use executor::*;
pub use graph::*;
pub use host_memory::*;
pub use limits::*;
pub(crate) use machine::fill_in;
pub use machine::*;
pub use memory::*;
pub use message::*;
pub use meta::*;
pub use notify::*;
pub use runtime::*;
pub use stream::*;
pub use unemulated::*;
pub use virtual_memory::*;

pub use crate::ops::functions::*;

use crate::c_pointer::not_null_or;
use crate::status::{Failure, NULL_PARAM, Outcome, PARAM_INVALID, failure};
use std::time::{Duration, Instant};

/// Refuses a null pointer.
fn not_null<T>(name: &str, pointer: *const T) -> Outcome {
    not_null_or(NULL_PARAM, name, pointer)
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

/// Answers a call: writes a value through the pointer of this name. Null is refused before the value is computed.
macro_rules! answer {
    ($to:ident, $value:expr) => {
        $crate::status::acl(|| {
            super::not_null(stringify!($to), $to)?;
            let value = $value;
            // SAFETY: not null, so valid for writing, by the promise of the caller from C.
            unsafe { super::store(stringify!($to), $to, value) }
        })
    };
}
use answer;

/// The deadline of a timeout in milliseconds from now; `None` for -1.
fn deadline(name: &str, milliseconds: i32) -> Outcome<Option<Instant>> {
    match u64::try_from(milliseconds) {
        Ok(ms) => Ok(Instant::now().checked_add(Duration::from_millis(ms))),
        Err(_) if milliseconds == -1 => Ok(None),
        Err(_) => Err(refuse(&format!("{name}: timeout"), milliseconds, "-1 (for ever), or milliseconds from 0 on")),
    }
}

/// A value that is not one of those allowed.
fn refuse(what: &str, value: impl std::fmt::Display, allowed: &str) -> Failure {
    failure!(PARAM_INVALID, "{what}: given {value}, allowed: {allowed}")
}
