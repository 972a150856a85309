//! Tensors, vectors and texts of ATB.

use super::malloc;
use ascend_emu::atb::Tensor;
use std::alloc::{Layout, handle_alloc_error};
use std::ffi::{c_char, c_void};
use std::ptr;
use std::slice;

/// `atb::Dims`.
#[repr(C)]
struct Dims {
    dims: [i64; 8],
    dim_num: u64,
}

/// `atb::TensorDesc`.
#[repr(C)]
struct TensorDesc {
    dtype: i32,
    format: i32,
    shape: Dims,
}

/// `atb::Tensor`.
#[repr(C)]
pub(super) struct CTensor {
    desc: TensorDesc,
    device_data: *mut c_void,
    host_data: *mut c_void,
    data_size: u64,
}

/// `atb::SVector`: up to 64 elements in place, more on the heap.
#[repr(C)]
pub(super) struct SVector<T> {
    capacity: usize,
    size: usize,
    storage: [T; 65],
    heap: *mut T,
}

/// `atb::VariantPack`.
#[repr(C)]
pub(super) struct VariantPack {
    pub(super) inputs: SVector<CTensor>,
    pub(super) outputs: SVector<CTensor>,
}

const _: () = {
    assert!(size_of::<CTensor>() == 0x68);
    assert!(size_of::<SVector<CTensor>>() == 0x1a80);
    assert!(size_of::<VariantPack>() == 0x3500);
};

impl<T> SVector<T> {
    /// The elements.
    ///
    /// # Safety
    ///
    /// The vector is one that a client has made.
    pub(super) unsafe fn elements(&self) -> &[T] {
        match self.heap.is_null() {
            true => self.storage.get(..self.size).unwrap_or_default(),
            // SAFETY: a client's vector that is not in place has its `size` elements behind `heap`, which do not
            // change while it is borrowed.
            false => unsafe { slice::from_raw_parts(self.heap, self.size) },
        }
    }
}

impl CTensor {
    fn shape(&self) -> &[i64] {
        let rank = usize::try_from(self.desc.shape.dim_num).unwrap_or(usize::MAX);
        self.desc.shape.dims.get(..rank).unwrap_or_default()
    }

    /// The tensor as the emulation takes it.
    ///
    /// # Safety
    ///
    /// The bytes of a tensor on the host may be read.
    pub(super) unsafe fn given(&self) -> Tensor<'_> {
        const INT32: i32 = 3;
        let elements = self.shape().iter().try_fold(1usize, |all, &size| all.checked_mul(usize::try_from(size).ok()?));
        let bytes = elements.and_then(|elements| elements.checked_mul(size_of::<i32>()));
        let readable = !self.host_data.is_null()
            && self.desc.dtype == INT32
            && self.host_data.cast::<i32>().is_aligned()
            && bytes.is_some_and(|bytes| bytes as u64 <= self.data_size);
        Tensor {
            dtype: self.desc.dtype,
            format: self.desc.format,
            shape: self.shape(),
            address: self.device_data.addr(),
            host: elements.filter(|_| readable).map(|elements| {
                // SAFETY: the caller promises that the `data_size` bytes at `host_data` may be read; the elements are
                // within them, and the address is aligned, as `readable` says.
                unsafe { slice::from_raw_parts(self.host_data.cast::<i32>(), elements) }
            }),
        }
    }
}

/// `std::string` as GNU's library has it, where the text is longer than 15 bytes.
#[repr(C)]
pub(super) struct CString {
    text: *mut c_char,
    length: usize,
    capacity: usize,
    unused: usize,
}

impl CString {
    /// A text in memory that the client gives back by `operator delete`, which is `free`.
    pub(super) fn new(text: &str) -> Self {
        let mut text = text.to_owned();
        // Shorter texts are within the string itself, whose place is not known here.
        while text.len() < 16 {
            text.push(' ');
        }
        let length = text.len();
        // SAFETY: `malloc` may be called with any size.
        let memory = unsafe { malloc(length + 1) }.cast::<u8>();
        if memory.is_null() {
            handle_alloc_error(Layout::for_value(text.as_bytes()));
        }
        // SAFETY: `malloc` gave `length + 1` bytes, room for the text and the zero behind it, and they overlap nothing.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr(), memory, length);
            memory.add(length).write(0);
        }
        CString { text: memory.cast(), length, capacity: length, unused: 0 }
    }
}

/// `atb::Utils::GetTensorSize(atb::Tensor const&)`: the bytes of a tensor; 0 for one without axes.
///
/// # Safety
///
/// `tensor` is a reference.
// SAFETY: the name is the library's purpose, and no other crate in this shared library defines it.
#[unsafe(export_name = "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE")]
unsafe extern "C" fn tensor_size(tensor: *const CTensor) -> u64 {
    // SAFETY: the caller promises a reference to a tensor, which does not change during the call.
    let tensor = unsafe { &*tensor };
    let bytes = ascend_emu::atb::element_bytes(tensor.desc.dtype);
    let elements = tensor.shape().iter().try_fold(1u64, |all, &size| all.checked_mul(u64::try_from(size).ok()?));
    match (tensor.shape(), elements) {
        ([], _) | (_, None) => 0,
        (_, Some(elements)) => elements.saturating_mul(bytes),
    }
}
