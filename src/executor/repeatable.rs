//! Executors that are launched again and again.

use std::ptr::NonNull;
use std::sync::Arc;

use ascend_sys::bindings::aclOpExecutor;

use crate::error::{Result, aclnn, null_error};
use crate::runtime::Context;

/// A prepared call that can be launched again and again with other addresses.
#[derive(Debug)]
pub(crate) struct Executor<D> {
    raw: NonNull<aclOpExecutor>,
    context: Arc<Context>,
    /// After `raw`, which refers to them, is destroyed.
    descriptors: D,
}

// SAFETY: the executor is data of CANN's that no thread owns; whoever has this has the only access to it.
unsafe impl<D: Send> Send for Executor<D> {}

impl<D> Executor<D> {
    /// Takes over what phase one returned, and makes it repeatable. The device must be bound.
    ///
    /// # Safety
    /// `raw` is null, or a new executor made of these descriptors.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        function: &'static str,
        raw: *mut aclOpExecutor,
        descriptors: D,
    ) -> Result<Self> {
        let api = context.runtime().api();
        let raw = NonNull::new(raw).ok_or_else(|| null_error(api, function))?;
        let executor = Self {
            raw,
            context: Arc::clone(context),
            descriptors,
        };
        // SAFETY: the executor is new: phase two has not run.
        unsafe { aclnn!(api, aclSetAclOpExecutorRepeatable(executor.as_ptr())) }?;
        Ok(executor)
    }

    pub(crate) fn as_ptr(&self) -> *mut aclOpExecutor {
        self.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What the executor was made of.
    pub(crate) fn descriptors(&self) -> &D {
        &self.descriptors
    }
}

impl<D> Drop for Executor<D> {
    fn drop(&mut self) {
        let destroy = || -> Result<()> {
            let api = self.context.bind()?;
            // SAFETY: a repeatable executor lives until it is destroyed, once, here; launches in flight keep what they
            // need of it.
            unsafe { aclnn!(api, aclDestroyAclOpExecutor(self.as_ptr())) }
        };
        if let Err(error) = destroy() {
            tracing::error!("cannot destroy an executor: {error}");
        }
    }
}
