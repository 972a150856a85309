//! The kind of an argument of a call, by its type.
//!
//! Method resolution chooses the trait, from the most special to the most general one, so that an argument of any
//! type is traced.

use crate::handle::Kind;
use ascend_sys::Enumeration;
use ascend_sys::bindings::{
    aclBoolArray, aclFloatArray, aclIntArray, aclScalar, aclScalarList, aclTensor, aclTensorList,
};
use std::ffi::{c_char, c_void};
use std::fmt::Debug;

/// An argument or a result, without the memory that it points to.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Signed(i64),
    Unsigned(u64),
    Single(f32),
    Double(f64),
    Flag(bool),
    Named(Name),
    /// A handle without contents, or an address.
    Address(usize),
    /// A text that the function reads.
    Text(*const c_char),
    /// Characters that the function reads or writes.
    Characters(*const c_char),
    Handle(Kind, usize),
    /// Elements that the function reads; another argument has their number.
    Elements(Pointee, *const c_void),
    /// One value that the function writes.
    Out(Pointee, *const c_void),
    /// A value of another type, as Rust shows it.
    Other(String),
}

/// A value of an enumeration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Name {
    pub(super) code: i64,
    pub(super) name: Option<&'static str>,
}

impl Name {
    pub(super) fn of(value: impl Enumeration) -> Self {
        Name { code: value.code(), name: value.name() }
    }
}

/// The types that a function reads or writes through a pointer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pointee {
    I32,
    U32,
    I64,
    U64,
    F32,
    Flag,
    Pointer,
    Enumeration(unsafe fn(*const c_void) -> Name),
}

impl Pointee {
    /// Bytes of one value.
    pub(super) fn bytes(self) -> usize {
        match self {
            Pointee::Flag => 1,
            Pointee::I32 | Pointee::U32 | Pointee::F32 | Pointee::Enumeration(_) => 4,
            Pointee::I64 | Pointee::U64 | Pointee::Pointer => 8,
        }
    }
}

/// # Safety
///
/// `at` is valid for reading a `T`.
unsafe fn read_name<T: Enumeration>(pointer: *const c_void) -> Name {
    // SAFETY: the caller's promise; C may give it any alignment.
    Name::of(unsafe { pointer.cast::<T>().read_unaligned() })
}

/// Wraps an argument, for the traits below.
#[derive(Debug)]
pub(crate) struct Argument<T>(pub(crate) T);

/// Types with an implementation of their own.
pub(crate) trait KnownType {
    fn value(&self) -> Value;
}

macro_rules! known {
    ($($type:ty: $given:ident => $value:expr;)*) => {
        $(
            impl KnownType for &&&&Argument<$type> {
                fn value(&self) -> Value {
                    let $given = self.0;
                    $value
                }
            }
        )*
    };
}

known! {
    i8: number => Value::Signed(number.into());
    i32: number => Value::Signed(number.into());
    i64: number => Value::Signed(number);
    u16: number => Value::Unsigned(number.into());
    u32: number => Value::Unsigned(number.into());
    u64: number => Value::Unsigned(number);
    usize: number => Value::Unsigned(number as u64);
    f32: number => Value::Single(number);
    f64: number => Value::Double(number);
    bool: flag => Value::Flag(flag);
    *const c_char: text => Value::Text(text);
    *mut c_char: text => Value::Characters(text);
    *const aclTensor: handle => Value::Handle(Kind::Tensor, handle.addr());
    *mut aclTensor: handle => Value::Handle(Kind::Tensor, handle.addr());
    *const aclTensorList: handle => Value::Handle(Kind::TensorList, handle.addr());
    *mut aclTensorList: handle => Value::Handle(Kind::TensorList, handle.addr());
    *const aclScalar: handle => Value::Handle(Kind::Scalar, handle.addr());
    *mut aclScalar: handle => Value::Handle(Kind::Scalar, handle.addr());
    *const aclScalarList: handle => Value::Handle(Kind::ScalarList, handle.addr());
    *mut aclScalarList: handle => Value::Handle(Kind::ScalarList, handle.addr());
    *const aclIntArray: handle => Value::Handle(Kind::IntArray, handle.addr());
    *mut aclIntArray: handle => Value::Handle(Kind::IntArray, handle.addr());
    *const aclFloatArray: handle => Value::Handle(Kind::FloatArray, handle.addr());
    *mut aclFloatArray: handle => Value::Handle(Kind::FloatArray, handle.addr());
    *const aclBoolArray: handle => Value::Handle(Kind::BoolArray, handle.addr());
    *mut aclBoolArray: handle => Value::Handle(Kind::BoolArray, handle.addr());
    *const i64: array => Value::Elements(Pointee::I64, array.cast());
    *const f32: array => Value::Elements(Pointee::F32, array.cast());
    *const bool: array => Value::Elements(Pointee::Flag, array.cast());
    *const *const aclTensor: array => Value::Elements(Pointee::Pointer, array.cast());
    *const *const aclScalar: array => Value::Elements(Pointee::Pointer, array.cast());
    *mut i32: to => Value::Out(Pointee::I32, to.cast_const().cast());
    *mut u32: to => Value::Out(Pointee::U32, to.cast_const().cast());
    *mut i64: to => Value::Out(Pointee::I64, to.cast_const().cast());
    *mut u64: to => Value::Out(Pointee::U64, to.cast_const().cast());
    *mut usize: to => Value::Out(Pointee::U64, to.cast_const().cast());
    *mut f32: to => Value::Out(Pointee::F32, to.cast_const().cast());
}

