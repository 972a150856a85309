//! A device, and what is made on it.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, OnceLock};

use ascend_spec::{Soc, Target};
use ascend_sys::bindings as sys;

use crate::error::{Error, Result, acl};
use crate::runtime::{Context, Platform, Runtime, capturing};

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// Not allocated.
    pub free: usize,
    /// All.
    pub total: usize,
}

/// A device in use. From [`Runtime::device`]; cloning is cheap.
///
/// # Threads
/// `Send` and `Sync`. Each function that touches the device makes it the calling thread's current one.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Shared>);

/// What all handles of a device share. Buffers hold the context alone, so that a cached mask does not keep itself
/// alive.
pub(super) struct Shared {
    context: Arc<Context>,
    kept: Kept,
}

impl Shared {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context, kept: Kept::default() }
    }
}

impl Device {
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// The device's only value of a type, made at the first call for the type; it lives as long as the device's
    /// handles.
    pub(crate) fn kept<T: Any + Send + Sync + Default>(&self) -> &T {
        self.0.kept.of()
    }

    /// Its number.
    pub fn id(&self) -> i32 {
        self.context().id()
    }

    /// The runtime that it belongs to.
    pub fn runtime(&self) -> &Runtime {
        self.context().runtime()
    }

    /// Name of the chip, such as `Ascend910B3`; empty if CANN gives none. (`aclrtGetSocName`)
    #[doc(alias = "aclrtGetSocName")]
    pub fn soc_name(&self) -> &str {
        self.context().soc_name()
    }

    /// Family of the chip, by which the operators' rules go.
    ///
    /// # Errors
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct).
    pub fn soc(&self) -> Result<Soc> {
        self.context().soc()
    }

    /// The product and the CANN release whose rules calls on this device are checked by, as CANN reports them. For a
    /// release newer than all known ones the rules of the newest known one stand in.
    ///
    /// # Errors
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct).
    #[doc(alias = "aclsysGetCANNVersion")]
    pub fn target(&self) -> Result<Target> {
        self.context().target()
    }

    /// Free and total device memory.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtGetMemInfo")]
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        let api = self.context().bind()?;
        self.context().sweep();
        let (mut free, mut total) = (0, 0);
        let attribute = sys::aclrtMemAttr::ACL_HBM_MEM;
        // SAFETY: the two are places for the results.
        unsafe { acl!(api, aclrtGetMemInfo(attribute, &mut free, &mut total)) }?;
        Ok(MemoryInfo { free, total })
    }

    /// Waits for everything queued on the device, by any thread or library.
    ///
    /// While any thread captures a graph on the device this wait is refused, by this crate on the capturing thread and
    /// by CANN on others, and the capture goes on. Other threads may call
    /// [`Stream::synchronize`](crate::Stream::synchronize) of another stream.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures; [`Error::Acl`](crate::Error::Acl), also
    /// for the failure of work queued earlier, and while another thread captures (status 107027).
    #[doc(alias = "aclrtSynchronizeDevice")]
    pub fn synchronize(&self) -> Result<()> {
        capturing::refuse("waiting for a device", "wait before or after the capture")?;
        let api = self.context().bind()?;
        // SAFETY: has no precondition but a bound device.
        unsafe { acl!(api, aclrtSynchronizeDevice()) }?;
        self.context().sweep();
        Ok(())
    }

    /// Asks for deterministic operators (`ACL_OPT_DETERMINISTIC`), or no longer: for calls that are planned from now
    /// on, by whoever shares the device's context in this process. Plans and captured graphs keep what held when they
    /// were made. The option ends with the last handle of the device.
    ///
    /// CANN promises that a deterministic operator gives equal bits whenever it is called again with equal inputs.
    /// The emulation promises more of FusedInferAttentionScore, PromptFlashAttention, IncreFlashAttention and
    /// FlashAttentionScore: that the bits of a row depend on its query and the keys that it sees alone
    /// ([`Device::is_batch_invariant`]), at the price of its kernel for decoding.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtCtxSetSysParamOpt")]
    pub fn set_deterministic(&self, deterministic: bool) -> Result<()> {
        let api = self.context().bind()?;
        let option = sys::aclSysParamOpt::ACL_OPT_DETERMINISTIC;
        // SAFETY: has no precondition but a current context.
        unsafe { acl!(api, aclrtCtxSetSysParamOpt(option, i64::from(deterministic))) }
    }

    /// Whether calls that are planned now are to be deterministic, by [`Device::set_deterministic`], another library
    /// that shares the context, or the option of the process.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtCtxGetSysParamOpt")]
    pub fn is_deterministic(&self) -> Result<bool> {
        let api = self.context().bind()?;
        let option = sys::aclSysParamOpt::ACL_OPT_DETERMINISTIC;
        let mut value = 0;
        // SAFETY: `value` is a place for the result.
        match unsafe { acl!(api, aclrtCtxGetSysParamOpt(option, &mut value)) } {
            Err(Error::Acl { status, .. }) if status.0 == sys::ACL_ERROR_RT_SYSPARAMOPT_NOT_SET => {
                // SAFETY: `value` is a place for the result.
                unsafe { acl!(api, aclrtGetSysParamOpt(option, &mut value)) }?;
            }
            read => read?,
        }
        Ok(value != 0)
    }

    /// Whether attention planned now, by an operator that [`set_deterministic`](Self::set_deterministic) names, gives a
    /// row the same bits in every batch, cut of a prompt into chunks, cache layout and number of threads.
    ///
    /// True on the emulation while [`Device::is_deterministic`] holds. Always false on an NPU and for functions that
    /// the program provides: CANN does not promise it, and `ascend-attn determinism` measures it there.
    ///
    /// # Errors
    /// As for [`Device::is_deterministic`].
    pub fn is_batch_invariant(&self) -> Result<bool> {
        Ok(self.runtime().platform() == Platform::Emulated && self.is_deterministic()?)
    }

    /// The raw context (`aclrtContext`), valid while this device is.
    pub fn as_raw(&self) -> *mut c_void {
        self.context().raw()
    }
}

impl PartialEq for Device {
    /// Whether both stand for the same device of the same runtime.
    fn eq(&self, other: &Self) -> bool {
        self.context().is(other.context())
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.id()).field("soc_name", &self.soc_name()).finish_non_exhaustive()
    }
}

/// One value of each type, made at the first call for the type.
#[derive(Default)]
pub(super) struct Kept(OnceLock<Box<Entry>>);

struct Entry {
    value: Box<dyn Any + Send + Sync>,
    next: Kept,
}

impl Kept {
    /// The value of a type.
    pub(super) fn of<T: Any + Send + Sync + Default>(&self) -> &T {
        let mut at = self;
        loop {
            let entry = at.0.get_or_init(|| Box::new(Entry { value: Box::new(T::default()), next: Kept::default() }));
            match entry.value.downcast_ref() {
                Some(value) => return value,
                None => at = &entry.next,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn each_type_has_one_value() {
        let kept = Kept::default();
        *kept.of::<Mutex<u8>>().lock().unwrap() = 1;
        *kept.of::<Mutex<String>>().lock().unwrap() = "two".to_owned();
        assert_eq!(*kept.of::<Mutex<u8>>().lock().unwrap(), 1);
        assert_eq!(*kept.of::<Mutex<String>>().lock().unwrap(), "two");
    }
}
