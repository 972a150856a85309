//! The small operators that PyTorch code calls around attention: copies, arithmetic, indices, sums, products. A few
//! are called by programs in C alone.
//!
//! They let programs run that use attention from Python: plain loops over strided views, in `f64` and `i64` whatever
//! the element types are, rounded once at the end. They are not written for speed, and their results may differ from
//! hardware's in the last bit. [`for_each_glue_function!`](crate::for_each_glue_function) lists all of them.
//!
//! Each operator is a module here that holds its two functions. Their contract is that of [`abi`](crate::abi): phase
//! one refuses null (161001) and tensors whose element types or shapes do not fit (161002), with a message that names
//! the operator, the parameter, and the allowed values. An error that only the data show, such as an index past the
//! end of its axis, is a device fault of the launch. Tensors may have any strides, and may share memory: inputs are
//! read before outputs are written. As in PyTorch, a tensor that is updated in place has no axis that repeats its
//! elements, unless the update puts the same number there or PyTorch merely warns.
//!
//! Where the data decide an output's shape (`aclnnMaskedSelect`, `aclnnNonzero`, `aclnnNonzeroV2`), the output has
//! room for the largest result; phase two waits for the launch and gives the tensor of the output's handle its shape.
//!
//! Element types are FLOAT, FLOAT16, BF16, DOUBLE, INT8, UINT8, INT16, INT32, INT64 and BOOL; where elements are
//! neither computed with nor converted, all types of whole bytes are allowed; weights may be INT4. Random numbers
//! depend only on seed, offset and place, and differ from hardware's for the same seed.

mod argument;
pub mod by_name;
mod call;
mod choose;
mod compare;
mod elementwise;
mod fill;
pub mod format_cast;
mod gate;
mod join;
mod latent;
mod matmul;
mod model;
mod number;
mod parameter;
mod parts;
mod quantised;
mod reduce;
mod rotary;
mod search;
mod select;
mod stored;
mod table;
mod view;

pub use parameter::{
    Flag, In, InOut, InOutShared, InPacked, InStored, Ins, Ints, OptionalIn, OptionalOut, OptionalScalar, Out,
    OutStored, Scalar, Text, Type,
};

use crate::for_each_glue_function;
use crate::trace::trace;
use crate::trace::value::value;
use ascend_spec::operator::name_of_field;
use elementwise as element;
use number::Number;
use parameter::Parameter;

macro_rules! define {
    ($( $(#[$doc:meta])* fn $name:ident ( $( $argument:ident : $kind:ident ),* ) = $compute:expr ; )*) => {
        /// The C names of the operators, each of which has two functions.
        pub const OPERATORS: &[&str] = &[$( stringify!($name) ),*];

        $(
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            $(#[$doc])*
            pub mod $name {
                use super::*;
                use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
                use std::ffi::c_void;

                /// Phase one.
                ///
                /// # Safety
                ///
                /// That of [`abi`](crate::abi).
                #[allow(clippy::too_many_arguments, reason = "the C signature")]
                pub unsafe extern "C" fn prepare(
                    $( $argument: $kind, )*
                    workspaceSize: *mut u64,
                    executor: *mut *mut aclOpExecutor,
                ) -> aclnnStatus {
                    // SAFETY: the caller's promise.
                    let body = || unsafe {
                        call::prepare(stringify!($name), workspaceSize, executor, &mut |call| {
                            $( let $argument = $argument.read(name_of_field(stringify!($argument)), call)?; )*
                            ($compute)($( $argument ),*)
                        })
                    };
                    let Some(trace) = trace() else {
                        return body();
                    };
                    let arguments = [
                        $( (name_of_field(stringify!($argument)), value!($argument)), )*
                        ("workspaceSize", value!(workspaceSize)),
                        ("executor", value!(executor)),
                    ];
                    let function = concat!(stringify!($name), "GetWorkspaceSize");
                    // SAFETY: the caller's promise.
                    unsafe { call::traced(trace, function, &arguments, &body) }
                }

                /// Phase two.
                ///
                /// # Safety
                ///
                /// That of [`abi`](crate::abi).
                pub unsafe extern "C" fn launch(
                    workspace: *mut c_void,
                    workspaceSize: u64,
                    executor: *mut aclOpExecutor,
                    stream: aclrtStream,
                ) -> aclnnStatus {
                    let body =
                        || call::launch(stringify!($name), workspace, workspaceSize, executor, stream);
                    let Some(trace) = trace() else {
                        return body();
                    };
                    let arguments = [
                        ("workspace", value!(workspace)),
                        ("workspaceSize", value!(workspaceSize)),
                        ("executor", value!(executor)),
                        ("stream", value!(stream)),
                    ];
                    // SAFETY: the caller's promise.
                    unsafe { call::traced(trace, stringify!($name), &arguments, &body) }
                }
            }
        )*
    };
}

for_each_glue_function! { define }
