//! Device memory as an array of elements.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::{Element, as_bytes, vec_from};
use crate::runtime::{Device, Memory, Stream};

/// Device memory for a number of elements. From [`Device::alloc`] or [`Device::alloc_zeroed`].
///
/// Dropping it while queued work uses it is safe and does not wait: the memory is freed when that work is over.
///
/// # Threads
/// `Send` and `Sync`. What different streams do with the memory has to be ordered by events, or the values are
/// unspecified.
pub struct DeviceBuffer<T: Element> {
    memory: Arc<Memory>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    pub(crate) fn alloc(device: &Device, len: usize) -> Result<Self> {
        let bytes = bytes_for::<T>(len)?;
        let memory = Memory::alloc(device.context(), bytes)?;
        Ok(Self { memory: Arc::new(memory), len, elements: PhantomData })
    }

    /// Wraps memory of another owner, such as another framework. Dropping the buffer does not free the memory.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a null address with elements, or more bytes than can be
    /// addressed.
    ///
    /// # Safety
    /// `address` is device memory of at least `len` elements on this device, aligned to the element. It stays allocated
    /// as long as this object and everything made of it, and until the work queued with them is over.
    pub unsafe fn from_raw_borrowed(device: &Device, address: *mut c_void, len: usize) -> Result<Self> {
        let bytes = bytes_for::<T>(len)?;
        if address.is_null() && bytes > 0 {
            return Err(Error::invalid("address", "null", "device memory")
                .fix("pass an address that an allocation returned, or no elements"));
        }
        // SAFETY: handed on to the caller.
        let memory = unsafe { Memory::borrowed(device.context(), address, bytes) };
        Ok(Self { memory: Arc::new(memory), len, elements: PhantomData })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address on the device, valid while this object is; null if there is no element. Work that other libraries
    /// queue with it has to be over before the buffer is dropped.
    pub fn as_raw(&self) -> *mut c_void {
        self.memory.address()
    }

    /// Waits for a stream, then copies elements in, from the first on, and waits for that.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// more elements than there are, or a stream of another device; [`Error::Acl`]; [`Error::Capturing`] on a thread
    /// that captures.
    #[doc(alias = "aclrtMemcpy")]
    pub fn copy_from(&self, stream: &Stream, elements: &[T]) -> Result<()> {
        self.memory.context().admits("stream", stream.context())?;
        stream.synchronize()?;
        self.memory.write(0, as_bytes(elements))
    }

    /// Waits for a stream, then copies all elements out.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; [`Error::Acl`]: the copy,
    /// or work on the stream, failed; [`Error::Capturing`] on a thread that captures.
    #[doc(alias = "aclrtMemcpy")]
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>> {
        self.memory.context().admits("stream", stream.context())?;
        stream.synchronize()?;
        vec_from(self.len, |bytes| self.memory.read(0, bytes))
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl Device {
    /// Device memory for `len` elements, whose content is whatever was there before.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), after having waited for memory that dropped buffers still
    /// held; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for more bytes than can be addressed;
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures, unless `len` is 0.
    #[doc(alias = "aclrtMalloc")]
    pub fn alloc<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::alloc(self, len)
    }

    /// Device memory for `len` elements of value 0.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Device::alloc`], and [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtMemset")]
    pub fn alloc_zeroed<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let buffer = DeviceBuffer::alloc(self, len)?;
        buffer.memory().zero()?;
        Ok(buffer)
    }
}

impl<T: Element> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("dtype", &T::DTYPE)
            .field("len", &self.len)
            .field("address", &self.memory.address())
            .finish()
    }
}

/// Bytes of a number of elements. No object can be larger than `isize::MAX` bytes.
pub(super) fn bytes_for<T: Element>(len: usize) -> Result<usize> {
    len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(|| {
        Error::invalid("len", len, format_args!("at most {}", isize::MAX.unsigned_abs() / size_of::<T>()))
            .fix("allocate several buffers")
    })
}
