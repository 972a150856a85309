//! The context of a device: what every handle on the device holds, and what gives the device up in the end.

use std::ffi::CStr;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use ascend_spec::{Soc, Target};
use ascend_sys::{Api, bindings as sys};

use crate::error::{Error, Result, acl};
use crate::runtime::Runtime;
use crate::runtime::deferred_free::{DeferredFrees, Resource};
use crate::runtime::stream_progress::Uses;

/// One use of a device. The last holder of it resets the device.
pub(crate) struct Context {
    runtime: Runtime,
    id: i32,
    raw: sys::aclrtContext,
    soc_name: String,
    soc: Option<Soc>,
    deferred: DeferredFrees,
}

// SAFETY: `raw` is a name, not memory: CANN lets any thread make any context its current one, at the same time as
// others. Everything else is Send and Sync by itself.
unsafe impl Send for Context {}
// SAFETY: as for `Send`; no method changes `raw`.
unsafe impl Sync for Context {}

impl Context {
    /// Takes a device into use. Its default context becomes the calling thread's.
    pub(crate) fn open(runtime: Runtime, id: i32) -> Result<Self> {
        let api = runtime.api();
        // SAFETY: any number is allowed; a wrong one is refused.
        unsafe { acl!(api, aclrtSetDevice(id)) }?;
        match Self::describe(api) {
            Ok((raw, soc_name)) => Ok(Self {
                id,
                raw,
                soc: Soc::from_name(&soc_name),
                soc_name,
                deferred: DeferredFrees::default(),
                runtime,
            }),
            Err(error) => {
                reset(api, id);
                Err(error)
            }
        }
    }

    fn describe(api: &Api) -> Result<(sys::aclrtContext, String)> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for the result.
        unsafe { acl!(api, aclrtGetCurrentContext(&mut raw)) }?;
        // SAFETY: the text belongs to the library, ends with NUL and is copied here.
        let name = unsafe {
            let name = api.aclrtGetSocName()?();
            if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
        };
        Ok((raw, name))
    }

    /// Makes the device the calling thread's, as every call of CANN needs it.
    pub(crate) fn bind(&self) -> Result<&Api> {
        let api = self.runtime.api();
        // SAFETY: the context lives until this object resets the device.
        unsafe { acl!(api, aclrtSetCurrentContext(self.raw)) }?;
        Ok(api)
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn id(&self) -> i32 {
        self.id
    }

    pub(crate) fn raw(&self) -> sys::aclrtContext {
        self.raw
    }

    pub(crate) fn soc_name(&self) -> &str {
        &self.soc_name
    }

    /// The chip family, by which the operators' rules go.
    pub(crate) fn soc(&self) -> Result<Soc> {
        self.soc.ok_or_else(|| Error::UnknownProduct { name: self.soc_name.clone() })
    }

    /// What the operators' rules hold for.
    pub(crate) fn target(&self) -> Result<Target> {
        let cann = self.runtime.installed().release.cann();
        Ok(Target::new(self.soc()?, cann).released()?)
    }

    /// Whether two handles are of one device of one runtime and may meet in one call.
    ///
    /// Equal raw contexts do not prove it: those of two runtimes are numbers or addresses of their own, which may
    /// happen to be equal. A runtime has one context for each device as long as a handle on the device is left.
    #[inline]
    pub(crate) fn is(&self, other: &Self) -> bool {
        ptr::eq(self, other)
    }

    /// Refuses a handle of another device, or of the same device of another runtime, for a call that goes to this
    /// context. Every function that takes a tensor, buffer, stream or event into a call uses this check.
    #[inline]
    pub(crate) fn admits(&self, argument: &'static str, other: &Self) -> Result<()> {
        if self.is(other) {
            return Ok(());
        }
        Err(self.elsewhere(argument, other))
    }

    #[cold]
    fn elsewhere(&self, argument: &'static str, other: &Self) -> Error {
        let runtime = match Arc::ptr_eq(&self.runtime.0, &other.runtime.0) {
            true => "",
            false => " of another runtime",
        };
        Error::by(
            &crate::rules::ARGUMENT_DEVICE,
            argument,
            format_args!("one of device {}{runtime}", other.id),
            format_args!("one of device {} of the same runtime, where the call goes", self.id),
        )
    }

    /// Frees a resource now or, while queued work still uses it, later. Never blocks, never fails: problems are logged.
    ///
    /// # Safety
    /// The caller owned the resource, gives it up here, and `uses` has every queued operation that uses it.
    pub(crate) unsafe fn retire(&self, resource: Resource, uses: &mut Uses) {
        match self.bind() {
            // SAFETY: handed on to the caller.
            Ok(api) => unsafe { self.deferred.retire(api, resource, uses) },
            Err(error) => tracing::error!("cannot free {resource:?}: {error}"),
        }
    }

    /// Frees the retired resources that are no longer used. The device must be bound.
    pub(crate) fn sweep(&self) {
        self.deferred.sweep(self.runtime.api());
    }

    /// Waits for the work that uses retired resources, and for no other, and frees them. Returns whether there was
    /// such work. The device must be bound.
    pub(crate) fn reclaim(&self) -> bool {
        self.deferred.reclaim(self.runtime.api())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Nothing else on the device is left: each stream, buffer and event holds this context.
        match self.bind() {
            Ok(api) => self.deferred.close(api),
            Err(error) => tracing::error!("cannot bind device {}: {error}", self.id),
        }
        reset(self.runtime.api(), self.id);
    }
}

fn reset(api: &Api, id: i32) {
    let reset = || -> Result<()> {
        // SAFETY: ends one use that `aclrtSetDevice` began; CANN counts them, so that other users of the device in this
        // process keep it.
        unsafe { acl!(api, aclrtResetDevice(id)) }
    };
    if let Err(error) = reset() {
        tracing::error!("cannot give up device {id}: {error}");
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.id).field("soc_name", &self.soc_name).finish_non_exhaustive()
    }
}
