//! Decodes arguments and results of a call to JSON, including the contents of handles and pointers.
//!
//! Only memory that the function itself may access is read: the caller's number of elements of an array, and the
//! results of a call that succeeded. Handles are looked up and not followed.

use super::json::Json;
use super::value::{Name, Pointee, Value};
use crate::descriptor::{
    BOOL_ARRAYS, DescribedTensor, FLOAT_ARRAYS, INT_ARRAYS, MOST_ELEMENTS, SCALARS, Scalar, TENSOR_LISTS, TENSORS,
};
use crate::handle::Kind;
use ascend_spec::{DType, Dims};
use ascend_sys::bindings::{aclDataType, aclFormat};
use half::{bf16, f16};
use std::ffi::{c_char, c_void};
use std::ptr;

/// Largest number of characters of a text that are shown.
const TEXT: usize = 4096;

/// Largest number of elements of an array that are shown.
const ARRAY: usize = 1024;

/// Largest number of members of a list that are shown.
const LIST: usize = 64;

/// A call's arguments by name.
pub(crate) type Arguments<'a> = &'a [(&'static str, Value)];

/// Writes an argument as it is before the call.
///
/// # Safety
///
/// The arguments keep the contract of [`abi`](crate::abi).
pub(super) unsafe fn argument(json: &mut Json, function: &str, name: &str, value: &Value, arguments: Arguments<'_>) {
    json.key(shown(name));
    match *value {
        // SAFETY: the caller's promise for a text that the function reads.
        Value::Text(text) => unsafe { self::text(json, text) },
        Value::Characters(text) if reads_text(function, name) => {
            // SAFETY: the caller's promise, since the function reads a text here.
            unsafe { self::text(json, text) }
        }
        Value::Elements(pointee, array) => match count(name, arguments) {
            // SAFETY: the caller's promise for an array and the argument that has its length.
            Some(count) if !array.is_null() => unsafe { elements(json, pointee, array, count) },
            _ => json.address(array.addr()),
        },
        Value::Out(pointee, array) => match batch(name, arguments) {
            // SAFETY: the caller's promise for an array and the argument that has its length.
            Some(count) if !array.is_null() => unsafe { elements(json, pointee, array, count) },
            _ => json.address(array.addr()),
        },
        Value::Characters(text) => json.address(text.addr()),
        Value::Handle(kind, handle) => self::handle(json, kind, handle),
        ref plain => self::plain(json, plain),
    }
}

/// Writes the value that a successful call has written through an argument.
///
/// # Safety
///
/// As for [`argument`], after the call.
pub(super) unsafe fn written(json: &mut Json, function: &str, name: &str, value: &Value, arguments: Arguments<'_>) {
    match *value {
        Value::Out(..) if batch(name, arguments).is_some() => {}
        Value::Out(pointee, at) if !at.is_null() => {
            json.key(shown(name));
            // SAFETY: the function has written a value there.
            unsafe { self::pointee(json, pointee, at) }
        }
        Value::Characters(text) if !reads_text(function, name) => {
            json.key(shown(name));
            // SAFETY: the function has written a text there.
            unsafe { self::text(json, text) }
        }
        _ => {}
    }
}

/// Writes a result that is no status.
///
/// # Safety
///
/// A text is null or ends in NUL.
pub(super) unsafe fn returned(json: &mut Json, value: &Value) {
    match *value {
        // SAFETY: the caller's promise.
        Value::Text(text) | Value::Characters(text) => unsafe { self::text(json, text) },
        Value::Handle(_, handle) => json.address(handle),
        Value::Elements(_, at) | Value::Out(_, at) => json.address(at.addr()),
        ref plain => self::plain(json, plain),
    }
}

/// Whether characters that a function could write are a text that it reads. Operators write no texts.
fn reads_text(function: &str, argument: &str) -> bool {
    function.starts_with("aclnn") || argument == "pkgName"
}

/// The name that an argument has in the headers, where its Rust name differs.
fn shown(name: &str) -> &str {
    name.trim_end_matches('_')
}

/// The number of elements of an array, read from the argument that holds it.
fn count(array: &str, arguments: Arguments<'_>) -> Option<usize> {
    let counter = match array {
        "viewDims" | "stride" => "viewDimsNum",
        "storageDims" => "storageDimsNum",
        _ => "size",
    };
    number(counter, arguments)
}

/// The number of elements of an array that a function reads through a pointer to non-const.
fn batch(array: &str, arguments: Arguments<'_>) -> Option<usize> {
    let counter = match array {
        "dsts" | "destMaxs" | "srcs" | "sizes" => "numBatches",
        "attrsIndexes" => "numAttrs",
        "devices" => "ndev",
        _ => return None,
    };
    number(counter, arguments)
}

/// The value of the argument with this name, as the length of an array.
fn number(counter: &str, arguments: Arguments<'_>) -> Option<usize> {
    let (_, value) = arguments.iter().find(|(name, _)| *name == counter)?;
    match *value {
        // An array that is refused for its length is not read.
        Value::Unsigned(count) if count <= MOST_ELEMENTS => usize::try_from(count).ok(),
        _ => None,
    }
}

/// # Safety
///
/// `text` is null or ends in NUL.
unsafe fn text(json: &mut Json, text: *const c_char) {
    if text.is_null() {
        return json.null();
    }
    // SAFETY: not null, and read up to its NUL alone.
    let character = |index: usize| unsafe { text.cast::<u8>().add(index).read() };
    let bytes: Vec<u8> = (0..TEXT).map(character).take_while(|&b| b != 0).collect();
    json.string(&String::from_utf8_lossy(&bytes));
}

/// # Safety
///
/// `array` is valid for reading `count` values of the type.
unsafe fn elements(json: &mut Json, pointee: Pointee, array: *const c_void, count: usize) {
    json.bounded(0..count, ARRAY, |json, index| {
        // SAFETY: the array has this value.
        unsafe { self::pointee(json, pointee, array.byte_add(index * pointee.bytes())) }
    });
}

/// # Safety
///
/// `pointer` is valid for reading a value of the type.
unsafe fn pointee(json: &mut Json, pointee: Pointee, pointer: *const c_void) {
    // SAFETY: the caller's promise; C may give it any alignment.
    unsafe {
        match pointee {
            Pointee::I32 => json.integer(pointer.cast::<i32>().read_unaligned()),
            Pointee::U32 => json.integer(pointer.cast::<u32>().read_unaligned()),
            Pointee::I64 => json.integer(pointer.cast::<i64>().read_unaligned()),
            Pointee::U64 => json.integer(pointer.cast::<u64>().read_unaligned()),
            Pointee::F32 => json.real(pointer.cast::<f32>().read_unaligned()),
            // A `bool` of C may hold what one of Rust may not.
            Pointee::Flag => json.boolean(pointer.cast::<u8>().read() != 0),
            Pointee::Pointer => json.address(pointer.cast::<*const c_void>().read_unaligned().addr()),
            Pointee::Enumeration(read) => name(json, read(pointer)),
        }
    }
}

fn name(json: &mut Json, name: Name) {
    match name.name {
        Some(name) => json.string(name),
        None => json.integer(name.code),
    }
}

fn plain(json: &mut Json, value: &Value) {
    match *value {
        Value::Signed(number) => json.integer(number),
        Value::Unsigned(number) => json.integer(number),
        Value::Single(number) => json.real(number),
        Value::Double(number) => json.real(number),
        Value::Flag(flag) => json.boolean(flag),
        Value::Named(name) => self::name(json, name),
        Value::Address(address) => json.address(address),
        Value::Other(ref text) => json.string(text),
        // Handled by the callers, each in its way.
        Value::Text(_) | Value::Characters(_) | Value::Handle(..) | Value::Elements(..) | Value::Out(..) => json.null(),
    }
}

/// Writes the contents of a handle, or the bare handle if no object has it.
fn handle(json: &mut Json, kind: Kind, handle: usize) {
    let raw: *const c_void = ptr::without_provenance(handle);
    match kind {
        _ if handle == 0 => json.null(),
        Kind::Tensor => match TENSORS.get(raw) {
            Ok(found) => tensor(json, Some(handle), &found.get()),
            Err(_) => json.address(handle),
        },
        Kind::TensorList => match TENSOR_LISTS.get(raw) {
            Ok(list) => {
                let members: Vec<_> = list.members(&TENSORS).collect();
                json.bounded(members.iter(), LIST, |json, member| match member {
                    Ok(found) => tensor(json, None, &found.get()),
                    Err(_) => json.null(),
                });
            }
            Err(_) => json.address(handle),
        },
        Kind::IntArray => match INT_ARRAYS.get(raw) {
            Ok(array) => json.bounded(array.iter(), ARRAY, |json, &value| json.integer(value)),
            Err(_) => json.address(handle),
        },
        Kind::FloatArray => match FLOAT_ARRAYS.get(raw) {
            Ok(array) => json.bounded(array.iter(), ARRAY, |json, &value| json.real(value)),
            Err(_) => json.address(handle),
        },
        Kind::BoolArray => match BOOL_ARRAYS.get(raw) {
            Ok(array) => json.bounded(array.iter(), ARRAY, |json, &value| json.boolean(value)),
            Err(_) => json.address(handle),
        },
        Kind::Scalar => match SCALARS.get(raw) {
            Ok(found) => scalar(json, &found),
            Err(_) => json.address(handle),
        },
        // Lists of scalars, and handles of the runtime, are shown by their number alone.
        _ => json.address(handle),
    }
}

/// Writes a scalar as its number, or only its type if the type is not a number.
fn scalar(json: &mut Json, scalar: &Scalar) {
    /// The first bytes of a scalar.
    fn first<const N: usize>(scalar: &Scalar) -> [u8; N] {
        let mut bytes = [0; N];
        let pairs = bytes.iter_mut().zip(scalar.bytes());
        pairs.for_each(|(to, from)| *to = *from);
        bytes
    }
    match scalar.dtype() {
        DType::Float => json.real(f32::from_le_bytes(first(scalar))),
        DType::Double => json.real(f64::from_le_bytes(first(scalar))),
        DType::Float16 => json.real(f16::from_le_bytes(first(scalar)).to_f32()),
        DType::Bf16 => json.real(bf16::from_le_bytes(first(scalar)).to_f32()),
        DType::Int8 => json.integer(i8::from_le_bytes(first(scalar))),
        DType::Int16 => json.integer(i16::from_le_bytes(first(scalar))),
        DType::Int32 => json.integer(i32::from_le_bytes(first(scalar))),
        DType::Int64 => json.integer(i64::from_le_bytes(first(scalar))),
        DType::UInt8 => json.integer(u8::from_le_bytes(first(scalar))),
        DType::UInt64 => json.integer(u64::from_le_bytes(first(scalar))),
        DType::Bool => json.boolean(first::<1>(scalar) != [0]),
        other => name(json, Name::of(aclDataType(other.acl()))),
    }
}

/// Writes a tensor; strides, offset and storage only where the shape does not imply them.
fn tensor(json: &mut Json, handle: Option<usize>, tensor: &DescribedTensor) {
    let desc = &tensor.desc;
    let dims = |json: &mut Json, dims: &Dims| {
        json.array(|json| dims.iter().for_each(|&dim| json.integer(dim)));
    };
    json.object(|json| {
        if let Some(handle) = handle {
            json.key("handle").address(handle);
        }
        let dtype = desc.dtype.acl();
        name(json.key("dtype"), Name::of(aclDataType(dtype)));
        dims(json.key("shape"), &desc.shape);
        if desc.strides != desc.shape.contiguous_strides() {
            dims(json.key("strides"), &desc.strides);
        }
        if desc.offset != 0 {
            json.key("offset").integer(desc.offset);
        }
        if tensor.storage != desc.shape {
            dims(json.key("storage"), &tensor.storage);
        }
        let format = desc.format.acl();
        name(json.key("format"), Name::of(aclFormat(format)));
        json.key("address").address(tensor.address);
    });
}
