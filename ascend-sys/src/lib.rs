//! Raw bindings to the C ABI of Huawei Ascend CANN: types, constants and functions for running the fused attention
//! operators, and the collectives between devices (HCCL).
//!
//! Most programs want the safe layer, the crate `ascend-attention`. This crate is for programs that build such a
//! layer, call a function that it does not cover, or provide another implementation of the ABI.
//!
//! - [`bindings`]: the declarations, as `bindgen` reads them from the headers. The names are those of C. C
//!   enumerations are newtypes with constants, so that a value that a newer CANN returns is not undefined behaviour.
//! - [`Api`]: the functions as a table, found one by one on first use. An older CANN that lacks a function gives
//!   [`MissingSymbol`] for that one; a machine without CANN gives [`LoadError`], which is plain data.
//! - [`VARIABLES`]: the environment variables that this crate and those above it read.
//! - [`for_each_function!`]: the same table for macros, so that implementations and wrappers cannot drift from it.
//!
//! # Three ways to fill the table
//!
//! | | needs at build time | needs at run time |
//! |---|---|---|
//! | [`Api::load`] | nothing | CANN's libraries, by the environment or on the loader's path |
//! | [`Api::load_from`], [`Api::load_with`] | nothing | CANN's libraries in a folder |
//! | `Api::linked` (feature `link`) | an installed toolkit | the same libraries, or the program does not start |
//! | [`Api::from_functions`] | an implementation in Rust or C | nothing |
//!
//! ```
//! use std::ffi::c_char;
//!
//! use ascend_sys::bindings::{ACL_SUCCESS, aclError};
//! use ascend_sys::{Api, Functions};
//!
//! unsafe extern "C" fn init(_config_path: *const c_char) -> aclError {
//!     ACL_SUCCESS
//! }
//!
//! let functions = Functions { aclInit: Some(init), ..Functions::default() };
//! let api = Api::from_functions(functions, "an example");
//!
//! let acl_init = api.aclInit()?;
//! // SAFETY: a null path is allowed.
//! assert_eq!(unsafe { acl_init(std::ptr::null()) }, ACL_SUCCESS);
//!
//! let missing = api.aclFinalize().unwrap_err();
//! assert_eq!((missing.library, missing.symbol), ("libascendcl.so", "aclFinalize"));
//! # Ok::<(), ascend_sys::MissingSymbol>(())
//! ```
//!
//! Loading looks the same but for the first line: `let api = unsafe { Api::load() }?;`.
//!
//! # Features
//!
//! None is on by default, and without any the build script reads nothing: no toolkit, no libclang.
//!
//! - `link`: the linker binds `libascendcl`, `libnnopbase`, `libopapi` and `libhccl` of the toolkit that
//!   `ASCEND_HOME_PATH` or `ASCEND_TOOLKIT_HOME` names. Costs: the program builds and starts only where these are.
//! - `bindgen`: makes the bindings anew at build time, from the headers of the toolkit that `ASCEND_HOME_PATH` names
//!   (what those lack comes from ours), or from ours alone. Costs: libclang, and a slower build.

#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(feature = "bindgen"))]
#[macro_use]
#[rustfmt::skip]
#[allow(
    missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals,
    reason = "the names are those of C, and not every item of a header has a comment"
)]
pub mod bindings;

/// Types, constants and functions, made from the headers when this crate was built.
#[cfg(feature = "bindgen")]
#[macro_use]
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "the names are those of C, and not every item of a header has a comment"
)]
pub mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

#[cfg(not(feature = "bindgen"))]
#[rustfmt::skip]
mod names;

#[cfg(feature = "bindgen")]
mod names {
    include!(concat!(env!("OUT_DIR"), "/names.rs"));
}

mod api;
mod enumeration;
mod environment;
mod functions;
mod library;
mod load;
mod search;

pub use api::{Api, FUNCTIONS, MissingSymbol, Origin};
pub use enumeration::Enumeration;
pub use environment::{
    EnvironmentVariable, UnknownVariable, VARIABLES, VariableReader, misspelt_variables_once, unknown_variables,
};
pub use functions::Functions;
pub use library::Library;
pub use load::{Attempt, LoadError, Outcome};
pub use names::{acl_error_name, aclnn_status_name};
pub use search::Search;
