//! Pinned host memory, and copies that run while the host goes on.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ascend_sys::bindings as sys;

use crate::error::{Error, Result, acl_error};
use crate::memory::Element;
use crate::memory::device_buffer::bytes_for;
use crate::memory::element::normalise;
use crate::runtime::{Context, Device, Event, Memory, Resource, Stream, Uses, capturing};

/// Pinned host memory: a slice of elements that the device can copy from and to by itself. From
/// [`Device::host_buffer`].
pub struct HostBuffer<T: Element> {
    context: Arc<Context>,
    start: NonNull<T>,
    len: usize,
    uses: Uses,
    elements: PhantomData<T>,
}

// SAFETY: owns its elements like a `Box<[T]>`; elements are Send.
unsafe impl<T: Element> Send for HostBuffer<T> {}
// SAFETY: as for `Send`; elements are Sync, and a shared buffer is only read.
unsafe impl<T: Element> Sync for HostBuffer<T> {}

impl<T: Element> HostBuffer<T> {
    pub(crate) fn alloc(device: &Device, len: usize) -> Result<Self> {
        let bytes = bytes_for::<T>(len)?;
        let context = device.context();
        let mut start = NonNull::dangling();
        if bytes > 0 {
            capturing::refuse("allocating memory", "allocate before the capture")?;
            let api = context.bind()?;
            context.sweep();
            let malloc = || {
                let mut at: *mut c_void = ptr::null_mut();
                // SAFETY: `at` is a place for the result.
                let status = unsafe { api.aclrtMallocHost()?(&mut at, bytes) };
                match (status, NonNull::new(at.cast::<T>())) {
                    (sys::ACL_SUCCESS, Some(at)) => Ok(at),
                    (failed, _) => Err(acl_error(api, "aclrtMallocHost", failed, bytes)),
                }
            };
            start = match malloc() {
                Err(Error::OutOfMemory { .. }) if context.reclaim() => malloc()?,
                outcome => outcome?,
            };
            // SAFETY: the memory is new and has `len` elements; CANN aligns it to at least 64 bytes.
            unsafe { start.as_ptr().write_bytes(0, len) };
        }
        Ok(Self { context: Arc::clone(context), start, len, uses: Uses::default(), elements: PhantomData })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The address, valid while this object is; dangling if there is no element.
    pub fn as_raw(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    /// Queues a copy of all elements to or from device memory, from byte `offset` of that memory on. The caller has
    /// checked that both belong to the stream's device.
    pub(crate) fn transfer(
        self,
        memory: &Memory,
        offset: usize,
        to_device: bool,
        stream: &Stream,
    ) -> Result<Transfer<T>> {
        let bytes = size_of_val(&*self);
        // SAFETY: this object owns the host memory, hands it out again only after the event below, and its drop waits
        // for the mark.
        let outcome = unsafe { memory.copy_async(offset, self.as_raw(), bytes, to_device, stream) };
        self.uses.mark(stream.progress(), stream.progress().issued());
        outcome?;
        Ok(Transfer { event: stream.record_event()?, buffer: self })
    }
}

impl Device {
    /// Pinned host memory for `len` elements of value 0: what asynchronous copies need.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Device::alloc`].
    #[doc(alias = "aclrtMallocHost")]
    pub fn host_buffer<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        HostBuffer::alloc(self, len)
    }
}

impl<T: Element> Deref for HostBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory has `len` valid elements, and no queued copy writes them: one that does owns the buffer.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for HostBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the memory has `len` valid elements, and no queued copy writes or reads them: one that does owns
        // the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            let at = self.start.as_ptr().cast();
            // SAFETY: this object allocated the memory, and every copy was noted in `uses`.
            unsafe { self.context.retire(Resource::HostMemory(at), &mut self.uses) };
        }
    }
}

impl<T: Element> fmt::Debug for HostBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("dtype", &T::DTYPE).field("len", &self.len).finish_non_exhaustive()
    }
}

/// A queued copy, which owns the host memory until it is over. Dropping it does not wait: the memory is freed later.
#[derive(Debug)]
#[must_use = "the host memory comes back from `wait`"]
pub struct Transfer<T: Element> {
    event: Event,
    buffer: HostBuffer<T>,
}

impl<T: Element> Transfer<T> {
    /// Waits for the copy and gives the host memory back.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`]: the copy, or work before it on the stream, failed; [`Error::Capturing`] on a thread that
    /// captures. The host memory is dropped with the error.
    #[doc(alias = "aclrtSynchronizeEvent")]
    pub fn wait(self) -> Result<HostBuffer<T>> {
        self.event.synchronize()?;
        // SAFETY: the copy is over, so the memory is this thread's; its bytes are initialised.
        unsafe { normalise(self.buffer.start.as_ptr(), self.buffer.len) };
        Ok(self.buffer)
    }

    /// Whether the copy is over.
    ///
    /// # Errors
    /// As for [`Event::is_complete`].
    #[doc(alias = "aclrtQueryEventStatus")]
    pub fn is_complete(&self) -> Result<bool> {
        self.event.is_complete()
    }
}
