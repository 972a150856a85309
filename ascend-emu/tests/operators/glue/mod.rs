//! The small operators around attention, against numbers written by hand and loops over single elements.

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
mod by_name;
mod calls;
mod choose;
mod compare;
mod elementwise;
mod fill;
mod format_cast;
mod functions;
mod gate;
mod join;
mod latent;
mod matmul;
mod memory;
mod model;
mod parts;
mod quantised;
mod reduce;
mod rotary;
mod rows;
mod search;
mod select;
mod tensors;
mod unwritten;
