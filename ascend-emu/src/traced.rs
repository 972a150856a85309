//! The functions of the C ABI, which write each call to the file that `ASCEND_EMU_TRACE` names.
//!
//! They call those of [`abi`](crate::abi), with the same contract. [`functions`](crate::functions) and the shared
//! library provide these functions; a program that calls `abi` itself is not traced.

use crate::trace::traced;

macro_rules! define {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        traced! { $( pub fn $name($( $argument: $type ),*) -> $result = crate::abi::$name; )* }
    };
}

ascend_sys::for_each_function! { define }
