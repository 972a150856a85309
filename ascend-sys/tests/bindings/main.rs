//! The bindings and the headers by the C compiler, the table of functions, and loading.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests end them by a panic, and modules are the program's own"
)]

mod abi;
mod compiler;
mod headers;
// A statically linked program cannot open libraries.
#[cfg(all(unix, not(target_feature = "crt-static")))]
mod load;
mod table;
