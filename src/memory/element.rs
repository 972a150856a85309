//! Rust types that stand for CANN's element types.

use std::mem;

use ascend_spec::DType;
use ascend_spec::minifloat::{Float8E4M3Fn, Float8E8M0, HiFloat8};
use half::{bf16, f16};

use crate::error::{Error, Result};

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is laid out like one of CANN's element types.
///
/// # Safety
/// The type has the size of its [`DTYPE`](Element::DTYPE), no padding, all zero bits are a value of it, and any bits
/// are one where [`ANY_BITS`](Element::ANY_BITS) is true. Implemented by this crate alone.
pub unsafe trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// CANN's type.
    const DTYPE: DType;
    /// Whether any bits are a value; otherwise each byte that is not 0 is read as 1.
    const ANY_BITS: bool = true;
}

macro_rules! elements {
    ($($type:ty = $dtype:ident;)*) => {
        $(
            impl sealed::Sealed for $type {}
            // SAFETY: a number of the size that CANN gives the type, without invalid bits.
            unsafe impl Element for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    f16 = Float16;
    bf16 = Bf16;
    f32 = Float;
    i8 = Int8;
    u8 = UInt8;
    i32 = Int32;
    i64 = Int64;
    u64 = UInt64;
    Float8E4M3Fn = Float8E4M3Fn;
    HiFloat8 = HiFloat8;
    Float8E8M0 = Float8E8M0;
}

impl sealed::Sealed for bool {}
// SAFETY: one byte; 0 is a value, and `ANY_BITS` is false, since not all are.
unsafe impl Element for bool {
    const DTYPE: DType = DType::Bool;
    const ANY_BITS: bool = false;
}

/// The bytes of some elements.
pub(crate) fn as_bytes<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: the slice is that long, its bytes are initialised (an element has no padding), and it stays borrowed.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), mem::size_of_val(elements)) }
}

/// Makes bytes that came from elsewhere valid elements.
///
/// # Safety
/// `at` points to `len` elements of memory that may be read and written, with initialised bytes.
pub(super) unsafe fn normalise<T: Element>(at: *mut T, len: usize) {
    if T::ANY_BITS {
        return;
    }
    // SAFETY: the memory is as the caller promises; elements have no padding.
    let bytes = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), len * size_of::<T>()) };
    for byte in bytes {
        *byte = u8::from(*byte != 0);
    }
}

/// An empty vector with room for `len` elements on the host, which need not have as much memory as a device.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE).
pub(crate) fn room<T>(len: usize) -> Result<Vec<T>> {
    let mut elements = Vec::new();
    match elements.try_reserve_exact(len) {
        Ok(()) => Ok(elements),
        Err(_) => Err(Error::invalid(
            "tensor",
            format_args!("{len} elements of {} bytes", size_of::<T>()),
            "what fits in the host's memory",
        )
        .fix("copy the tensor in parts, by `narrow`")),
    }
}

/// A vector of `len` zero bytes on the host.
///
/// # Errors
/// As for [`room`].
pub(crate) fn zeros(len: usize) -> Result<Vec<u8>> {
    let mut bytes = room(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// A vector of `len` elements, whose bytes `fill` writes.
pub(crate) fn vec_from<T: Element>(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Vec<T>> {
    let mut elements: Vec<T> = room(len)?;
    // SAFETY: the vector has room for `len` elements; zero bits are a value of each; the bytes that `fill` leaves are
    // made valid before the vector counts them as elements.
    unsafe {
        let start = elements.as_mut_ptr();
        start.write_bytes(0, len);
        let bytes = std::slice::from_raw_parts_mut(start.cast::<u8>(), len * size_of::<T>());
        fill(bytes)?;
        normalise(start, len);
        elements.set_len(len);
    }
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_cann() {
        fn same<T: Element>() {
            assert_eq!(T::DTYPE.size(), Some(size_of::<T>()));
        }
        same::<f16>();
        same::<bf16>();
        same::<f32>();
        same::<i8>();
        same::<u8>();
        same::<bool>();
        same::<i32>();
        same::<i64>();
        same::<u64>();
        same::<Float8E4M3Fn>();
        same::<HiFloat8>();
        same::<Float8E8M0>();
    }

    #[test]
    fn bytes_become_valid_elements() {
        let bools = vec_from::<bool>(3, |bytes| {
            bytes.copy_from_slice(&[0, 1, 255]);
            Ok(())
        });
        assert_eq!(bools, Ok(vec![false, true, true]));
        let halves = vec_from::<f16>(1, |bytes| {
            bytes.copy_from_slice(&[0x00, 0x3c]);
            Ok(())
        });
        assert_eq!(halves, Ok(vec![f16::ONE]));
        assert_eq!(as_bytes(&[1i32, -1]), [1, 0, 0, 0, 255, 255, 255, 255]);
        assert_eq!(vec_from::<i64>(0, |_| Ok(())), Ok(vec![]));
    }
}
