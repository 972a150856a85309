//! The emulator as a shared library: `libascend_emu_c.so` exports the C names of CANN's libraries.
//!
//! `cargo run -p xtask -- emu-libs DIR` lays it out as an installed toolkit, for programs that link CANN's libraries
//! and for loaders that look for them. Implemented here is only what such programs take from CANN beside its C ABI:
//! members of `op::fp16_t` and the copies of `libc_sec.so`; functions of CANN that programs link and that are not
//! emulated, which refuse with their names, and `aclAppLog` ([`unsupported`]); and the recording of calls as case files
//! (`record`, by `ASCEND_RECORD`).

mod atb;
#[cfg(feature = "glue")]
pub mod by_name;
pub mod fp16;
#[cfg(feature = "glue")]
pub mod glue;
mod record;
pub mod secure;
pub mod unsupported;

macro_rules! export {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        $(
            /// The C function of this name; see [`ascend_emu::traced`].
            ///
            /// # Safety
            ///
            /// That of [`ascend_emu::abi`].
            // SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            #[allow(clippy::too_many_arguments, reason = "the C signatures")]
            pub unsafe extern "C" fn $name($( $argument: $type ),*) -> $result {
                if const { record::begins_call(stringify!($name)) } {
                    record::begin();
                }
                if const { matches!(stringify!($name).as_bytes(), b"aclInit") } {
                    // Programs in C and Python do not check their calls against the contract.
                    ascend_emu::report_lints();
                }
                // SAFETY: the caller keeps the same contract.
                unsafe { ascend_emu::traced::$name($( $argument ),*) }
            }
        )*
    };
}

ascend_sys::for_each_function! { export }