impl<T> KnownType for &&&&Argument<*mut *mut T> {
    fn value(&self) -> Value {
        Value::Out(Pointee::Pointer, self.0.cast_const().cast())
    }
}

impl<T> KnownType for &&&&Argument<*mut *const T> {
    fn value(&self) -> Value {
        Value::Out(Pointee::Pointer, self.0.cast_const().cast())
    }
}

/// Values of enumerations.
pub(crate) trait Enumerator {
    fn value(&self) -> Value;
}

impl<T: Enumeration> Enumerator for &&&Argument<T> {
    fn value(&self) -> Value {
        Value::Named(Name::of(self.0))
    }
}

/// Pointers that an enumeration is written through.
pub(crate) trait EnumerationOut {
    fn value(&self) -> Value;
}

impl<T: Enumeration> EnumerationOut for &&Argument<*mut T> {
    fn value(&self) -> Value {
        Value::Out(Pointee::Enumeration(read_name::<T>), self.0.cast_const().cast())
    }
}

/// Pointers to anything else, of which only the address is shown.
pub(crate) trait Pointer {
    fn value(&self) -> Value;
}

impl<T> Pointer for &Argument<*const T> {
    fn value(&self) -> Value {
        Value::Address(self.0.addr())
    }
}

impl<T> Pointer for &Argument<*mut T> {
    fn value(&self) -> Value {
        Value::Address(self.0.addr())
    }
}

/// Any other type: callbacks and structures.
pub(crate) trait ShownType {
    fn value(&self) -> Value;
}

impl<T: Debug> ShownType for Argument<T> {
    fn value(&self) -> Value {
        Value::Other(format!("{:?}", self.0))
    }
}

/// The [`Value`] of an argument.
macro_rules! value {
    ($argument:expr) => {{
        #[allow(unused_imports, reason = "method resolution takes the first that has the type")]
        use $crate::trace::value::{EnumerationOut, Enumerator, KnownType, Pointer, ShownType};
        (&&&&&$crate::trace::value::Argument($argument)).value()
    }};
}
pub(crate) use value;

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_sys::bindings::{aclFormat, aclOpExecutor, aclrtRunMode};
    use std::ptr;

    #[test]
    fn a_type_takes_the_most_special_way() {
        assert!(matches!(value!(-1i32), Value::Signed(-1)));
        assert!(matches!(value!(u64::MAX), Value::Unsigned(u64::MAX)));
        let text: *const c_char = c"x".as_ptr();
        assert!(matches!(value!(text), Value::Text(_)));
        let tensor: *const aclTensor = ptr::without_provenance(0xb1);
        assert!(matches!(value!(tensor), Value::Handle(Kind::Tensor, 0xb1)));
        let executor: *mut aclOpExecutor = ptr::without_provenance_mut(0xb8);
        assert!(matches!(value!(executor), Value::Address(0xb8)));
        let out: *mut *mut aclOpExecutor = ptr::null_mut();
        assert!(matches!(value!(out), Value::Out(Pointee::Pointer, _)));
        let Value::Named(name) = value!(aclFormat::ACL_FORMAT_NCL) else {
            panic!("no enumeration");
        };
        assert_eq!((name.code, name.name), (47, Some("ACL_FORMAT_NCL")));
        let mut mode = aclrtRunMode::ACL_HOST;
        let Value::Out(Pointee::Enumeration(read), at) = value!(&raw mut mode) else {
            panic!("no result");
        };
        // SAFETY: `mode` is alive.
        assert_eq!(unsafe { read(at) }.name, Some("ACL_HOST"));
        assert!(matches!(value!(Some(5u8)), Value::Other(text) if text == "Some(5)"));
    }
}
