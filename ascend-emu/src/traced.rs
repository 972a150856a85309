//! The functions of the C ABI, each call written down where `ASCEND_EMU_TRACE` says so.
//!
//! They are those of [`abi`](crate::abi) otherwise, with the same contract. A program that reaches them by
//! [`functions`](crate::functions) or through the shared library is traced; one that calls `abi` itself is not.

use crate::trace::traced;

macro_rules! define {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        traced! { $( pub fn $name($( $argument: $type ),*) -> $result = crate::abi::$name; )* }
    };
}

ascend_sys::for_each_function! { define }
