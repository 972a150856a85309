//! GatherPaKvCache.

use super::executor_of;
use crate::descriptor::Described;
use crate::executor::launch;
use crate::op::gather::GatherOperator;
use crate::runtime::context;
use crate::status::{Outcome, aclnn};
use ascend_spec::ops::gather_pa_kv_cache::Arguments;
use ascend_spec::{OperatorVersion, arguments_of_version, gather_pa_kv_cache_arguments};
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

/// Phase one.
///
/// # Safety
///
/// The pointers are null or valid for writing.
unsafe fn prepare(
    read: impl FnOnce() -> Outcome<Arguments<Described>>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        executor_of(workspace_size, executor, || {
            let arguments = read()?;
            let descs = arguments.map(|_, tensor| tensor.desc);
            let op = GatherOperator::new(descs, context::machine().target.soc)?;
            Ok((op, arguments))
        })
    }
}

gather_pa_kv_cache_arguments! { arguments_of_version {
    1 phase_one { aclnnGatherPaKvCacheGetWorkspaceSize, Arguments, prepare() }
} }
phase_two!(
    aclnnGatherPaKvCache,
    OperatorVersion::GatherPaKvCache.symbol()
);
