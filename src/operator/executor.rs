//! Executors that are launched again and again.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use ascend_spec::operator::{Argument, Kind};
use ascend_sys::Api;
use ascend_sys::bindings::aclOpExecutor;

use crate::error::{Result, aclnn, null_error};
use crate::runtime::Context;

use super::{Descriptors, Parameter};

/// A prepared call that can be launched again and again with other addresses.
#[derive(Debug)]
pub(super) struct Executor<P> {
    raw: NonNull<aclOpExecutor>,
    context: Arc<Context>,
    /// Dropped after `raw`, which refers to them, is destroyed.
    descriptors: Descriptors<P>,
}

// SAFETY: an executor is data of CANN's that belongs to no thread, and is reached through this value alone. The
// descriptors are `Send` apart from their texts, which CANN alone reads.
unsafe impl<P: Send> Send for Executor<P> {}

impl<P> Executor<P> {
    /// Takes over what phase one returned, and makes it repeatable. The device must be bound.
    ///
    /// # Safety
    /// `raw` is null, or a new executor made of these descriptors.
    pub(super) unsafe fn new(
        context: &Arc<Context>,
        function: &'static str,
        raw: *mut aclOpExecutor,
        descriptors: Descriptors<P>,
    ) -> Result<Self> {
        let api = context.runtime().api();
        let raw = NonNull::new(raw).ok_or_else(|| null_error(api, function))?;
        let executor = Self { raw, context: Arc::clone(context), descriptors };
        // SAFETY: the executor is new: phase two has not run.
        unsafe { aclnn!(api, aclSetAclOpExecutorRepeatable(executor.as_ptr())) }?;
        Ok(executor)
    }

    pub(super) fn as_ptr(&self) -> *mut aclOpExecutor {
        self.raw.as_ptr()
    }
}

impl<P: Parameter> Executor<P> {
    /// Gives a tensor another address, for launches from now on. The device must be bound, and the memory laid out as
    /// the tensor's descriptor requires.
    pub(super) fn set_address(
        &mut self,
        api: &Api,
        Argument { parameter, index }: Argument<P>,
        at: *mut c_void,
    ) -> Result<()> {
        let executor = self.as_ptr();
        let numbers = self.descriptors.numbers(parameter);
        // SAFETY: the executor is repeatable and alive, the descriptors are those that it was made of, and the caller
        // has checked the memory.
        unsafe {
            if let (Some(input), Kind::TensorList) = (numbers.input, parameter.info().kind) {
                let list = self.descriptors.list(parameter);
                return aclnn!(api, aclSetDynamicInputTensorAddr(executor, input, index, list, at));
            }
            let tensor = self.descriptors.tensor(parameter);
            if let Some(input) = numbers.input {
                aclnn!(api, aclSetInputTensorAddr(executor, input, tensor, at))?;
            }
            if let Some(output) = numbers.output {
                aclnn!(api, aclSetOutputTensorAddr(executor, output, tensor, at))?;
            }
        }
        Ok(())
    }
}

impl<P> Drop for Executor<P> {
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
