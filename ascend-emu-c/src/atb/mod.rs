//! `libatb.so`: what PyTorch's extension for Ascend takes from ATB (Ascend Transformer Boost), a library with an ABI of
//! C++.
//!
//! Three operators are emulated, by [`ascend_emu::atb`]: PagedAttention, ReshapeAndCache and SelfAttention. The others
//! that the extension links, and values of parameters that change what an operator computes, are refused by name when
//! an object is to be made.
//!
//! The layouts are those of ATB's public headers (`include/atb/types.h`, `svector.h`, `context.h`, `operation.h` and
//! `infer_op_params.h` of `cann/ascend-transformer-boost`) by the Itanium ABI of C++, as its clients for Linux have it;
//! each offset was compared with the code of three versions of the extension (2.7.1, 2.10, 2.14), which agree.
//! Tables of virtual functions begin with both destructors. Nothing here is thrown, and no client asks for the types of
//! objects, so that the tables have none.

mod context;
mod create;
mod layout;
mod operation;

use ascend_emu::atb::Refusal;
use std::ffi::c_void;

/// `atb::Status`.
type Status = i32;
const NO_ERROR: Status = 0;

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut c_void;
}

fn status_of(outcome: Result<(), Refusal>) -> Status {
    outcome.map_or_else(|refusal| refusal.status, |()| NO_ERROR)
}

/// A destructor that leaves the memory to the caller.
unsafe extern "C" fn nothing<T>(_: *mut T) {}
