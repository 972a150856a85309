//! One piece of device memory, and the work that uses it.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ascend_sys::bindings as sys;

use crate::error::{Error, Result, acl, acl_error};

use super::{Context, Resource, Uses, capturing};

/// One piece of device memory. Dropping it frees it, as soon as no queued work uses it.
pub(crate) struct Memory {
    context: Arc<Context>,
    /// Null if it has no bytes.
    address: *mut c_void,
    bytes: usize,
    owned: bool,
    /// Whether other owners rely on the content.
    frozen: AtomicBool,
    uses: Uses,
}

// SAFETY: `address` is a place on the device: the host reads and writes nothing through it, and CANN's copies are
// given it from any thread.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory of some bytes; none for 0.
    pub(crate) fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut memory = Self {
            context: Arc::clone(context),
            address: ptr::null_mut(),
            bytes,
            owned: true,
            frozen: AtomicBool::new(false),
            uses: Uses::default(),
        };
        if bytes == 0 {
            return Ok(memory);
        }
        capturing::refuse("allocating memory", "allocate before the capture")?;
        let api = context.bind()?;
        context.sweep();
        let mut malloc = || {
            let policy = sys::aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST;
            // SAFETY: `address` is a place for the result.
            let status = unsafe { api.aclrtMalloc()?(&mut memory.address, bytes, policy) };
            match status {
                sys::ACL_SUCCESS => Ok(()),
                failed => Err(acl_error(api, "aclrtMalloc", failed, bytes)),
            }
        };
        match malloc() {
            // Memory that was dropped but is still in use may be what is missing.
            Err(Error::OutOfMemory { .. }) if context.reclaim() => malloc()?,
            outcome => outcome?,
        }
        Ok(memory)
    }

    /// Wraps memory that another owner has allocated.
    ///
    /// # Safety
    /// As for [`DeviceBuffer::from_raw_borrowed`](super::DeviceBuffer::from_raw_borrowed).
    pub(crate) unsafe fn borrowed(context: &Arc<Context>, address: *mut c_void, bytes: usize) -> Self {
        Self {
            context: Arc::clone(context),
            address,
            bytes,
            owned: false,
            frozen: AtomicBool::new(false),
            uses: Uses::default(),
        }
    }

    #[inline]
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        self.address
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    #[inline]
    pub(crate) fn uses(&self) -> &Uses {
        &self.uses
    }

    /// Whether all queued work that uses the memory is known to be over. If not, an event is recorded so that a later
    /// call knows.
    pub(crate) fn is_idle(&self) -> bool {
        let api = self.context.bind();
        api.is_ok_and(|api| self.uses.are_over(api))
    }

    /// Address of a byte; null if the memory has none.
    #[inline]
    pub(crate) fn at(&self, offset: usize) -> *mut c_void {
        self.address.wrapping_byte_add(if self.address.is_null() { 0 } else { offset })
    }

    /// Refuses a range of `len` bytes from an offset on that is not within this memory.
    pub(super) fn holds(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Error::invalid(
                "memory",
                format_args!("{len} bytes from byte {offset} on"),
                format_args!("at most the {} bytes of the memory", self.bytes),
            )
            .fix("stay within the memory")),
        }
    }

    /// Lets only [`Memory::renew`] write to the memory from now on.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Refuses to write to memory whose content other owners rely on.
    pub(crate) fn writable(&self, argument: &'static str) -> Result<()> {
        if !self.frozen.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::shared(
            argument,
            "memory that others rely on: a tensor of the mask cache, which all callers share, a block table, lengths, \
             slots, a padding",
            "one of your own, such as `Masks::custom` makes; `BlockTable::overwrite`, `SlotMapping::overwrite` and \
             `SparseSequences::overwrite` check what they write",
        )
        .fix(
            "write to a tensor of your own, or by `overwrite` of the table, slots or sequences; make those anew that \
             have none",
        ))
    }

    /// Copies host bytes in and waits for that. Does not wait for work that uses the memory.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.writable("tensor")?;
        self.renew(offset, bytes)
    }

    /// As [`Memory::write`], but also for frozen memory, for its owner.
    pub(crate) fn renew(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.holds(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        capturing::refuse("a copy that the host waits for", "copy before the capture")?;
        let api = self.context.bind()?;
        let kind = sys::aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE;
        // SAFETY: source and destination have `bytes.len()` bytes, as checked; the copy is over when the call
        // returns.
        unsafe {
            acl!(api, aclrtMemcpy(self.at(offset), self.bytes - offset, bytes.as_ptr().cast(), bytes.len(), kind,))
        }
    }

    /// Copies bytes out and waits for that. Does not wait for work that uses the memory.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.holds(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        capturing::refuse("a copy that the host waits for", "copy before the capture")?;
        let api = self.context.bind()?;
        let kind = sys::aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_HOST;
        // SAFETY: source and destination have `bytes.len()` bytes, as checked; the copy is over when the call
        // returns.
        unsafe { acl!(api, aclrtMemcpy(bytes.as_mut_ptr().cast(), bytes.len(), self.at(offset), bytes.len(), kind,)) }
    }

    /// Sets all bytes to 0 and waits for that.
    pub(crate) fn zero(&self) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        capturing::refuse("a copy that the host waits for", "copy before the capture")?;
        let api = self.context.bind()?;
        // SAFETY: the memory has `bytes` bytes; the call returns when it is done.
        unsafe { acl!(api, aclrtMemset(self.address, self.bytes, 0, self.bytes)) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owned && !self.address.is_null() {
            // SAFETY: this object allocated the memory, and every use was noted in `uses`.
            unsafe { self.context.retire(Resource::DeviceMemory(self.address), &mut self.uses) };
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("address", &self.address)
            .field("bytes", &self.bytes)
            .field("owned", &self.owned)
            .finish_non_exhaustive()
    }
}
