//! Contiguous copies of strided tensors.

use crate::host_memory::{HostMemoryExhausted, try_with_capacity};
use ascend_spec::TensorDesc;

/// Bytes of an element; 0 for types that share bytes.
fn size(desc: &TensorDesc) -> usize {
    desc.dtype.size().unwrap_or(0)
}

/// Visits the offset in bytes of each element of a tensor, in row-major order.
fn each_element(desc: &TensorDesc, mut visit: impl FnMut(isize)) {
    let size = size(desc) as i64;
    let mut index = [0i64; ascend_spec::Dims::MAX_RANK];
    for _ in 0..desc.elements().unwrap_or(0) {
        let axes = index.iter().zip(desc.strides.iter());
        let element = axes.fold(desc.offset, |at, (i, stride)| at + i * stride);
        visit((element * size) as isize);
        for (index, &dim) in index.iter_mut().zip(desc.shape.iter()).rev() {
            *index += 1;
            if *index < dim {
                break;
            }
            *index = 0;
        }
    }
}

/// The elements of a tensor at `base`, in row-major order.
///
/// # Errors
/// There is no host memory for the elements.
///
/// # Safety
///
/// The bytes of the description may be read.
pub(super) unsafe fn gather(desc: &TensorDesc, base: *const u8) -> Result<Vec<u8>, HostMemoryExhausted> {
    let size = size(desc);
    let elements = desc.elements().and_then(|count| usize::try_from(count).ok());
    let mut copy = try_with_capacity(elements.unwrap_or(usize::MAX).saturating_mul(size))?;
    each_element(desc, |at| {
        for byte in 0..size {
            // SAFETY: the byte is one of the description's, by the caller's promise.
            copy.push(unsafe { base.wrapping_offset(at).wrapping_add(byte).read() });
        }
    });
    Ok(copy)
}

/// Writes elements in row-major order to a tensor at `base`.
///
/// # Safety
///
/// The bytes of the description may be written.
pub(super) unsafe fn scatter(desc: &TensorDesc, elements: &[u8], base: *mut u8) {
    let size = size(desc);
    let mut elements = elements.chunks_exact(size.max(1));
    each_element(desc, |at| {
        for (byte, &value) in elements.next().into_iter().flatten().enumerate() {
            // SAFETY: the byte is one of the description's, by the caller's promise.
            unsafe { base.wrapping_offset(at).wrapping_add(byte).write(value) };
        }
    });
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::{gather, scatter};
    use ascend_spec::{DType, Dims, TensorDesc};

    #[test]
    fn strided_elements_come_and_go_in_order() {
        let desc =
            TensorDesc { strides: Dims::of([1, -4]), offset: 9, ..TensorDesc::packed(DType::UInt8, Dims::of([2, 3])) };
        let mut bytes: Vec<u8> = (0..12).collect();
        // SAFETY: the description ends with byte 10.
        let copy = unsafe { gather(&desc, bytes.as_ptr()) }.unwrap();
        assert_eq!(copy, [9, 5, 1, 10, 6, 2]);
        // SAFETY: the description ends with byte 10, and there are six elements.
        unsafe { scatter(&desc, &[20, 21, 22, 23, 24, 25], bytes.as_mut_ptr()) };
        assert_eq!(bytes, [0, 22, 25, 3, 4, 21, 24, 7, 8, 20, 23, 11]);
    }
}
