//! The small operators around attention, against numbers written by hand and loops over single elements.

#![cfg(feature = "glue")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to locals"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../bench/mod.rs"]
mod bench;

/// Prepares and launches an operator on the default stream; the status of what fails first.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let (mut bytes, mut executor) = (1, std::ptr::null_mut());
        let mut status = unsafe {
            ascend_emu::glue::$name::prepare($($argument,)* &raw mut bytes, &raw mut executor)
        };
        if status == 0 {
            assert_eq!(bytes, 0);
            status = unsafe {
                ascend_emu::glue::$name::launch(std::ptr::null_mut(), bytes, executor, std::ptr::null_mut())
            };
        }
        status
    }};
}

mod bits;
mod calls;
mod choose;
mod compare;
mod elementwise;
mod fill;
mod functions;
mod join;
mod matmul;
mod model;
mod reduce;
mod rows;
mod search;
mod select;
mod tensors;
mod unwritten;
